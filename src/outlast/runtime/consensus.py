"""Consensus: decisions that all ranks take together, for one small reduction a step.

A rank that is told to leave must not leave alone: its peers would wait for it in the next collective for
ever. So each rank says at a step's begin what it wants, one all-reduce (maximum) of a few integers runs
beside the step, and at the step's end every rank reads the same answer. Nobody waits extra: by then a step's
own collectives have brought the ranks together anyway. What becomes known during a step is told at the next
one's begin.

The reduction has a gloo group of its own, so that it neither orders itself behind gradients nor needs a
device.

Leaving in the middle of a reduction has a trap: gloo (torch 2.13) can miss that its connections were cut while data was
on its way in both directions, and then waits out the group's timeout, as does whoever frees the group. So a reduction
that peers take part in is given the moment that it needs before it is cut.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from outlast.errors import PeerLost
from outlast.runtime.group import Group

if TYPE_CHECKING:
    import torch.distributed

__all__ = ["Consensus"]

log = logging.getLogger(__name__)
COMPLETE_S = 0.05
"""Seconds that a reduction may take to its end, once nobody reads it any more."""
CUT_S = 0.5
"""Seconds in which a cut reduction fails."""


class Consensus:
    """Agree on the largest of what any rank asked for, once a step.

    Args:
        questions: Names of what is asked, the same in the same order on all ranks.
        world_size: Number of ranks; 1 needs no ``torch.distributed``.
        timeout_s: Seconds after which a reduction fails because a peer did not take part.

    Collective: with more than one rank, all ranks of the default group must make it (it opens a group).
    Blocks: up to ``timeout_s``, until all ranks have come.
    Thread: one at a time.
    """

    def __init__(self, questions: Sequence[str], *, world_size: int = 1, timeout_s: float = 1800.0) -> None:
        assert questions, "ask at least one question"
        assert len(set(questions)) == len(questions), "a question is asked twice"
        self.questions = tuple(questions)
        self._timeout_s = timeout_s
        self._group = Group.open(timeout_s=timeout_s) if world_size > 1 else None
        self._asked = [0] * len(self.questions)
        self._pending = False
        self._work: torch.distributed.Work | None = None
        if self._group is not None:
            import torch

            self._values = torch.zeros(len(self.questions), dtype=torch.int64)

    def begin(self, asked: Mapping[str, int]) -> None:
        """Start the step's reduction with what this rank knows now.

        Args:
            asked: Question to a number, 0 or absent for "no"; the largest of all ranks is agreed on.

        Collective: once a step on every rank, followed by :meth:`finish`.
        Blocks: never.
        """
        assert not self._pending, "begin() again before finish()"
        for index, question in enumerate(self.questions):
            self._asked[index] = int(asked.get(question, 0))
        self._pending = True
        if self._group is not None:
            for index, value in enumerate(self._asked):
                self._values[index] = value
            self._work = self._group.start_max(self._values)

    def finish(self) -> dict[str, int]:
        """Return what all ranks agreed on: each question's largest number.

        Raises:
            PeerLost: A peer is gone, or did not come in time.

        Collective: once a step on every rank, after :meth:`begin`.
        Blocks: until all ranks have begun the same step; up to the group's timeout.
        """
        assert self._pending, "finish() without begin()"
        self._pending = False
        if self._work is None:
            return dict(zip(self.questions, self._asked, strict=True))
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return dict(zip(self.questions, self._values.tolist(), strict=True))

    def agree(self, values: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' numbers, one by one, at once.

        Raises:
            PeerLost: A peer is gone, or did not come in time.

        Collective: all ranks, with as many numbers, in the same order with :meth:`begin`.
        Blocks: until all ranks have come; up to the group's timeout.
        """
        if self._group is None:
            return list(values)
        import torch

        numbers = torch.tensor(values, dtype=torch.int64)
        try:
            self._group.start_max(numbers).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        agreed: list[int] = numbers.tolist()
        return agreed

    @property
    def pending(self) -> bool:
        """Whether a reduction was begun and not read."""
        return self._pending

    def close(self) -> None:
        """Give the group back, however the peers fare. Idempotent.

        Blocks: where a reduction was begun and not read, up to :data:`COMPLETE_S` for a peer that takes part in it,
        and a moment more.
        """
        if self._group is None:
            return
        if self._work is not None and not _has_ended(self._work, COMPLETE_S):
            self._group.cut()
            if not _has_ended(self._work, CUT_S):
                # Nothing wakes gloo any more, and whoever drops the last reference waits for it: nobody does.
                log.warning("a cut reduction does not end; its group is left to the end of this process")
                _abandon(self._work, self._group.process_group, self._values)
                self._group, self._work = None, None
                return
        self._group.close()
        self._group, self._work = None, None

    def _lost(self, error: RuntimeError) -> PeerLost:
        return PeerLost(
            f"a peer left or did not reach this step within {self._timeout_s:g} s ({error}); "
            "its own log or the launcher's report says why"
        )


def _has_ended(work: torch.distributed.Work, timeout_s: float) -> bool:
    """Wait until a reduction is done or has failed; return whether it is. Blocks: up to ``timeout_s``."""
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        log.debug("a reduction that nobody reads ended: %s", error)
    return bool(work.is_completed())


def _abandon(*objects: object) -> None:
    """Keep objects from ever being freed, at the interpreter's end too."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
