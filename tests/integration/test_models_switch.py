"""Another version of a model while callers keep coming: a real stack, and a tiny model whose versions differ."""

import asyncio
import dataclasses
import json
import os
import re
import signal
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import onnx
import pytest
from typer.testing import CliRunner

import model_builder
from local_stack import Stack
from local_stack.process import children, command_line
from model_builder import switching, versions
from serving.deadline import Deadline
from serving.errors import ConfigError, TwodoorError
from serving.models import Lane
from serving.pipeline import Pipeline, encode
from serving.postprocess import Classification
from serving.registry import Model, Registry
from serving.settings import ModelSettings, TritonSettings
from serving.triton_client import TritonClient, parse_config
from tests.integration.gateway_jobs import ACME, ADMIN, MODEL, bearer, job_door, keys_file
from tests.parts import remove, wait_until
from tests.unit.tiny_models import classifier_model, write_tokenizer
from twodoor.cli import app
from twodoor.commands.models import pinned_versions
from twodoor.config import ClientConfig

TEXT = "a fine film by the sea"
SETTLE_S = 0.4
"""More than the 0.1 s after which the doors of these tests look at Triton again."""


class Served:
    """A stack of Triton and gateway, its supervisor at work, and the model ``mood`` in versions 1 and 2; 3 is no model, 4 has another output."""

    def __init__(self, stack: Stack, repository: Path) -> None:
        self.stack, self.repository, self.folder = stack, repository, repository / "mood"

    def switch(self, version: str, pinned: Callable[[], set[str]] = set, **options: Any) -> model_builder.Switched:
        settings = {"timeout_s": 30.0, "settle_s": SETTLE_S, "progress": lambda line: None, **options}
        return model_builder.switch(
            self.repository, "mood", version,
            triton_address=self.stack.triton_grpc, pinned=pinned, **settings,
        )  # fmt: skip

    def ready(self) -> dict[str, set[str]]:
        """Return the ready versions of the model and of its twin."""
        url = f"http://{self.stack.triton_http}/v2/repository/index"
        found: dict[str, set[str]] = {"mood": set(), "mood_bulk": set()}
        for entry in httpx.post(url, json={}).json():
            if entry.get("state") == "READY":
                found[entry["name"]].add(entry["version"])
        return found

    @staticmethod
    def alone(version: str) -> dict[str, set[str]]:
        return {"mood": {version}, "mood_bulk": {version}}

    def routed(self) -> str:
        return str(self.predict().json()["model_version"])

    def predict(self, client: httpx.Client | None = None) -> httpx.Response:
        return (client or httpx).post(f"{self.stack.gateway_url}/predict", json={"text": [TEXT], "model": "mood"})

    def on_disk(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            parse_config((self.folder.parent / name / "config.pbtxt").read_text()) for name in ("mood", "mood_bulk")
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    work = tmp_path_factory.mktemp("versions")
    tokenizer = write_tokenizer(work / "tokenizer")
    repository = work / "repository"
    for number in ("1", "2"):
        onnx.save(classifier_model(2, seed=int(number)), work / f"{number}.onnx")
        model_builder.add(
            repository, "mood", work / f"{number}.onnx", tokenizer, "classify",
            progress=lambda _: None, version=number if number != "1" else None,
        )  # fmt: skip
    for config in repository.glob("*/config.pbtxt"):
        # One process for each version of each lane is enough here, and starts sooner.
        config.write_text(re.sub(r"count: \d+", "count: 1", config.read_text()))
    # The folders of versions that nobody has switched to must not matter.
    for number in ("3", "4"):
        (repository / "mood" / number).mkdir()
    (repository / "mood" / "3" / "model.onnx").write_bytes(b"no model at all")
    onnx.save(classifier_model(3), repository / "mood" / "4" / "model.onnx")
    environment = {
        "TWODOOR_MODELS_DEFAULT": "mood",
        "TWODOOR_TRITON_POLL_INTERVAL_S": "0.1",
        "TWODOOR_STACK_CANARY_INTERVAL_S": "0.25",
    }
    with Stack(work / "home", ("triton", "gateway"), repository, environment=environment) as stack:
        made = Served(stack, repository)
        wait_until(lambda: made.predict().status_code == 200, "the first version answers")
        assert made.routed() == "1"
        yield made
    remove(work)


class Callers:
    """Callers of both lanes: what they were told by which version, and every error."""

    def __init__(self) -> None:
        self.answers: dict[str, set[float]] = defaultdict(set)
        self.errors: list[str] = []
        self.last = ""

    def note(self, version: str, score: float) -> None:
        self.answers[version].add(round(score, 3))
        self.last = version


@contextmanager
def calling(served: Served) -> Iterator[tuple[Callers, Callers]]:
    """Keep calling ``/predict`` and, as a consumer does, the bulk lane; yields what each of them got."""
    front, bulk, stop = Callers(), Callers(), threading.Event()

    def call_front() -> None:
        with httpx.Client() as client:
            while not stop.wait(0.02):
                answer = served.predict(client)
                if answer.status_code != 200:
                    front.errors.append(answer.text)
                    continue
                body = answer.json()
                front.note(body["model_version"], body["predictions"][0]["score"])

    threads = [
        threading.Thread(target=call_front),
        threading.Thread(target=lambda: asyncio.run(_bulk(served, bulk, stop))),
    ]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: bool(front.last and bulk.last), "both lanes answer")
        yield front, bulk
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)


