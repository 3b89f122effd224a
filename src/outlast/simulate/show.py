"""What a study looks like: lines for a terminal, and a drawing of its sweeps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outlast.errors import ConfigError
from outlast.simulate.run import SimulatedPart
from outlast.simulate.study import StudyResult, SweepResult
from outlast.wording import count

__all__ = ["Canvas", "render"]

_WIDTH = 40
_COLOURS = {
    SimulatedPart.PRODUCTIVE: "#2e7d32",
    SimulatedPart.STRAGGLER: "#9e9d24",
    SimulatedPart.REDONE: "#c62828",
    SimulatedPart.SAVE_STALL: "#1565c0",
    SimulatedPart.DETECTION: "#6a1b9a",
    SimulatedPart.RESTART: "#ef6c00",
    SimulatedPart.RENDEZVOUS: "#f9a825",
    SimulatedPart.LOAD: "#00838f",
    SimulatedPart.START_UP: "#8d6e63",
    SimulatedPart.IDLE: "#757575",
    SimulatedPart.QUEUED: "#37474f",
}


def render(result: StudyResult) -> Iterator[str]:
    """Yield the lines of a result, for people."""
    scenario, form = result.scenario, result.closed_form
    low, high = result.ettr_ci
    nodes = f"{scenario.num_nodes:,} {'node' if scenario.num_nodes == 1 else 'nodes'}"
    ranks = f"{scenario.num_ranks:,} {'rank' if scenario.num_ranks == 1 else 'ranks'}"
    yield (
        f"{ranks} on {nodes} and {count(scenario.spares, 'spare')}, {_time(scenario.duration_s)}, "
        f"{len(result.runs)} runs simulated in {result.wall_s:.1f} s"
    )
    yield ""
    yield f"ETTR      {result.ettr:.2%} of the time is productive (95 %: {low:.2%} to {high:.2%})"
    yield f"formula   {form.ettr:.2%} (Young/Daly, Meta); {_compare(result)}"
    yield f"failures  {_describe_failures(result)}"
    yield f"saves     {_describe_saves(result)}"
    if result.loads:
        loads = ", ".join(f"{number:,.1f} from {tier}" for tier, number in result.loads.items())
        yield f"loads     {loads}"
    if result.num_stops:
        again = scenario.restart_stopped_s
        after = "nobody starts it again" if again is None else f"somebody starts it again after {_time(again)}"
        yield f"stopped   by the ladder {result.num_stops:.1f} times a run; {after}"
        yield f"          {result.stop_reason}"
    yield ""
    yield "part           a run    share"
    for name, seconds in result.partition.items():
        share = seconds / scenario.duration_s
        bar = "#" * round(share * _WIDTH)
        yield f"{name:<11} {_time(seconds):>10}  {share:>6.2%}  {bar}".rstrip()
    if result.tried:
        yield ""
        yield f"what pays, of {count(result.tried, 'change')} that were tried with the same faults"
        for advice in result.advice:
            yield f"  {advice.text}"
        if not result.advice:
            yield "  none of them lies outside the noise"
    for sweep in result.sweeps:
        yield ""
        yield from _render_sweep(sweep)


def _render_sweep(sweep: SweepResult) -> Iterator[str]:
    heading = f"{sweep.name} ({sweep.unit})"
    width = max(len(heading), 12)
    yield f"{heading:>{width}}     ETTR            95 %            formula   failures"
    for row in sweep.rows:
        low, high = row.ettr_ci
        mark = "  best" if row.value == sweep.best else ""
        yield (
            f"{row.value:>{width}g}  {row.ettr:>7.2%}  {low:>7.2%} to {high:>7.2%}  {row.closed_form:>7.2%}  "
            f"{row.num_failures:>9,.1f}{mark}"
        )


def _compare(result: StudyResult) -> str:
    form = result.closed_form
    if result.agrees:
        return "it lies in the interval of the simulation"
    away = f"{100 * (form.ettr - result.ettr):+.2f} points from the simulation"
    if not form.holds:
        between = f"{_time(form.overhead_s + form.lost_s)} of the {_time(form.mtbf_s)} between two"
        return f"{away}: it is for rarer failures at random times, and enough spares; one costs {between}"
    parts = result.partition
    waits = [name for name in ("idle", "queued") if parts[name] > 0.001 * result.scenario.duration_s]
    # What comes but once: the first start.
    first_s = result.scenario.costs.start_up_s + result.scenario.costs.rendezvous_of(result.scenario.num_nodes)
    waits += ["the first start"] if first_s > 0.0003 * result.scenario.duration_s else []
    return f"{away}, and it leaves out {' and '.join(waits)}" if waits else away


def _describe_failures(result: StudyResult) -> str:
    mtbf_s = result.closed_form.mtbf_s
    if math.isinf(mtbf_s):
        return "none"
    shown = result.to_fields()["num_by_kind"]
    kinds = ", ".join(f"{kind} {number:,.1f}" for kind, number in sorted(shown.items(), key=lambda one: -one[1]))
    return f"{result.num_failures:,.1f} a run, one every {_time(mtbf_s)}" + (f": {kinds}" if kinds else "")


def _describe_saves(result: StudyResult) -> str:
    scenario = result.scenario
    now = [
        f"{where} every {_time(every * scenario.slow_step_s)}" if every else f"none to {where}"
        for where, every in (("the near tiers", scenario.near_every), ("all tiers", scenario.global_every))
    ]
    best, young = result.best, result.young
    shown = best if best is not None else young
    word = "best of those simulated" if best is not None else "Young's optimum"
    there = [
        f"{_time(seconds)} ({where})"
        for where, seconds in (("near", shown.near_s), ("all", shown.global_s))
        if seconds > 0
    ]
    return "; ".join([", ".join(now), *([f"{word}: {', '.join(there)}"] if there else [])])


def _time(seconds: float) -> str:
    """Return a time with three significant digits, in the unit that people would use."""
    for limit, unit, name in ((90.0, 1.0, "s"), (5400.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    days = seconds / 86400.0
    return f"{days:.3g} days" if days < 1000 else f"{days:,.0f} days"


class Canvas:
    """A file that sweeps are drawn in.

    Args:
        path: The file; its suffix says its format.

    Raises:
        ConfigError: The suffix is another one, the folder is not there, or matplotlib is not installed.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() not in (".png", ".svg"):
            raise ConfigError(f"--plot {path}: a drawing is a .png or .svg file; name one")
        if not path.parent.is_dir():
            raise ConfigError(f"--plot {path}: there is no folder {path.parent}; make it, or name another")
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'outlast[plots]'") from None
        self.path = path
        self._figure_type = Figure

    def draw(self, result: StudyResult) -> None:
        """Draw the sweeps: the ETTR with its interval and the formula, and under it the parts of the time.

        Raises:
            OSError: The file cannot be written.
        """
        num = len(result.sweeps)
        figure = self._figure_type(figsize=(6.4 * num, 7.2), layout="constrained")
        axes = figure.subplots(2, num, squeeze=False)
        for column, sweep in enumerate(result.sweeps):
            self._draw_ettr(axes[0][column], sweep)
            self._draw_parts(axes[1][column], sweep, result.scenario.duration_s)
        scenario = result.scenario
        figure.suptitle(f"{scenario.num_ranks:,} ranks, {_time(scenario.duration_s)}, {len(result.runs)} runs each")
        figure.savefig(self.path)

    @staticmethod
    def _draw_ettr(axis: Any, sweep: SweepResult) -> None:
        values = [row.value for row in sweep.rows]
        means = [100 * row.ettr for row in sweep.rows]
        below = [100 * (row.ettr - row.ettr_ci[0]) for row in sweep.rows]
        above = [100 * (row.ettr_ci[1] - row.ettr) for row in sweep.rows]
        axis.errorbar(values, means, yerr=[below, above], marker="o", capsize=3, label="simulated, 95 %")
        axis.plot(values, [100 * row.closed_form for row in sweep.rows], linestyle="--", label="formula")
        axis.set_xlabel(f"{sweep.name} ({sweep.unit})")
        axis.set_ylabel("ETTR (%)")
        axis.grid(alpha=0.3)
        axis.legend()

    @staticmethod
    def _draw_parts(axis: Any, sweep: SweepResult, duration_s: float) -> None:
        labels = [f"{row.value:g}" for row in sweep.rows]
        under = [0.0] * len(labels)
        for part, colour in _COLOURS.items():
            if part == SimulatedPart.PRODUCTIVE:
                continue
            shares = [100 * row.partition[part.value] / duration_s for row in sweep.rows]
            if max(shares) < 0.005:
                continue
            axis.bar(labels, shares, bottom=under, color=colour, label=part.value)
            under = [low + share for low, share in zip(under, shares, strict=True)]
        axis.set_xlabel(f"{sweep.name} ({sweep.unit})")
        axis.set_ylabel("not productive (% of the time)")
        axis.legend(fontsize="small")
