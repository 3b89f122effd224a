"""``outlast simulate``: the fields of a scenario as options in convenient units, and the output of the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outlast.cli.main import Command, echo, ending_on_signals, json_option, print_json
from outlast.errors import ConfigError

if TYPE_CHECKING:
    from outlast.simulate.scenario import Scenario
    from outlast.simulate.study import Study


@dataclass(frozen=True, slots=True)
class _Setting:
    """A numeric option for a field of the scenario, of its costs, or of the recovery policy's limits."""

    flag: str
    field: str
    metavar: str
    help: str
    is_whole: bool = False
    factor: float = 1.0
    """Converts the option's unit to the field's."""
    word: str = ""
    """A word instead of a number, for None: automatic, or never."""

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--")

    @property
    def parameter(self) -> str:
        """Name of the command's argument, with a prefix that no other option has."""
        return "set_" + self.name.replace("-", "_")

    def parse(self, text: str) -> float | int | None:
        """Return the value for the field.

        Raises:
            ConfigError: The text is not a number.
        """
        if self.word and text == self.word:
            return None
        try:
            number = int(text) if self.is_whole else float(text)
            if math.isnan(number):
                raise ValueError
        except ValueError:
            kind = "a whole number" if self.is_whole else "a number"
            more = f", or {self.word}" if self.word else ""
            raise ConfigError(f"{self.flag}={text} is not {kind}{more}; see outlast simulate --help") from None
        return number if self.factor == 1.0 else number * self.factor