async def _bulk(served: Served, callers: Callers, stop: threading.Event) -> None:
    async with _door(served) as (registry, pipeline):
        while not stop.is_set():
            try:
                model = registry.get("mood")
                callers.note(model.spec.version, await ask(pipeline, model, "bulk"))
            except TwodoorError as exc:
                callers.errors.append(repr(exc))
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _door(served: Served) -> AsyncIterator[tuple[Registry, Pipeline]]:
    """Open what a door has of its own, looking at Triton every 0.1 s."""
    given: dict[str, Any] = {"grpc_address": served.stack.triton_grpc, "poll_interval_s": 0.1}
    repository: dict[str, Any] = {"repository": served.repository}
    async with TritonClient(settings := TritonSettings(**given)) as client:
        registry = Registry(client, ModelSettings(**repository), settings)
        await registry.refresh()
        task = asyncio.create_task(registry.run())
        try:
            yield registry, Pipeline(client)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def ask(pipeline: Pipeline, model: Model, lane: Lane) -> float:
    encoded = await encode(model, [TEXT], False, 1000, 10_000)
    rows = [row for row in encoded if not isinstance(row, Exception)]
    (answer,) = await pipeline.infer(model, rows, lane, Deadline.after_ms(10_000))
    assert isinstance(answer, Classification)
    return answer.score


def now_and_next(served: Served) -> tuple[str, str]:
    """Return the version that serves (alone, whatever the test before left) and the one to switch to."""
    now = served.routed()
    if served.ready() != served.alone(now):
        served.switch(now)
    return now, {"1": "2", "2": "1"}[now]


def test_callers_of_both_lanes_go_over_without_an_error_and_a_job_that_began_on_the_old_version_ends_on_it(
    served: Served,
) -> None:
    old, new = now_and_next(served)
    said: list[str] = []

    def pinned() -> set[str]:
        if said[-1].startswith("mood: waiting"):
            return set()  # the job has ended
        # By now new work is routed to the new version; a job of the old one runs on.
        wait_until(lambda: served.routed() == new, "the new version is routed to")
        assert asyncio.run(on_version(old)) != asyncio.run(on_version(new))
        return {old}

    async def on_version(version: str) -> float:
        async with _door(served) as (registry, pipeline):
            assert registry.versions("mood") == (new, old)
            return await ask(pipeline, registry.get("mood", version), "bulk")

    with calling(served) as (front, bulk):
        assert served.switch(new, pinned, progress=said.append).retired
        assert any(f"open jobs have begun on version {old}" in line for line in said)
        wait_until(lambda: front.last == bulk.last == new, "all callers get the new version")
        assert served.ready() == served.alone(new)
        # And back.
        assert served.switch(old) == model_builder.Switched("mood", old, (new,), retired=True)
        wait_until(lambda: front.last == bulk.last == old, "all callers get the old version")
        assert served.ready() == served.alone(old)
    assert front.errors == bulk.errors == []
    # Each version has its own answer, the same in both lanes, and no answer went under the other one's name.
    assert {version: len(scores) for version, scores in front.answers.items()} == {"1": 1, "2": 1}
    assert front.answers == bulk.answers
    assert front.answers["1"] != front.answers["2"]


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("3", "ONNX Runtime refuses it"),
        ("4", r"logits is float32 \[3\], the config has FP32 \[2\]"),
        ("5", "does not exist"),
        ("new", "whole number"),
    ],
)
def test_a_version_that_cannot_be_served_changes_nothing(served: Served, version: str, reason: str) -> None:
    now, _ = now_and_next(served)
    before = served.on_disk()
    with pytest.raises(ConfigError, match=reason):
        served.switch(version)
    assert (served.on_disk(), served.ready(), served.routed()) == (before, served.alone(now), now)


