"""Terminal output: a study, and the table of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from outlast.simulate.study import Study
from outlast.wording import count

_WIDTH = 40


def render_study(study: Study) -> Iterator[str]:
    scenario = study.scenario
    nodes = f"{scenario.num_nodes:,} {'node' if scenario.num_nodes == 1 else 'nodes'}"
    ranks = f"{scenario.num_ranks:,} {'rank' if scenario.num_ranks == 1 else 'ranks'}"
    yield (
        f"{ranks} on {nodes} and {count(scenario.spares, 'spare')}, {_time(scenario.duration_s)}, "
        f"{count(len(study.runs), 'run')} simulated in {study.wall_s:.1f} s"
    )
    low, high = study.ettr_range
    saves = [
        f"{where} every {_time(every * scenario.slow_step_s)}" if every else f"none to {where}"
        for where, every in (("the node-local tiers", scenario.node_every), ("all tiers", scenario.global_every))
    ]
    yield ""
    yield f"ETTR      {study.ettr:.2%} of the time is productive (5 to 95 % of the runs: {low:.2%} to {high:.2%})"
    yield f"failures  {_describe_failures(study)}"
    yield f"saves     {', '.join(saves)}"
    if study.loads:
        yield f"loads     {', '.join(f'{number:,.1f} from {tier}' for tier, number in study.loads.items())}"
    if study.num_stops:
        again = scenario.restart_stopped_s
        after = "and stays stopped" if again is None else f"and is started again after {_time(again)}"
        yield f"stopped   by the recovery policy {study.num_stops:.1f} times a run, {after}"
        yield f"          {study.stop_reason}"
    yield ""
    yield "part           a run    share"
    for name, seconds in study.partition.items():
        share = seconds / scenario.duration_s
        bar = "#" * round(share * _WIDTH)
        yield f"{name:<11} {_time(seconds):>10}  {share:>6.2%}  {bar}".rstrip()


def render_sweep(name: str, studies: Mapping[str, Study]) -> Iterator[str]:
    """Yield the table of a sweep; ``studies`` by the text of the value."""
    width = max(12, len(name), *map(len, studies))
    best = max(study.ettr for study in studies.values())
    yield f"{name:>{width}}     ETTR  5 to 95 % of the runs   failures"
    for value, study in studies.items():
        low, high = study.ettr_range
        mark = "  best" if study.ettr == best else ""
        yield f"{value:>{width}}  {study.ettr:>7.2%}   {low:>7.2%} to {high:>7.2%}  {study.num_failures:>9,.1f}{mark}"


def _describe_failures(study: Study) -> str:
    rate = study.scenario.failures_per_s
    if rate <= 0:
        return "none"
    most_first = sorted(study.num_by_kind.items(), key=lambda one: -one[1])
    kinds = ", ".join(f"{kind} {number:,.1f}" for kind, number in most_first)
    return f"{study.num_failures:,.1f} a run, one every {_time(1.0 / rate)}" + (f": {kinds}" if kinds else "")


def _time(seconds: float) -> str:
    """Return a time with three significant digits, in a suitable unit."""
    for limit, unit, name in ((90.0, 1.0, "s"), (5400.0, 60.0, "min"), (172800.0, 3600.0, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    days = seconds / 86400.0
    return f"{days:.3g} days" if days < 1000 else f"{days:,.0f} days"