_WORLD = (
    _Setting("--ranks", "num_ranks", "N", "Ranks of the world; default 16384.", is_whole=True),
    _Setting("--ranks-per-node", "ranks_per_node", "N", "Ranks on a node; default 8.", is_whole=True),
    _Setting("--nodes-per-rack", "nodes_per_rack", "N", "Nodes that a lost rack takes; default 2.", is_whole=True),
    _Setting("--spares", "num_spares", "N", "Nodes that wait for a slot; default 1 % of the nodes.", is_whole=True),
    _Setting("--days", "duration_s", "DAYS", "How long the run is; default 30.", factor=86400.0),
    _Setting("--hours", "duration_s", "HOURS", "The same in hours.", factor=3600.0),
    _Setting("--minutes", "duration_s", "MINUTES", "The same in minutes.", factor=60.0),
    _Setting("--step", "step_s", "SECONDS", "One iteration without saves; default 5."),
    _Setting("--slow-share", "slow_share", "SHARE", "What slow ranks add to each, as a share of it; default 0."),
)
_FAILURES = (
    _Setting("--mttf", "rank_mttf_hours", "HOURS", "Mean time to a failure of one rank; default 29500 (Meta)."),
    _Setting("--failure-every", "failure_every_s", "SECONDS", "Mean time between failures of the world, instead."),
    _Setting("--weibull", "weibull_shape", "SHAPE", "Weibull times between failures, such as 0.7; else exponential."),
    _Setting("--preempt-every", "preempt_every_s", "HOURS", "Mean time between requests to leave.", factor=3600.0),
    _Setting("--queue", "queue_s", "SECONDS", "How long the job waits in the queue then; default 600."),
    _Setting(
        "--restart-stopped",
        "restart_stopped_s",
        "HOURS|never",
        "Until a run that the recovery policy stopped is started again; default 1.",
        factor=3600.0,
        word="never",
    ),
    _Setting("--repair", "repair_s", "HOURS", "Mean time until a lost node is repaired; default 24.", factor=3600.0),
)
_SAVES = (
    _Setting(
        "--interval",
        "interval_s",
        "SECONDS|auto",
        "Training between saves to the node-local tiers; 0 = no such saves; default auto, Young's optimum.",
        word="auto",
    ),
    _Setting("--interval-iterations", "interval_iterations", "N", "The same in iterations.", is_whole=True),
    _Setting("--global-interval", "global_interval_s", "SECONDS|auto", "Between saves to all tiers.", word="auto"),
    _Setting("--global-interval-iterations", "global_interval_iterations", "N", "In iterations.", is_whole=True),
    _Setting("--replication", "replication", "N", "Nodes with each shard, its own included; default 2.", is_whole=True),
    _Setting(
        "--replication-jump", "replication_jump", "RANKS", "Ranks to the next copy; default a node.", is_whole=True
    ),
)
_COSTS = (
    _Setting(
        "--save-stall", "save_stall_s", "SECONDS", "Training waits in a save to the node-local tiers; default 0.07."
    ),
    _Setting("--save", "save_s", "SECONDS", "From there until it is committed; default 0.36."),
    _Setting("--global-save-stall", "global_save_stall_s", "SECONDS", "In a save to all tiers; default 0.07."),
    _Setting("--global-save", "global_save_s", "SECONDS", "From there until it is committed globally; default 60."),
    _Setting("--load-memory", "load_memory_s", "SECONDS", "A load from the node's memory; default 0.15."),
    _Setting("--load-local", "load_local_s", "SECONDS", "From its disk; default 0.11."),
    _Setting("--load-replica", "load_replica_s", "SECONDS", "From another node; default 1."),
    _Setting("--load-global", "load_global_s", "SECONDS", "From the global tier; default 60."),
    _Setting("--detection", "detection_s", "SECONDS", "Until a dead worker is detected; default 0.012."),
    _Setting("--hang-timeout", "hang_timeout_s", "SECONDS", "Until a hang is detected; default 300."),
    _Setting("--node-timeout", "node_timeout_s", "SECONDS", "Until a lost node is detected; default 5."),
    _Setting("--restart", "restart_s", "SECONDS", "Until the workers run again; default 0.09."),
    _Setting("--rendezvous", "rendezvous_s", "SECONDS", "Until the nodes have met; default 0.00017 for each node."),
    _Setting("--start-up", "start_up_s", "SECONDS", "Imports, groups, compilation, first step; default 60."),
)
_LIMITS = (
    _Setting(
        "--max-restarts", "max_restarts", "N", "Restarts in a row without progress; default 3 or more.", is_whole=True
    ),
    _Setting("--max-restarts-total", "max_restarts_total", "N", "Restarts in all; default no limit.", is_whole=True),
    _Setting(
        "--max-no-progress-cycles",
        "max_no_progress_cycles",
        "N",
        "Cycles in a row without progress; default 3, and more above 4096 nodes.",
        is_whole=True,
    ),
    _Setting("--max-node-faults", "max_node_faults", "N", "Faults until a spare takes over; default 3.", is_whole=True),
)
_SETTINGS = (*_WORLD, *_FAILURES, *_SAVES, *_COSTS, *_LIMITS)
_DURATIONS = ("--days", "--hours", "--minutes")
_MOST_VALUES = 200
"""Values of a sweep."""


