"""A small job API on a real socket for tests of the client and the command line: it breaks where a test says so."""

import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

BROKEN = 0
"""As the status of a scripted failure: the request is carried out, and the connection closed without an answer."""


@dataclass
class Asked:
    """One request as it came, its body decoded."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class JobServer:
    """Its state; tests set what goes wrong and look at what was asked."""

    port: int = 0
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    results: bytes = b""
    asked: list[Asked] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    """(status, code) of the next requests; ``BROKEN`` for one that is carried out and not answered."""
    break_after: list[int] = field(default_factory=list)
    """Bytes after which the next answers with results break off."""
    steps: list[str] = field(default_factory=list)
    """States a job shows when it is asked for, in turn; then the last."""
    bulk: list[str] = field(default_factory=lambda: ["running"])
    ranges: bool = True
    hold_s: float = 0.0
    """How long Prefer: wait is honoured at most."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def add(self, number: int, status: str = "queued", rows: int = 3, failed: int = 0, **more: Any) -> dict[str, Any]:
        """Make a job."""
        done = rows if status not in ("queued", "running", "cancelling") else 0
        job = {
            "id": f"job_{number:032x}", "status": status, "model": "m", "model_version": None,
            "rows": {"total": rows, "succeeded": done - failed if done else 0, "failed": failed, "pending": rows - done},
            "progress": 1.0 if done else 0.0, "created_at": "2026-01-02T03:04:05.000006Z", "started_at": None,
            "finished_at": "2026-01-02T03:04:07.000006Z" if done else None, "deadline_at": "2026-01-03T03:04:05.000006Z",
            "expires_at": None, "metadata": {}, **more,
        }  # fmt: skip
        self.jobs[str(job["id"])] = job
        return job

    def count(self, method: str, path: str) -> int:
        """Return how often a path was asked for."""
        return sum(one.method == method and one.path == path for one in self.asked)


def result_lines(rows: int) -> bytes:
    """Return results: every third row failed."""
    lines = []
    for index in range(rows):
        if index % 3 == 2:
            answer: dict[str, Any] = {"error": {"code": "empty_text", "message": "empty", "line": index + 1}}
        else:
            answer = {"output": {"label": "a", "score": 0.5, "scores": {"a": 0.5, "b": 0.5}}}
        lines.append(json.dumps({"index": index, "id": f"r{index}", **answer}))
    return "".join(f"{line}\n" for line in lines).encode()


@contextmanager
def serving() -> Iterator[JobServer]:
    """Run a server until the block ends."""
    state = JobServer()
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
    http.block_on_close = False
    http.daemon_threads = True
    state.port = http.server_port
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
        thread.join(5)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: JobServer

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionResetError, BrokenPipeError):
            return  # a test whose caller does not wait

    def _any(self) -> None:
        parts, state = urlsplit(self.path), self.state
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, parts.path, dict(parse_qsl(parts.query)), headers, self._body(headers))
        state.asked.append(asked)
        failure = state.failures.pop(0) if state.failures else None
        if failure is not None and failure[0] != BROKEN:
            problem = {"title": "t", "status": failure[0], "code": failure[1], "detail": f"about {failure[1]}"}
            self._say(failure[0], problem)
            return
        answer = self._answer(asked)
        if failure is not None:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif answer is not None:
            self._say(*answer)

    do_GET = do_POST = do_DELETE = _any  # noqa: N815 (http.server looks for these names)

    def _answer(self, asked: Asked) -> tuple[int, Any] | tuple[int, Any, dict[str, str]] | None:
        state = self.state
        if asked.path == "/v1/jobs":
            return self._submit(asked) if asked.method == "POST" else self._list(asked.query)
        if asked.path.startswith("/v1/admin/bulk"):
            state_now = state.bulk.pop(0) if len(state.bulk) > 1 else state.bulk[0]
            return 200, {"state": state_now, "epoch": 1, "consumers": [{"id": "c\x1b[31m1", "rows_in_flight": 2}]}
        job = state.jobs.get(asked.path.split("/")[3])
        if job is None:
            return 404, {"title": "t", "status": 404, "code": "not_found", "detail": "no such job"}
        if asked.path.endswith("/results"):
            self._results(asked)
            return None
        if asked.method == "DELETE":
            del state.jobs[job["id"]]
            return 204, None
        if asked.path.endswith("/cancel"):
            job["status"] = "cancelling"
            return 202, job
        wait = re.search(r"wait=(\d+)", asked.headers.get("prefer", ""))
        if wait:
            time.sleep(min(int(wait[1]), state.hold_s))
        if state.steps:
            job = state.add(int(job["id"][4:], 16), state.steps.pop(0))
        return 200, job

    def _submit(self, asked: Asked) -> tuple[int, Any, dict[str, str]]:
        state, key = self.state, asked.headers["idempotency-key"]
        replayed = key in state.keys
        if not replayed:
            state.keys[key] = state.add(len(state.keys) + 1)["id"]
        return 202, state.jobs[state.keys[key]], {"Idempotent-Replayed": "true"} if replayed else {}

    def _list(self, query: dict[str, str]) -> tuple[int, Any]:
        jobs = [job for job in self.state.jobs.values() if query.get("status") in (None, job["status"])]
        ids = [job["id"] for job in jobs]
        first = ids.index(query["after"]) + 1 if "after" in query else 0
        page = jobs[first : first + int(query["limit"])]
        more = first + len(page) < len(jobs)
        return 200, {"data": page, "has_more": more, "next": page[-1]["id"] if more else None}

    def _results(self, asked: Asked) -> None:
        state, start = self.state, 0
        if asked.query.get("only") == "errors":
            content = b"".join(line + b"\n" for line in state.results.split(b"\n") if b'"error"' in line)
        else:
            content = state.results
        total = len(content)
        if state.ranges and "range" in asked.headers:
            start = int(asked.headers["range"].removeprefix("bytes=").removesuffix("-"))
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(total - start))
        self.end_headers()
        if state.break_after:
            self.wfile.write(content[start : start + state.break_after.pop(0)])
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(content[start:])

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(pieces)
        else:
            body = self.rfile.read(int(headers.get("content-length", "0")))
        return gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body

    def _say(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass
