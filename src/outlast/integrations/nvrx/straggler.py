"""``nvidia_resiliency_ext.attribution.straggler``: the extension's straggler detector, with outlast's scores.

The time of a section is host time from entry to end. The GPU score comes from kernels that torch's profiler times in
two entries of each window (without a device: torch's operators); no section is timed in these entries. Collectives are
excluded, since they take as long as their ranks wait.

Scores are those of :mod:`outlast.policy.slowness`: the reference is the lower median of the ranks. The extension's
reference, the fastest rank, is rejected: one fast outlier would make stragglers of all others. A straggler is a rank
whose score is below a threshold and whose times are outside the noise of the ranks.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from operator import attrgetter
from time import perf_counter_ns
from typing import Any, ClassVar

import msgspec

from outlast import clock, env
from outlast.config.base import require
from outlast.errors import OutlastError
from outlast.integrations.nvrx.exchange import WorldExchange
from outlast.integrations.replacements import Replacements
from outlast.policy.slowness import (
    KERNELS,
    REFERENCES,
    Basis,
    RankTimings,
    Slowness,
    Timing,
    lower_median,
    measure_individual,
    measure_relative,
    summarise,
)
from outlast.straggler.recorder import MAX_SAMPLES, NUM_KERNEL_STEPS, KernelTimes

log = logging.getLogger(__name__)

RELATIVE, INDIVIDUAL = "relative_perf_scores", "individual_perf_scores"
NUM_ESTIMATED = 16
"""Iterations whose pace determines the number of iterations between two reports."""
FIRST_TRACED = 1
"""First entry of a window, from 0, whose kernels are timed; the entry before measures the section alone."""
_SECTION = "section "
"""Prefix of a section's name among names of kernels."""


class DetectorNotInitialized(OutlastError, RuntimeError):
    """The detector is used before ``Detector.initialize()`` or after ``Detector.shutdown()``."""


class Statistic(Enum):
    """Statistics of the times of a section or kernel, in milliseconds."""

    MIN = 1
    MAX = 2
    MED = 3
    AVG = 4
    STD = 5
    NUM = 6


@dataclass(frozen=True)
class CallableId:
    """A function or method whose calls are timed.

    Raises:
        ConfigError: A filter of arguments is given.
    """

    obj: object
    """The object, class or module that has the callable as an attribute."""
    name: str
    """Name of the attribute."""
    arg_filter_fn: Callable[..., bool] | None = None
    extra_args_fn: Callable[..., dict[str, Any]] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("arg_filter_fn", "extra_args_fn", "ignored_args"):
            text = f"CallableId({name}=...) is not supported: every call is timed; leave it out"
            require(getattr(self, name) is None, text)

    def __str__(self) -> str:
        if inspect.ismodule(self.obj):
            return f"{self.obj.__name__}.{self.name}"
        if inspect.isclass(self.obj):
            return f"{self.obj.__module__}.{self.obj.__name__}.{self.name}"
        return f"{type(self.obj).__name__}.{self.name}"


@dataclass(frozen=True)
class StragglerId:
    """A rank that is slow."""

    rank: int
    node: str


@dataclass(frozen=True)
class PerformanceReport:
    """Scores of ranks: 1 = as fast as the reference, 0.5 = half as fast. By rank; for sections by name and rank.

    On rank 0 with ``gather_on_rank0`` a report contains all ranks, otherwise this rank alone. Scores that could not be
    computed are left out.
    """

    gpu_relative_perf_scores: Mapping[int, float]
    section_relative_perf_scores: Mapping[str, Mapping[int, float]]
    gpu_individual_perf_scores: Mapping[int, float]
    section_individual_perf_scores: Mapping[str, Mapping[int, float]]
    rank_to_node: Mapping[int, str]
    local_section_summaries: Mapping[str, Mapping[Statistic, float]]
    """Times of this rank, in milliseconds."""
    local_kernel_summaries: Mapping[str, Mapping[Statistic, float]]
    generate_report_elapsed_time: float
    """Milliseconds that the report took."""
    gather_on_rank0: bool
    rank: int | None
    within_noise: frozenset[tuple[Basis, str, int]] = frozenset()
    """Basis, section (``kernels``: the GPU) and rank of scores that the noise of the ranks explains."""

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = 0.75,
        section_rel_threshold: float = 0.75,
        gpu_indiv_threshold: float = 0.75,
        section_indiv_threshold: float = 0.75,
    ) -> dict[str, Any]:
        """Return the ranks whose scores are below a threshold and outside the noise of the ranks.

        The reference of relative scores is the median of the ranks; in the extension it is the fastest rank.

        Returns:
            Sets of :class:`StragglerId` as ``straggler_gpus_relative`` and ``straggler_gpus_individual``; sets by
                section, for sections that have any, as ``straggler_sections_relative`` and ``..._individual``.
        """

        def below(scores: Mapping[int, float], threshold: float, basis: Basis, name: str) -> set[StragglerId]:
            return {
                StragglerId(rank, self.rank_to_node.get(rank, "<unk>"))
                for rank, score in scores.items()
                if score < threshold and (basis, name, rank) not in self.within_noise
            }

        found: dict[str, Any] = {}
        for basis, gpu_threshold, section_threshold in (
            (Basis.RELATIVE, gpu_rel_threshold, section_rel_threshold),
            (Basis.INDIVIDUAL, gpu_indiv_threshold, section_indiv_threshold),
        ):
            gpus, sections = getattr(self, f"gpu_{basis}_perf_scores"), getattr(self, f"section_{basis}_perf_scores")
            found[f"straggler_gpus_{basis}"] = below(gpus, gpu_threshold, basis, KERNELS)
            slow = {name: below(scores, section_threshold, basis, _SECTION + name) for name, scores in sections.items()}
            found[f"straggler_sections_{basis}"] = {name: ranks for name, ranks in slow.items() if ranks}
        return found


@dataclass
class _TimedSection:
    """The entries of one section, and its times in this window in nanoseconds."""

    num_entries: int = 0
    times_ns: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))


class _Pace:
    """Determines after how many iterations a report is due, the same number on all ranks."""

    def __init__(self, interval_s: float, least: int) -> None:
        self._interval_s, self._least = interval_s, least
        self._num = 0
        self._began_ns = 0
        self._took_ns: list[int] = []
        self._every: int | None = None

    @property
    def is_elapsed(self) -> bool:
        return self._every is not None and self._num % self._every == 0

    def advance(self, exchange: WorldExchange) -> None:
        """Count an iteration. The sixteenth timed iteration determines the number. Collective: all ranks, in that
        iteration."""
        self._num += 1
        now = clock.now_ns()
        if self._every is None:
            if self._began_ns:
                self._took_ns.append(now - self._began_ns)
            self._began_ns = now
            if len(self._took_ns) == NUM_ESTIMATED:
                iteration_s = max(1e-9, lower_median(self._took_ns) / 1e9)
                wanted = exchange.gather(self._interval_s / iteration_s, float)
                self._every = max(1, self._least, int(max(wanted)))


@dataclass
class _Detection:
    """State of an initialised detector."""

    comparison: _Comparison
    profiling_interval: int
    pace: _Pace
    kernels: KernelTimes = field(default_factory=KernelTimes)
    sections: dict[str, _TimedSection] = field(default_factory=dict)
    wrapped: Replacements = field(default_factory=Replacements)
    depth: int = 0
    num_profiled: int = 0
    """Outermost entries of this window that may be profiled."""

    def begin_trace(self) -> bool:
        """Time the kernels of this outermost entry if it is due; the same entries on all ranks."""
        at, self.num_profiled = self.num_profiled, self.num_profiled + 1
        if FIRST_TRACED <= at < FIRST_TRACED + NUM_KERNEL_STEPS:
            self.kernels.start()
        return self.kernels.is_running


class Detector:
    """Time sections and callables, and report how fast ranks are. The class itself is used, as in NVRx.

    Thread: the thread of the training loop.
    """

    initialized: ClassVar[bool] = False
    _state: ClassVar[_Detection | None] = None

    def __init__(self) -> None:
        raise RuntimeError("Detector is used without making one: call Detector.initialize()")

    @classmethod
    def initialize(
        cls,
        scores_to_compute: Sequence[str] | str = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60,
        node_name: str | None = None,
    ) -> None:
        """Start the detector.

        Args:
            scores_to_compute: ``relative_perf_scores`` and ``individual_perf_scores``, or ``all``.
            gather_on_rank0: Rank 0's report contains all ranks and the others get none; otherwise each rank gets its
                own.
            profiling_interval: Time one of this many entries of a section.
            report_time_interval: Seconds between reports.
            node_name: Name of this node in reports; ``None`` = the scheduler's, else the machine's.

        Raises:
            OutlastError: It was called before.
            ConfigError: A value is invalid.
        """
        if cls._state is not None:
            raise OutlastError("Detector.initialize() was called before; call Detector.shutdown() first")
        scores = _read_scores(scores_to_compute)
        require(profiling_interval >= 1, f"profiling_interval={profiling_interval} must be at least 1 entry")
        text = f"report_time_interval={report_time_interval} must be above 0 seconds"
        require(0 < report_time_interval < math.inf, text)
        node = node_name or env.read_worker().node
        pace = _Pace(float(report_time_interval), profiling_interval)
        cls._state = _Detection(_Comparison(scores, gather_on_rank0, node), profiling_interval, pace)
        cls.initialized = True
        log.info(
            "scores of the straggler detector: relative = against %s, individual = against its own best so far",
            REFERENCES[Basis.RELATIVE],
        )

    @classmethod
    def shutdown(cls) -> None:
        """Stop the detector and restore wrapped callables. Idempotent. Blocks: while a trace of kernels ends."""
        cls.restore_original_callables()
        state, cls._state = cls._state, None
        cls.initialized = False
        if state is None:
            return
        state.kernels.stop()
        state.comparison.exchange.close()

    @classmethod
    @contextmanager
    def detection_section(cls, name: str | None = None, profile_cuda: bool = True) -> Iterator[None]:
        """Time the body; a body that raises is not counted.

        Args:
            name: Name of the section; ``None`` = file and line of the ``with`` statement.
            profile_cuda: The kernels of the section count for the score of the GPU.

        Raises:
            RuntimeError: The detector is not initialised.
        """
        state = cls._get()
        if name is None:
            frame = inspect.currentframe()
            caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
            name = "<unknown>" if caller is None else f"{caller.f_code.co_filename}:{caller.f_lineno}"
        section = state.sections.setdefault(name, _TimedSection())
        counts = section.num_entries % state.profiling_interval == 0
        section.num_entries += 1
        traces = counts and profile_cuda and state.depth == 0 and state.begin_trace()
        state.depth += 1
        began_ns = perf_counter_ns()
        try:
            yield
            took_ns = perf_counter_ns() - began_ns
            if counts and not state.kernels.is_running:
                section.times_ns.append(took_ns)
        finally:
            state.depth -= 1
            if traces:
                state.kernels.stop()

    @classmethod
    def wrap_callables(cls, callable_ids: list[CallableId], profile_cuda: bool = True) -> None:
        """Time every call of some callables, each as a section of its name, until :meth:`shutdown`.

        Raises:
            OutlastError: There is no such callable; also a ``RuntimeError``: the detector is not initialised.
        """
        state = cls._get()
        for target in callable_ids:
            original = getattr(target.obj, target.name, None)
            if not callable(original):
                raise OutlastError(f"{target} cannot be timed: there is no such callable")
            state.wrapped.replace(target.obj, target.name, cls._timed(original, str(target), profile_cuda))

    @classmethod
    def restore_original_callables(cls) -> None:
        """Restore the callables that :meth:`wrap_callables` wrapped. Idempotent."""
        if cls._state is not None:
            cls._state.wrapped.give_back()

    @classmethod
    def _timed(cls, function: Callable[..., Any], name: str, profile_cuda: bool) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if cls._state is None:
                return function(*args, **kwargs)
            with cls.detection_section(name, profile_cuda):
                return function(*args, **kwargs)

        return timed

    @classmethod
    def generate_report(cls) -> PerformanceReport | None:
        """Return the scores of the times since the last report, and reset the times.

        Returns:
            The report; ``None`` on ranks other than 0 with ``gather_on_rank0``.

        Raises:
            RuntimeError: The detector is not initialised.
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks.
        Blocks: until all ranks have arrived, up to 10 min; with individual scores of each rank alone, never.
        """
        state = cls._get()
        began_ns = clock.now_ns()
        kernel_times = {name: list(times) for name, times in state.kernels.times_s.items()}
        section_times = {name: [ns / 1e9 for ns in one.times_ns] for name, one in state.sections.items()}
        for section in state.sections.values():
            section.times_ns.clear()
        state.num_profiled = 0
        return state.comparison.report(
            [summarise(_SECTION + name, times) for name, times in section_times.items() if times],
            state.kernels.take({}),
            began_ns=began_ns,
            section_summaries=_statistics(section_times),
            kernel_summaries=_statistics(kernel_times),
        )

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> PerformanceReport | None:
        """Count an iteration and return a report if one is due; call it once per iteration on all ranks.

        The first report is due once 16 iterations have determined the pace.

        Returns:
            As :meth:`generate_report`; ``None`` also where no report is due, see :meth:`is_interval_elapsed`.

        Collective: all ranks.
        """
        state = cls._get()
        state.pace.advance(state.comparison.exchange)
        return cls.generate_report() if state.pace.is_elapsed else None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Return whether the last :meth:`generate_report_if_interval_elapsed` made a report; the same on all ranks."""
        return cls._get().pace.is_elapsed

    @classmethod
    def _get(cls) -> _Detection:
        if cls._state is None:
            raise DetectorNotInitialized("the detector is not initialised; call Detector.initialize() first")
        return cls._state


class ReportGenerator:
    """Create reports from the script's own summaries of sections and kernels.

    Args:
        scores_to_compute: ``relative_perf_scores`` and ``individual_perf_scores``, or one of them.
        gather_on_rank0: Rank 0's report contains all ranks and the others get none; otherwise each rank gets its own.
        pg: Refused: all ranks are compared.
        node_name: Name of this node in reports.

    Raises:
        ConfigError: A value is invalid.
    """

    def __init__(
        self,
        scores_to_compute: Sequence[str] | str,
        gather_on_rank0: bool = True,
        pg: None = None,
        node_name: str = "<notset>",
    ) -> None:
        require(pg is None, "ReportGenerator(pg=...) is not supported: all ranks are compared; leave it out")
        self._comparison = _Comparison(_read_scores(scores_to_compute), gather_on_rank0, node_name)

    def generate_report(
        self,
        section_summaries: Mapping[str, Mapping[Statistic, float]],
        kernel_summaries: Mapping[str, Mapping[Statistic, float]],
    ) -> PerformanceReport | None:
        """Compare summaries, in milliseconds; kernels of collectives do not count.

        Args:
            section_summaries: Summaries of this rank's sections, by name.
            kernel_summaries: Summaries of its kernels, by name; without any, the score of its GPU is NaN.

        Returns:
            The report; ``None`` on ranks other than 0 with ``gather_on_rank0``.

        Raises:
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks.
        Blocks: until all ranks have arrived, up to 10 min; with individual scores of each rank alone, never.
        """
        began_ns = clock.now_ns()
        kernels = {name: one for name, one in kernel_summaries.items() if _COLLECTIVE_KERNEL not in name}
        report = self._comparison.report(
            [_read_summary(_SECTION + name, one) for name, one in section_summaries.items()],
            [_read_summary(name, one) for name, one in kernels.items()],
            began_ns=began_ns,
            section_summaries=section_summaries,
            kernel_summaries=kernels,
        )
        if report is None:
            return None
        unknown = dict.fromkeys(report.rank_to_node, math.nan)
        scores = self._comparison.scores
        return replace(
            report,
            gpu_relative_perf_scores={**unknown, **report.gpu_relative_perf_scores} if RELATIVE in scores else {},
            gpu_individual_perf_scores={**unknown, **report.gpu_individual_perf_scores} if INDIVIDUAL in scores else {},
        )


_COLLECTIVE_KERNEL = "ncclDev"
"""Part of the names of kernels that take as long as their ranks wait."""


def _read_scores(scores_to_compute: Sequence[str] | str) -> tuple[str, ...]:
    named = (RELATIVE, INDIVIDUAL) if scores_to_compute == "all" else scores_to_compute
    scores = (named,) if isinstance(named, str) else tuple(named)
    text = f"scores_to_compute={scores_to_compute!r} must be 'all', or of {RELATIVE}, {INDIVIDUAL}"
    require(bool(scores) and set(scores) <= {RELATIVE, INDIVIDUAL}, text)
    return scores


def _read_summary(name: str, summary: Mapping[Statistic, float]) -> Timing:
    missing = [one.name for one in (Statistic.MED, Statistic.AVG, Statistic.NUM) if one not in summary]
    what = name.removeprefix(_SECTION)
    require(not missing, f"the summary of {what!r} has no {', '.join(missing)}; give MED, AVG and NUM")
    deviation_s = float(summary.get(Statistic.STD, math.nan)) / 1e3
    count = int(summary[Statistic.NUM])
    return Timing(
        name=name,
        count=count,
        median_s=float(summary[Statistic.MED]) / 1e3,
        spread_s=0.0 if math.isnan(deviation_s) else _MAD_OF_SIGMA * deviation_s,
        total_s=float(summary[Statistic.AVG]) / 1e3 * count,
    )


_MAD_OF_SIGMA = 0.6745
"""Median absolute deviation of normal values, as a ratio to their standard deviation."""


@dataclass
class _Comparison:
    """Which scores reports contain, and the state that is kept between reports."""

    scores: tuple[str, ...]
    gather_on_rank0: bool
    node: str
    exchange: WorldExchange = field(default_factory=lambda: WorldExchange("the report on slow ranks"))
    best_s: dict[str, float] = field(default_factory=dict)
    """Best median of this rank so far, by name; names of sections start with :data:`_SECTION`."""

    def report(
        self,
        sections: Iterable[Timing],
        kernels: Iterable[Timing],
        *,
        began_ns: int,
        section_summaries: Mapping[str, Mapping[Statistic, float]],
        kernel_summaries: Mapping[str, Mapping[Statistic, float]],
    ) -> PerformanceReport | None:
        """Return scores against the other ranks and this rank's best; ``None``: another rank has the report."""
        rank = self.exchange.rank
        mine = RankTimings(
            rank=rank,
            node=self.node,
            sections=tuple(self._with_best(one) for one in sections),
            kernels=tuple(self._with_best(one) for one in kernels),
        )
        is_alone = not self.gather_on_rank0 and RELATIVE not in self.scores
        ranks = [mine] if is_alone else self.exchange.gather(mine, RankTimings)
        measured: dict[Basis, list[Slowness]] = {
            Basis.RELATIVE: measure_relative(ranks) if RELATIVE in self.scores else [],
            Basis.INDIVIDUAL: measure_individual(ranks) if INDIVIDUAL in self.scores else [],
        }
        if self.gather_on_rank0 and rank != 0:
            return None
        shown = {one.rank for one in ranks} if self.gather_on_rank0 else {rank}
        for basis, found in measured.items():
            measured[basis] = sorted((one for one in found if one.rank in shown), key=attrgetter("rank"))
        return PerformanceReport(
            **_scores(Basis.RELATIVE, measured[Basis.RELATIVE]),
            **_scores(Basis.INDIVIDUAL, measured[Basis.INDIVIDUAL]),
            rank_to_node={one.rank: one.node for one in ranks if one.rank in shown},
            local_section_summaries=section_summaries,
            local_kernel_summaries=kernel_summaries,
            generate_report_elapsed_time=(clock.now_ns() - began_ns) / 1e6,
            gather_on_rank0=self.gather_on_rank0,
            rank=rank,
            within_noise=frozenset(
                (one.basis, one.name, one.rank)
                for found in measured.values()
                for one in found
                if len(ranks) > 1 and not one.is_slow(1.0)
            ),
        )

    def _with_best(self, timing: Timing) -> Timing:
        """Return a timing with the best median so far; in the first window the score is 1."""
        best_s = self.best_s
        if timing.is_usable:
            best_s[timing.name] = min(timing.median_s, best_s.get(timing.name, timing.median_s))
        return msgspec.structs.replace(timing, best_s=best_s.get(timing.name, 0.0))


def _scores(basis: Basis, measured: Iterable[Slowness]) -> dict[str, dict[Any, Any]]:
    """Return the report's fields for one basis: scores of GPUs by rank, and of sections by name and rank."""
    gpus: dict[int, float] = {}
    sections: dict[str, dict[int, float]] = {}
    for one in measured:
        scores = gpus if one.name == KERNELS else sections.setdefault(one.name.removeprefix(_SECTION), {})
        scores[one.rank] = one.score
    return {f"gpu_{basis}_perf_scores": gpus, f"section_{basis}_perf_scores": sections}


def _statistics(times_s: Mapping[str, Sequence[float]]) -> dict[str, dict[Statistic, float]]:
    return {
        name: {
            Statistic.MIN: min(values) * 1e3,
            Statistic.MAX: max(values) * 1e3,
            Statistic.MED: lower_median(values) * 1e3,
            Statistic.AVG: statistics.fmean(values) * 1e3,
            Statistic.STD: statistics.stdev(values) * 1e3 if len(values) > 1 else math.nan,
            Statistic.NUM: float(len(values)),
        }
        for name, values in times_s.items()
        if values
    }
