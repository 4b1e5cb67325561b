"""Run the demo: a stack of its own, all entrances at once, then the count that decides the exit code."""

import asyncio
import itertools
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import local_stack
from twodoor.client import AsyncClient
from twodoor.config import ClientConfig
from twodoor.console import Exit, shorten
from twodoor.demo import bulk, docs_text, sentences
from twodoor.demo.callers import Callers
from twodoor.demo.job import JobRun
from twodoor.demo.screen import Bulk, Figures, Screen
from twodoor.demo.tally import Calls, Records, accuracy
from twodoor.errors import TwodoorError
from twodoor.topics import KafkaAway, TopicTrouble

ALONE_S = 8.0


def main(rows: int, as_json: bool) -> int:
    """Run it; returns 0 only if every record, row and call was answered exactly once, and the same everywhere."""
    figures = Figures()
    screen = Screen(figures)
    try:
        with _stoppable():
            problems = _with_a_stack(rows, figures, screen)
    except KeyboardInterrupt:
        screen.say("demo: stopped; nothing was left running")
        return Exit.FAILED
    except (local_stack.ConfigError, bulk.NoProgress, KafkaAway, TopicTrouble, TwodoorError) as exc:
        problems = [" | ".join(str(exc).splitlines())]
    if as_json:
        screen.say(json.dumps({"ok": not problems, "problems": problems, **_summary(figures)}))
    screen.say(f"demo: failed: {'; '.join(problems)}" if problems else f"demo: ok {_last_line(figures)}")
    return Exit.FAILED if problems else Exit.DONE


def _with_a_stack(rows: int, figures: Figures, screen: Screen) -> list[str]:
    began = time.monotonic()
    with ThreadPoolExecutor(1) as aside, tempfile.TemporaryDirectory(prefix="twodoor-demo-") as home:
        found = aside.submit(docs_text.collect, rows)
        screen.say("starting Triton, Kafka, PostgreSQL, the gateway and the consumer on free ports …")
        stack = local_stack.Stack(Path(home))
        try:
            _start(stack, Path(home), screen)
            screen.say(f"the stack was ready after {time.monotonic() - began:.1f} s")
            config = ClientConfig.from_environ({**os.environ, **stack.environment})
            problems = asyncio.run(_all_entrances(config, found, figures, screen))
        finally:
            stopping = time.monotonic()
            # From here on a second Ctrl-C would only leave something behind; stopping has a bound of its own.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            stack.stop()
    screen.close()
    stopped_s = time.monotonic() - stopping
    screen.say(f"the stack stopped in {stopped_s:.1f} s; the whole demo took {time.monotonic() - began:.0f} s")
    return problems


def _start(stack: local_stack.Stack, home: Path, screen: Screen) -> None:
    try:
        stack.start()
    except local_stack.ConfigError:
        # The logs go away with the folder: what they end with is said here.
        for log in sorted(home.glob("logs/*.log")):
            for line in log.read_text(errors="replace").splitlines()[-3:]:
                screen.say(f"{log.stem}: {shorten(line, 300)}")
        raise


