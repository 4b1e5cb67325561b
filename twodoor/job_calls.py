"""The job API's calls, blocking."""

import os
import uuid
from collections.abc import Iterator, Mapping

from twodoor import job_flows as flows
from twodoor.download import Download
from twodoor.job_bodies import Options, Progress, Rows, prepared
from twodoor.job_flows import LONG_WAIT_S
from twodoor.job_records import BulkState, Job, ResultRow
from twodoor.result_flows import Lines, results_flow
from twodoor.transport import SyncCore


class JobCalls(SyncCore):
    """Jobs, their results, and the operator's hand on bulk work."""

    def submit_job(
        self,
        rows: Rows,
        *,
        model: str | None = None,
        truncate: bool = False,
        metadata: Mapping[str, str] | None = None,
        completion_window_s: int | None = None,
        result_ttl_s: int | None = None,
        idempotency_key: str | None = None,
        compress: bool = False,
        timeout_s: float = 60.0,
        request_id: str | None = None,
        on_progress: Progress | None = None,
    ) -> Job:
        """Hand over rows and return the job that does them: from then on each row gives exactly one result.

        ``rows``: texts, or mappings ``{"text", "id"?}``; or a Path to JSON lines (``.gz``: already compressed), or
        a binary stream of them; nothing is held whole in memory. ``compress``: gzip on the way. The client makes an
        idempotency key where none is given, so a broken connection never makes two jobs. ``timeout_s`` is how long
        the server may be silent. Raises Invalid, NotFound, QuotaExceeded, Unavailable and the tree's other errors,
        OSError where a file cannot be read.
        """
        options = Options(
            model or self._config.default_model, truncate, metadata or {}, completion_window_s, result_ttl_s
        )
        key = idempotency_key or uuid.uuid4().hex
        with prepared(rows, options, compress, on_progress) as content:
            return self._run(flows.submit_flow(content, options, key, timeout_s, self.retry, request_id))

    def get_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Return a job; raises NotFound."""
        return self._run(flows.get_flow(job_id, self.wanted_s(timeout_s), self.retry))

    def wait_job(self, job_id: str, *, timeout_s: float | None = None, outage_s: float = 60.0) -> Job:
        """Wait until a job has ended, however it did, and return it; raises DeadlineExceeded after ``timeout_s``.

        The server is asked to hold its answer, so the end is known at once. One that is away is waited for, up to
        ``outage_s`` at a time.
        """
        return self._run(flows.watch_flow(job_id, LONG_WAIT_S, timeout_s, outage_s))

    def watch_job(
        self, job_id: str, *, every_s: float = 1.0, timeout_s: float | None = None, outage_s: float = 60.0
    ) -> Iterator[Job]:
        """Yield a job now, then about every ``every_s``, until it has ended: the last one yielded is the ended job."""
        return self._iterate(flows.watch_flow(job_id, every_s, timeout_s, outage_s))

    def list_jobs(
        self, *, status: str | None = None, page_rows: int = 100, timeout_s: float | None = None
    ) -> Iterator[Job]:
        """Yield the jobs, newest first, all pages of them; ``status`` picks those in one state."""
        return self._iterate(flows.list_flow(status, page_rows, self.wanted_s(timeout_s), self.retry))

    def results(
        self,
        job_id: str,
        *,
        only_errors: bool = False,
        partial: bool = False,
        idle_timeout_s: float = 30.0,
        outage_s: float = 30.0,
    ) -> Iterator[ResultRow]:
        """Yield one result for each row, in row order, as they arrive; a broken connection is taken up where it broke.

        ``only_errors``: rows without an answer alone. ``partial``: what is finished of a job that still runs, where
        otherwise Conflict is raised. ``idle_timeout_s`` bounds each read; a server that is away is waited for, up to
        ``outage_s`` since the last byte.
        """
        flow = results_flow(
            job_id,
            Lines(),
            only_errors=only_errors,
            partial=partial,
            idle_timeout_s=idle_timeout_s,
            outage_s=outage_s,
        )
        return self._iterate(flow)

    def download_results(
        self,
        job_id: str,
        path: str | os.PathLike[str],
        *,
        only_errors: bool = False,
        partial: bool = False,
        idle_timeout_s: float = 30.0,
        outage_s: float = 30.0,
        on_progress: Progress | None = None,
    ) -> int:
        """Write the results' JSON lines to a file and return how many bytes they have.

        The file appears when it is whole; until then its beginning lies beside it, and a call that was cut off is
        taken up there by the next. Raises as ``results`` does, and OSError where the file cannot be written.
        """
        with Download(path, job_id, only_errors, partial, on_progress) as file:
            flow = file.flow(idle_timeout_s, outage_s)
            for piece in self._iterate(flow):
                file.write(piece)
            return file.finish()

    def cancel_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Begin to cancel a job and return it; one that has ended stays as it is. Finished rows keep their results."""
        return self._run(flows.cancel_flow(job_id, self.wanted_s(timeout_s), self.retry))

    def delete_job(self, job_id: str, *, timeout_s: float | None = None) -> None:
        """Delete a job that has ended, with its results; raises Conflict for one that has not, NotFound."""
        self._run(flows.delete_flow(job_id, self.wanted_s(timeout_s), self.retry))

    def bulk_state(self, *, wait_s: float | None = None, timeout_s: float | None = None) -> BulkState:
        """Return whether bulk work goes on, with what each consumer does; needs an admin key where there are keys.

        With ``wait_s``, while it is ``pausing``, wait until it is ``paused``; raises DeadlineExceeded.
        """
        return self._run(flows.bulk_flow(None, wait_s, self.wanted_s(timeout_s), self.retry))

    def pause_bulk(self, *, wait_s: float | None = None, timeout_s: float | None = None) -> BulkState:
        """Pause bulk work; with ``wait_s`` return once no row is in flight any more, or raise DeadlineExceeded."""
        return self._run(flows.bulk_flow("pause", wait_s, self.wanted_s(timeout_s), self.retry))

    def resume_bulk(self, *, wait_s: float | None = None, timeout_s: float | None = None) -> BulkState:
        """Let bulk work go on; one that is not paused goes on as it was."""
        return self._run(flows.bulk_flow("resume", wait_s, self.wanted_s(timeout_s), self.retry))
