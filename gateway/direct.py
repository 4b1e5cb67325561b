"""`POST /predict` straight on ASGI: the framework's middleware, routing and dependencies cost more than the call itself."""

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.metrics import Metrics
from gateway.problems import CallerGone, Problem, respond
from gateway.routes import PREDICT_PATH, predict_content
from serving.errors import TwodoorError

_JSON = (b"content-type", b"application/json")


class DoorApp(FastAPI):
    """The application. The framework serves whatever has no shorter way."""

    short: ASGIApp | None = None
    """Serves ``POST /predict``, with all that surrounds it."""
    long: ASGIApp | None = None
    """Serves all else: ``framework``, with what has to be around its own handler of bugs too."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        is_short = scope["type"] == "http" and scope["path"] == PREDICT_PATH and scope["method"] == "POST"
        way = (self.short if is_short else None) or self.long or self.framework
        await way(scope, receive, send)

    async def framework(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection by the framework alone."""
        await super().__call__(scope, receive, send)


def predict_app(metrics: Metrics) -> ASGIApp:
    """Return the innermost app of the short way."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            content = await predict_content(scope, receive)
        except (Problem, TwodoorError, CallerGone) as exc:
            await respond(exc, scope, metrics)(scope, receive, send)
            return
        except Exception as exc:
            await respond(exc, scope, metrics)(scope, receive, send)
            raise  # the server logs it: it is a bug of ours
        headers = [_JSON, (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return serve
