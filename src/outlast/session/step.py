"""One step of a session: its reports, its attempts, and the agreement of all ranks at its end.

Reports are heartbeats, the section ``step``, PROGRESS events, and metrics for a logger. A step has one attempt and,
after an invalid result, a second one on all ranks. One small reduction per step decides what follows; if the step has
attempts, their reduction carries the decision.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outlast import clock
from outlast.decoding import from_json
from outlast.env import WorkerEnv
from outlast.errors import ExitReason, OutlastError
from outlast.incidents import EventKind
from outlast.monitor.rank_monitor import RankMonitor
from outlast.policy.rerun import Replay
from outlast.runtime.consensus import Consensus
from outlast.runtime.journal import Journal
from outlast.session.checks import SlowRanks
from outlast.session.inprocess_scope import InProcessScope
from outlast.session.metrics import Goodput, LogMetrics, MetricsRun, MetricsSink, read_earlier
from outlast.session.preemption import Preemption
from outlast.session.saves import Saves

if TYPE_CHECKING:
    from outlast.chaos.armed import ArmedFaults
    from outlast.config import RerunStateMachineConfig
    from outlast.numerics.replay import ReplayableIterator
    from outlast.numerics.rerun_machine import RerunDecision, RerunMachine


log = logging.getLogger(__name__)
PROGRESS_EVERY_NS = 5_000_000_000
"""A rank writes a PROGRESS event at most this often."""
SINK_CLOSE_S = 5.0
"""Seconds that the end of a session waits for a sink to write pending metrics."""


class ProgressReporter:
    """Report the begin and the end of each step to monitor, journal and logger. Thread: that of the training loop."""

    def __init__(
        self,
        scope: InProcessScope,
        monitor: RankMonitor,
        journal: Journal,
        place: WorkerEnv,
        log_metrics: LogMetrics | None,
    ) -> None:
        self._scope, self._monitor, self._journal, self._place = scope, monitor, journal, place
        self._log_metrics = log_metrics
        self._began_ns = 0
        self._wrote_progress_ns: int | None = None
        self._wrote_steps_started = False
        self.total: int | None = None
        """Number of iterations at which the run is complete; ``None`` = not known."""
        self._steps_s, self._num_steps = 0.0, 0
        """Of the steps since the last PROGRESS event."""
        self._has_raised = False
        self._earlier_incidents = Counter[str]()
        began_wall_ns: int | None = None
        if log_metrics is not None and place.run_dir is not None:
            self._earlier_incidents, began_wall_ns = read_earlier(Path(place.run_dir), place.global_rank)
        self._num_counted = -1
        self._counts = {
            "outlast/restart_count": float(place.cycle),
            "outlast/in_process_restart_count": float(place.call),
        }
        self.goodput = Goodput(journal, began_wall_ns)

    def begin_run(self, iteration: int) -> None:
        """Notify a sink that training continues from ``iteration``."""
        if isinstance(self._log_metrics, MetricsSink):
            place = self._place
            run = MetricsRun(
                run_id=place.run_id,
                iteration=iteration,
                global_rank=place.global_rank,
                local_rank=place.local_rank,
                world_size=place.world_size,
            )
            self._call(self._log_metrics.begin_run, run)

    def end_run(self, *, is_orderly: bool) -> None:
        """Have a sink write pending metrics. Blocks: up to :data:`SINK_CLOSE_S` at an orderly end."""
        if isinstance(self._log_metrics, MetricsSink):
            self._call(self._log_metrics.end_run, SINK_CLOSE_S if is_orderly else 0.0)

    def begin_step(self, iteration: int) -> None:
        self._scope.ping()
        self._monitor.heartbeat()
        if not self._wrote_steps_started:
            self._wrote_steps_started = True
            known = {} if self.total is None else {"total": self.total}
            self.goodput.begin(iteration)
            self._journal.write(EventKind.STEPS_STARTED, rank=self._place.global_rank, iteration=iteration, **known)
        self._monitor.start_section("step")
        self._began_ns = clock.now_ns()

    def end_step(self, iteration: int, loss: float | None) -> float:
        """Report the end of a step and return its duration in seconds.

        Args:
            iteration: Number of optimizer steps done, including this one.
            loss: The loss that was validated in the step, if one was.
        """
        self._monitor.end_section("step")
        self._monitor.set_iteration(iteration)
        now_ns = clock.now_ns()
        took_s = (now_ns - self._began_ns) / 1e9
        self._steps_s, self._num_steps = self._steps_s + took_s, self._num_steps + 1
        if self._wrote_progress_ns is None or now_ns - self._wrote_progress_ns >= PROGRESS_EVERY_NS:
            self._wrote_progress_ns = now_ns
            facts: dict[str, Any] = {"step_s": round(self._steps_s / self._num_steps, 6)}
            if loss is not None and math.isfinite(loss):
                facts["loss"] = loss
            self._steps_s, self._num_steps = 0.0, 0
            self._journal.write(EventKind.PROGRESS, rank=self._place.global_rank, iteration=iteration, **facts)
        self.goodput.note_step(now_ns, iteration)
        return took_s

    def log_step(self, iteration: int, took_s: float, report: dict[str, float]) -> None:
        """Pass a step's metrics to the logger.

        Args:
            iteration: Number of optimizer steps done.
            took_s: Duration of the step.
            report: Metrics of the straggler report, if there was one after this step.
        """
        if self._log_metrics is None:
            return
        seen = self._journal.incidents
        if seen.total() != self._num_counted:
            self._num_counted = seen.total()
            counted = (self._earlier_incidents + seen).items()
            self._counts |= {f"outlast/incidents/{kind}": float(number) for kind, number in counted}
        metrics = {
            "outlast/step_time_s": took_s,
            "outlast/goodput": self.goodput.share,
            **self._counts,
        }
        if report:
            metrics.update((f"outlast/{name}", value) for name, value in report.items())
        self._call(self._log_metrics, metrics, iteration)

    def log_save(self, iteration: int, stall_s: float) -> None:
        """Pass the time that training waited for a save to the logger."""
        self.goodput.note_wait(stall_s)
        if self._log_metrics is not None:
            self._call(self._log_metrics, {"outlast/save_stall_s": stall_s}, iteration)

    def _call(self, what: Callable[..., object], *arguments: object) -> None:
        try:
            what(*arguments)
        except Exception as error:  # a failing logger must not end training
            if not self._has_raised:
                log.warning("log_metrics failed (%s: %s); training continues", type(error).__name__, error)
                log.debug("log_metrics failed", exc_info=True)
            self._has_raised = True


QUESTIONS = ("stop", "save", "report", "refused", "overdue")
"""Values that all ranks agree on once a step: exit on a notice, save after the step, compare the ranks, exit because
nothing can be saved any more, and exit because nothing that survives the end of the job was committed for too long
(rank 0's clock decides)."""


class StepConsensus:
    """Agree once a step on what follows: in a separate reduction, or in that of the step's attempts.

    Args:
        decides: Whether this rank's clock decides for all; one rank's does.

    Thread: that of the training loop.
    """

    def __init__(
        self,
        consensus: Consensus,
        preemption: Preemption,
        saves: Saves | None,
        slow_ranks: SlowRanks | None,
        *,
        decides: bool,
    ) -> None:
        self._decides = decides
        self._consensus, self._preemption, self._saves, self._slow_ranks = consensus, preemption, saves, slow_ranks
        self._iteration = 0
        self._agreed: dict[str, int] | None = None

    def begin(self, iteration: int, *, with_attempts: bool) -> None:
        """Begin a step.

        Args:
            iteration: Number of optimizer steps done.
            with_attempts: The reduction of the step's attempts carries this rank's requests.

        Collective: all ranks. Blocks: never.
        """
        self._iteration, self._agreed = iteration, None
        if not with_attempts:
            self._consensus.begin(self._requests())
        if self._slow_ranks is not None:
            self._slow_ranks.begin_step(iteration)

    def agree(self, values: Sequence[int]) -> list[int]:
        """Agree with all ranks on the largest of each value; once a step, also on what follows the step.

        Raises:
            PeerLost: A peer left, or did not come in time.

        Collective: all ranks.
        Blocks: until all ranks have come.
        """
        if self._consensus.pending:  # attempts were not expected when the step began
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
        if self._slow_ranks is not None:
            self._slow_ranks.detector.end_step()
        agreed, self._agreed = self._agreed, None
        if agreed is None or self._consensus.pending:
            if not self._consensus.pending:
                self._consensus.begin(self._requests())  # attempts were expected, but the step had none
            agreed = self._consensus.finish()
        if self._slow_ranks is not None:
            self._slow_ranks.note_wait()
        return agreed

    def _requests(self) -> dict[str, int]:
        """Return this rank's values for :data:`QUESTIONS`, in that order."""
        saves, slow_ranks = self._saves, self._slow_ranks
        wanted = 0 if saves is None else saves.schedule.request(self._iteration + 1, saves.manager.save_cost_s)
        return {
            "stop": self._preemption.requested_signal(self._iteration),
            "save": wanted,
            "report": 0 if slow_ranks is None else int(slow_ranks.detector.wants_report()),
            "refused": int(saves is not None and saves.manager.refusal is not None),
            "overdue": int(self._decides and saves is not None and saves.is_overdue),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDecision:
    """The agreement of all ranks at a step's end; the same on every rank."""

    iteration: int
    """Number of optimizer steps done, including this one."""
    save: Literal["near", "all"] | None
    """The save that is due now: to the node-local tiers, to all tiers, or none; call :meth:`Session.save_due`."""
    reason: ExitReason | None = None
    """Why all ranks stop now; ``None`` = they continue. ``PREEMPTED``: a shutdown was requested. ``STRAGGLER``: a rank
    is so slow that its node must be replaced. ``NO_PROGRESS``: nothing can be saved any more because a directory
    belongs to another run, or nothing that survives the end of the job was committed for
    ``checkpoint.max_durable_lag``. ``FAILED_VALIDATION`` and ``RESUME_TO_DISAMBIGUATE``: replicas differ."""
    signal: int | None = None
    """Number of the signal that requested the shutdown, SIGTERM for other notices; ``None`` = none did."""

    @property
    def stop(self) -> bool:
        """Whether all ranks stop now; :meth:`Session.finish` and :meth:`Session.leave` end the process as agreed."""
        return self.reason is not None


class Attempt:
    """One attempt of a step: the body of ``for attempt in run.attempts(...)``.

    Thread: that of the training loop.
    """

    __slots__ = ("_faults", "_iterators", "_machine", "number")

    def __init__(
        self,
        machine: RerunMachine,
        iterators: Sequence[ReplayableIterator[Any]],
        number: int,
        faults: ArmedFaults | None,
    ) -> None:
        self._machine, self._iterators, self._faults = machine, iterators, faults
        self.number = number
        """0 for the first attempt of the step, 1 for the one after an invalid result."""

    def next_batch(self, source: int = 0) -> Any:
        """Return the step's next batch; each attempt of a step gets the same batches.

        Args:
            source: Index of the source given to ``run.attempts()``, from 0.

        Raises:
            OutlastError: The source is exhausted or does not exist.
        """
        num_given = len(self._iterators)
        if not 0 <= source < num_given:
            raise OutlastError(f"run.attempts() was given {num_given} sources of batches; there is no {source}")
        try:
            return next(self._iterators[source])
        except StopIteration:
            raise OutlastError(
                f"there is no batch left for iteration {self._machine.iteration}; give run.attempts() what lasts as "
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
        """Reject NaN, infinity, spikes and results that the script rejects, before the optimizer changes a weight.

        Args:
            value: A number, or a tensor with one element; a device tensor is read when the attempt ends.
            what: Name of the value for people; spikes are detected against earlier values of the same name.
            rejects: Returns whether the number is invalid, in addition to ``rerun_state_machine``.
            message: The reason for a rejection by ``rejects``.
            tolerance: Relative difference up to which the values of two runs are the same.

        Raises:
            ValueError: The value is not one number.
        """
        if self._faults is not None:
            value = self._faults.on_loss(self._machine.iteration, value)
        self._machine.validate(value, what, rejects=rejects, message=message, tolerance=tolerance)


class Attempts:
    """Drive the re-run state machine for a session. Thread: that of the training loop."""

    may_be_absent = True
    """A checkpoint without this state can be loaded."""

    def __init__(
        self,
        config: RerunStateMachineConfig | None,
        place: WorkerEnv,
        journal: Journal,
        *,
        consensus: StepConsensus,
        faults: ArmedFaults | None,
        goodput: Goodput,
    ) -> None:
        from outlast.numerics.rerun_machine import RerunMachine

        self._machine = RerunMachine(place, journal, config=config, agree=consensus.agree)
        self._faults, self._goodput = faults, goodput
        self._is_used = False
        self._state: Mapping[str, Any] = {}
        self.replay: Replay | None = from_json(place.replay, Replay) if place.replay and place.call == 0 else None
        """Steps to replay first; ``None`` = none, or the replay has begun."""

    @property
    def have_reduction(self) -> bool:
        """Whether steps are expected to have attempts, whose reduction can carry more values."""
        return self._is_used and self._machine.config.rerun_mode == "validate_results"

    @property
    def decision(self) -> RerunDecision:
        return self._machine.decision

    def watch(self, state: Mapping[str, Any]) -> None:
        self._state = state
        import torch

        from outlast.runtime.nested import find_kind

        self._machine.watch(*(module for _, module in find_kind(state, torch.nn.Module)))

    def begin_step(self, iteration: int) -> None:
        """Begin a step, or its replay if it is the one to replay.

        Collective: all ranks.
        """
        if self.replay is not None and self.replay.iteration <= iteration:
            replay, self.replay = self.replay, None
            if replay.iteration == iteration:
                self._machine.begin_replay(replay)
            else:
                log.warning("iteration %d is not replayed: training resumes from %d", replay.iteration, iteration)

    def run(self, iteration: int, batches: Any) -> Iterator[Attempt]:
        """Yield the attempts of a step; :attr:`decision` then says what follows.

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

    @property
    def loss(self) -> float | None:
        """The loss validated in the last step, once it was judged; ``None`` = none was."""
        return self._machine.numbers.get("loss")

    def finish(self) -> None:
        """Report the differences between two runs of a step, in the mode that measures them."""
        if self._is_used and self._machine.config.rerun_mode == "report_determinism_stats":
            self._machine.report()

    def state_dict(self) -> dict[str, Any]:
        return {"rerun": self._machine.state_dict(), "goodput": self._goodput.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._machine.load_state_dict(state["rerun"])
        if (goodput := state.get("goodput")) is not None:  # absent in checkpoints of an earlier version
            self._goodput.load_state_dict(goodput)

    def close(self) -> None:
        self._machine.close()
