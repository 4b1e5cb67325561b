"""`twodoor consume`: print results as they are committed."""

import asyncio
from typing import Annotated, Any

import typer

from twodoor.config import ClientConfig
from twodoor.console import Exit, complain, plain, read_config, say_json, shorten


def consume(
    topic: Annotated[str | None, typer.Option(help="Default: the result topic.")] = None,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="Start with the oldest record, not with the next one.")
    ] = False,
    max_records: Annotated[int | None, typer.Option("--max", min=1, help="End after this many records.")] = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout-s", min=0.1, help="End when no record came for so long.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print each result as one line of JSON.")] = False,
) -> None:
    """Print results; only what was committed is seen, and nothing is marked as read.

    Without --max and --timeout-s it goes on until Ctrl-C. Exits 1 where --max asks for more than came in time.
    """
    from twodoor import topics

    config = read_config()
    try:
        seen = topics.run(
            _consume(config, topic or config.results_topic, from_beginning, max_records, timeout_s, as_json)
        )
    except KeyboardInterrupt:
        return
    if max_records is not None and seen < max_records:
        complain(f"{seen:,} of {max_records:,} records came")
        raise typer.Exit(Exit.FAILED)


async def _consume(
    config: ClientConfig, topic: str, from_beginning: bool, most: int | None, timeout_s: float | None, as_json: bool
) -> int:
    from twodoor import topics

    loop = asyncio.get_running_loop()
    seen = 0
    async with topics.started(config, topics.reader(config)) as consumer:
        partitions = await topics.assign_all(consumer, topic)
        async with asyncio.timeout(topics.CONNECT_TIMEOUT_S):
            await (consumer.seek_to_beginning if from_beginning else consumer.seek_to_end)(*partitions)
        complain(f"reading {topic} from its {'beginning' if from_beginning else 'end'}")
        record_at = loop.time()
        while most is None or seen < most:
            left_s = 1.0 if timeout_s is None else record_at + timeout_s - loop.time()
            if left_s <= 0:
                break
            wanted = 500 if most is None else min(500, most - seen)
            batch = await consumer.getmany(timeout_ms=int(min(left_s, 1.0) * 1000) + 1, max_records=wanted)
            for records in batch.values():
                for record in records:
                    _show(record, as_json)
                    seen += 1
                    record_at = loop.time()
    return seen


def _show(record: Any, as_json: bool) -> None:
    from twodoor.lines import decode_result

    try:
        result = decode_result(record.value or b"", record.headers)
    except ValueError:
        complain(f"{record.topic}-{record.partition}-{record.offset} is no result")
        return
    if as_json:
        say_json(result)
        return
    typer.echo(f"{shorten(str(result.get('id', '-')), 40):<40} {plain(_answer(result))}")


def _answer(result: dict[str, Any]) -> str:
    if "event" in result:  # of twodoor.jobs.events
        told = result.get("status") or f"{result.get('code')}: {result.get('message')}"
        return f"{result['event']} {told}"
    if "error" in result:
        return f"error {result['error'].get('code')}: {result['error'].get('message')}"
    if "predictions" in result:
        return f"{len(result['predictions'])} answers: " + "; ".join(map(_answer_of_row, result["predictions"][:4]))
    return _answer_of_row(result.get("output") or {})


def _answer_of_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"error {row['error'].get('code')}"
    if "embedding" in row:
        return f"embedding of {len(row['embedding'])} numbers"
    label = row.get("label")
    return f"{label} {(row.get('scores') or {}).get(label, 0.0):.3f}"
