"""Straggler detection: what is timed, when ranks exchange it, and what follows.

A window ends with a report, which must be after the same step on all ranks. A session agrees on it with the step's
other decisions (:meth:`StragglerDetector.wants_report`); without one, each report contains the pace of the ranks, from
which all compute the step of the next: nothing is sent between two reports (:meth:`StragglerDetector.report_if_due`).

The machine of a reported rank is checked by a small benchmark (:mod:`outlast.straggler.machine_check`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

import msgspec
import torch.distributed as dist

from outlast import clock
from outlast.config.base import frozen
from outlast.config.training import StragglerDetectionConfig
from outlast.decoding import from_msgpack
from outlast.env import read_worker
from outlast.errors import OutlastError, PeerLost
from outlast.policy.slowness import MIN_SAMPLES, OUTSIDE, RankTimings, Timing, lower_median
from outlast.policy.stragglers import (
    Findings,
    MachineDecision,
    SlownessCause,
    Streaks,
    choose_others,
    judge,
    ranks_to_stop_for,
)
from outlast.runtime.device import device_word, training_device
from outlast.runtime.device_timing import timing_event
from outlast.runtime.process_groups import Group, gather_bytes
from outlast.straggler.machine_check import gather_machine_decision
from outlast.straggler.recorder import (
    MAX_SAMPLES,
    NUM_KERNEL_STEPS,
    DeviceTimes,
    KernelTimes,
    SectionRecorder,
    StepSection,
    Wrappings,
)
from outlast.straggler.report import Metrics, Report, publish

FIRST_REPORT_STEPS = 16
"""Timed steps before the first self-paced report, which shows the pace of the ranks."""
NUM_DENSE_STEPS, DEVICE_INTERVAL = 32, 7
"""The first so many steps of a window are all timed on the device, then one in so many: recording and reading an event
takes some 3 us each, and the hooks that split a backward some 50 us. A prime number, since what does not happen in each
step often happens in each 2nd, 4th or 10th."""
MAX_GROWTH = 8
"""Maximum ratio of a window's steps to those of the window before: the first steps may differ from later ones."""
KERNELS_FROM = 3
"""Step of a window from which kernels are timed."""
NUM_FASTEST = 3
"""Fastest windows of which the middle one is the best: a single window with less work, or wrong times, does not count.
"""
MAX_CHECKED = 2
"""Ranks whose machines are checked in one report, the worst ones."""


