"""The result of a call that was submitted: to be waited for by a thread, or awaited in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from outlast.errors import DeadlineExceeded

__all__ = ["Pending"]


class Pending:
    """Stand for the result of a submitted call.

    Awaitable: ``await pending`` gives the result, or raises what the call raised. To stop waiting, by a timeout, by
    Ctrl-C, or by cancelling the task that awaits it, does not stop the call: the group goes on with it, and calls that
    are submitted later begin after it.

    Args:
        method: Name of the method that is called.
        future: Is given the result.

    Thread: any.
    """

    def __init__(self, method: str, future: Future[Any]) -> None:
        self.method = method
        self._future = future

    @property
    def is_done(self) -> bool:
        """Whether there is a result, or an error."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the call's result.

        Args:
            timeout_s: Seconds to wait; ``None``: as long as it takes.

        Raises:
            DeadlineExceeded: There is none in time; the call goes on.

        Blocks: until the call has ended, recoveries included.
        """
        try:
            return self._future.result(timeout_s)
        except FutureTimeout as error:
            if self._future.done():
                raise  # the call itself raised it
            raise DeadlineExceeded(
                f"{self.method!r} has not ended within {timeout_s} s; it goes on: wait again, or close the group"
            ) from error

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the result in an event loop."""
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()
