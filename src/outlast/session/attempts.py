"""The attempts of a step: the first one and, if a result was invalid, one more, with all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from outlast.env import WorkerEnv
from outlast.errors import OutlastError
from outlast.policy.rerun import Replay, decode_replay
from outlast.runtime.journal import Journal
from outlast.session.step_consensus import StepConsensus

if TYPE_CHECKING:
    from outlast.chaos.armed import ArmedFaults
    from outlast.config import RerunStateMachineConfig
    from outlast.numerics.replay import ReplayableIterator
    from outlast.numerics.rerun_machine import RerunDecision, RerunStateMachine

__all__ = ["Attempt", "Attempts"]

log = logging.getLogger(__name__)


class Attempt:
    """One attempt of a step; the body of ``for attempt in run.attempts(...)`` makes it.

    Thread: that of the training loop.
    """

    __slots__ = ("_faults", "_iterators", "_machine", "number")

    def __init__(
        self,
        machine: RerunStateMachine,
        iterators: Sequence[ReplayableIterator[Any]],
        number: int,
        faults: ArmedFaults | None,
    ) -> None:
        self._machine, self._iterators, self._faults = machine, iterators, faults
        self.number = number
        """0 for the first attempt of the step, 1 for the one after an invalid result."""

    def next_batch(self, source: int = 0) -> Any:
        """Return the step's next batch; each attempt of a step gets the same ones.

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
                f"there is no batch left for iteration {self._machine.iteration}; give run.attempts() what goes on as "
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
        if self._faults is not None:
            value = self._faults.on_loss(self._machine.iteration, value)
        self._machine.validate(value, what, rejects=rejects, message=message, tolerance=tolerance)


class Attempts:
    """Drive the re-run state machine for a session.

    Args:
        config: Its settings; ``None`` = the defaults.
        place: This worker's place.
        journal: Where findings are written.
        consensus: How the ranks agree.
        faults: Faults that a test injects into results; ``None`` = none.

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
        consensus: StepConsensus,
        faults: ArmedFaults | None,
    ) -> None:
        from outlast.numerics.rerun_machine import machine_for

        self._machine: RerunStateMachine = machine_for(place, journal, config=config, agree=consensus.agree)
        self._faults = faults
        self._is_used = False
        self._state: Mapping[str, Any] = {}
        self.replay: Replay | None = decode_replay(place.replay)
        """What is to be run again before anything else; ``None`` = nothing, or it has begun."""

    @property
    def have_reduction(self) -> bool:
        """Whether the steps are expected to have attempts, whose reduction can carry more."""
        return self._is_used and self._machine.config.rerun_mode == "validate_results"

    @property
    def decision(self) -> RerunDecision:
        """What follows the last step; the same on all ranks."""
        return self._machine.decision

    def watch(self, state: Mapping[str, Any]) -> None:
        """Take the state that the steps change."""
        self._state = state
        self._machine.watch(*_modules_in(state))

    def begin_step(self, iteration: int) -> None:
        """Begin a step of the session; where that is the one to replay, begin the replay.

        Collective: all ranks.
        """
        if self.replay is not None and self.replay.iteration <= iteration:
            replay, self.replay = self.replay, None
            if replay.iteration == iteration:
                self._machine.begin_replay(replay)
            else:
                log.warning("iteration %d is not replayed: training resumes from %d", replay.iteration, iteration)

    def run(self, iteration: int, batches: Any) -> Iterator[Attempt]:
        """Yield the attempts of a step; :attr:`decision` says what follows.

        Collective: all ranks.
        Blocks: after each attempt until all ranks have ended theirs.
        """
        self._is_used = True
        sources = batches if isinstance(batches, list | tuple) else [] if batches is None else [batches]
        iterators = [self._machine.replayable(source) for source in sources]
        self._machine.begin_step(iteration, iterators)
        number = 0
        while self._machine.should_run():
            yield Attempt(self._machine, iterators, number, self._faults)
            number += 1
            if self._faults is not None:
                self._faults.after_backward(iteration, self._state)

    def finish(self) -> None:
        """Report how much two runs of a step differed, where they were run twice for that."""
        if self._is_used and self._machine.config.rerun_mode == "report_determinism_stats":
            self._machine.report()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next process resumes from."""
        return {"rerun": self._machine.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what :meth:`state_dict` returned."""
        self._machine.load_state_dict(state["rerun"])

    def close(self) -> None:
        """Release what the machine holds."""
        self._machine.close()


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
