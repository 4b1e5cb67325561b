"""`twodoor dlq`: look at the dead letters, and send them back to the request topic once."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from twodoor.config import ClientConfig
from twodoor.console import plain, read_config, say_json, shorten

app = typer.Typer(help="Records that could not be read.", no_args_is_help=True)

# Dead letters sent back in one transaction.
BATCH_RECORDS = 200
_OWN_HEADERS = "twodoor-"


@app.command("list")
def list_letters(
    everything: Annotated[bool, typer.Option("--all", help="Also those that were replayed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each dead letter as one line of JSON.")] = False,
) -> None:
    """Show the dead letters that were not replayed: why each could not be read, and where it came from."""
    from twodoor import topics

    count = topics.run(_list(read_config(), everything, as_json))
    if not as_json:
        typer.echo(f"{count:,} dead letters")


@app.command("replay")
def replay(
    most: Annotated[int | None, typer.Option("--max", min=1, help="Send back at most so many.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the count as JSON.")] = False,
) -> None:
    """Send dead letters back to the request topic, each once: a second replay does not send them again.

    A letter goes back as it came (key, value, headers). One that still cannot be read becomes a new dead letter.
    """
    from twodoor import topics

    config = read_config()
    count = topics.run(_replay(config, most))
    if as_json:
        say_json({"topic": config.requests_topic, "records": count})
    else:
        typer.echo(f"replayed {count:,} dead letters to {config.requests_topic}")


def _group(config: ClientConfig) -> str:
    return f"{config.group_id}.dlq-replay"


async def _list(config: ClientConfig, everything: bool, as_json: bool) -> int:
    from twodoor import topics

    count = 0
    async with topics.started(config, topics.reader(config, _group(config))) as consumer:
        partitions = await topics.assign_all(consumer, config.dlq_topic)
        await _start_at(consumer, partitions, from_beginning=everything)
        async for record in topics.read_to_end(consumer, partitions):
            count += 1
            _show(record, as_json)
    return count


def _show(record: Any, as_json: bool) -> None:
    headers = {name: value.decode("utf-8", "replace") for name, value in record.headers}
    source = "-".join(headers.get(f"twodoor-source-{part}", "?") for part in ("topic", "partition", "offset"))
    code, message = headers.get("twodoor-error-code", "?"), headers.get("twodoor-error-message", "")
    size_bytes = len(record.value or b"")
    if as_json:
        place = {"partition": record.partition, "offset": record.offset}
        say_json({**place, "code": code, "message": message, "source": source, "size_bytes": size_bytes})
        return
    where = f"{record.partition}-{record.offset}"
    typer.echo(f"{where:<8} {plain(code):<16} {plain(source):<28} {size_bytes:>8} B  {shorten(message, 100)}")


async def _replay(config: ClientConfig, most: int | None) -> int:
    from twodoor import topics

    # The same transactional id for all: a replay that starts shuts out one that still runs.
    kafka = topics.producer(config, transactional_id=_group(config))
    count = 0
    group = _group(config)
    async with topics.started(config, kafka), topics.started(config, topics.reader(config, group)) as consumer:
        await topics.partitions_of(kafka, config.requests_topic)
        partitions = await topics.assign_all(consumer, config.dlq_topic)
        # Read after the producer has begun: nobody can move these offsets any more.
        await _start_at(consumer, partitions, from_beginning=False)
        batch: list[Any] = []
        async for record in topics.read_to_end(consumer, partitions):
            batch.append(record)
            if len(batch) == BATCH_RECORDS or count + len(batch) == most:
                count += await _send_back(config, kafka, batch)
                batch = []
            if count == most:
                return count
        return count + (await _send_back(config, kafka, batch) if batch else 0)


async def _start_at(consumer: Any, partitions: Sequence[Any], from_beginning: bool) -> None:
    """Stand at the first letter that was not replayed; one that retention has removed is passed over by Kafka."""
    from twodoor.topics import CONNECT_TIMEOUT_S

    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        first = await consumer.beginning_offsets(partitions)
        for partition in partitions:
            replayed = None if from_beginning else await consumer.committed(partition)
            consumer.seek(partition, max(first[partition], replayed or 0))


async def _send_back(config: ClientConfig, kafka: Any, batch: Sequence[Any]) -> int:
    """Send a batch and the offsets behind it in one transaction; returns how many."""
    from aiokafka import TopicPartition
    from aiokafka.errors import ProducerFenced

    from twodoor.topics import CONNECT_TIMEOUT_S, TopicTrouble

    offsets = {TopicPartition(record.topic, record.partition): record.offset + 1 for record in batch}
    try:
        # The inner bound is the work's; the outer one is for undoing it where the broker does not answer that either.
        async with (
            asyncio.timeout(3 * CONNECT_TIMEOUT_S),
            asyncio.timeout(2 * CONNECT_TIMEOUT_S),
            kafka.transaction(),
        ):
            sent = [await _send(config, kafka, record) for record in batch]
            await asyncio.gather(*sent)
            await kafka.send_offsets_to_transaction(offsets, _group(config))
    except ProducerFenced:
        raise TopicTrouble("another replay has begun and took over; nothing was sent twice") from None
    return len(batch)


async def _send(config: ClientConfig, kafka: Any, record: Any) -> Any:
    headers = [(name, value) for name, value in record.headers if not name.startswith(_OWN_HEADERS)]
    sent = await kafka.send(config.requests_topic, record.value, key=record.key, headers=headers)
    # Where the transaction fails nobody waits for this one any more: its error is known from the others.
    sent.add_done_callback(lambda done: done.cancelled() or done.exception())
    return sent
