"""One tree of errors with stable codes; each door has one table that renders them.

TwodoorError
├── ConfigError                the operator has to change something; the process does not start
├── RowError                   belongs to one row and never harms its neighbours
│   ├── EmptyText              empty_text
│   ├── TextTooLong            text_too_long
│   ├── InvalidRow             invalid_row
│   ├── InvalidJson            invalid_json
│   ├── InvalidUnicode         invalid_unicode
│   ├── RowTooLarge            row_too_large
│   ├── UnknownModel           unknown_model
│   ├── NonFiniteOutput        non_finite_output
│   ├── ModelFailed            model_failed
│   │   └── ModelRefused       model_failed
│   ├── RowCrashed             row_crashed
│   ├── ResultTooLarge         result_too_large
│   ├── JobCancelled           job_cancelled
│   ├── JobExpired             job_expired
│   └── JobFailed              job_failed
├── JobError                   what a caller of the job API did or asked for cannot be
│   ├── UnknownJob             not_found
│   ├── EmptyInput             empty_input
│   ├── InvalidJob             invalid_request
│   ├── IdempotencyMismatch    idempotency_mismatch
│   ├── JobNotEnded            job_not_ended
│   └── InputLost              input_lost
├── QuotaError                 the caller has used up its share
│   ├── RateLimited            rate_limited
│   └── QuotaExceeded          quota_exceeded
└── ServerError                the row is fine: try again later
    ├── Overloaded             overloaded
    ├── DeadlineExceeded       deadline_exceeded
    └── DependencyDown         dependency_down
        ├── ModelNotReady      dependency_down
        │   └── VersionGone    dependency_down
        └── ModelDied          dependency_down
"""

from typing import ClassVar


class TwodoorError(Exception):
    """Base of everything Twodoor raises on purpose.

    ``code`` is stable and is what callers may branch on; ``str(error)`` is a sentence written for the caller
    and never holds the text of an internal error. ``retriable`` is a fact of the class, so that no retry
    policy has to read messages.
    """

    code: ClassVar[str] = "internal_error"
    retriable: ClassVar[bool] = False


class ConfigError(TwodoorError):
    """Raised when a setting, a model's config or a model's files are wrong; the message says what to change."""

    code = "config_error"


class RowError(TwodoorError):
    """Raised (or returned in a row's place) for a failure that trying again would only repeat."""


class EmptyText(RowError):
    """The text is empty or has no content token."""

    code = "empty_text"


class TextTooLong(RowError):
    """The text has more tokens than the model takes and the caller did not ask to truncate."""

    code = "text_too_long"


class InvalidRow(RowError):
    """The row does not have the shape of a row: a field is missing or of the wrong type."""

    code = "invalid_row"


class InvalidJson(RowError):
    """The row is not JSON."""

    code = "invalid_json"


class InvalidUnicode(RowError):
    """The row is not UTF-8, or its text holds a lone surrogate."""

    code = "invalid_unicode"


class RowTooLarge(RowError):
    """The row has more bytes or characters than the limit."""

    code = "row_too_large"


class UnknownModel(RowError):
    """No such model in the repository. A model's bulk twin is no model to callers."""

    code = "unknown_model"


class NonFiniteOutput(RowError):
    """The model answered NaN or Inf for this row."""

    code = "non_finite_output"


class ModelFailed(RowError):
    """The model refused or failed on this row while it answers others."""

    code = "model_failed"


class ModelRefused(ModelFailed):
    """The model server said that the input itself is wrong (INVALID_ARGUMENT): there is no doubt whose fault it is."""


class RowCrashed(RowError):
    """The model's process died three times with this row alone in flight."""

    code = "row_crashed"


class ResultTooLarge(RowError):
    """The answer does not fit into one record of the result topic."""

    code = "result_too_large"


class JobCancelled(RowError):
    """The row had not run when its job was cancelled."""

    code = "job_cancelled"


class JobExpired(RowError):
    """The row had not run when its job's completion window ended."""

    code = "job_expired"


class JobFailed(RowError):
    """The row could not run because its job failed: its input was lost, or the model version it had pinned is gone."""

    code = "job_failed"


class JobError(TwodoorError):
    """Raised when what a caller of the job API did or asked for cannot be; trying again would not help."""


class UnknownJob(JobError):
    """No such job for this tenant; another tenant's job is none. Also a list's cursor that names no job."""

    code = "not_found"


class EmptyInput(JobError):
    """The input holds no row."""

    code = "empty_input"


class InvalidJob(JobError):
    """An option of the job is wrong; ``field`` names it, ``limit`` is the bound it broke (None where there is none)."""

    code = "invalid_request"

    def __init__(self, message: str, field: str, limit: float | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.limit = limit


class IdempotencyMismatch(JobError):
    """The Idempotency-Key was used before for another request, or for a job that was deleted since."""

    code = "idempotency_mismatch"


class JobNotEnded(JobError):
    """The job has not ended yet: its results are not complete, and it cannot be deleted."""

    code = "job_not_ended"


class InputLost(JobError):
    """The job's input object is no longer there."""

    code = "input_lost"


class QuotaError(TwodoorError):
    """Raised when the caller has used up its share. ``retry_after_s`` is when to come back."""

    retriable = True

    def __init__(self, message: str, retry_after_s: float = 1.0, limit: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.limit = limit


class RateLimited(QuotaError):
    """The tenant sends more rows in a second than its key allows."""

    code = "rate_limited"


class QuotaExceeded(QuotaError):
    """The tenant's jobs hold as many rows that have not run as its key allows."""

    code = "quota_exceeded"


class ServerError(TwodoorError):
    """Raised when the trouble is the service's own. Never a row's failure: work waits or is refused, and comes back."""

    retriable = True


class Overloaded(ServerError):
    """A bound is reached. ``retry_after_s`` is when to come back, from the measured drain rate."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(ServerError):
    """The caller's deadline passed before there was an answer."""

    code = "deadline_exceeded"


class DependencyDown(ServerError):
    """A part this process needs does not answer. ``retry_after_s`` is when to come back."""

    code = "dependency_down"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelNotReady(DependencyDown):
    """Triton answers, but the model is not loaded (yet, or any more)."""


class VersionGone(ModelNotReady):
    """That version of the model is not loaded, while another one is: whoever is free to choose takes that one."""


class ModelDied(DependencyDown):
    """The model's process died while rows were in flight; whose fault it was is for the caller to find out."""
