"""One cold start of Triton and the gateway in a state folder of their own: each phase's end, and the first right answer."""

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import orjson
import psutil

from benchmarks.callers import Expected, HttpConnection, post
from local_stack.stack import Stack

ASK_EVERY_S = 0.01
LIMIT_S = 180.0
SERVICES = ("triton", "gateway")
_TRITON_LINE = re.compile(r"^[IWE](\d{4} \d{2}:\d{2}:\d{2}\.\d{6}) .*\] (.*)$", re.MULTILINE)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked until it is answered rightly."""

    text: str
    expected: Expected


class ColdStack:
    """A Triton with a gateway before it, started and asked from an event loop."""

    def __init__(self, stack: Stack, model: str, question: Question, executor: ThreadPoolExecutor) -> None:
        self._stack, self._model, self._question, self._executor = stack, model, question, executor

    async def start(self) -> Mapping[str, float]:
        """Start both; returns phase → seconds, the last of them counted from the command."""
        begin_s = time.time()
        answer_s = await self._until_answer(self._stack.start)
        return {
            **_triton_phases(self._log("triton"), self._born_s("triton"), self._model),
            **_gateway_phases(self._log("gateway")),
            "from the command to the first process": min(map(self._born_s, SERVICES)) - begin_s,
            "from the first process to the first right answer": answer_s - min(map(self._born_s, SERVICES)),
            "from the command to the first right answer": answer_s - begin_s,
        }

    async def restart(self, service: str) -> float:
        """Stop a service and start it while the other one is warm; returns the seconds from its process to the answer."""
        await self._in_thread(partial(self._stack.stop_service, service))
        answer_s = await self._until_answer(partial(self._stack.start_service, service))
        return answer_s - self._born_s(service)

    async def stop(self) -> None:
        """Stop both."""
        await self._in_thread(self._stack.stop)

    async def _in_thread(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def _until_answer(self, start: Callable[[], object]) -> float:
        """Start, and ask from then on; returns the moment of the first right answer, and waits until all is ready."""
        async with asyncio.timeout(LIMIT_S):
            answer, _ = await asyncio.gather(self._ask(), self._in_thread(start))
        return answer

    async def _ask(self) -> float:
        parts = urlsplit(self._stack.gateway_url)
        host, port = str(parts.hostname), int(parts.port or 80)
        request = post("/predict", orjson.dumps({"text": self._question.text}), f"{host}:{port}")
        connection = HttpConnection(host, port)
        try:
            while True:
                try:
                    status, body = await connection.send(request)
                except OSError:  # nobody listens yet
                    status, body = 0, b""
                if status == 200:
                    return self._checked(body)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            if connection.connected:
                await connection.close()

    def _checked(self, body: bytes) -> float:
        now_s, answer = time.time(), orjson.loads(body)
        if fault := self._question.expected.fault(answer["sentiment"] == "positive", answer["score"]):
            raise ValueError(f"the first answer: {fault}")
        return now_s

    def _born_s(self, service: str) -> float:
        return psutil.Process(self._stack.pid(service)).create_time()

    def _log(self, service: str) -> str:
        return self._stack.log_path(service).read_text(errors="replace")


@asynccontextmanager
async def cold_stack(
    repository: Path, model: str, question: Question, environment: Mapping[str, str]
) -> AsyncIterator[ColdStack]:
    """Make a stack that is not started; what was started is stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="twodoor-cold-") as folder, ThreadPoolExecutor(1) as executor:
        stack = Stack(
            Path(folder) / "home",
            services=SERVICES,
            repository=repository,
            environment={"TWODOOR_MODELS_DEFAULT": model, "TWODOOR_STACK_START_TIMEOUT_S": str(LIMIT_S), **environment},
            start_timeout_s=LIMIT_S,
        )
        cold = ColdStack(stack, model, question, executor)
        try:
            yield cold
        finally:
            await cold.stop()


def _triton_phases(log: str, born_s: float, model: str) -> dict[str, float]:
    """Read the moments of Triton's own log; the model's are those of the slowest of its instances."""
    lines = [(_moment_s(at), text) for at, text in _TRITON_LINE.findall(log)]

    def last(part: str) -> float:
        return max((at_s for at_s, text in lines if part in text), default=float("nan"))

    begun_s, loaded_s = last(f"loading: {model}:"), last(f"instance={model}_0_")
    ready_s, ports_s = last(f"successfully loaded '{model}'"), last("Started GRPCInferenceService")
    return {
        "Triton: process": begun_s - born_s,
        "Triton: model's processes and files": loaded_s - begun_s,
        "Triton: warm-up": ready_s - loaded_s,
        "Triton: other models, then ports": ports_s - ready_s,
    }


def _moment_s(text: str) -> float:
    """Triton's log names no year."""
    return datetime.strptime(f"{time.localtime().tm_year} {text}", "%Y %m%d %H:%M:%S.%f").timestamp()  # noqa: DTZ007


def _gateway_phases(log: str) -> dict[str, float]:
    names = {
        "imports": "gateway: imports",
        "open": "gateway: opening",
        "tokenizers": "gateway: tokenizers (a thread)",
        "triton": "gateway: wait for Triton",
        "models": "gateway: models' configs and tokenizers",
    }
    found = dict.fromkeys(names.values(), float("nan"))
    for line in log.splitlines():
        entry = orjson.loads(line) if line.startswith("{") else {}
        if entry.get("event") == "startup" and entry["phase"] in names:
            found[names[entry["phase"]]] = float(entry["seconds"])
    return found
