"""The re-run state machine: is an invalid result transient, the device's fault, or correct?

A step is run; what the script validates is judged before the optimizer moves a weight. If any rank rejects a result,
all ranks put back what the run had changed and run the step again, with the same batches and random numbers. What
follows is in :mod:`outlast.policy.rerun_table`.

It has two faces. Megatron's::

    while machine.should_run_forward_backward(data_iterator):
        loss = forward_backward(data_iterator)
        machine.validate_result(loss, torch.isnan, "the loss is NaN")
    save, leave, code = machine.should_checkpoint_and_exit()

And the session's: :meth:`RerunStateMachine.begin_step`, ``while machine.should_run()`` around the step with
:meth:`RerunStateMachine.validate` in it, then :attr:`RerunStateMachine.decision`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from outlast import env
from outlast.config import RerunStateMachineConfig
from outlast.errors import OutlastError
from outlast.numerics.ballot import Agree, Ballot, agree_alone, agree_on_culprit
from outlast.numerics.batches import Batches, ReplayableIterator, as_iterators
from outlast.numerics.decision import Decision
from outlast.numerics.determinism import DeterminismStatistics, Differences
from outlast.numerics.findings import Findings
from outlast.numerics.judge import StepJudge
from outlast.numerics.rewind import Rewinder
from outlast.numerics.step_facts import StepFacts
from outlast.numerics.step_replay import StepReplay, fingerprint_of
from outlast.numerics.validations import Compare, Judged
from outlast.policy.rerun import Diagnosis, Finding, Replay
from outlast.policy.rerun_table import TABLE, Action, Outcome, RunState, advance
from outlast.runtime.group import current_place, is_initialised

if TYPE_CHECKING:
    from outlast.runtime.journal import Journal

__all__ = ["RerunStateMachine"]

log = logging.getLogger(__name__)


class RerunStateMachine:
    """Judge the results of every step, and run a step with an invalid one again.

    Args:
        config: The settings; ``None`` = the defaults.
        modules: Modules of which gradients and buffers are put back before a step is run again.
        place: This worker's place; ``None`` = from the environment and ``torch.distributed``.
        journal: Where findings are written; ``None`` = nowhere.
        agree: How the ranks agree. Called with one number when a run of a step ends and, where something was rejected,
            a few times more with others; ``None`` = through a group of its own.
        timeout_s: Seconds that a peer may be late, without ``agree``.

    Raises:
        RendezvousError: The ranks did not find each other.

    Collective: all ranks make it and use it in the same order.
    Thread: that of the training loop.
    """

    def __init__(
        self,
        config: RerunStateMachineConfig | None = None,
        *,
        modules: Iterable[torch.nn.Module] = (),
        place: env.WorkerEnv | None = None,
        journal: Journal | None = None,
        agree: Agree | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.config = config or RerunStateMachineConfig()
        self.decision = Decision()
        """What follows the last step whose runs are over."""
        self._place = place or _own_place()
        self._validates = self.config.rerun_mode == "validate_results"
        self._compares = self.config.rerun_mode == "report_determinism_stats"
        self._ballot: Ballot | None = None
        if agree is None and self._validates and self._place.world_size > 1:
            self._ballot = agree = Ballot(timeout_s=timeout_s)
        self._agree: Agree = agree or agree_alone
        self._rewinder = Rewinder()
        self._rewinder.watch(modules)
        self._findings = Findings(self._place, journal)
        self._judge = StepJudge(
            self.config,
            f"{self._place.job}-{self._place.cycle}-{self._place.global_rank}",
            say_rejected=lambda one, first: self._findings.say_rejected(one, self._iteration, is_first_run=first),
        )
        self._statistics = DeterminismStatistics()
        self._wrapped: list[tuple[Any, ReplayableIterator[Any]]] = []
        self._iterators: tuple[ReplayableIterator[Any], ...] = ()
        self._iteration = -1
        self._state = RunState.FIRST_RUN
        self._is_open, self._num_runs = False, 0
        self._replay = StepReplay(self._place, self._findings.device, self._judge, self._rewinder)

    @property
    def iteration(self) -> int:
        """Number of optimizer steps done before the step that runs, or that was run last."""
        return self._iteration

    @property
    def num_found(self) -> Mapping[Finding, int]:
        """Invalid results of this rank by what was found of them, in this process and those it goes on from."""
        return self._findings.counts

    def watch(self, *modules: torch.nn.Module) -> None:
        """Put back gradients and buffers of these modules too; one that is known already changes nothing."""
        if self._is_open:
            raise OutlastError("watch() within a step; call it between steps")
        self._rewinder.watch(modules)

    def replayable(self, batches: Any) -> ReplayableIterator[Any]:
        """Return an iterator over ``batches`` that can give a step's again; for the same object the same one."""
        if isinstance(batches, ReplayableIterator):
            return batches
        for source, iterator in self._wrapped:
            if source is batches:
                return iterator
        iterator = ReplayableIterator(batches)
        self._wrapped.append((batches, iterator))
        return iterator

    def begin_step(self, iteration: int, batches: Batches = None) -> None:
        """Begin a step; :meth:`should_run` says when its runs are over.

        Args:
            iteration: Number of optimizer steps done before it.
            batches: The iterators that it draws from, as :meth:`replayable` returns them.

        Raises:
            OutlastError: The process was to end, or the step is not the one that is to be replayed.
            TypeError: An iterator cannot be rewound.
        """
        if self._state not in TABLE:
            raise OutlastError(f"the ranks were to leave with exit code {self.decision.exit_code}; no step follows")
        self._iterators = as_iterators(batches)
        for iterator in self._iterators:
            iterator.is_recording = self._validates or self._compares
        self._iteration, self._num_runs, self._is_open = iteration, 0, True
        self._replay.begin_step(iteration, self._state, self._iterators)

    def should_run(self) -> bool:
        """Return whether the step is to be run (again); when not, :attr:`decision` says what follows.

        Raises:
            PeerLost: A peer left, or did not end its run in time.

        Collective: all ranks, after each run.
        Blocks: at the end of a run, until the device has computed what was validated and all ranks have ended theirs.
        """
        if not self._is_open:
            raise OutlastError("should_run() without begin_step(); call it for each step")
        self._num_runs += 1
        if self._num_runs == 1:
            if self._validates or self._compares:
                self._rewinder.begin()
            return True
        if self._validates:
            return self._end_judged_run()
        if self._compares:
            return self._end_compared_run()
        self._end_step(Decision())
        return False

    def validate(
        self,
        value: Any,
        what: str = "loss",
        *,
        rejects: Callable[[float], bool] | None = None,
        message: str = "rejected by the script",
        tolerance: float = 0.0,
    ) -> None:
        """Judge one number of the step that runs: NaN, infinity, spikes, and what the script says itself.

        A number on a device is read when the run ends, so that nothing waits for the device before that.

        Args:
            value: A number, or a tensor with one element.
            what: Its name, for people; spikes are told from earlier values of the same name.
            rejects: Says of the number whether it is invalid, beside what the settings say.
            message: Why, in that case.
            tolerance: Relative difference up to which two values are the same.

        Raises:
            ValueError: It is not one number.
        """
        if not self._is_open or not (self._validates or self._compares):
            return
        self._judge.take_number(value, what, rejects=rejects, message=message, tolerance=tolerance)

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str = "unexpected result",
        comparison_func: Compare | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Judge one result of the step that runs, at once.

        Args:
            result: A number or a tensor with one element; with ``comparison_func`` anything.
            rejection_func: Says of the result whether it is invalid.
            message: Why, in that case; it also names the validation.
            comparison_func: Says how much two results differ; ``None`` = 0 when equal or both NaN, infinite when one is
                NaN or infinite, else the relative difference.
            tolerance: Difference up to which two results are the same.
            fatal: Whether the result must not be trained on even if it comes again.

        Blocks: until a device has computed the result.
        """
        if not self._is_open or not (self._validates or self._compares):
            return
        self._judge.take_result(
            result,
            rejection_func,
            message,
            comparison_func=comparison_func,
            tolerance=tolerance,
            fatal=fatal,
        )

    def should_run_forward_backward(self, data_iterator: Batches = None) -> bool:
        """Return whether the step is to be run (again); the first call after the end of a step begins the next.

        Iterations are counted from 0, or from the one that was loaded. If that was a diagnostic save, its step is
        replayed first.

        Args:
            data_iterator: The iterators that the step draws from: :class:`ReplayableIterator`, several, or none.

        Collective: all ranks, before and after each run.
        Blocks: as :meth:`should_run` does.
        """
        if not self._is_open:
            replay = self._replay
            if self._validates and replay.facts is not None and replay.ordered is None and not self.decision.must_save:
                self.begin_replay()
            iteration = self._iteration + 1 if replay.ordered is None else replay.ordered.iteration
            self.begin_step(iteration, data_iterator)
        return self.should_run()

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Return whether to save for a diagnosis, whether to leave, and with which exit code; before the optimizer."""
        code = self.decision.exit_code
        return self.decision.must_save, code is not None, code or 0

    def begin_replay(self, replay: Replay | None = None) -> None:
        """Make the next step a replay of the one whose diagnostic save was loaded, with the batches saved there.

        Args:
            replay: What the launcher asks for; ``None`` = what the save says, as the last try on the same device.

        Raises:
            OutlastError: There is neither.

        Collective: all ranks, after :meth:`load_state_dict`.
        Blocks: until all ranks have come.
        """
        if not self._validates:
            log.warning("nothing is replayed: rerun_mode is %r", self.config.rerun_mode)
            return
        self._state = self._replay.order(replay, max_tries=self.config.max_same_device_reruns, agree=self._agree)

    def report(self) -> dict[str, Differences]:
        """Return how much two runs of a step differed on this rank so far, by the name of what was validated.

        It is logged and written to the journal too.
        """
        report = self._statistics.report()
        self._findings.say_differences(report, self._iteration)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return what the next process goes on from; ``step`` is ``None`` unless a diagnostic save is due."""
        is_done, facts = not (self._is_open or self.decision.must_save), self._replay.facts
        return {
            "next_iteration": self._iteration + is_done,
            "spikes": self._judge.rules.state_dict(),
            "found": {str(finding): number for finding, number in self._findings.counts.items()},
            "step": facts.stored if self.decision.must_save and facts is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._iteration = int(state["next_iteration"]) - 1
        self._judge.rules.load_state_dict(state["spikes"])
        for finding in Finding:
            self._findings.counts[finding] = int(state["found"].get(str(finding), 0))
        self._replay.facts = StepFacts(state["step"]) if state["step"] is not None else None

    def close(self) -> None:
        """Let go of the machine's own group, if it has one. Idempotent.

        Blocks: never.
        """
        if self._ballot is not None:
            self._ballot.close()
            self._ballot = None

    def _end_judged_run(self) -> bool:
        self._judge.end_run()
        self._rewinder.end_run()
        judged = self._judge.judged(same_batch=self._replay.has_same_batch(self._iterators))
        mine = Outcome.VALID if judged is None else judged.outcome
        outcome = Outcome(self._agree([mine])[0])
        transition = advance(self._state, outcome)
        if transition.action is Action.RUN_AGAIN:
            if judged is None:
                log.info("iteration %d: another rank rejected a result; the step is run again", self._iteration)
            self._run_again()
            self._judge.begin_second_run()
            self._state = transition.state
            return True
        if transition.action is Action.GO_ON:
            diagnosis = None
            if judged is not None:
                own = advance(self._state, mine).finding
                diagnosis = self._diagnose(judged, own or Finding.UNDECIDED)
                self._findings.settle_here(diagnosis)
            self._state = transition.state
            self._end_step(Decision(diagnosis=diagnosis))
            return False
        finding = transition.finding or Finding.UNDECIDED
        diagnosis = agree_on_culprit(
            self._agree,
            self._diagnose(judged, finding) if judged is not None and mine == outcome else None,
            rejected=judged is not None,
            rank=self._place.global_rank,
            world_size=self._place.world_size,
        )
        if transition.action is Action.SAVE_AND_LEAVE:
            self._replay.keep(diagnosis, self._iterators)
        self._state = transition.state
        self._findings.leave(diagnosis)
        self._is_open = False
        self.decision = Decision(action=transition.action, diagnosis=diagnosis)
        return False

    def _end_compared_run(self) -> bool:
        self._judge.end_run()
        self._rewinder.end_run()
        if self._num_runs == 2:
            self._run_again()
            self._judge.begin_second_run()
            return True
        for what, difference in self._judge.validations.differences:
            self._statistics.add(what, difference)
        for what in self._judge.validations.unmatched():
            self._statistics.add_unreached(what)
        self._end_step(Decision())
        return False

    def _run_again(self) -> None:
        if any(iterator.changed() for iterator in self._iterators):
            log.warning("the step changes its batch in place, so its second run cannot be the same; copy it first")
        self._rewinder.rewind()
        for iterator in self._iterators:
            iterator.rewind()

    def _end_step(self, decision: Decision) -> None:
        self._judge.rules.commit()
        for iterator in self._iterators:
            iterator.end_step()
        self._is_open = False
        self._replay.forget()
        self.decision = decision

    def _diagnose(self, judged: Judged, finding: Finding) -> Diagnosis:
        return self._findings.diagnose(
            judged,
            finding,
            iteration=self._iteration,
            batch=fingerprint_of(self._iterators),
            max_tries=self.config.max_same_device_reruns,
            replay=self._replay.ordered,
            facts=self._replay.facts,
            num_tries=self._replay.num_tries(self._state),
        )


def _own_place() -> env.WorkerEnv:
    place = current_place()
    return place if is_initialised() else dataclasses.replace(place, global_rank=0, world_size=1)