async def _all_entrances(
    config: ClientConfig, found: "Future[list[str]]", figures: Figures, screen: Screen
) -> list[str]:
    labelled = sentences.load()
    documentation = [text for text in found.result() if text not in {row.text for row in labelled}]
    said = {f"said-{number:03}": row.text for number, row in enumerate(labelled, 1)}
    docs = [(f"docs-{number:05}", text) for number, text in enumerate(documentation, 1)]
    # The labelled sentences go in everywhere; of the others each takes one way, or the demo would take twice as long.
    records, rows = Records({**said, **dict(docs[::2])}), Records({**said, **dict(docs[1::2])}, "rows of the job")
    figures.topic.rows, figures.job.rows = len(records.texts), len(rows.texts)
    screen.say(
        f"{len(labelled)} labelled sentences and {len(documentation):,} of the installed packages' documentation"
    )
    async with AsyncClient(config.url) as client:
        callers = Callers(client)
        await callers.closed_loop([row.text for row in labelled], figures.labelled)
        turn = itertools.cycle(documentation or [row.text for row in labelled])
        screen.say(
            f"{ALONE_S:.0f} s of calls alone, then calls beside {len(records.texts):,} records "
            f"and a job of {len(rows.texts):,} rows …"
        )
        await _calls_alone(callers, turn, figures)
        reader, job = bulk.Reader(config, records), JobRun(client, rows)
        await _calls_beside(config, callers, turn, reader, job, figures, screen)
        for entrance, verdicts in (("topic", records.verdicts), ("job", rows.verdicts)):
            pairs = ((row.label, verdicts.get(row_id)) for row_id, row in zip(said, labelled, strict=True))
            figures.accuracy[entrance] = accuracy(pairs)
        figures.accuracy["interactive"] = accuracy((row.label, callers.said.get(row.text)) for row in labelled)
        unasked = [text for text in {**records.texts, **rows.texts}.values() if text not in callers.said]
        screen.say(f"asking /predict for the other {len(unasked):,} texts, to compare the two doors …")
        failures = await callers.lists(unasked)
    failures += figures.failures
    lost = [f"{len(failures):,} calls failed ({failures[0]}, …)"] if failures else []
    return records.problems(callers.said) + job.problems() + rows.problems(callers.said) + lost


async def _calls_alone(callers: Callers, turn: Iterator[str], figures: Figures) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(callers.open_loop(turn, stop, figures.alone, seed=1))
        await asyncio.sleep(ALONE_S)
        stop.set()


async def _calls_beside(
    config: ClientConfig,
    callers: Callers,
    turn: Iterator[str],
    reader: bulk.Reader,
    job: JobRun,
    figures: Figures,
    screen: Screen,
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    records = reader.records
    began = loop.time()

    def refresh() -> None:
        figures.topic.answered, figures.job.answered = records.answered, job.done
        figures.topic.seconds = (reader.last_result_at if records.complete else loop.time()) - began
        figures.job.seconds = (job.ended_at or loop.time()) - began

    with _unwrapped():
        async with asyncio.TaskGroup() as group:
            calling = group.create_task(callers.open_loop(turn, stop, figures.beside, seed=2))
            showing = group.create_task(screen.live(refresh))
            producing = group.create_task(bulk.produce(config, records.texts))
            working = group.create_task(job.run())
            await reader.until_complete()
            await working
            stop.set()
            await asyncio.gather(producing, calling)
            showing.cancel()
    refresh()


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the first error of a task group as itself: each of them ends the demo with one line."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does, so that it leaves nothing behind either way."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # The handler that Ctrl-C has now: Python's own, or the event loop's, which cancels what runs there.
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):
            raise KeyboardInterrupt
        handler(signal.SIGINT, frame)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError):
                signal.signal(number, handler)


def _summary(figures: Figures) -> Mapping[str, Any]:
    return {
        "topic": _bulk(figures.topic),
        "job": _bulk(figures.job),
        "calls": figures.calls,
        "alone_ms": _percentiles(figures.alone),
        "beside_ms": _percentiles(figures.beside),
        "accuracy": figures.accuracy,
    }


def _bulk(part: Bulk) -> dict[str, float]:
    return {"rows": part.rows, "answered": part.answered, "rows_per_s": round(part.rows_per_s, 1)}


def _percentiles(calls: Calls) -> dict[str, float]:
    return {f"p{percent}": round(calls.percentile_ms(percent), 2) for percent in (50, 99) if calls.latencies_ms}


def _last_line(figures: Figures) -> str:
    topic, job = figures.topic, figures.job
    return (
        f"{topic.rows:,} records and a job of {job.rows:,} rows answered exactly once "
        f"at {topic.rows_per_s + job.rows_per_s:,.0f} rows/s, {figures.calls:,} calls answered, "
        f"p50 {figures.alone.percentile_ms(50):.0f} ms alone and {figures.beside.percentile_ms(50):.0f} ms beside them"
    )