@pytest.mark.parametrize("fault", ["load", "canary"])
def test_a_version_that_fails_in_the_model_server_leaves_callers_with_the_old_one(
    served: Served, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    now, after = now_and_next(served)
    if fault == "load":
        # Whatever was looked at: the server finds something else.
        monkeypatch.setattr(switching, "examine", lambda *_: looked_at(served, now, "3"))
    else:
        monkeypatch.setattr(Pipeline, "canary_passes", no_canary_passes)
    with calling(served) as (front, bulk):
        with pytest.raises(ConfigError, match="version 3 is at UNAVAILABLE" if fault == "load" else "canary row"):
            served.switch("3" if fault == "load" else after)
        wait_until(lambda: served.ready() == served.alone(now), "only the old version is left")
    assert front.errors == bulk.errors == []
    assert set(front.answers) == set(bulk.answers) == {now}
    # A model server that starts anew comes up with the old one too.
    assert all(config["version_policy"] == {"specific": {"versions": [now]}} for config in served.on_disk())


def looked_at(served: Served, good: str, bad: str) -> versions.Version:
    """Say of a bad version what is true of a good one."""
    looked = versions.examine(served.repository, "mood", good)
    file = served.repository / "mood_bulk" / bad / "model.onnx"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"no model at all")
    return dataclasses.replace(looked, spec=dataclasses.replace(looked.spec, version=bad))


async def no_canary_passes(*_: object) -> bool:
    return False


def test_a_switch_that_was_interrupted_is_finished_by_the_same_call(served: Served) -> None:
    _, new = now_and_next(served)

    def interrupt_at(moment: str) -> Callable[[str], None]:
        def progress(line: str) -> None:
            if moment in line:
                raise KeyboardInterrupt

        return progress

    with calling(served) as (front, bulk):
        for moment in ("ready in both lanes", "new work goes to", "waiting"):
            with pytest.raises(KeyboardInterrupt):
                served.switch(new, lambda: {"1", "2"}, progress=interrupt_at(moment))
        assert served.switch(new).retired
        wait_until(lambda: front.last == bulk.last == new, "all callers get the new version")
    assert front.errors == bulk.errors == []
    assert served.ready() == served.alone(new)


def test_the_command_says_what_keeps_the_old_version_loaded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    _, new = now_and_next(served)
    monkeypatch.setenv("TWODOOR_MODELS_REPOSITORY", str(served.repository))
    monkeypatch.setenv("TWODOOR_TRITON_GRPC_ADDRESS", served.stack.triton_grpc)
    monkeypatch.setenv("TWODOOR_CLIENT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("twodoor.commands.models.SETTLE_S", SETTLE_S)
    result = CliRunner().invoke(app, ["models", "switch", "mood", new, "--timeout-s", "1", "--json"])
    assert result.exit_code == 1
    assert "the gateway does not tell" in result.stderr
    assert json.loads(result.stdout)["retired"] is False
    wait_until(lambda: served.routed() == new, "the new version is routed to")
    assert served.ready() == {"mood": {"1", "2"}, "mood_bulk": {"1", "2"}}


def test_the_supervisor_takes_no_switch_for_a_death_and_sees_the_death_of_either_versions_process(
    served: Served,
) -> None:
    if served.ready() != {"mood": {"1", "2"}, "mood_bulk": {"1", "2"}}:  # as the test before left it
        old, new = now_and_next(served)
        assert not served.switch(new, lambda: {old}, timeout_s=1).retired
    assert not [line for line in served.stack.lines() if "loading it again" in line or "another result" in line]
    for number, version in enumerate("12", start=1):
        stubs = [
            pid
            for pid in children(served.stack.pid("triton"))
            if f"/mood/{version}/" in "".join(command_line(pid)[1:2])
        ]
        assert stubs
        for pid in stubs:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda n=number: len(times_loaded(served)) >= n, f"the death of version {version} is seen")  # type: ignore[misc]
    wait_until(lambda: asyncio.run(both_answer(served)), "both versions answer again")


def times_loaded(served: Served) -> list[str]:
    return [line for line in served.stack.lines() if "ready again" in line]


async def both_answer(served: Served) -> bool:
    async with _door(served) as (registry, pipeline):
        try:
            return len({await ask(pipeline, registry.get("mood", version), "interactive") for version in "12"}) == 2
        except TwodoorError:
            return False


async def test_an_admins_key_shows_which_versions_open_jobs_have_begun_on(tmp_path: Path) -> None:
    async with job_door(keys=keys_file(tmp_path)) as door:
        for _ in range(2):  # one begins, one waits and has begun on none
            await door.submit(headers=bearer(ACME))
        assert await door.ledger.claim("consumer", {MODEL: ("7",)}, (), 30)
        answer = await door.client.get("/v1/admin/models", headers=bearer(ADMIN))
        assert answer.json() == {"pinned": {MODEL: ["7"]}}
        url = {"TWODOOR_CLIENT_URL": str(door.client.base_url)}
        for key, pinned in ((ADMIN, {"7"}), (ACME, None), ("", None)):
            config = ClientConfig.from_environ({**url, "TWODOOR_CLIENT_API_KEY": key})
            assert await asyncio.to_thread(pinned_versions, config, MODEL) == pinned
        assert await asyncio.to_thread(
            pinned_versions, ClientConfig.from_environ({**url, "TWODOOR_CLIENT_API_KEY": ADMIN}), "other"
        ) == frozenset()  # fmt: skip
