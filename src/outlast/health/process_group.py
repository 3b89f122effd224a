"""Check that all ranks respond to each other; dead, silent and wrong ranks are distinguished.

The ranks exchange numbers in a separate group, so that the training's groups are not affected. Gloo's timeout is not
used: it closes connections before any rank can record why, and a rank that sees its connection closed would mistake a
silent peer for a dead one. Instead the first rank that detects a problem writes its finding to the ranks' TCPStore, and
only then closes the connections.

The check covers the ranks' processes, not the links between their GPUs.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from outlast.clock import now_s
from outlast.errors import ConfigError, RendezvousError
from outlast.health.probing import CheckOutcome, CheckResult, Status, failed, ok
from outlast.runtime.process_groups import Group

if TYPE_CHECKING:
    import torch

_MARGIN_S = 3.0
_LATE_S = 0.5
"""Seconds that a rank may come later than others before it counts as absent after a closed connection."""
_SLACK = 6.0
"""Gloo's timeout as a multiple of the check's."""


class ProcessGroupCheck:
    """Check repeatedly whether all ranks respond.

    A context manager. After a failed check the group is unusable, and later checks return the same result at once.

    Args:
        timeout_s: Seconds for all ranks to respond, including the latest.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised.
        RendezvousError: The ranks did not find each other.

    Collective: all ranks of the default group create one, and call :meth:`run` equally often.
    Blocks: on creation, up to ``timeout_s``.
    """

    def __init__(self, *, timeout_s: float = 10.0) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised; call init_process_group() first")
        assert timeout_s > 0
        self._timeout_s = timeout_s
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._group = Group.open(timeout_s=timeout_s * _SLACK)
        self._name = _name_of(self._group)
        self._round = 0
        self._failed: CheckResult | None = None

    def __enter__(self) -> ProcessGroupCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> CheckResult:
        """Check all ranks once.

        Returns:
            ``OK``; ``LOST``: a rank is gone; ``TIMED_OUT``: a rank does not respond; ``FAILED``: a rank returned a
            wrong number; ``ERROR``: the ranks' TCPStore cannot be queried. The reason lists the known ranks.

        Collective: all ranks.
        Blocks: up to ``timeout_s`` and some seconds, whatever the peers do.
        """
        if self._failed is not None:
            return self._failed
        self._round += 1
        started_s = now_s()
        exchange = _Exchange(self._group, f"{self._name}/{self._round}", self._rank, self._world_size, self._round)
        outcome = exchange.run(self._timeout_s)
        target = f"{self._world_size} rank{'' if self._world_size == 1 else 's'}"
        result = outcome.result("process group", target, started_s=started_s)
        if result.has_failed:
            self._failed = result
        return result

    def close(self) -> None:
        """Close the group. Blocks: never; peers in a check see this rank as gone."""
        self._group.close()


def check_process_group(timeout_s: float = 10.0) -> CheckResult:
    """Check all ranks once with a temporary :class:`ProcessGroupCheck`.

    Raises:
        ConfigError: ``torch.distributed`` is not initialised.

    Collective: all ranks of the default group.
    Blocks: up to about twice ``timeout_s`` plus the time to create a group; for repeated checks keep a
    :class:`ProcessGroupCheck`.
    """
    try:
        with ProcessGroupCheck(timeout_s=timeout_s) as check:
            return check.run()
    except RendezvousError as error:
        reason = f"no group could be made: {' '.join(str(error).split())[:300]}"
        return CheckResult(name="process group", target="all ranks", status=Status.LOST, reason=reason, took_s=0.0)


class _Exchange:
    """One round: each rank contributes a number that all ranks can compute."""

    def __init__(self, group: Group, key: str, rank: int, world_size: int, number: int) -> None:
        self._group, self._key, self._rank = group, key, rank
        self._expected = [expected_answer(rank, number) for rank in range(world_size)]
        self._outcome: CheckOutcome | None = None
        self._done = threading.Event()
        self._is_judging = False
        self._lock = threading.Lock()

    def run(self, timeout_s: float) -> CheckOutcome:
        # A thread, because a store or collective with a stopped peer can block beyond its timeout.
        threading.Thread(target=self._ask, name="outlast-group-check", daemon=True).start()
        if not self._done.wait(timeout_s) and not (self._is_judging and self._done.wait(_MARGIN_S)):
            judge = threading.Thread(target=self._give_up, args=(timeout_s,), name="outlast-group-judge", daemon=True)
            judge.start()
            if not self._done.wait(_MARGIN_S):
                self._settle(
                    CheckOutcome(status=Status.TIMED_OUT, reason="neither the ranks nor their TCPStore responded")
                )
            self._group.cut()
        with self._lock:
            assert self._outcome is not None
            return self._outcome

    def _settle(self, outcome: CheckOutcome) -> None:
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
        self._done.set()

    def _ask(self) -> None:
        import torch
        import torch.distributed as dist

        try:
            store = _store()
            store.set(f"{self._key}/{self._rank}", "here")
            mine = torch.tensor([self._expected[self._rank]])
            theirs = [torch.zeros_like(mine) for _ in self._expected]
            dist.all_gather(theirs, mine, group=self._group.process_group)
        except RuntimeError as error:
            if not self._done.is_set():
                self._is_judging = True
                self._settle(self._find(Status.LOST, " ".join(str(error).split())[:200]))
                self._group.cut()
            return
        self._settle(self._compare(theirs))

    def _compare(self, theirs: list[torch.Tensor]) -> CheckOutcome:
        wrong = [rank for rank, number in enumerate(theirs) if int(number) != self._expected[rank]]
        if wrong:
            reason = f"{_ranks(wrong)} responded with a wrong number"
            return failed(reason, wrong_ranks=wrong)
        count = len(self._expected)
        return ok("alone" if count == 1 else f"all {count} ranks responded")

    def _give_up(self, timeout_s: float) -> None:
        self._settle(self._find(Status.TIMED_OUT, f"no response in {timeout_s:g} s"))

    def _find(self, status: Status, why: str) -> CheckOutcome:
        """Return the finding of the first rank that detected a problem: this one unless another was faster."""
        try:
            store = _store()
            absent = self._absent(store)
            who = f"{_ranks(absent)} did not come" if absent else "all ranks came, and one fell silent or left"
            mine = f"{status}|{','.join(map(str, absent))}|{who} ({why})"
            finding = store.compare_set(f"{self._key}/finding", "", mine).decode()
        except RuntimeError as error:
            text = " ".join(str(error).split())[:200]
            return CheckOutcome(
                status=status, reason=f"{why}; the ranks' TCPStore cannot be queried for the absent ranks ({text})"
            )
        first, ranks, reason = finding.split("|", 2)
        known = [int(rank) for rank in ranks.split(",") if rank]
        return CheckOutcome(status=Status(first), reason=reason, facts={"absent_ranks": known})

    def _absent(self, store: Any) -> list[int]:
        """Return the ranks that did not come, after waiting for those that are a little late."""
        since_s, absent = now_s(), list(range(len(self._expected)))
        while absent and now_s() - since_s < _LATE_S:
            still = [rank for rank in absent if not store.check([f"{self._key}/{rank}"])]
            if still != absent:
                since_s, absent = now_s(), still
            time.sleep(0.02)
        return absent


def expected_answer(rank: int, number: int) -> int:
    return (rank * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9) % (1 << 62)


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _name_of(group: Group) -> str:
    """Return a name that is the same on all ranks and unique to the group."""
    assert group.process_group is not None
    return f"outlast/health/{group.process_group.group_name}"
