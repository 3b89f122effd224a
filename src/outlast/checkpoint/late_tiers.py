"""Reports of late tiers: one log line per minute lists the saves that are missing in a tier, and the reason.

On rank 0 a thread reads the lanes' progress: a tier that hangs reports nothing itself, and one that fails would report
every save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from outlast import clock
from outlast.wording import count

log = logging.getLogger(__name__)
LATE_S = 30.0
"""A save that has been under way in a tier for so long is reported."""
INTERVAL_S = 60.0
"""Seconds between two log lines about a tier."""
LOOK_S = 1.0


@dataclass(slots=True)
class _TierProgress:
    where: str
    began_ns: int | None = None
    iteration: int = 0
    waits_for: str = ""
    num_failed: int = 0
    num_replaced: int = 0
    error: str = ""
    newest: tuple[int, int] | None = None
    behind_ns: int | None = None
    """Since when a save has failed or was replaced; ``None`` = none since the last commit."""
    reported_ns: int | None = None
    warned_ns: int | None = None


class LateTiers:
    """Collects the outcomes of saves by tier, and reports the tiers that are behind.

    Thread: any. Without :meth:`start` nothing is reported.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tiers: dict[str, _TierProgress] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, places: dict[str, str]) -> None:
        with self._lock:
            self._tiers = {lane: _TierProgress(where) for lane, where in places.items()}
        if self._tiers:
            self._thread = threading.Thread(target=self._run, name="outlast-late-tiers", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def begin(self, lane: str, iteration: int, waits_for: str) -> None:
        """Record that an attempt to write a save to a tier begins and waits for ``waits_for``, see :meth:`wait_for`."""
        with self._tier(lane) as tier:
            tier.began_ns, tier.iteration, tier.waits_for = clock.now_ns(), iteration, waits_for

    def wait_for(self, lane: str, what: str) -> None:
        """Record what the attempt under way waits for: a rank with its node, for people."""
        with self._tier(lane) as tier:
            tier.waits_for = what

    def commit(self, lane: str, iteration: int) -> None:
        with self._tier(lane) as tier:
            tier.began_ns, tier.error, tier.newest = None, "", (iteration, clock.now_ns())
            if tier.reported_ns is not None:
                log.info("%s works again: it has the checkpoint of iteration %d", tier.where, iteration)
            tier.behind_ns = tier.reported_ns = None
            tier.num_failed = tier.num_replaced = 0

    def fail(self, lane: str, error: str) -> None:
        with self._tier(lane) as tier:
            tier.began_ns, tier.error = None, error
            tier.num_failed += 1

    def replace(self, lane: str) -> None:
        with self._tier(lane) as tier:
            tier.num_replaced += 1

    @contextmanager
    def _tier(self, lane: str) -> Iterator[_TierProgress]:
        """Yield a tier's progress under the lock; for an unreported tier, a dummy."""
        with self._lock:
            yield self._tiers.get(lane) or _TierProgress(lane)

    def may_warn(self, lane: str) -> bool:
        """Return whether a failure is to be logged individually: the first one of a minute is."""
        with self._lock:
            tier = self._tiers.setdefault(lane, _TierProgress(lane))
            now_ns = clock.now_ns()
            if tier.warned_ns is not None and now_ns - tier.warned_ns < INTERVAL_S * 1e9:
                return False
            tier.warned_ns = now_ns
            tier.reported_ns = now_ns
            return True

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            with self._lock:
                lines = [line for tier in self._tiers.values() if (line := _report(tier, clock.now_ns()))]
            for line in lines:
                log.warning("%s", line)


def _report(tier: _TierProgress, now_ns: int) -> str:
    under_way_s = 0.0 if tier.began_ns is None else (now_ns - tier.began_ns) / 1e9
    is_late = under_way_s >= LATE_S
    if not (is_late or tier.error or tier.num_replaced):
        return ""
    if tier.behind_ns is None:
        tier.behind_ns = now_ns
    since_ns = tier.reported_ns
    if since_ns is None and not is_late:
        since_ns = tier.behind_ns
    if since_ns is not None and now_ns - since_ns < INTERVAL_S * 1e9:
        return ""
    tier.reported_ns = now_ns
    parts = []
    if is_late:
        parts.append(
            f"the save of iteration {tier.iteration} has been under way for {under_way_s:.0f} s and waits for "
            f"{tier.waits_for}"
        )
    if tier.num_failed:
        parts.append(f"{count(tier.num_failed, 'attempt')} failed")
    if tier.num_replaced:
        parts.append(f"{count(tier.num_replaced, 'save')} not written there, since newer ones took their place")
    if tier.newest is None:
        parts.append("no checkpoint was written there since this cycle began")
    else:
        iteration, at_ns = tier.newest
        parts.append(f"its newest checkpoint is iteration {iteration}, {(now_ns - at_ns) / 1e9:.0f} s old")
    if tier.error:
        parts.append(f"last error: {tier.error}")
    tier.num_failed = tier.num_replaced = 0
    return f"{tier.where} is behind: {'; '.join(parts)}; training continues"
