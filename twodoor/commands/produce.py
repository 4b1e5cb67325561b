"""`twodoor produce`: a JSON lines file goes to the request topic."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from twodoor.config import ClientConfig
from twodoor.console import Exit, complain, fail, plain, read_config, say_json

# Records sent and not yet acknowledged: enough to keep the broker busy, and a bound on memory.
MAX_UNACKNOWLEDGED = 2_000


class ContentType(StrEnum):
    """The forms a record can have."""

    json = "json"
    protobuf = "protobuf"


class Compression(StrEnum):
    """What a batch of records is compressed with."""

    none = "none"
    gzip = "gzip"
    snappy = "snappy"
    lz4 = "lz4"
    zstd = "zstd"


def produce(
    file: Annotated[str, typer.Argument(metavar="FILE.jsonl", help="JSON lines; `-` reads from stdin.")],
    topic: Annotated[str | None, typer.Option(help="Default: the request topic.")] = None,
    model: Annotated[str | None, typer.Option(help="Model of the lines that name none.")] = None,
    content_type: Annotated[ContentType, typer.Option(help="Form of the records.")] = ContentType.json,
    compression: Annotated[Compression, typer.Option(help="Codec of the record batches.")] = Compression.lz4,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send each line's bytes as they are, readable or not: to try dead letters.")
    ] = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1, help="Longest wait for Kafka.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Send each line, a JSON string or {"id"?, "text" or "inputs", "model"?, "truncate"?}, as one record.

    A line that is no record is named with its number on stderr and the rest goes on; the command then exits 1.
    Blank lines are skipped. With an id, the id is the record's key. Each record is written once even where the
    connection breaks; where Kafka does not acknowledge in time, the command says how many records are certain.
    """
    from twodoor import topics

    config = read_config()
    to_record = _raw if raw else _encoder(model or config.default_model, content_type.value)
    codec = None if compression is Compression.none else compression.value
    job = Producing(config, topic or config.requests_topic, codec, to_record, timeout_s)
    stream = _open(file)
    with stream:
        size_bytes = None if file == "-" else Path(file).stat().st_size
        try:
            topics.run(job.run(stream, size_bytes))
        except OSError as exc:
            fail(f"reading {file} failed: {exc.strerror}")
    if as_json:
        say_json({"topic": job.topic, "records": job.acknowledged, "bad_lines": job.bad_lines})
    else:
        typer.echo(f"produced {job.acknowledged:,} records to {job.topic}, {job.bad_lines:,} bad lines")
    if job.bad_lines:
        raise typer.Exit(Exit.FAILED)


def _open(file: str) -> BinaryIO:
    try:
        # A copy without a buffer: closing the buffered one waits for the line that a terminal has not sent yet.
        return os.fdopen(os.dup(0), "rb", buffering=0) if file == "-" else Path(file).open("rb")
    except OSError as exc:
        fail(f"cannot read {file}: {exc.strerror}", Exit.USAGE)


def _encoder(model: str, content_type: str) -> Callable[[bytes], Any]:
    from twodoor import lines

    return lambda line: lines.encode(lines.parse(line, model), content_type)


def _raw(line: bytes) -> Any:
    from twodoor.lines import Record

    return Record(line)


class Producing:
    """One run of the command: what was acknowledged, and what was wrong."""

    def __init__(
        self,
        config: ClientConfig,
        topic: str,
        compression: str | None,
        to_record: Callable[[bytes], Any],
        timeout_s: float,
    ) -> None:
        self.topic = topic
        self.acknowledged = 0
        self.bad_lines = 0
        self._config = config
        self._compression = compression
        self._to_record = to_record
        self._timeout_s = timeout_s
        self._waiting: deque[tuple[int, asyncio.Future[Any]]] = deque()

    async def run(self, stream: BinaryIO, size_bytes: int | None) -> None:
        """Send every line of a stream and wait for the acknowledgements; raises KafkaAway, TopicTrouble, OSError."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from twodoor import lines, topics

        screen = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.fields[records]:,} records"), TimeElapsedColumn())
        progress = Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True)
        kafka = topics.producer(self._config, linger_ms=5, compression_type=self._compression)
        async with topics.started(self._config, kafka):
            await topics.partitions_of(kafka, self.topic)
            with progress:
                bar = progress.add_task("produce", total=size_bytes, records=0)
                async for number, line, read_bytes in lines.read_lines(stream, self._config.max_message_bytes):
                    await self._send(kafka, number, line)
                    progress.update(bar, completed=read_bytes, records=self.acknowledged)
                await self._settle(0)

    async def _send(self, kafka: Any, number: int, line: bytes | None) -> None:
        from aiokafka.errors import MessageSizeTooLargeError

        from twodoor.lines import BadLine

        if line is None:
            self._bad(number, f"larger than {self._config.max_message_bytes:,} bytes")
            return
        if not line.strip():
            return
        try:
            record = self._to_record(line)
            async with asyncio.timeout(self._timeout_s):
                sent = await kafka.send(self.topic, record.value, key=record.key, headers=list(record.headers))
        except BadLine as exc:
            self._bad(number, str(exc))
            return
        except MessageSizeTooLargeError:
            self._bad(number, "larger than a record may be")
            return
        except TimeoutError:
            raise self._away() from None
        self._waiting.append((number, sent))
        await self._settle(MAX_UNACKNOWLEDGED)

    async def _settle(self, bound: int) -> None:
        """Take what is acknowledged off the line, and wait until at most ``bound`` records are not."""
        from aiokafka.errors import MessageSizeTooLargeError

        while self._waiting and (len(self._waiting) > bound or self._waiting[0][1].done()):
            number, sent = self._waiting[0]
            # asyncio.wait does not cancel what it waits for: the record stays in flight either way.
            done, _ = await asyncio.wait({sent}, timeout=self._timeout_s)
            if not done:
                raise self._away()
            self._waiting.popleft()
            try:
                sent.result()
                self.acknowledged += 1
            except MessageSizeTooLargeError:
                self._bad(number, "larger than a record of the topic may be")

    def _bad(self, number: int, reason: str) -> None:
        self.bad_lines += 1
        complain(f"line {number}: {plain(reason)}")

    def _away(self) -> Exception:
        from twodoor.topics import KafkaAway

        return KafkaAway(
            f"Kafka did not acknowledge within {self._timeout_s:g} s: {self.acknowledged:,} records are certain, "
            f"{len(self._waiting):,} may or may not arrive"
        )
