"""What a user imports: a typed client for `/predict`, sync and async, and its errors.

    from twodoor import Client

    with Client() as client:
        print(client.predict("a warm and funny film").sentiment)

Names are loaded when they are first used, so that the command line starts fast and needs no server package.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twodoor.client import AsyncClient, Client
    from twodoor.errors import (
        BadAnswer,
        ConnectionLost,
        DeadlineExceeded,
        NotReachable,
        RateLimited,
        Refused,
        RowFailed,
        ServerFailed,
        TwodoorError,
        Unavailable,
        UnknownModel,
    )
    from twodoor.wire import Prediction, Predictions

__all__ = [
    "AsyncClient",
    "BadAnswer",
    "Client",
    "ConnectionLost",
    "DeadlineExceeded",
    "NotReachable",
    "Prediction",
    "Predictions",
    "RateLimited",
    "Refused",
    "RowFailed",
    "ServerFailed",
    "TwodoorError",
    "Unavailable",
    "UnknownModel",
]

_HOMES = {"AsyncClient": "client", "Client": "client", "Prediction": "wire", "Predictions": "wire"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'twodoor' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"twodoor.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
