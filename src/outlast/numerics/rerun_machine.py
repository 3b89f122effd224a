"""The re-run state machine: is an invalid result transient, the device's fault, or correct?

Results of a step are validated before the optimizer changes a weight. If any rank rejects a result, all ranks restore
what the run had changed and run the step again, with the same batches and random numbers. The transitions are in
:mod:`outlast.policy.rerun`.

It has two interfaces. Megatron's::

    while machine.should_run_forward_backward(data_iterator):
        loss = forward_backward(data_iterator)
        machine.validate_result(loss, torch.isnan, "the loss is NaN")
    save, leave, code = machine.should_checkpoint_and_exit()

And the session's: :meth:`RerunStateMachine.begin_step`, ``while machine.should_run()`` around the step with
:meth:`RerunStateMachine.validate` in it, then :attr:`RerunStateMachine.decision`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import torch

from outlast.config import RerunStateMachineConfig
from outlast.decoding import from_json
from outlast.env import WorkerEnv
from outlast.errors import NotFinite, OutlastError
from outlast.incidents import Decision, EventKind, RecoveryLevel
from outlast.numerics.replay import Batches, ReplayableIterator, Rewinder, StepReplay, as_iterators, fingerprint_of
from outlast.numerics.validation import Compare, Differences, Judged, StepValidation, describe_differences
from outlast.policy.rerun import (
    TABLE,
    Action,
    Diagnosis,
    Finding,
    Replay,
    RunOutcome,
    StepRun,
    advance,
    replay_state,
    to_number,
)
from outlast.runtime.consensus import Consensus
from outlast.runtime.device import device_name
from outlast.runtime.diagnoses import journal_diagnosis, leave_diagnosis
from outlast.runtime.process_groups import current_place, is_initialised

if TYPE_CHECKING:
    from outlast.runtime.journal import Journal


log = logging.getLogger(__name__)
Agree: TypeAlias = Callable[[Sequence[int]], list[int]]
"""Takes this rank's numbers, below 2^63, and returns the elementwise maximum over all ranks. Collective: all ranks,
with the same number of elements."""
_FIRST = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class RerunDecision:
    """Decision for all ranks after the runs of a step."""

    action: Action = Action.GO_ON
    """The same on all ranks."""
    diagnosis: Diagnosis | None = None
    """If the process is to end, the diagnosis of the rank that decided, the same on all ranks; else this rank's, if it
    had an invalid result."""

    @property
    def must_save(self) -> bool:
        """Whether the state, the machine's included, is to be saved for a diagnosis before the process ends."""
        return self.action is Action.SAVE_AND_EXIT

    @property
    def exit_code(self) -> int | None:
        """The process's exit code; ``None`` = training continues."""
        code = self.action.exit_code
        return None if code is None else int(code)


_GO_ON = RerunDecision()


