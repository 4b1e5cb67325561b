"""More of the same model: copies of a built one under other names, loaded one after another into a stack of their own."""

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.callers import HttpConnection, post
from benchmarks.stack import START_TIMEOUT_S, Endpoints, endpoints
from local_stack.stack import Stack
from serving.settings import KafkaSettings, load

LOAD_TIMEOUT_S = 120.0
ASK_S = 0.05
TWIN = "_bulk"
_INSTANCES = re.compile(r"count: \d+ kind")


def copy_name(model: str, number: int) -> str:
    """Return the name of copy ``number``, counted from 1; the first keeps the model's own."""
    return model if number == 1 else f"{model}_{number}"


def write_copy(source: Path, model: str, target: Path, name: str, *, whole: bool = True) -> None:
    """Write ``model`` and its twin of repository ``source`` into ``target`` as ``name``; weights are hard links.

    Not ``whole``: without warm-up and with one instance, so that it starts in a fraction of the time.
    """
    for suffix in ("", TWIN):
        for file in (path for path in (source / (model + suffix)).rglob("*") if path.is_file()):
            place = target / (name + suffix) / file.relative_to(source / (model + suffix))
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.name == "config.pbtxt":
                text = file.read_text(encoding="utf-8")
                place.write_text(renamed(text if whole else quick(text), model, name), encoding="utf-8")
            elif file.suffix == ".onnx":
                _link(file, place)
            else:
                shutil.copy(file, place)


def renamed(config: str, model: str, name: str) -> str:
    """Return a config.pbtxt in which the model and its twin have another name."""
    return config.replace(f'"{model}"', f'"{name}"').replace(f'"{model}{TWIN}"', f'"{name}{TWIN}"')


def quick(config: str) -> str:
    """Return a config.pbtxt without warm-up and with one instance."""
    return _INSTANCES.sub("count: 1 kind", config.partition("model_warmup")[0])


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # another file system
        shutil.copy(file, place)


class Copies:
    """A running Triton with its gateway that begins with one copy; ``add`` brings the others."""

    def __init__(self, source: Path, model: str, repository: Path, stack: Endpoints, *, whole: bool) -> None:
        self.stack = stack
        self._source = source
        self._model = model
        self._repository = repository
        self._whole = whole

    async def add(self, numbers: Sequence[int], text: str) -> None:
        """Write copies, let Triton load them, and wait until the gateway answers ``text`` by each; raises TimeoutError."""
        from tritonclient.grpc.aio import InferenceServerClient

        names = [copy_name(self._model, number) for number in numbers]
        client = InferenceServerClient(self.stack.triton)
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                for name in names:
                    write_copy(self._source, self._model, self._repository, name, whole=self._whole)
                    await client.load_model(name + TWIN)
                    await client.load_model(name)
                await asyncio.gather(*(self._answers(name, text) for name in names))
        finally:
            await client.close()

    async def _answers(self, name: str, text: str) -> None:
        connection = HttpConnection(*self.stack.gateway)
        body = f'{{"model": "{name}", "text": "{text}"}}'.encode()
        try:
            while (await connection.send(post("/predict", body, "copies")))[0] != 200:  # noqa: ASYNC110 (asked over HTTP)
                await asyncio.sleep(ASK_S)
        finally:
            await connection.close()


@contextmanager
def copies(source: Path, model: str, *, whole: bool) -> Iterator[Copies]:
    """Start a Triton and a gateway with the first copy; stop them at the end. To be entered on the main thread."""
    kafka = load(KafkaSettings)
    with tempfile.TemporaryDirectory(prefix="twodoor-copies-") as folder:
        repository = Path(folder) / "repository"
        write_copy(source, model, repository, copy_name(model, 1), whole=whole)
        environment = {
            "TWODOOR_STACK_START_TIMEOUT_S": str(START_TIMEOUT_S),
            "TWODOOR_MODELS_DEFAULT": model,
        }
        with Stack(
            Path(folder) / "home", ("triton", "gateway"), repository, 0, environment, START_TIMEOUT_S + 10
        ) as stack:
            yield Copies(source, model, repository, endpoints(stack, repository, kafka), whole=whole)
