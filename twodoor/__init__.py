"""What a user imports: a typed client for `/predict`, streams and jobs, sync and async, and its errors.

    from twodoor import Client

    with Client() as client:
        print(client.predict("a warm and funny film").sentiment)
        job = client.submit_job(["a warm and funny film", "what a bore"])
        client.wait_job(job.id)
        for row in client.results(job.id):
            print(row.index, row.answer)

Names are loaded when they are first used, so that the command line starts fast and needs no server package.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twodoor.client import AsyncClient, Client
    from twodoor.errors import (
        BadAnswer,
        Conflict,
        ConnectionLost,
        DeadlineExceeded,
        Forbidden,
        Invalid,
        NotFound,
        NotReachable,
        QuotaExceeded,
        RateLimited,
        Refused,
        RowFailed,
        ServerFailed,
        TwodoorError,
        Unauthorized,
        Unavailable,
        UnknownModel,
    )
    from twodoor.job_records import BulkState, Job, JobError, JobRows, ResultRow
    from twodoor.stream_async import OpenStream
    from twodoor.stream_wire import StreamAnswer
    from twodoor.wire import Prediction, Predictions

__all__ = [
    "AsyncClient",
    "BadAnswer",
    "BulkState",
    "Client",
    "Conflict",
    "ConnectionLost",
    "DeadlineExceeded",
    "Forbidden",
    "Invalid",
    "Job",
    "JobError",
    "JobRows",
    "NotFound",
    "NotReachable",
    "OpenStream",
    "Prediction",
    "Predictions",
    "QuotaExceeded",
    "RateLimited",
    "Refused",
    "ResultRow",
    "RowFailed",
    "ServerFailed",
    "StreamAnswer",
    "TwodoorError",
    "Unauthorized",
    "Unavailable",
    "UnknownModel",
]

_HOMES = {
    "AsyncClient": "client",
    "Client": "client",
    "Prediction": "wire",
    "Predictions": "wire",
    "BulkState": "job_records",
    "Job": "job_records",
    "JobError": "job_records",
    "JobRows": "job_records",
    "ResultRow": "job_records",
    "OpenStream": "stream_async",
    "StreamAnswer": "stream_wire",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'twodoor' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"twodoor.{_HOMES.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
