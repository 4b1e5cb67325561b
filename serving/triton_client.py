"""The one Triton client: async gRPC, one long-lived channel per process, foreign errors translated in one place."""

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self, cast

import grpc
import numpy as np
import structlog
from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import InferInput, InferRequestedOutput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from serving.deadline import Deadline
from serving.errors import (
    ConfigError,
    DeadlineExceeded,
    DependencyDown,
    ModelDied,
    ModelFailed,
    ModelNotReady,
    ModelRefused,
    Overloaded,
    TwodoorError,
    UnknownModel,
)
from serving.postprocess import FloatArray
from serving.preprocess import IdArray
from serving.settings import TritonSettings

log = structlog.get_logger(__name__)

# From this server version on a cancelled call is survived: the fixes #7840 and #8078 of triton-inference-server/server
# are in. Before it, a call whose caller left is let run to its end and its answer thrown away.
CANCEL_SAFE_VERSION = (2, 57)

# Triton answers most troubles with UNAVAILABLE or INTERNAL; only the sentence tells them apart. First match wins.
_BY_MESSAGE: tuple[tuple[re.Pattern[str], type[TwodoorError], str], ...] = (
    (re.compile(r"maximum queue size", re.I), Overloaded, "the model's queue is full"),
    (re.compile(r"request timeout expired|deadline exceeded", re.I), DeadlineExceeded, "the deadline passed in the model's queue"),
    (re.compile(r"stub process .*(not healthy|unexpectedly|exited|failed)|broken pipe|shared memory", re.I), ModelDied, "the model's process died"),
    (re.compile(r"unknown model.* version \d+ is not found", re.I), ModelNotReady, "that version of the model is not ready"),
    (re.compile(r"unknown model.*is not found|failed to find model", re.I), UnknownModel, "no such model"),
    (re.compile(r"no available versions|is not ready|unknown model|stopped accepting|server is stopping|being unloaded", re.I), ModelNotReady, "the model is not ready"),
)  # fmt: skip
_BY_STATUS: Mapping[str, tuple[type[TwodoorError], str]] = {
    "StatusCode.INVALID_ARGUMENT": (ModelRefused, "the model refused this input"),
    "StatusCode.DEADLINE_EXCEEDED": (DeadlineExceeded, "the deadline passed while the model worked"),
    "StatusCode.UNAVAILABLE": (DependencyDown, "the model server does not answer"),
    "StatusCode.CANCELLED": (DependencyDown, "the model server gave the call up"),
    "StatusCode.RESOURCE_EXHAUSTED": (ModelFailed, "the input or its answer is larger than a message may be"),
}


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model of the repository, as Triton's index tells it; ``versions`` are those that are ready, newest first."""

    name: str
    versions: tuple[str, ...]


