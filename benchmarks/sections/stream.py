"""The stream: many texts on one WebSocket, alone and beside a saturated topic, and as fast as one connection takes them."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from benchmarks.bench import Bench, Section
from benchmarks.callers import Expected
from benchmarks.jobs import Address
from benchmarks.load import Call, LoadResult, poisson
from benchmarks.sections.topic import driver
from benchmarks.stats import Bar, Figure, paired_ratio, percentile

P99_BAR_MS = Bar(500.0, at_least=False)
DRAIN_S = 300.0
PERCENTS = (50, 99)


@dataclass(frozen=True, slots=True)
class Stream:
    """One connection to ``/v1/stream`` that all callers share: each sends a text and waits for the answer with its id."""

    address: Address
    texts: Sequence[str]
    expected: Sequence[Expected]

    @asynccontextmanager
    async def calls(self, callers: int) -> AsyncIterator[list[Call]]:
        """Open the connection; gives one call function for each caller."""
        host, port = self.address
        waiting: dict[str, asyncio.Future[bytes]] = {}
        ids = itertools.count()

        async def call(number: int) -> str:
            place, own_id = number % len(self.texts), str(next(ids))
            answer = waiting[own_id] = asyncio.get_running_loop().create_future()
            try:
                await socket.send(orjson.dumps({"id": own_id, "text": self.texts[place]}).decode())
                told = orjson.loads(await answer)
            except ConnectionClosed:
                raise ConnectionError("closed") from None
            finally:
                waiting.pop(own_id, None)
            if "error" in told:
                return f"error {told['error']['code']}"
            return self.expected[place].fault(told["output"]["label"] == "positive", told["output"]["score"])

        url = f"ws://{host}:{port}/v1/stream"
        async with connect(url, compression=None, proxy=None, max_queue=None) as socket:
            reading = asyncio.create_task(_hand_out(socket, waiting))
            try:
                yield [call] * callers
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


async def _hand_out(socket: ClientConnection, waiting: dict[str, "asyncio.Future[bytes]"]) -> None:
    """Give each answer to who waits for it; where the connection ends, all who wait learn it."""
    try:
        while True:
            content = await socket.recv(decode=False)
            answer = waiting.get(orjson.loads(content)["id"])
            if answer is not None and not answer.done():
                answer.set_result(content)
    except ConnectionClosed:
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionError("closed"))


async def measure(bench: Bench) -> Section:
    """Measure in rounds: Poisson texts alone, the same beside the topic, and one connection as full as the bound lets it be."""
    plan = bench.plan.stream
    section = Section(
        "stream", f"The stream: {plan.texts_per_s:g} Poisson texts/s on one WebSocket, and a saturated topic"
    )
    target = Stream(bench.stack.gateway, bench.corpus.texts, bench.corpus.expected)
    alone: list[LoadResult] = []
    beside: list[LoadResult] = []
    full: list[LoadResult] = []
    predict: list[LoadResult] = []
    async with driver(bench) as bulk:
        await bulk.run(min(len(bench.corpus.texts), 64), 120)
        for number in range(plan.rounds):
            bench.say(f"stream: round {number + 1} of {plan.rounds}")
            moments = poisson(plan.texts_per_s, plan.seconds, number)
            alone.append(await bench.open(section, "texts alone", target, moments))
            async with bulk.saturated(bench.plan.mix_backlog, DRAIN_S):
                await asyncio.sleep(plan.settle_s)
                beside.append(await bench.open(section, "texts beside the topic", target, moments))
                if bulk.outstanding < bench.plan.mix_backlog // 4:
                    section.notes.append(f"round {number + 1}: the topic ran dry")
            full.append(await bench.closed(section, "stream", target, plan.unanswered))
            predict.append(await bench.closed(section, "gateway", bench.predict, plan.unanswered))
        section.check("topic", bulk.wrong)
    section.figures = _figures(alone, beside, full, predict, plan.unanswered)
    count = sum(run.calls for run in (*alone, *beside, *full))
    section.notes.append(
        f"{count} texts (in both arms of a round at the same moments), each on its round's one connection, every answer checked."
    )
    section.data = {
        "alone_ms": [value for run in alone for value in run.latencies_ms.tolist()],
        "beside_ms": [value for run in beside for value in run.latencies_ms.tolist()],
    }
    return section


def _figures(
    alone: list[LoadResult],
    beside: list[LoadResult],
    full: list[LoadResult],
    predict: list[LoadResult],
    unanswered: int,
) -> list[Figure]:
    figures = []
    for percent in PERCENTS:
        before = [percentile(run.latencies_ms, percent) for run in alone]
        shared = [percentile(run.latencies_ms, percent) for run in beside]
        bar = P99_BAR_MS if percent == PERCENTS[-1] else None
        figures += [
            Figure(f"texts alone: p{percent}", "ms", tuple(before)),
            Figure(f"texts beside the topic: p{percent}", "ms", tuple(shared), bar),
            paired_ratio(f"texts' p{percent} beside the topic ÷ alone", shared, before),
        ]
    streamed, called = [run.per_s for run in full], [run.per_s for run in predict]
    return [
        *figures,
        Figure(f"one connection, {unanswered} unanswered", "texts/s", tuple(streamed)),
        paired_ratio(f"the same ÷ `/predict` with {unanswered} callers, texts/s", streamed, called),
    ]
