"""What can go wrong with a call, as one small tree.

TwodoorError
├── NotReachable         nobody answers at the address               retriable
│   └── ConnectionLost   the connection broke before the answer      retriable
├── DeadlineExceeded     no answer within the deadline (504, or the client's own clock)
├── Refused              4xx: the call itself is wrong
│   ├── UnknownModel     404 unknown_model
│   └── RateLimited      429                                         retriable
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
    """The connection broke before the answer came. A prediction changes nothing, so it may be asked again."""


class DeadlineExceeded(TwodoorError):
    """There was no answer within the deadline."""


class Refused(TwodoorError):
    """The server says that the call is wrong; asking again changes nothing."""


class UnknownModel(Refused):
    """The server has no such model."""


class RateLimited(Refused):
    """A quota is used up until ``retry_after_s``."""

    retriable = True


class ServerFailed(TwodoorError):
    """The server failed on the call."""


class Unavailable(ServerFailed):
    """The server is overloaded or one of its parts is away; ``retry_after_s`` says when to come back."""

    retriable = True


class BadAnswer(TwodoorError):
    """The answer does not have the form of Twodoor's answers: most often another program has the port."""


class RowFailed(TwodoorError):
    """One text has no answer (``empty_text``, ``text_too_long``, …); in a list it stands in that row's place."""


def class_for(status: int, code: str) -> type[TwodoorError]:
    """Return the class of an answer that is not a success."""
    if code == "unknown_model":
        return UnknownModel
    special: dict[int, type[TwodoorError]] = {429: RateLimited, 503: Unavailable, 504: DeadlineExceeded}
    if status in special:
        return special[status]
    if 400 <= status < 500:
        return Refused
    return ServerFailed if status >= 500 else BadAnswer