class TritonClient:
    """Calls Triton. Make it inside a running event loop (after any fork) and close it with ``async with``."""

    def __init__(self, settings: TritonSettings) -> None:
        self._settings = settings
        self._client = InferenceServerClient(settings.grpc_address, channel_args=_channel_args(settings))
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._may_cancel = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End abandoned calls and close the channel."""
        for task in self._abandoned:
            task.cancel()
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=self._settings.control_timeout_s)
        await self._client.close()

    async def server_version(self) -> str:
        """Return the server's version and learn whether it survives cancelled calls."""
        with _translated():
            metadata = await self._client.get_server_metadata(client_timeout=self._settings.control_timeout_s)
        self._may_cancel = _version_tuple(metadata.version) >= CANCEL_SAFE_VERSION
        return str(metadata.version)

    async def models(self) -> dict[str, ModelState]:
        """Return every model of the repository, loaded or not."""
        with _translated():
            index = await self._client.get_model_repository_index(client_timeout=self._settings.control_timeout_s)
        ready: dict[str, list[str]] = {}
        for model in index.models:
            versions = ready.setdefault(model.name, [])
            if model.state == "READY":
                versions.append(model.version)
        return {name: ModelState(name, newest_first(versions)) for name, versions in ready.items()}

    async def model_config(self, name: str, version: str) -> dict[str, Any]:
        """Return the config Triton has loaded, proto field names as keys."""
        with _translated():
            config = await self._client.get_model_config(
                name, version, as_json=True, client_timeout=self._settings.control_timeout_s
            )
        return cast("dict[str, Any]", config["config"])

    async def config_digest(self, name: str, version: str) -> bytes:
        """Return a hash of the config Triton has loaded: a model that was loaded again under its version may have another."""
        with _translated():
            config = await self._client.get_model_config(name, version, client_timeout=self._settings.control_timeout_s)
        return hashlib.sha256(config.SerializeToString(deterministic=True)).digest()

    async def load(self, name: str, config: Mapping[str, Any] | None, timeout_s: float) -> None:
        """Load a model, or load it again, with the config in its folder or with another one; returns when it is ready.

        What was ready before serves on meanwhile, and for good where this fails: all of a load's versions come, or none.
        Raises ConfigError with Triton's reason, or DependencyDown.
        """
        text = None if config is None else json.dumps(config)
        try:
            await self._client.load_model(name, config=text, client_timeout=timeout_s)
        except InferenceServerException as exc:
            if str(exc.status()) in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED"):
                raise DependencyDown(f"the model server did not load {name}") from exc
            reason = str(exc.message()).strip().splitlines() or ["no reason given"]
            raise ConfigError(f"the model server cannot load {name}: {reason[0][:400]}") from exc

    async def requests_seen(self, name: str) -> dict[str, int]:
        """Return version → how many requests it has ended since it was loaded, well or not."""
        with _translated():
            answer = await self._client.get_inference_statistics(name, client_timeout=self._settings.control_timeout_s)
        counts = ((s.version, s.inference_stats) for s in answer.model_stats)
        return {version: stats.success.count + stats.fail.count for version, stats in counts}

    async def infer(
        self,
        model: str,
        version: str,
        inputs: Mapping[str, IdArray],
        output: str,
        deadline: Deadline,
        *,
        priority: int = 0,
        headers: Mapping[str, str] | None = None,
        ended: Callable[[], None] | None = None,
    ) -> FloatArray:
        """Run one request on a version of the model ("" = the newest); returns FP32 of shape [rows, size].

        The deadline becomes Triton's queue timeout (µs) and this call's own. A call that is late or whose caller
        left is cancelled only on a server that survives it; otherwise it runs on unobserved and its answer is dropped.
        ``priority``: the level in the model's queue, 1 before 2; 0 = its default. ``ended`` is called once, when nothing of the call runs any more: for an abandoned call that is later.
        """
        try:
            call = self._start(model, version, inputs, output, deadline, priority, headers)
        except BaseException:
            if ended is not None:
                ended()
            raise
        if ended is not None:
            call.add_done_callback(lambda _: ended())
        try:
            with _translated():
                # Not `wait_for`, which loses a cancellation that comes together with the answer.
                async with asyncio.timeout(deadline.remaining_s()):
                    result = await asyncio.shield(call)
        except TimeoutError:
            self._abandon(call)
            raise DeadlineExceeded("the deadline passed while the model worked") from None
        except (asyncio.CancelledError, DeadlineExceeded):
            self._abandon(call)
            raise
        array = result.as_numpy(output)
        if array is None or array.dtype != np.float32:
            raise ModelFailed(f"{model} gave no FP32 output {output}")
        return cast("FloatArray", array)

    def _start(
        self,
        model: str,
        version: str,
        inputs: Mapping[str, IdArray],
        output: str,
        deadline: Deadline,
        priority: int,
        headers: Mapping[str, str] | None,
    ) -> "asyncio.Task[Any]":
        return asyncio.ensure_future(
            self._client.infer(
                model,
                [_tensor(name, array) for name, array in inputs.items()],
                # Tokens, labels and the version an answer names belong together, so that no other one may answer.
                model_version=version,
                outputs=[InferRequestedOutput(output)],
                priority=priority,
                timeout=deadline.queue_timeout_us(),
                client_timeout=deadline.remaining_s() + (0 if self._may_cancel else self._settings.abandon_grace_s),
                headers=dict(headers) if headers else None,
            )
        )

    def _abandon(self, call: "asyncio.Task[Any]") -> None:
        """Keep a call nobody waits for until it ends: its outcome is read, so that no task is left unobserved."""
        if call.done():
            _read_outcome(call)
            return
        self._abandoned.add(call)
        call.add_done_callback(self._abandoned.discard)
        call.add_done_callback(_read_outcome)
        if self._may_cancel:
            call.cancel()


def _read_outcome(call: "asyncio.Task[Any]") -> None:
    if not call.cancelled() and call.exception() is not None:
        log.debug("abandoned call failed", error=type(call.exception()).__name__)


def _tensor(name: str, array: IdArray) -> InferInput:
    tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _channel_args(settings: TritonSettings) -> Sequence[tuple[str, int]]:
    # channel_args replaces every default of tritonclient, so the message sizes must be named again.
    return [
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", settings.keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", settings.keepalive_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 0),
        # A server that comes back is found again soon: gRPC's own back-off grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 250),
        # Each client its own connection: a shared one would tie the doors of one test process together.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def parse_config(text: str) -> dict[str, Any]:
    """Return a config.pbtxt as a mapping with proto field names; raises ConfigError where it is none."""
    try:
        config = text_format.Parse(text, ModelConfig())
    except text_format.ParseError as exc:
        raise ConfigError(f"config.pbtxt cannot be read: {exc}") from None
    return MessageToDict(config, preserving_proto_field_name=True)


def newest_first(versions: Iterable[str]) -> tuple[str, ...]:
    """Return Triton's version numbers, the largest first."""
    return tuple(sorted(versions, key=int, reverse=True))


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@contextmanager
def _translated() -> Iterator[None]:
    """Turn tritonclient's one exception into ours; the server's own words go to the log, not to the caller."""
    try:
        yield
    except InferenceServerException as exc:
        raise translate(str(exc.status()), str(exc.message())) from exc
    except grpc.aio.UsageError as exc:
        raise DependencyDown("the connection to the model server is closed") from exc


def translate(status: str, message: str) -> TwodoorError:
    """Return our error for what Triton answered (gRPC status as ``StatusCode.NAME`` and its sentence)."""
    log.debug("triton refused", status=status, message=message)
    for pattern, error, sentence in _BY_MESSAGE:
        if pattern.search(message):
            return error(sentence)
    error, sentence = _BY_STATUS.get(status, (ModelFailed, "the model failed on this input"))
    return error(sentence)