class RerunMachine:
    """The re-run state machine of a worker whose place is known; see :class:`RerunStateMachine`.

    Args:
        place: The worker's place.
        journal: Where findings are written; ``None`` = nowhere.
    """

    def __init__(
        self,
        place: WorkerEnv,
        journal: Journal | None = None,
        *,
        config: RerunStateMachineConfig | None = None,
        modules: Iterable[torch.nn.Module] = (),
        agree: Agree | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.config = config or RerunStateMachineConfig()
        self.decision = _GO_ON
        """Decision after the last step whose runs are over."""
        self._place, self._journal = place, journal
        self._device = device_name(place.device or place.node, place.local_rank)
        self._is_active = self.config.rerun_mode != "disabled"
        self._judges = self.config.rerun_mode == "validate_results"
        self._consensus: Consensus | None = None
        if agree is None and self._judges:
            self._consensus = Consensus(["outcome"], world_size=place.world_size, timeout_s=timeout_s)
            agree = self._consensus.agree
        self._agree: Agree = agree or list
        self._rewinder = Rewinder()
        self._rewinder.watch(modules)
        self._validation = StepValidation(self.config, place, self._device)
        self._replay = StepReplay(place, self._device)
        self._num_found = dict.fromkeys(Finding, 0)
        """Invalid results of this rank, in this process and those that it continues from."""
        self._wrapped: list[tuple[Any, ReplayableIterator[Any]]] = []
        self._iterators: tuple[ReplayableIterator[Any], ...] = ()
        self._iteration = -1
        self._state = StepRun.FIRST_RUN
        self._is_open, self._num_runs = False, 0

    @property
    def iteration(self) -> int:
        """Number of optimizer steps done before the current step, or the last one."""
        return self._iteration

    def watch(self, *modules: torch.nn.Module) -> None:
        """Restore gradients and buffers of these modules, too; known ones are ignored."""
        if self._is_open:
            raise OutlastError("watch() within a step; call it between steps")
        self._rewinder.watch(modules)

    def replayable(self, batches: Any) -> ReplayableIterator[Any]:
        """Return an iterator over ``batches`` that can return a step's again; the same one for the same object."""
        if isinstance(batches, ReplayableIterator):
            return batches
        for source, iterator in self._wrapped:
            if source is batches:
                return iterator
        iterator = ReplayableIterator(batches)
        self._wrapped.append((batches, iterator))
        return iterator

    def begin_step(self, iteration: int, batches: Batches = None) -> None:
        """Begin a step; :meth:`should_run` returns when its runs are over.

        Args:
            iteration: Number of optimizer steps done before it.
            batches: The iterators that it draws from, as :meth:`replayable` returns them.

        Raises:
            OutlastError: The process was to end, or the step is not the one to be replayed.
            TypeError: An iterator cannot be rewound.
        """
        if self._state not in TABLE:
            raise OutlastError(f"the ranks were to leave with exit code {self.decision.exit_code}; no step follows")
        self._iterators = as_iterators(batches)
        for iterator in self._iterators:
            iterator.is_recording = self._is_active
        self._iteration, self._num_runs, self._is_open = iteration, 0, True
        expected, injected = self._replay.begin_step(iteration, self._iterators)
        self._validation.begin_step(iteration, self._state, expected=expected, injected=injected)

    def should_run(self) -> bool:
        """Return whether the step is to be run (again); if not, :attr:`decision` is set.

        Raises:
            PeerLost: A peer exited, or did not end its run in time.
            NotFinite: A number is NaN or infinite, and ``rerun_mode`` is ``disabled``, as in Megatron.
            OutlastError: Another result was rejected in that mode.

        Collective: all ranks, after each run.
        Blocks: at the end of a run, until the device has computed the validated values and all ranks have ended theirs.
        """
        if not self._is_open:
            raise OutlastError("should_run() without begin_step(); call it for each step")
        self._num_runs += 1
        if self._num_runs == 1:
            if self._is_active:
                self._rewinder.begin()
            return True
        if self._is_active:
            self._validation.end_run()
            self._rewinder.end_run()
            if self._judges:
                return self._end_judged_run()
            if self._num_runs == 2:
                self._begin_second_run()
                return True
            self._validation.count_differences()
        else:
            self._validation.end_run()
            self._raise_rejected(self._validation.judge())
        self._end_step(_GO_ON)
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
        """Validate one number of the current step: NaN, infinity, spikes, and the script's own criteria.

        A number on a device is read when the run ends, so that nothing waits for the device before that.

        Args:
            value: A number, or a tensor with one element.
            what: Its name; spikes are compared with earlier values of the same name.
            rejects: Returns whether the number is invalid, in addition to the criteria of the settings.
            message: The reason in that case.
            tolerance: Relative difference up to which two values are the same.

        Raises:
            ValueError: ``value`` is not one number.
        """
        # Do not wait for the device if nothing can be rejected.
        ignores = not (self._is_active or self.config.check_for_nan_in_loss or rejects)
        if not self._is_open or (ignores and isinstance(value, torch.Tensor) and not value.is_cpu):
            return
        self._validation.take_number(value, what, rejects=rejects, message=message, tolerance=tolerance)

    def validate_result(
        self,
        result: Any,
        rejection_func: Callable[[Any], Any],
        message: str = "unexpected result",
        comparison_func: Compare | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
    ) -> None:
        """Validate one result of the current step immediately.

        Args:
            result: A number or a tensor with one element; with ``comparison_func`` any value.
            rejection_func: Returns whether the result is invalid.
            message: The reason in that case; it also names the validation.
            comparison_func: Returns how much two results differ; ``None`` = 0 when equal or both NaN, infinite when one
                is NaN or infinite, else the relative difference.
            tolerance: Difference up to which two results are the same.
            fatal: Whether the result must not be trained on even if it is reproduced.

        Blocks: until a device has computed the result.
        """
        if not self._is_open:
            return
        self._validation.take_result(result, rejection_func, message, comparison_func, tolerance, fatal=fatal)

    @property
    def numbers(self) -> Mapping[str, float]:
        """The numbers validated in the step's newest run, by name; those on a device once the run has ended."""
        return self._validation.numbers

    def should_run_forward_backward(self, data_iterator: Batches = None) -> bool:
        """Return whether the step is to be run (again); the first call after the end of a step begins the next.

        Iterations are counted from 0, or from the loaded one. If a diagnostic save was loaded, its step is replayed
        first.

        Args:
            data_iterator: The iterators that the step draws from: :class:`ReplayableIterator`, several, or none.

        Collective: all ranks, before and after each run.
        Blocks: as :meth:`should_run` does.
        """
        if not self._is_open:
            replay = self._replay
            if self._judges and replay.saved is not None and replay.ordered is None and not self.decision.must_save:
                self.begin_replay()
            iteration = self._iteration + 1 if replay.ordered is None else replay.ordered.iteration
            self.begin_step(iteration, data_iterator)
        return self.should_run()

    def should_checkpoint_and_exit(self) -> tuple[bool, bool, int]:
        """Return whether to save for a diagnosis, whether to exit, and the exit code; to be called before the optimizer
        steps."""
        code = self.decision.exit_code
        return self.decision.must_save, code is not None, code or 0

    def begin_replay(self, replay: Replay | None = None) -> None:
        """Make the next step a replay of the one whose diagnostic save was loaded, with its saved batches.

        Args:
            replay: The launcher's request; ``None`` = as described by the save, as the last try on the same device.

        Raises:
            OutlastError: There is neither.

        Collective: all ranks, after :meth:`load_state_dict`.
        Blocks: until all ranks have called it.
        """
        if not self._judges:
            log.warning("nothing is replayed: rerun_mode is %r", self.config.rerun_mode)
            return
        max_tries = self.config.max_same_device_reruns
        if (ordered := replay) is None:
            if self._replay.saved is None:
                raise OutlastError("there is nothing to replay; load the state of a diagnostic save first")
            ordered = from_json(self._replay.saved["diagnosis"], Diagnosis).replay(tries=max_tries)
        is_here = self._place.global_rank == ordered.rank and self._device == ordered.device
        (same_device,) = self._agree([int(is_here)])
        self._replay.ordered = ordered
        self._state = replay_state(same_device=bool(same_device), tries=ordered.tries, max_tries=max_tries)

    def report(self) -> dict[str, Differences]:
        """Return how much two runs of a step differed on this rank so far, by the name of the validation.

        The report is also logged and written to the journal.
        """
        report = {what: counts.summary() for what, counts in self._validation.statistics.items()}
        log.info("differences between two runs of a step:\n%s", describe_differences(report))
        if self._journal is not None:
            rank, builtins = self._place.global_rank, msgspec.to_builtins(report)
            self._journal.write(EventKind.DETERMINISM_REPORT, rank=rank, iteration=self._iteration, report=builtins)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the next process; ``step`` is ``None`` unless a diagnostic save is due."""
        is_done = not (self._is_open or self.decision.must_save)
        return {
            "next_iteration": self._iteration + is_done,
            "spikes": self._validation.state_dict(),
            "found": {str(finding): number for finding, number in self._num_found.items()},
            "step": self._replay.saved if self.decision.must_save else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of :meth:`state_dict`."""
        self._iteration = int(state["next_iteration"]) - 1
        self._validation.load_state_dict(state["spikes"])
        for finding in Finding:
            self._num_found[finding] = int(state["found"].get(str(finding), 0))
        self._replay.saved = dict(state["step"]) if state["step"] is not None else None

    def close(self) -> None:
        """Close the machine's own connections, if any. Idempotent.

        Blocks: never.
        """
        if self._consensus is not None:
            self._consensus.close()
            self._consensus = None

    def _end_judged_run(self) -> bool:
        judged = self._validation.judge(same_batch=self._replay.has_same_batch(self._iterators))
        mine = RunOutcome.VALID if judged is None else judged.outcome
        outcome = RunOutcome(self._agree([mine])[0])
        transition = advance(self._state, outcome)
        if transition.action is Action.RUN_AGAIN:
            if judged is None:
                log.info("iteration %d: another rank rejected a result; the step is run again", self._iteration)
            self._begin_second_run()
            self._state = transition.state
            return True
        if transition.action is Action.GO_ON:
            diagnosis = None
            if judged is not None:
                finding = advance(self._state, mine).finding
                diagnosis = self._diagnose(judged, finding or Finding.UNDECIDED)
                self._num_found[diagnosis.finding] += 1
                log.warning("%s; training continues with the newer run", diagnosis.describe())
                reason = "the step was run again, and training continues with the newer run"
                journal_diagnosis(
                    self._journal,
                    self._place,
                    diagnosis,
                    Decision(recovery_level=RecoveryLevel.RERUN_STEP, reason=reason),
                )
            self._state = transition.state
            self._end_step(_GO_ON if diagnosis is None else RerunDecision(diagnosis=diagnosis))
            return False
        own = None
        if judged is not None and mine == outcome:
            own = self._diagnose(judged, transition.finding or Finding.UNDECIDED)
        diagnosis = self._agree_on_root_cause(own, has_rejected=judged is not None)
        if transition.action is Action.SAVE_AND_EXIT:
            self._rewinder.rewind()
            self._replay.keep(diagnosis, self._validation, self._iterators, self._rewinder.random.state)
        self._state = transition.state
        self._num_found[diagnosis.finding] += diagnosis.rank == self._place.global_rank
        leave_diagnosis(self._place, diagnosis, self._journal)
        self._is_open = False
        self.decision = RerunDecision(action=transition.action, diagnosis=diagnosis)
        return False

    def _raise_rejected(self, judged: Judged | None) -> None:
        """Raise for an invalid result that no run of the step can confirm, before it is trained on."""
        if judged is None or not judged.rejected.fatal:
            return
        rejected, rank = judged.rejected, self._place.global_rank
        value = to_number(rejected.value)
        kind = OutlastError if value is None or math.isfinite(value) else NotFinite
        self._is_open = False
        raise kind(
            f"{rejected.what} of iteration {self._iteration} is {rejected.value} on rank {rank} ({rejected.message}), "
            "and rerun_mode='disabled' runs no step again; no weight was moved by it: look at the data and at this "
            "rank, or set rerun_mode='validate_results'",
            rank=rank,
            iteration=self._iteration,
        )

    def _begin_second_run(self) -> None:
        if any(iterator.changed() for iterator in self._iterators):
            log.warning("the step changes its batch in place, so its second run cannot be the same; copy it first")
        self._rewinder.rewind()
        for iterator in self._iterators:
            iterator.rewind()
        self._validation.begin_second_run()

    def _end_step(self, decision: RerunDecision) -> None:
        self._validation.end_step()
        for iterator in self._iterators:
            iterator.end_step()
        self._is_open = False
        self._replay.ordered = self._replay.saved = None  # the next step is run for the first time
        self.decision = decision

    def _diagnose(self, judged: Judged, finding: Finding) -> Diagnosis:
        node, device = self._replay.first_seen_on()
        return Diagnosis(
            finding=finding,
            rank=self._place.global_rank,
            node=node,
            device=device,
            iteration=self._iteration,
            call=judged.rejected.call,
            what=judged.rejected.what,
            message=judged.rejected.message,
            first=judged.rejected.value,
            second=judged.second,
            batch=fingerprint_of(self._iterators),
            tries=self._replay.num_tries(self._state),
            max_tries=self.config.max_same_device_reruns,
            replayed_on="" if self._replay.ordered is None else self._device,
            rejected_ranks=(self._place.global_rank,),
        )

    def _agree_on_root_cause(self, mine: Diagnosis | None, *, has_rejected: bool) -> Diagnosis:
        """Return one rank's diagnosis on all ranks: of those that have one, that of the earliest validation.

        Args:
            mine: This rank's diagnosis if it is one of those that decided; at least one rank has one.
            has_rejected: Whether this rank had an invalid result.

        Raises:
            OutlastError: No rank has one.

        Collective: all ranks.
        Blocks: as ``agree`` does, three times.
        """
        rank, world_size = self._place.global_rank, self._place.world_size
        key = 0 if mine is None else _FIRST - (mine.call * world_size + rank)
        best, *flags = self._agree([key, *(int(has_rejected and one == rank) for one in range(world_size))])
        if best == 0:
            raise OutlastError("an invalid result was agreed on, but no rank has one; do all ranks run the same code?")
        is_mine = mine is not None and (_FIRST - best) % world_size == rank
        data = list(msgspec.json.encode(mine)) if mine is not None and is_mine else []
        (length,) = self._agree([len(data)])
        diagnosis = from_json(bytes(self._agree(data or [0] * length)), Diagnosis)
        ranks = tuple(one for one, flag in enumerate(flags) if flag)
        return msgspec.structs.replace(diagnosis, rejected_ranks=ranks)


class RerunStateMachine(RerunMachine):
    """Validate the results of every step, and run a step with an invalid one again.

    Args:
        config: The settings; ``None`` = the defaults.
        modules: Modules whose gradients and buffers are restored before a step is run again.
        agree: How the ranks agree. Called with one number when a run of a step ends and, after a rejection, a few times
            more with others; ``None`` = through a separate group.
        timeout_s: Seconds that a peer may be late, without ``agree``.

    Raises:
        RendezvousError: The ranks could not connect to each other.

    Collective: all ranks create and use it in the same order.
    Thread: that of the training loop.
    """

    def __init__(
        self,
        config: RerunStateMachineConfig | None = None,
        *,
        modules: Iterable[torch.nn.Module] = (),
        agree: Agree | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        place = current_place()
        if not is_initialised():
            place = replace(place, global_rank=0, world_size=1)
        super().__init__(place, config=config, modules=modules, agree=agree, timeout_s=timeout_s)
