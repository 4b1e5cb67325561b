"""What can go wrong with a call, as one small tree.

TwodoorError
├── NotReachable         nobody answers at the address               retriable
│   └── ConnectionLost   the connection broke before the answer      retriable
├── DeadlineExceeded     no answer within the deadline (504, or the client's own clock)
├── Refused              4xx: the call itself is wrong
│   ├── Unauthorized     401: no API key, or one the server does not know
│   ├── Forbidden        403: the key may not do this
│   ├── NotFound         404: no such job; another tenant's is none
│   │   └── UnknownModel 404 unknown_model
│   ├── Conflict         409: not in this state: a job that has not ended, say
│   ├── Invalid          422: a field, an option, an empty input, a key used for another request
│   └── RateLimited      429                                         retriable
│       └── QuotaExceeded  as many rows are queued as the key allows
├── ServerFailed         5xx
│   └── Unavailable      503: overload, or a part is away            retriable
├── BadAnswer            the answer is not Twodoor's
└── RowFailed            one text has no answer; its neighbours do
"""

from typing import ClassVar


class TwodoorError(Exception):
    """Base of every error of the client.

    ``code`` is stable and what a program may branch on; ``status`` is the HTTP status, None where there was no
    answer or the call as a whole was answered; ``retry_after_s`` is what the server asked for; ``request_id`` is how
    the server's log names the call.
    """

    retriable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.retry_after_s = retry_after_s
        self.request_id = request_id


class NotReachable(TwodoorError):
    """Nobody answers at the address."""

    retriable = True


class ConnectionLost(NotReachable):
    """The connection broke before the answer came. Asking again is safe: a submission has its
    idempotency key, and the other calls change nothing twice."""


class DeadlineExceeded(TwodoorError):
    """There was no answer within the deadline."""


class Refused(TwodoorError):
    """The server says that the call is wrong; asking again changes nothing."""


class Unauthorized(Refused):
    """The call has no API key, or one that the server does not know."""


class Forbidden(Refused):
    """The API key is known and may not do this: admin calls need an admin key."""


class NotFound(Refused):
    """There is no such job (or route); another tenant's job is none."""


class UnknownModel(NotFound):
    """The server has no such model."""


class Conflict(Refused):
    """The job is not in a state for this: its results are not complete, or it cannot be deleted yet."""


class Invalid(Refused):
    """A field or an option is wrong, the input holds no row, or the idempotency key was used for another request."""


class RateLimited(Refused):
    """A quota is used up until ``retry_after_s``."""

    retriable = True


class QuotaExceeded(RateLimited):
    """The tenant's jobs hold as many rows that have not run as its key allows."""


class ServerFailed(TwodoorError):
    """The server failed on the call."""


class Unavailable(ServerFailed):
    """The server is overloaded or one of its parts is away; ``retry_after_s`` says when to come back."""

    retriable = True


class BadAnswer(TwodoorError):
    """The answer does not have the form of Twodoor's answers: most often another program has the port."""


class RowFailed(TwodoorError):
    """One text has no answer (``empty_text``, ``text_too_long``, …); in a list it stands in that row's place."""


_BY_CODE: dict[str, type[TwodoorError]] = {"unknown_model": UnknownModel, "quota_exceeded": QuotaExceeded}
_BY_STATUS: dict[int, type[TwodoorError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    422: Invalid,
    429: RateLimited,
    503: Unavailable,
    504: DeadlineExceeded,
}


def class_for(status: int, code: str) -> type[TwodoorError]:
    """Return the class of an answer that is not a success."""
    special = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if special is not None:
        return special
    if 400 <= status < 500:
        return Refused
    return ServerFailed if status >= 500 else BadAnswer