class StragglerDetector:
    """Time the steps of this rank, compare them with those of all others, and report the slow ones.

    Args:
        config: Settings; ``None`` = the defaults. ``enabled`` is for sessions, and is ignored here.
        global_rank: This rank; ``None`` = from the environment, as for the next two.
        local_rank: This rank's local rank.
        node: Name of its node.
        role: Role of this rank, such as its stage of a pipeline: ranks of one role are compared with each other.
        num_warmup_steps: First steps that are not timed.
        log_metrics: Called on rank 0 with smallest, median and largest score of each report, if ``enable_logging`` is
            on.
        on_report: Called on rank 0 with each report, once it is logged.
        timeout_s: Seconds after which a report fails because a peer does not take part.

    Thread: that of the training loop.
    """

    def __init__(
        self,
        config: StragglerDetectionConfig | None = None,
        *,
        global_rank: int | None = None,
        local_rank: int | None = None,
        node: str | None = None,
        role: str = "",
        num_warmup_steps: int = 3,
        log_metrics: Metrics | None = None,
        on_report: Callable[[Report], object] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.config = frozen(config) or StragglerDetectionConfig()
        place = read_worker()
        self._rank = place.global_rank if global_rank is None else global_rank
        self._node = place.node if node is None else node
        self._device = training_device(place.local_rank if local_rank is None else local_rank)
        self._role, self._timeout_s = role, timeout_s
        self._log_metrics, self._on_report = log_metrics, on_report
        self._recorder = SectionRecorder(None if self._device.type == "cpu" else DeviceTimes(timing_event))
        self._outside = self._recorder.index(OUTSIDE)
        self._kernels = KernelTimes() if self.config.profile_kernels else None
        self._wrappings = Wrappings(self._recorder)
        self._sections: dict[str, StepSection] = {}
        self._waiting, self._left_out = self._recorder.waiting(), self._recorder.left_out()
        self._best = _OwnBest()
        self._streaks = Streaks()
        self._causes: dict[int, SlownessCause] = {}
        self._group: Group | None = None
        self._num_warmup = num_warmup_steps
        self._interval = self.config.profiling_interval
        self._iteration = self._num_steps = 0
        self._is_open = False
        self._due_at = num_warmup_steps + FIRST_REPORT_STEPS * self._interval
        self._begin_window()

    def section(self, name: str, *, on_device: bool = True) -> StepSection:
        """Return a context manager, also usable as a decorator, that times its body as part of a step.

        Args:
            name: Its name.
            on_device: Time the work in the device's current stream, where there is a device; off: the host's time, as
                for loading data.
        """
        if name == OUTSIDE:
            raise OutlastError(f"the section {OUTSIDE!r} is what is left of a step; choose another name")
        if name not in self._sections:
            self._sections[name] = self._recorder.section(name, on_device=on_device)
        return self._sections[name]

    def waiting(self) -> StepSection:
        """Return a context manager, also usable as a decorator, for waiting for other ranks: not counted as the rank's
        own time."""
        return self._waiting

    def leave_out(self) -> StepSection:
        """Return a context manager, also usable as a decorator, for work outside steps, such as a save."""
        return self._left_out

    def wrap(self, owner: Any, attribute: str, name: str | None = None, *, waits: bool = False) -> None:
        """Time every call of a function or method, until :meth:`close`.

        Args:
            owner: The object, class or module that has it.
            attribute: Its name there.
            name: The section's name; ``None`` = the attribute.
            waits: It waits for other ranks: not counted as the rank's own time.

        Raises:
            OutlastError: There is no such callable.
        """
        self._wrappings.wrap(owner, attribute, self._waiting if waits else self.section(name or attribute))

    def watch(self, state: Any) -> None:
        """Time the parts of a training step, until :meth:`close`, and mark where it waits for other ranks.

        The sections are ``forward`` of the modules, ``backward`` until all gradients of this rank are computed,
        ``optimizer`` and, where torch's ``DataLoader`` loads, ``data``. Collectives are marked as waiting.

        Args:
            state: A module, an optimizer, or a mapping of them, also a nested one; other contents are ignored.
        """
        self._wrappings.watch(state, self.section)

    def begin_step(self, iteration: int) -> None:
        """Begin to time a step; the time since the end of the step before is part of it.

        Args:
            iteration: Number of optimizer steps done before it.
        """
        if not self._is_open:
            self._open_step()
        self._is_open = False
        self._iteration = iteration
        self._num_steps += 1
        self._num_in_window += 1
        if self._kernels is not None and self._profiles_kernels(self._num_in_window):
            self._kernels.start()
            self._drop_step()
        self._step_began_ns = perf_counter_ns()

    def _open_step(self) -> None:
        """Begin to time what is outside the sections of the next step."""
        recorder, number = self._recorder, self._num_steps + 1
        recorder.drop_open()
        recorder.active = number > self._num_warmup and number % self._interval == 0
        recorder.uses_device = self._num_timed < NUM_DENSE_STEPS or self._num_timed % DEVICE_INTERVAL == 0
        recorder.enter(self._outside)
        self._is_open = True

    def _drop_step(self) -> None:
        self._recorder.drop_open()
        self._recorder.active = self._is_open = False

    def end_step(self) -> None:
        """End the step of :meth:`begin_step`, before this rank waits for the others."""
        recorder = self._recorder
        self._iteration += 1
        if recorder.active:
            self._steps_ns.append(perf_counter_ns() - self._step_began_ns)
            self._num_timed += 1
        recorder.leave(self._outside)
        recorder.poll()
        kernels = self._kernels
        if kernels is not None and kernels.is_running and not self._profiles_kernels(self._num_in_window + 1):
            kernels.stop()
        self._open_step()

    def note_wait(self, wait_s: float) -> None:
        """Record how long this rank waited for the others at the end of the step that was just timed."""
        self._waits_s.append(wait_s)

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """Time a step: :meth:`begin_step` and :meth:`end_step`; one that raises is not counted."""
        self.begin_step(iteration)
        try:
            yield
        except BaseException:
            self._drop_step()
            raise
        self.end_step()

    def wants_report(self) -> bool:
        """Return whether a report is due by this rank's clock; ranks differ, so they must agree on it."""
        elapsed_s = (clock.now_ns() - self._window_began_ns) / 1e9
        return self._num_timed >= MIN_SAMPLES and elapsed_s >= self.config.report_time_interval

    def report_if_due(self) -> Report | None:
        """Create the report if it is due after this step, which is the same step on all ranks.

        Collective: all ranks of the default group, after each step.
        Blocks: at a report, until all ranks have reached it; up to the timeout.
        """
        return self.report() if self._num_steps >= self._due_at else None

    def report(self) -> Report:
        """Compare all ranks' timings of the window that ends here, and begin the next one.

        Rank 0 writes the report to the logger. When a rank is reported that was not reported in the window before, its
        machine is checked, if ``check_machine`` is on.

        Returns:
            The report; except for its processing time, the same on all ranks.

        Raises:
            PeerLost: A peer exited, or did not reach the report in time.

        Collective: all ranks of the default group, after the same step; the first one opens a group.
        Blocks: until all ranks have reached it; up to the timeout.
        """
        begin_ns = clock.now_ns()
        mine = self._close_window()
        try:
            ranks = self._gather(mine)
            self._streaks, findings = judge(self._streaks, ranks, self.config)
            machines = self._check_machines(ranks, findings) if self.config.check_machine else ()
            self._causes.update({decision.rank: decision.cause for decision in machines})
        except RuntimeError as error:
            raise PeerLost(
                f"a peer exited or did not reach the report on slow ranks within {self._timeout_s:g} s ({error}); "
                "see that rank's log or the launcher's report for the cause",
                iteration=self._iteration,
            ) from error
        self._pace(ranks)
        report = Report(
            iteration=self._iteration,
            device=device_word(),
            ranks=ranks,
            findings=findings,
            machines=machines,
            stop_for=ranks_to_stop_for(findings, self._causes) if self.config.stop_if_detected else (),
        )
        report = replace(report, processing_s=(clock.now_ns() - begin_ns) / 1e9)
        if self._rank == 0:
            publish(report, self.config, self._log_metrics)
            if self._on_report is not None:
                self._on_report(report)
        self._begin_window()
        return report

    def close(self) -> None:
        """Remove the wrappers of callables, modules and optimizers, and close the group. Idempotent.

        Blocks: never; peers that wait in the group fail.
        """
        self._wrappings.undo()
        if self._kernels is not None:
            self._kernels.stop()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _begin_window(self) -> None:
        self._drop_step()
        self._window_began_ns = clock.now_ns()
        self._num_in_window = self._num_timed = 0
        self._step_began_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=MAX_SAMPLES)
        self._waits_s: deque[float] = deque(maxlen=MAX_SAMPLES)

    def _profiles_kernels(self, step: int) -> bool:
        """Return whether kernels are timed in a step of the window; the first window's are past the warm-up."""
        first = KERNELS_FROM + (self._num_warmup if self._num_steps - self._num_in_window < self._num_warmup else 0)
        return first <= step < first + NUM_KERNEL_STEPS

    def _close_window(self) -> RankTimings:
        """Return this rank's timings, and update its own best."""
        best_s = self._best.best_s()
        if self._kernels is not None and self._kernels.is_running:
            self._kernels.stop()
        kernels = () if self._kernels is None else self._kernels.take(best_s)
        sections = self._recorder.take(best_s)
        self._best.note((*sections, *kernels))
        elapsed_s = (clock.now_ns() - self._window_began_ns) / 1e9
        return RankTimings(
            rank=self._rank,
            node=self._node,
            role=self._role,
            num_steps=self._num_timed,
            step_s=lower_median(self._steps_ns) / 1e9 if self._steps_ns else 0.0,
            pace_s=elapsed_s / self._num_in_window if self._num_in_window else 0.0,
            wait_s=lower_median(self._waits_s) if self._waits_s else None,
            sections=sections,
            kernels=kernels,
        )

    def _gather(self, mine: RankTimings) -> tuple[RankTimings, ...]:
        group = self._open_group()
        if group is None:
            return (mine,)
        gathered = gather_bytes(group, msgspec.msgpack.encode(mine))
        return tuple(from_msgpack(data, RankTimings) for data in gathered)

    def _open_group(self) -> dist.ProcessGroup | None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        if self._group is None:
            self._group = Group.share(timeout_s=self._timeout_s)
        assert self._group.process_group is not None, "closed"
        return self._group.process_group

    def _check_machines(self, ranks: tuple[RankTimings, ...], findings: Findings) -> tuple[MachineDecision, ...]:
        group = self._open_group()
        if group is None:
            return ()
        nodes = {owner.rank: owner.node for owner in ranks}
        roles = {owner.rank: owner.role for owner in ranks}
        slow = tuple({one.rank for one in (*findings.named, *findings.suspects)})
        decisions = []
        for rank in findings.newly_named[:MAX_CHECKED]:
            others = choose_others(rank, nodes, roles, findings.relative, slow)
            scope = next(one.scope for one in findings.named if one.rank == rank)
            decisions.append(gather_machine_decision(group, rank, others, nodes, scope=scope, device=self._device))
        return tuple(decisions)

    def _pace(self, ranks: tuple[RankTimings, ...]) -> None:
        """Set the step of the next report, the same on all ranks."""
        slowest_s = max(owner.pace_s for owner in ranks)
        fewest = MIN_SAMPLES * self._interval + (NUM_KERNEL_STEPS + KERNELS_FROM if self._kernels is not None else 0)
        most = max(fewest, MAX_GROWTH * max(1, self._num_in_window))
        wanted = round(self.config.report_time_interval / slowest_s) if slowest_s > 0 else most
        self._due_at = self._num_steps + min(most, max(fewest, wanted))


class _OwnBest:
    """The medians of the fastest windows so far, by name."""

    def __init__(self) -> None:
        self._fastest_s: dict[str, list[float]] = {}

    def best_s(self) -> dict[str, float]:
        """Return the best by name, of those with at least :data:`NUM_FASTEST` windows."""
        return {name: lower_median(fastest) for name, fastest in self._fastest_s.items() if len(fastest) == NUM_FASTEST}

    def note(self, timings: Iterable[Timing]) -> None:
        """Add a window's timings, except those with too few samples."""
        for timing in timings:
            if timing.is_usable and timing.count >= MIN_SAMPLES:
                fastest = self._fastest_s.setdefault(timing.name, [])
                fastest.append(timing.median_s)
                fastest.sort()
                del fastest[NUM_FASTEST:]
