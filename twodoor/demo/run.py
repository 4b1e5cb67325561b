"""Run the demo: a stack of its own, both doors at once, then the count that decides the exit code."""

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
from twodoor.demo.screen import Figures, Screen
from twodoor.demo.tally import Calls, Records, accuracy
from twodoor.topics import KafkaAway, TopicTrouble

ALONE_S = 8.0


def main(rows: int, as_json: bool) -> int:
    """Run it; returns 0 only if every record was answered exactly once, the same at both doors, and every call too."""
    figures = Figures()
    screen = Screen(figures)
    try:
        with _stoppable():
            problems = _with_a_stack(rows, figures, screen)
    except KeyboardInterrupt:
        screen.say("demo: stopped; nothing was left running")
        return Exit.FAILED
    except (local_stack.ConfigError, bulk.NoProgress, KafkaAway, TopicTrouble) as exc:
        problems = [" | ".join(str(exc).splitlines())]
    if as_json:
        screen.say(json.dumps({"ok": not problems, "problems": problems, **_summary(figures)}))
    screen.say(f"demo: failed: {'; '.join(problems)}" if problems else f"demo: ok {_last_line(figures)}")
    return Exit.FAILED if problems else Exit.DONE


def _with_a_stack(rows: int, figures: Figures, screen: Screen) -> list[str]:
    began = time.monotonic()
    with ThreadPoolExecutor(1) as aside, tempfile.TemporaryDirectory(prefix="twodoor-demo-") as home:
        found = aside.submit(docs_text.collect, rows)
        screen.say("starting Triton, Kafka, the gateway and the consumer on free ports …")
        stack = local_stack.Stack(Path(home))
        try:
            _start(stack, Path(home), screen)
            screen.say(f"the stack was ready after {time.monotonic() - began:.1f} s")
            config = ClientConfig.from_environ({**os.environ, **stack.environment})
            problems = asyncio.run(_both_doors(config, found, figures, screen))
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


async def _both_doors(config: ClientConfig, found: "Future[list[str]]", figures: Figures, screen: Screen) -> list[str]:
    labelled = sentences.load()
    documentation = [text for text in found.result() if text not in {row.text for row in labelled}]
    texts = {f"said-{number:03}": row.text for number, row in enumerate(labelled, 1)}
    texts |= {f"docs-{number:05}": text for number, text in enumerate(documentation, 1)}
    records = Records(texts)
    figures.rows = len(texts)
    screen.say(
        f"{len(labelled)} labelled sentences and {len(documentation):,} of the installed packages' documentation"
    )
    async with AsyncClient(config.url) as client:
        callers = Callers(client)
        await callers.closed_loop([row.text for row in labelled], figures.labelled)
        figures.accuracy["interactive"] = accuracy((row.label, callers.said.get(row.text)) for row in labelled)
        turn = itertools.cycle(documentation or [row.text for row in labelled])
        screen.say(f"{ALONE_S:.0f} s of calls alone, then calls beside {figures.rows:,} records …")
        await _calls_alone(callers, turn, figures)
        await _calls_beside(config, callers, turn, records, figures, screen)
        pairs = ((row.label, records.verdicts.get(row_id)) for row_id, row in zip(texts, labelled, strict=False))
        figures.accuracy["bulk"] = accuracy(pairs)
        unasked = [text for text in texts.values() if text not in callers.said]
        screen.say(f"asking /predict for the other {len(unasked):,} texts, to compare the two doors …")
        failures = await callers.lists(unasked)
    failures += figures.failures
    lost = [f"{len(failures):,} calls failed ({failures[0]}, …)"] if failures else []
    return records.problems(callers.said) + lost


async def _calls_alone(callers: Callers, turn: Iterator[str], figures: Figures) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(callers.open_loop(turn, stop, figures.alone, seed=1))
        await asyncio.sleep(ALONE_S)
        stop.set()


async def _calls_beside(
    config: ClientConfig, callers: Callers, turn: Iterator[str], records: Records, figures: Figures, screen: Screen
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    reader = bulk.Reader(config, records)
    began = loop.time()

    def refresh() -> None:
        figures.answered = records.answered
        figures.bulk_s = (reader.last_result_at if records.complete else loop.time()) - began

    with _unwrapped():
        async with asyncio.TaskGroup() as group:
            calling = group.create_task(callers.open_loop(turn, stop, figures.beside, seed=2))
            showing = group.create_task(screen.live(refresh))
            producing = group.create_task(bulk.produce(config, records.texts))
            await reader.until_complete()
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
        "records": figures.rows,
        "answered": figures.answered,
        "rows_per_s": round(figures.rows_per_s, 1),
        "calls": figures.calls,
        "alone_ms": _percentiles(figures.alone),
        "beside_ms": _percentiles(figures.beside),
        "accuracy": figures.accuracy,
    }


def _percentiles(calls: Calls) -> dict[str, float]:
    return {f"p{percent}": round(calls.percentile_ms(percent), 2) for percent in (50, 99) if calls.latencies_ms}


def _last_line(figures: Figures) -> str:
    return (
        f"{figures.rows:,} records answered exactly once at {figures.rows_per_s:,.0f} rows/s, {figures.calls:,} calls answered, "
        f"p50 {figures.alone.percentile_ms(50):.0f} ms alone and {figures.beside.percentile_ms(50):.0f} ms beside them"
    )
