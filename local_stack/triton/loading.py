"""The models a Triton is started with, and those it is asked for once it answers.

Triton opens its ports when every model it was started with is loaded. So it starts with the one that callers who name
none get, and loads the others, bulk twins at their low priority among them, while that one answers already.
"""

import asyncio
from pathlib import Path

from local_stack.triton import model_names
from local_stack.triton.health import TritonApi


class Loading:
    """One Triton's models in two stages; ``begin`` goes before each of its starts."""

    def __init__(self, repository: Path, default: str, *, staged: bool) -> None:
        self._repository, self._default, self._staged = repository, default, staged
        self.names: tuple[str, ...] = ()
        self._rest: tuple[str, ...] = ()

    def begin(self) -> tuple[str, ...]:
        """Return the models to start with: all that are there now, where the default one is not among them."""
        self.names = tuple(model_names(self._repository))
        first = (self._default,) if self._staged and self._default in self.names else self.names
        self._rest = tuple(name for name in self.names if name not in first)
        return first

    async def load_rest(self, api: TritonApi, timeout_s: float) -> None:
        """Ask for the others, all at one time, and wait; once after each start, and again where there was no answer.

        Why one does not load stands in Triton's index. Raises httpx.HTTPError if Triton does not answer.
        """
        asked, self._rest = self._rest, ()
        answers = await asyncio.gather(*(api.load(name, timeout_s) for name in asked), return_exceptions=True)
        failures = {
            name: answer for name, answer in zip(asked, answers, strict=True) if isinstance(answer, BaseException)
        }
        self._rest = tuple(failures)
        for failure in failures.values():
            raise failure
