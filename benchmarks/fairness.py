"""``python -m benchmarks.fairness``: a small job behind a giant one, and two tenants with weights 1 and 3.

Prints one line a figure; the exit code is 1 where a bar is missed or an answer was wrong.
"""

import argparse
import asyncio
import hashlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.corpus import sst2_texts
from benchmarks.job_door import JobDriver
from benchmarks.stats import Bar, Figure
from local_stack.stack import Stack

MODEL = "sentiment_model"
SMALL_ROWS, GIANT_ROWS, SHARE_ROWS = 50, 200_000, 60_000
KEYS = {"light": 1.0, "heavy": 3.0}
BEHIND_BAR = Bar(3.0, at_least=False)
LOW, HIGH = 2.7, 3.3


def main() -> int:
    """Run both measurements on a stack of our own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fairness", description=__doc__)
    parser.add_argument("--tries", type=int, default=7, help="small jobs in each arm")
    parser.add_argument("--share-s", type=float, default=60.0, help="how long two tenants are watched")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="twodoor-fairness-") as folder:
        keys = Path(folder) / "keys.jsonl"
        keys.write_text("".join(_key_line(name, weight) for name, weight in KEYS.items()))
        # The ledger shows a chunk at a time: small ones give a finer ruler.
        environment = {"TWODOOR_GATEWAY_KEYS_FILE": str(keys), "TWODOOR_JOBS_CHUNK_ROWS": "128"}
        with Stack(Path(folder) / "home", environment=environment) as stack:
            return asyncio.run(_measure(stack, options.tries, options.share_s))


def _key_line(name: str, weight: float) -> str:
    fields = {"sha256": hashlib.sha256(_key(name).encode()).hexdigest(), "tenant": name, "weight": weight}
    return json.dumps({**fields, "max_queued_rows": 10_000_000}) + "\n"


def _key(name: str) -> str:
    return f"fairness-{name}"


async def _measure(stack: Stack, tries: int, share_s: float) -> int:
    texts = sst2_texts(2_000).texts
    async with (
        JobDriver(stack.gateway_url, MODEL, _key("light")) as light,
        JobDriver(stack.gateway_url, MODEL, _key("heavy")) as heavy,
    ):
        await light.run(texts, SMALL_ROWS, 120)
        ratio = await _behind_a_giant(light, texts, tries)
        share = await _shares(light, heavy, texts, share_s)
        wrong = light.wrong + heavy.wrong
    print(
        f"small job behind a giant ÷ alone: {ratio:.2f} (bar {BEHIND_BAR}: {'met' if BEHIND_BAR.met_by(ratio) else 'missed'})"
    )
    met = LOW <= share <= HIGH
    print(f"rows of weight 3 ÷ rows of weight 1: {share:.2f} (bar {LOW} to {HIGH}: {'met' if met else 'missed'})")
    for fault, count in wrong.items():
        print(f"wrong: {count} x {fault}")
    return 0 if BEHIND_BAR.met_by(ratio) and met and not wrong else 1


async def _behind_a_giant(jobs: JobDriver, texts: tuple[str, ...], tries: int) -> float:
    """Return the median time of a small job behind a giant one of the same tenant, divided by that on an idle system."""
    alone = [(await jobs.run(texts, SMALL_ROWS, 120)).seconds for _ in range(tries)]
    giant = await jobs.submit(texts, GIANT_ROWS)
    await _under_way(jobs, giant)
    behind = [(await jobs.run(texts, SMALL_ROWS, 300)).seconds for _ in range(tries)]
    await jobs.cancel(giant)
    await jobs.wait(giant, 120)
    for name, runs in (("alone", alone), (f"behind {GIANT_ROWS:,} rows", behind)):
        figure = Figure(name, "s", tuple(runs))
        print(f"{SMALL_ROWS} rows {name}: {figure.median:.2f} s ({figure.low:.2f} to {figure.high:.2f})")
    return statistics.median(behind) / statistics.median(alone)


async def _under_way(jobs: JobDriver, job_id: str) -> None:
    async with asyncio.timeout(120):
        while not (await jobs.get(job_id))["rows"]["succeeded"]:  # noqa: ASYNC110 (asked over HTTP)
            await asyncio.sleep(0.1)


async def _shares(light: JobDriver, heavy: JobDriver, texts: tuple[str, ...], seconds: float) -> float:
    """Return the rows of the heavy tenant divided by those of the light one, both with a job that never runs dry."""
    ids = [await light.submit(texts, SHARE_ROWS), await heavy.submit(texts, SHARE_ROWS)]
    await asyncio.gather(_under_way(light, ids[0]), _under_way(heavy, ids[1]))
    before = [await _done(light, ids[0]), await _done(heavy, ids[1])]
    begin_s = time.monotonic()
    await asyncio.sleep(seconds)
    after = [await _done(light, ids[0]), await _done(heavy, ids[1])]
    rows = [late - early for early, late in zip(before, after, strict=True)]
    print(
        f"two tenants for {time.monotonic() - begin_s:.0f} s: {rows[0]:,} rows with weight 1, {rows[1]:,} with weight 3"
    )
    for jobs, job_id in zip((light, heavy), ids, strict=True):
        await jobs.cancel(job_id)
        await jobs.wait(job_id, 120)
    return rows[1] / max(1, rows[0])


async def _done(jobs: JobDriver, job_id: str) -> int:
    rows = (await jobs.get(job_id))["rows"]
    return int(rows["succeeded"] + rows["failed"])


if __name__ == "__main__":
    sys.exit(main())
