"""The replay of a step whose diagnostic save was loaded: which step, with which batches and results; what is kept."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from outlast.env import WorkerEnv
from outlast.errors import OutlastError
from outlast.numerics.ballot import Agree
from outlast.numerics.batches import ReplayableIterator
from outlast.numerics.judge import StepJudge
from outlast.numerics.plain import fingerprint
from outlast.numerics.rewind import Rewinder
from outlast.numerics.step_facts import StepFacts, expected_of
from outlast.policy.rerun import Diagnosis, Replay
from outlast.policy.rerun_table import RunState, replay_state
from outlast.runtime.random_numbers import restore_random

__all__ = ["StepReplay", "fingerprint_of"]

log = logging.getLogger(__name__)
Iterators = Sequence[ReplayableIterator[Any]]


class StepReplay:
    """What this rank knows of the step that is to be replayed, or is to be in the next process.

    Args:
        place: This worker's place.
        device: What this rank computes on.
        judge: Judges the step.
        rewinder: Puts back what the step changes.
    """

    def __init__(self, place: WorkerEnv, device: str, judge: StepJudge, rewinder: Rewinder) -> None:
        self._place, self._device, self._judge, self._rewinder = place, device, judge, rewinder
        self.ordered: Replay | None = None
        """The step that is to be replayed; ``None``: steps are run for the first time."""
        self.facts: StepFacts | None = None
        """What this rank keeps of a step, for a diagnostic save or from one."""
        self._has_batches = True

    def order(self, replay: Replay | None, *, max_tries: int, agree: Agree) -> RunState:
        """Make the next step a replay; return in which state.

        Args:
            replay: What the launcher asks for; ``None`` = what the save says, as the last try on the same device.
            max_tries: Replays on the same device.
            agree: How the ranks agree.

        Raises:
            OutlastError: There is neither.

        Collective: all ranks.
        """
        if replay is None:
            if self.facts is None:
                raise OutlastError("there is nothing to replay; load the state of a diagnostic save first")
            replay = self.facts.as_replay(tries=max_tries)
        is_here = self._place.global_rank == replay.rank and self._device == replay.device
        (same_device,) = agree([int(is_here)])
        self.ordered = replay
        return replay_state(same_device=bool(same_device), tries=replay.tries, max_tries=max_tries)

    def begin_step(self, iteration: int, state: RunState, iterators: Iterators) -> None:
        """Have a step judged; the one that is to be replayed with its own batches, results and random numbers.

        Raises:
            OutlastError: Another step is to be replayed.
        """
        self._has_batches = True
        if self.ordered is None:
            self._judge.begin_step(state, iteration)
        else:
            self._begin_replay(self.ordered, iteration, state, iterators)

    def has_same_batch(self, iterators: Iterators) -> bool:
        """Return whether the step had the batches it is to have: its saved ones, or the same drawn again."""
        if self._has_batches:
            return True
        # Without its save: training up to it draws the same ones, if the data comes in the same order.
        return self.ordered is not None and bool(self.ordered.batch) and fingerprint_of(iterators) == self.ordered.batch

    def num_tries(self, state: RunState) -> int:
        """Return the replays on the same device, the one that runs included."""
        return 0 if self.ordered is None else self.ordered.tries + (state is not RunState.REPLAY_ELSEWHERE)

    def keep(self, diagnosis: Diagnosis, iterators: Iterators) -> None:
        """Put back what the step changed, and keep what its replay needs, for the save that follows."""
        self._rewinder.rewind()
        self.facts = facts = StepFacts.gather(
            diagnosis=diagnosis,
            node=self._place.node,
            device=self._device,
            rejected=self._judge.validations.all_rejected(),
            struck=sorted(self._judge.injector.struck),
            iterators=iterators,
            random=self._rewinder.random.state,
        )
        if facts.problems:
            log.warning("the batches are not saved: %s cannot be stored safely", ", ".join(facts.problems))

    def forget(self) -> None:
        """Go on with steps that are run for the first time."""
        self.ordered = self.facts = None

    def _begin_replay(self, replay: Replay, iteration: int, state: RunState, iterators: Iterators) -> None:
        if replay.iteration != iteration:
            raise OutlastError(
                f"iteration {replay.iteration} is to be replayed, but the step is that of {iteration}; "
                "load the diagnostic save first"
            )
        facts, local_rank = self.facts, self._place.local_rank
        if facts is not None and facts.iteration != iteration:
            facts = self.facts = None
        is_culprit = self._place.global_rank == replay.rank
        expected = facts.expected(local_rank) if facts is not None else expected_of(replay) if is_culprit else {}
        self._has_batches = facts is not None and facts.replay(iterators, local_rank)
        if not self._has_batches:
            why = ", ".join(facts.problems) if facts is not None and facts.problems else "they are not known"
            log.warning("the step is replayed with new batches instead of its own (%s)", why)
        struck = facts.struck if facts is not None else ()
        self._judge.begin_step(state, iteration, expected=expected, struck=struck)
        if facts is not None:
            restore_random(facts.random)


def fingerprint_of(iterators: Iterators) -> str:
    """Return a fingerprint of what was drawn for the step that runs; empty without iterators."""
    return fingerprint([iterator.drawn for iterator in iterators]) if iterators else ""
