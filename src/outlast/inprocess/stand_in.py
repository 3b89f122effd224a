"""Standing in at the meeting for a rank that died before its monitor process was told where the hub is.

The others would wait for that rank as long as the meeting may take. Its monitor process has no torch, which the
launcher's store needs, so it starts another process that looks there, and tells it: a rank's is told where the hub is,
that of initial rank 0 has everybody told that the hub is with it.

Only that other process imports torch.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
from collections.abc import Callable

import msgspec

from outlast.decoding import from_json
from outlast.errors import OutlastError
from outlast.inprocess import messages as m

__all__ = ["StandIn", "main"]

log = logging.getLogger("outlast.inprocess.stand_in")


class _Errand(msgspec.Struct, frozen=True, kw_only=True):
    """What the other process is told."""

    key: str
    address: str
    timeout_s: float
    known: m.Connect | None


class StandIn:
    """Ask at the meeting.

    Args:
        selector: Of the process's loop; what it reports with a callable as data is called with the events.
        key: Of the meeting.
        address: ``host port`` where this process could host the hub.
        known: What initial rank 0 told before it died; ``None``: nothing.
        timeout_s: How long initial rank 0 is waited for.
        on_answer: Gets what the rank would have told; ``None``: it cannot be known.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        *,
        key: str,
        address: str,
        known: m.Connect | None,
        timeout_s: float,
        on_answer: Callable[[m.Connect | None], None],
    ) -> None:
        self._selector, self._on_answer = selector, on_answer
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "outlast.inprocess.stand_in"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._is_asking = True
        self._answer = b""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        errand = _Errand(key=key, address=address, timeout_s=timeout_s, known=known)
        try:
            self._stdin.write(msgspec.json.encode(errand) + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            pass  # its end is seen below
        selector.register(self._stdout, selectors.EVENT_READ, self._on_event)

    def _on_event(self, _: int) -> None:
        data = os.read(self._stdout.fileno(), m.MAX_PACKET_BYTES)
        self._answer += data
        if data and not self._answer.endswith(b"\n"):
            return
        self._stop_asking()
        try:
            answer = from_json(self._answer, m.Connect)
        except msgspec.DecodeError as error:
            log.warning("the hub cannot be located: %s", error)
            answer = None
        self._on_answer(answer)

    def close(self) -> None:
        """End the other process. Idempotent. Blocks: some milliseconds."""
        self._stop_asking()
        self._process.kill()
        self._process.wait()
        for end in (self._stdin, self._stdout):
            try:
                end.close()
            except BrokenPipeError:
                pass

    def _stop_asking(self) -> None:
        if self._is_asking:
            self._is_asking = False
            self._selector.unregister(self._stdout)


def main() -> int:
    """Run as the other process: answer, and then host what has to be hosted until nobody listens; return 0 or 1."""
    from outlast import env
    from outlast.inprocess.meeting import Meeting

    told: list[m.Connect] = []
    try:
        errand = from_json(sys.stdin.buffer.readline(), _Errand)
        meeting = Meeting(env.read_worker(), timeout_s=errand.timeout_s, key=errand.key)
        meeting.meet(errand.address, told.append, known=errand.known)
    except (msgspec.DecodeError, OutlastError) as error:
        log.warning("the rendezvous store cannot be reached: %s", error)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(told[0]) + b"\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    meeting.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
