"""The runs of a step: the first one and, if a result was invalid, one more, with all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outlast.env import WorkerEnv
from outlast.errors import ConfigError, OutlastError
from outlast.policy.rerun import Replay, decode_replay
from outlast.runtime.consensus import Consensus
from outlast.runtime.journal import Journal

if TYPE_CHECKING:
    from outlast.chaos.armed import ArmedFaults
    from outlast.config import RerunStateMachineConfig
    from outlast.numerics.replay import ReplayableIterator
    from outlast.numerics.rerun_machine import RerunStateMachine, StepDecision

__all__ = ["OWN_STATE", "Attempt", "Attempts"]

log = logging.getLogger(__name__)
OWN_STATE = "outlast"
"""Name under which the session saves what it goes on from itself."""


class Attempt:
    """One run of a step; the body of ``for attempt in run.attempts(...)`` does it.

    Thread: that of the training loop.
    """

    __slots__ = ("_attempts", "_iterators", "number")

    def __init__(self, attempts: Attempts, iterators: Sequence[ReplayableIterator[Any]], number: int) -> None:
        self._attempts, self._iterators = attempts, iterators
        self.number = number
        """0 for the first run of the step, 1 for the one that an invalid result asked for."""

    def next_batch(self, source: int = 0) -> Any:
        """Return the step's next batch; a run of the same step gets the same ones.

        Args:
            source: Which of the sources given to ``run.attempts()``, from 0.

        Raises:
            OutlastError: The source has no more, or there is none.
        """
        if not 0 <= source < len(self._iterators):
            raise OutlastError(
                f"run.attempts() was given {len(self._iterators)} sources of batches; there is no {source}"
            )
        try:
            return next(self._iterators[source])
        except StopIteration:
            raise OutlastError(
                f"there is no batch left for iteration {self._attempts.iteration}; give run.attempts() what goes on as "
                "long as training does, such as itertools.chain.from_iterable(epochs)"
            ) from None

    def validate(
        self,
        value: Any,
        what: str = "loss",
        *,
        rejects: Callable[[float], bool] | None = None,
        message: str = "rejected by the script",
        tolerance: float = 0.0,
    ) -> None:
        """Judge a number before the optimizer moves a weight: NaN, infinity, spikes, and what you say yourself.

        Args:
            value: A number, or a tensor with one element; one on a device is read when the run ends.
            what: Its name, for people; spikes are told from earlier values of the same name.
            rejects: Says of the number whether it is invalid, beside what ``rerun_state_machine`` says.
            message: Why, in that case.
            tolerance: Relative difference up to which two runs' values are the same.

        Raises:
            ValueError: It is not one number.
        """
        self._attempts.validate(value, what, rejects=rejects, message=message, tolerance=tolerance)


class Attempts:
    """Drive the re-run state machine for a session.

    Args:
        config: Its settings; ``None`` = the defaults.
        place: This worker's place.
        journal: Where findings are written.
        consensus: How the ranks agree.
        wishes: What else this rank asks all ranks for at a step's end; it rides along in the same reduction.
        faults: What befalls results on purpose, in a test.

    Thread: that of the training loop.
    """

    may_be_absent = True
    """A generation saved without its state is loaded all the same."""

    def __init__(
        self,
        config: RerunStateMachineConfig | None,
        place: WorkerEnv,
        journal: Journal,
        *,
        consensus: Consensus,
        wishes: Callable[[], Mapping[str, int]],
        faults: ArmedFaults | None,
    ) -> None:
        from outlast.numerics.rerun_machine import RerunStateMachine

        self._machine: RerunStateMachine = RerunStateMachine(config, place=place, journal=journal, agree=self._agree)
        self._consensus, self._wishes, self._faults = consensus, wishes, faults
        self._agreed: dict[str, int] | None = None
        self._is_used = False
        self._state: Mapping[str, Any] = {}
        self.replay: Replay | None = decode_replay(place.replay)
        """What is to be run again before anything else; ``None`` = nothing, or it has begun."""

    @property
    def iteration(self) -> int:
        """Number of optimizer steps done before the step that runs."""
        return self._machine.iteration

    @property
    def carries_wishes(self) -> bool:
        """Whether the steps' own reduction also asks for what the session wishes."""
        return self._is_used and self._machine.config.rerun_mode == "validate_results"

    def watch(self, state: Mapping[str, Any]) -> None:
        """Take in the state that the steps change.

        Raises:
            ConfigError: It uses a name that is the session's own.
        """
        if OWN_STATE in state:
            raise ConfigError(f"state[{OWN_STATE!r}] is the session's own; choose another name")
        self._state = state
        self._machine.watch(*_modules_in(state))

    def begin_step(self, iteration: int) -> None:
        """Begin a step of the session; where that is the one to replay, the machine is told.

        Collective: all ranks.
        """
        self._agreed = None
        if self.replay is not None and self.replay.iteration <= iteration:
            replay, self.replay = self.replay, None
            if replay.iteration == iteration:
                self._machine.begin_replay(replay)
            else:
                log.warning("iteration %d is not replayed: training resumes from %d", replay.iteration, iteration)

    def run(self, iteration: int, batches: Any) -> Iterator[Attempt]:
        """Yield the runs of a step; :attr:`decision` says what follows.

        Collective: all ranks.
        Blocks: after each run until all ranks have ended theirs.
        """
        self._is_used = True
        sources = batches if isinstance(batches, list | tuple) else [] if batches is None else [batches]
        iterators = [self._machine.replayable(source) for source in sources]
        self._machine.begin_step(iteration, iterators)
        number = 0
        while self._machine.should_run():
            yield Attempt(self, iterators, number)
            number += 1
            if self._faults is not None:
                self._faults.after_backward(iteration, self._state)

    @property
    def decision(self) -> StepDecision:
        """What follows the last step; the same on all ranks."""
        return self._machine.decision

    def validate(self, value: Any, what: str, **how: Any) -> None:
        """See :meth:`Attempt.validate`."""
        if self._faults is not None:
            value = self._faults.on_loss(self._machine.iteration, value)
        self._machine.validate(value, what, **how)

    def take_agreed(self) -> dict[str, int] | None:
        """Return what all ranks wished for in the step's own reduction; ``None`` = there was none."""
        agreed, self._agreed = self._agreed, None
        return agreed

    def finish(self) -> None:
        """Tell how much two runs of a step differed, where that is what they were run twice for."""
        if self._is_used and self._machine.config.rerun_mode == "report_determinism_stats":
            self._machine.report()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next process goes on from."""
        return {"rerun": self._machine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._machine.load_state_dict(state["rerun"])

    def close(self) -> None:
        """Let go of what the machine holds."""
        self._machine.close()

    def _agree(self, values: Sequence[int]) -> list[int]:
        """Agree with all ranks on the largest of each value; once a step, on what the session wishes too."""
        if self._consensus.pending:  # the session does not know yet that this step has attempts
            self._agreed = self._consensus.finish()
        if self._agreed is not None:
            return self._consensus.agree(values)
        wishes = self._wishes()
        answer = self._consensus.agree([*wishes.values(), *values])
        self._agreed = dict(zip(wishes, answer, strict=False))
        return answer[len(wishes) :]


def _modules_in(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.nn.Module):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _modules_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _modules_in(inner)
