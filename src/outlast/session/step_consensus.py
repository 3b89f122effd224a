"""The one small reduction a step in which all ranks agree on what follows it, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outlast.errors import ExitReason
from outlast.runtime.consensus import Consensus
from outlast.session.checks import SlowRanks
from outlast.session.preemption import Preemption
from outlast.session.saves import Saves

__all__ = ["QUESTIONS", "StepConsensus", "StepDecision"]

QUESTIONS = ("stop", "save", "report", "refused")
"""What all ranks are asked once a step: to leave on a notice, to save after the step, to compare the ranks, to leave
because nothing can be saved any more."""


class StepConsensus:
    """Agree once a step on what follows it: in a reduction of its own, or in that of the step's attempts.

    Args:
        consensus: How the ranks agree, on :data:`QUESTIONS`.
        preemption: Whether this rank has to leave.
        saves: What this rank wants saved; ``None`` = nothing is.
        slow_ranks: Whether a report is due; ``None`` = there is none.

    Thread: that of the training loop.
    """

    def __init__(
        self, consensus: Consensus, preemption: Preemption, saves: Saves | None, slow_ranks: SlowRanks | None
    ) -> None:
        self._consensus, self._preemption, self._saves, self._slow_ranks = consensus, preemption, saves, slow_ranks
        self._iteration = 0
        self._agreed: dict[str, int] | None = None

    def begin(self, iteration: int, *, with_attempts: bool) -> None:
        """Begin a step, ``iteration`` of which are done.

        Args:
            iteration: Number of optimizer steps done.
            with_attempts: The reduction of the step's attempts carries what this rank asks for.

        Collective: all ranks.
        Blocks: never.
        """
        self._iteration, self._agreed = iteration, None
        if not with_attempts:
            self._consensus.begin(self._requests())

    def agree(self, values: Sequence[int]) -> list[int]:
        """Agree with all ranks on the largest of each value; once a step, on what follows the step too.

        Raises:
            PeerLost: A peer left, or did not come in time.

        Collective: all ranks.
        Blocks: until all ranks have come.
        """
        if self._consensus.pending:  # nobody knew at the step's begin that it has attempts
            self._agreed = self._consensus.finish()
        if self._agreed is not None:
            return self._consensus.agree(values)
        answer = self._consensus.agree([*self._requests().values(), *values])
        self._agreed = dict(zip(QUESTIONS, answer, strict=False))
        return answer[len(QUESTIONS) :]

    def finish(self) -> dict[str, int]:
        """Return what all ranks agreed on in the step.

        Raises:
            PeerLost: A peer left, or did not come in time.

        Collective: all ranks, after :meth:`begin`.
        Blocks: until all ranks have begun the step.
        """
        agreed, self._agreed = self._agreed, None
        if not self._consensus.pending:
            if agreed is not None:
                return agreed
            self._consensus.begin(self._requests())  # the step had no attempts after all
        return self._consensus.finish()

    def _requests(self) -> dict[str, int]:
        """Return this rank's answers to :data:`QUESTIONS`, in their order."""
        saves, slow_ranks = self._saves, self._slow_ranks
        wanted = 0 if saves is None else saves.schedule.request(self._iteration + 1, saves.manager.save_cost_s)
        return {
            "stop": self._preemption.requested_signal(self._iteration),
            "save": wanted,
            "report": 0 if slow_ranks is None else int(slow_ranks.wants_report()),
            "refused": int(saves is not None and saves.refusal is not None),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """What all ranks agreed on at a step's end; the same on every rank."""

    iteration: int
    """Number of optimizer steps done, this one included."""
    save: Literal["near", "all"] | None
    """What is saved now: to the near tiers, to all tiers, or nothing. :meth:`Session.save_due` does it."""
    reason: ExitReason | None = None
    """Why all ranks stop now; ``None`` = they go on. ``PREEMPTED``: a shutdown was requested. ``STRAGGLER``: a rank is
    so slow that its node is to be replaced. ``NO_PROGRESS``: nothing can be saved any more, as a directory is another
    run's. ``FAILED_VALIDATION`` and ``RESUME_TO_DISAMBIGUATE``: replicas differ."""
    signal: int | None = None
    """Number of the signal that requested the shutdown, SIGTERM for other notices; ``None`` = none did."""

    @property
    def stop(self) -> bool:
        """Whether all ranks stop now; :meth:`Session.finish` and :meth:`Session.leave` end the process as agreed."""
        return self.reason is not None