def _add(settings: tuple[_Setting, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for one in reversed(settings):
            function = click.option(one.flag, one.parameter, metavar=one.metavar, help=one.help)(function)
        return function

    return add


@click.command("simulate", cls=Command)
@_add(_WORLD)
@_add(_FAILURES)
@click.option("--fixed-repair", is_flag=True, help="Each repair takes its mean time; else times are exponential.")
@click.option(
    "--shares",
    metavar="KIND=SHARE,...",
    help="Shares of the failures, which sum to 1; default process=0.7,hang=0.05,node=0.24,rack=0.01.",
)
@click.option(
    "--trace",
    metavar="FILE|RUN_DIR",
    help="Recorded faults instead: CSV or JSON with time, kind and node, or a run directory.",
)
@_add(_SAVES)
@click.option("--no-memory", is_flag=True, help="No copies in the nodes' memory: near copies are on their disks.")
@click.option(
    "--costs",
    "cost_files",
    multiple=True,
    metavar="FILE",
    help="Costs: a result of python -m benchmarks; repeatable.",
)
@_add(_COSTS)
@_add(_LIMITS)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=20, metavar="N", help="Runs, each with its own seed; default 20."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Names the study; default 0.")
@click.option("--sweep", metavar="NAME=VALUES", help="Values of one option in turn: spares=0:8:2, or mttf=1e4,3e4.")
@json_option
def simulate(
    *,
    shares: str | None,
    trace: str | None,
    fixed_repair: bool,
    no_memory: bool,
    cost_files: tuple[str, ...],
    repeats: int,
    seed: int,
    sweep: str | None,
    as_json: bool,
    **given: str | None,
) -> None:
    """Predict goodput at scale; compare intervals, spares and timeouts.

    Simulates a run of any size, failure by failure, with the policy that decides in a real run, and prints which share
    of the time is productive (ETTR) and how the rest is spent. Costs are those that were measured on one machine, and
    assumptions where a cluster is needed: put in your own.

    Examples:
      outlast simulate --ranks 131072 --days 30
      outlast simulate --ranks 1024 --mttf 8090 --sweep spares=0:8:2
      outlast simulate --ranks 16384 --interval 300 --load-global 240 --start-up 180
      outlast simulate --ranks 4096 --costs save.json --costs restart.json --json
      outlast simulate --ranks 2048 --trace /shared/runs/gpt --sweep interval=10,30,60,120
      outlast simulate --ranks 2 --ranks-per-node 1 --minutes 10 --step 0.1 --failure-every 20 --shares process=1
    """
    from outlast.simulate.show import render_study, render_sweep
    from outlast.simulate.study import run_study

    scenario = _make_scenario(given, shares, trace, cost_files, fixed_repair=fixed_repair, uses_memory=not no_memory)
    swept = None if sweep is None else _parse_sweep(sweep)
    changed = {} if swept is None else {text: _change(scenario, swept[0], text) for text in swept[1]}

    def study(one: Scenario, what: str) -> Study:
        return run_study(
            one, repeats=repeats, seed=seed, progress=lambda line: echo(f"[simulate] {what}: {line}", err=True)
        )

    with ending_on_signals():
        result = study(scenario, "as it is")
        studies = {text: study(one, f"{sweep}: {text}") for text, one in changed.items()}
    if as_json:
        fields = result.to_fields()
        if swept is not None:
            rows = [_row(text if text == swept[0].word else float(text), one) for text, one in studies.items()]
            fields["sweep"] = {"name": swept[0].name, "rows": rows}
        print_json(fields)
        return
    lines = list(render_study(result))
    if swept is not None:
        lines += ["", *render_sweep(f"{swept[0].name} ({swept[0].metavar})", studies)]
    echo(*lines)


def _row(value: float | str, study: Study) -> dict[str, Any]:
    fields = study.to_fields()
    return {"value": value} | {name: fields[name] for name in ("ettr", "ettr_range", "num_failures", "partition")}


def _parse_sweep(text: str) -> tuple[_Setting, list[str]]:
    """Parse ``interval=10,30,60`` or ``spares=0:8:2`` (from, to, step; the end is included).

    Raises:
        ConfigError: The text is neither, does not name a numeric option, or has too many values.
    """
    from outlast.config.base import nearest

    known = {setting.name: setting for setting in _SETTINGS}
    name, sign, values = (part.strip() for part in text.partition("="))
    if not sign or not values:
        raise ConfigError(f"the sweep {text!r} must be NAME=VALUE,VALUE,... or NAME=FROM:TO:STEP, such as spares=0:8:2")
    if name not in known:
        raise ConfigError(f"there is no sweep {name!r}; {nearest(name, known)}")
    found = [value.strip() for value in values.split(",")]
    if ":" in values:
        try:
            first, last, step = (float(part) for part in f"{values}:1".split(":")[:3])
            num = math.floor((last - first) / step + 1e-9) + 1
            found = [f"{first + step * number:g}" for number in range(min(num, _MOST_VALUES + 1))] if step > 0 else []
        except (ValueError, ArithmeticError):
            raise ConfigError(f"the sweep {text!r}: {values!r} must be numbers such as 0:8:2, or 10,30,60") from None
    if not 1 <= len(found) <= _MOST_VALUES:
        raise ConfigError(f"the sweep {text!r} has {len(found)} values; give 1 to {_MOST_VALUES}")
    return known[name], list(dict.fromkeys(found))


def _change(scenario: Scenario, setting: _Setting, text: str) -> Scenario:
    """Return a scenario with one value of a sweep. Raises: ConfigError, when it is invalid."""
    from outlast.config.base import as_written

    value = setting.parse(text)
    try:
        return scenario.change(**{setting.field: value})
    except ConfigError as error:
        written = {setting.field: f"{setting.flag}={text}"}
        raise ConfigError(as_written(str(error), lambda field, _: written.get(field))) from None


def _make_scenario(
    given: Mapping[str, str | None],
    shares: str | None,
    trace: str | None,
    cost_files: tuple[str, ...],
    *,
    fixed_repair: bool,
    uses_memory: bool,
) -> Scenario:
    from outlast.config.base import as_written
    from outlast.policy.recovery_policy import Limits
    from outlast.simulate.costs import read_costs
    from outlast.simulate.failures import read_trace
    from outlast.simulate.scenario import RecoveryCosts, Scenario

    texts = {setting: text for setting in _SETTINGS if (text := given[setting.parameter]) is not None}
    _refuse_twice(texts)
    if trace is not None:
        drawn = [setting.flag for setting in texts if setting.flag in ("--mttf", "--failure-every", "--weibull")]
        for flag in [*drawn, *(["--shares"] if shares is not None else [])]:
            raise ConfigError(f"{flag} is for failures drawn at random, and --trace for recorded ones; leave one out")
    values = {setting.field: setting.parse(text) for setting, text in texts.items()}
    written = {setting.field: f"{setting.flag}={text}" for setting, text in texts.items()}
    costs = read_costs(map(Path, cost_files))
    try:
        scenario_values = {name: value for name, value in values.items() if name in Scenario.__dataclass_fields__}
        own = {name: value for name, value in values.items() if name in RecoveryCosts.__dataclass_fields__}
        limits = {name: value for name, value in values.items() if name in Limits.__dataclass_fields__}
        kept = {name: getattr(costs, name) for name in RecoveryCosts.__dataclass_fields__}
        scenario = Scenario(
            **scenario_values,  # type: ignore[arg-type]
            **(_parse_shares(shares) if shares is not None else {}),  # type: ignore[arg-type]
            trace=None if trace is None else read_trace(Path(trace)),
            fixed_repair=fixed_repair,
            use_memory=uses_memory,
            costs=RecoveryCosts(**{**kept, **own}),
        )
        return scenario.change(**limits)
    except ConfigError as error:
        raise ConfigError(as_written(str(error), lambda field, _: written.get(field))) from None


def _refuse_twice(texts: Mapping[_Setting, str]) -> None:
    """Refuse several options for the same value."""
    durations = [setting.flag for setting in texts if setting.flag in _DURATIONS]
    if len(durations) > 1:
        raise ConfigError(f"{' and '.join(durations)} set the same duration; leave one out")
    flags = {setting.flag for setting in texts}
    if {"--mttf", "--failure-every"} <= flags:
        raise ConfigError("--mttf and --failure-every set the same rate, of a rank and of the world; leave one out")


def _parse_shares(text: str) -> dict[str, float]:
    """Parse ``process=0.7,node=0.3``; a kind without a share gets 0.

    Raises:
        ConfigError: The text is malformed.
    """
    from outlast.config.base import nearest
    from outlast.simulate.scenario import SHARES

    names = {kind.name.lower(): field for kind, field in SHARES.items()}
    found = dict.fromkeys(names.values(), 0.0)
    for part in text.split(","):
        name, _, share = (word.strip() for word in part.partition("="))
        if name not in names:
            raise ConfigError(f"--shares: there is no kind {name!r} of failure; {nearest(name, names)}")
        try:
            found[names[name]] = float(share)
        except ValueError:
            raise ConfigError(f"--shares: {part.strip()!r} must be a kind and a number, such as process=0.7") from None
    return found
