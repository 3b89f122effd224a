"""The options of ``outlast run``: torchrun's, and ours."""

from __future__ import annotations

import argparse
import datetime
import difflib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from outlast import clock, env
from outlast.config import Config, FaultToleranceConfig, HealthConfig
from outlast.config.flags import add_ft_arguments, ft_config_from, unknown_flag_message
from outlast.config.precedence import LayeredSettings
from outlast.errors import ConfigError
from outlast.launch.torchrun_parser import make_torchrun_parser

__all__ = ["RunOptions", "given_options", "make_parser", "parse_options"]

DEFAULT_MAX_RESTARTS = 3
NO_TERMINATION_SIGNAL = "outlast run ends a hung worker with SIGKILL; leave it out"
"""Why ``rank_termination_signal`` has no effect."""
_BACKENDS = ("static", "c10d", "outlast")
_EPILOG = """examples:
  outlast run --nproc-per-node=8 train.py --lr 3e-4
  outlast run --nnodes=4:5 --nproc-per-node=8 --rdzv-endpoint=$HEAD:29400 --rdzv-id=$RUN \\
      --ft-rank_section_timeouts=setup:600,step:180,checkpointing:420 train.py

--nnodes=MIN:MAX trains on MIN nodes; the others, up to MAX, wait as warm spares and take the slots of lost nodes.
Options may be abbreviated as long as they stay distinct, other than --ft-*.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What ``outlast run`` was told, checked."""

    torchrun: argparse.Namespace
    """torchrun's own options."""
    num_slots: int
    max_nodes: int
    endpoints: str
    run_id: str
    run_dir: Path
    node_name: str
    node_name_given: bool
    wish: int | None
    layers: LayeredSettings
    """The fault tolerance settings of each source."""
    health: HealthConfig | None
    """What the node must have; ``None`` = it is not looked at."""
    health_places: tuple[str, ...]
    """Where the run writes on this node."""
    max_restarts_total: int | None
    preload: tuple[str, ...]
    warm_start: bool
    restart_grace_s: float
    workers_stop_timeout_s: float
    join_timeout_s: float
    is_named: bool
    """The run has an id or a directory of its own, so that a later job goes on with it; once finished, it stays so."""
    names: tuple[str, ...]
    """The names that the run was given: its id, its directory."""
    resumes_other: bool
    """Its workers may go on from what another run saved."""
    notes: tuple[str, ...]
    """What to log at the start: settings that mean something else than they do to torchrun."""

    @property
    def fault_tolerance(self) -> FaultToleranceConfig:
        """What is in force before the script runs."""
        return self.layers.config


class _Parser:
    """torchrun's parser with our options; its errors are :class:`ConfigError`."""

    def __init__(self) -> None:
        self.parser = make_torchrun_parser()
        self.parser.prog = "outlast run"
        self.parser.description = (
            "Launch a training script on this node and keep it alive: torchrun's options, and outlast's own."
        )
        self.parser.epilog = _EPILOG
        self.parser.formatter_class = argparse.RawDescriptionHelpFormatter
        self.parser.error = self._refuse  # type: ignore[method-assign]
        for action in self.parser._actions:
            if action.dest == "max_restarts" and action.default == 0:
                action.default = DEFAULT_MAX_RESTARTS
                action.help = "Restarts in a row without progress in between (torchrun: in all); default 3."
            elif action.dest == "nnodes":
                action.help = "Nodes: N, or MIN:MAX, of which MIN train and the others wait as spares."
            elif action.dest == "node_rank" and action.default == 0:
                action.default = None  # so that a given 0 differs from none
        self._torchruns = set(self.parser._actions)
        self._add_ours()
        add_ft_arguments(self.parser)
        self._abbreviated: Callable[[str], list[Any]] = self.parser._get_option_tuples
        self.parser._get_option_tuples = self._complete  # type: ignore[assignment, method-assign]

    def _complete(self, text: str) -> list[Any]:
        """Return the option that an abbreviation stands for, in a list that is empty where that is not certain.

        What torchrun takes for one of its own options means that option here, too, whatever we have added. argparse
        asks this of the script's arguments as well, which must not be refused; so no error is raised here.
        """
        found = {match[0]: match for match in self._abbreviated(text)}
        matches = [match for action, match in found.items() if action in self._torchruns] or list(found.values())
        return matches if len(matches) == 1 else []

    def _refuse(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments:"):
            flag = message.removeprefix("unrecognized arguments:").split()[0]
            if flag.startswith("--ft"):
                raise ConfigError(unknown_flag_message(flag))
            short = flag.partition("=")[0]
            candidates = {match[0] for match in self._abbreviated(short)}
            longs = {next(name for name in one.option_strings if name.startswith("--")) for one in candidates}
            if len(longs) > 1:
                raise ConfigError(f"{short} may be {' or '.join(sorted(longs))}; write the option in full")
            known = {option.lstrip("-") for action in self.parser._actions for option in action.option_strings}
            close = difflib.get_close_matches(flag.lstrip("-").partition("=")[0], sorted(known), n=1, cutoff=0.7)
            hint = f"did you mean --{close[0]}?" if close else "see outlast run --help"
            raise ConfigError(f"unknown option {flag}; {hint}")
        raise ConfigError(f"{message}; see outlast run --help")

    def _add_ours(self) -> None:
        group = self.parser.add_argument_group("outlast")

        def add(name: str, **kwargs: Any) -> None:
            group.add_argument(f"--{name}", *(f"--{name.replace('-', '_')}",) if "-" in name else (), **kwargs)

        add(
            "run-dir",
            default=None,
            metavar="DIR",
            help="Run directory (journal, stacks, ladder.json); default outlast-runs/ID.",
        )
        add(
            "node-name",
            default=None,
            metavar="NAME",
            help="Name of this node, unique in the job; default Slurm's, without it the host's.",
        )
        # One option: the second name is our own former one, the others are those of ft_launcher.
        group.add_argument(
            "--config",
            *("--health-config", "--health_config", "--ft-cfg-path", "--ft-cfg_path", "--ft_cfg_path"),
            default=None,
            metavar="FILE",
            help="The run's settings: [fault_tolerance] comes after the --ft-* options and before the script's own "
            "config; tiers and [health] limits are looked at before this node joins; run_dir is that of --run-dir.",
        )
        add(
            "no-health-check",
            action="store_true",
            help="Look neither at this node before it joins nor later.",
        )
        add(
            "max-restarts-total",
            type=int,
            default=None,
            metavar="N",
            help="Restarts in the whole run, with or without progress; default no limit.",
        )
        add(
            "resume-from-other-run",
            action="store_true",
            help="Go on from checkpoints that another run saved, for this launch, as "
            "checkpoint.resume_from_other_run does.",
        )
        add(
            "preload",
            default="",
            metavar="MODULE,...",
            help="Modules that are imported before the workers are forked, beside torch.",
        )
        add(
            "no-warm-start",
            action="store_true",
            help="Start workers as fresh interpreters instead of forking them from a process that has imported torch.",
        )
        add(
            "restart-grace",
            type=float,
            default=0.0,
            metavar="SECONDS",
            help="Seconds between SIGTERM and SIGKILL for the survivors of a failed cycle; default 0: SIGKILL at once.",
        )
        add(
            "workers-stop-timeout",
            type=float,
            default=15.0,
            metavar="SECONDS",
            help="Seconds between SIGTERM and SIGKILL at an orderly end that is no preemption; default 15.",
        )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``outlast run``; its ``error`` raises :class:`ConfigError`."""
    return _Parser().parser


def given_options(argv: Sequence[str]) -> frozenset[str]:
    """Return which options a command line gives, as names of attributes; what follows the script does not count.

    Raises:
        ConfigError: A value does not fit its option, or there is no script.
    """
    parser = make_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return frozenset(vars(parser.parse_known_args(list(argv))[0]))


def parse_options(argv: Sequence[str]) -> RunOptions:
    """Parse and check the command line, before anything is started.

    Raises:
        ConfigError: Something is unknown, out of range, contradictory, or cannot be used; one line with the remedy.
    """
    parser = make_parser()
    args, unknown = parser.parse_known_args(list(argv))
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    num_slots, max_nodes = _parse_nnodes(args.nnodes)
    config = _read_config(args.config)
    layers = LayeredSettings(
        options=ft_config_from(args),
        file=config.fault_tolerance.given if config.fault_tolerance is not None else {},
        file_name=args.config or "",
    )
    fault_tolerance = layers.config
    _require(args.max_restarts >= 0, f"--max-restarts={args.max_restarts} must not be negative")
    total = args.max_restarts_total
    _require(total is None or total >= 0, f"--max-restarts-total={total} must not be negative")
    _require(args.restart_grace >= 0, f"--restart-grace={args.restart_grace} must not be negative")
    _require(
        args.workers_stop_timeout >= 0,
        f"--workers-stop-timeout={args.workers_stop_timeout} must not be negative",
    )
    _require(
        args.rdzv_backend in _BACKENDS,
        f"--rdzv-backend={args.rdzv_backend}: outlast run brings a rendezvous of its own; leave the option out",
    )
    if fault_tolerance.min_nodes is not None:
        _require(
            fault_tolerance.min_nodes <= num_slots,
            f"--ft-min_nodes={fault_tolerance.min_nodes} is more than the {num_slots} nodes of --nnodes; lower it",
        )
    _check_nproc(args.nproc_per_node)
    _check_script(args)
    alone = args.standalone or (max_nodes == 1 and not args.rdzv_endpoint and args.master_port is None)
    endpoints = "localhost:0" if alone else args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    from outlast.runtime.endpoints import parse_endpoints

    parse_endpoints(endpoints)
    run_id = args.rdzv_id
    if run_id == "none" or args.standalone:
        run_id = _fresh_run_id() if alone or max_nodes == 1 else "none"
    conf, ignored = _parse_conf(args.rdzv_conf)
    run_dir = _make_run_dir(args.run_dir or config.run_dir, run_id)
    health, places = _health(args, config, run_dir)
    return RunOptions(
        torchrun=args,
        num_slots=num_slots,
        max_nodes=max_nodes,
        endpoints=endpoints,
        run_id=run_id,
        run_dir=run_dir,
        node_name=env.clean_name(args.node_name or env.node_name()),
        node_name_given=args.node_name is not None,
        wish=None if alone else args.node_rank,
        layers=layers,
        health=health,
        health_places=places,
        max_restarts_total=total,
        preload=tuple(name for name in args.preload.split(",") if name),
        warm_start=not args.no_warm_start,
        restart_grace_s=args.restart_grace,
        workers_stop_timeout_s=args.workers_stop_timeout if args.shutdown_timeout is None else args.shutdown_timeout,
        join_timeout_s=conf.get("join_timeout", conf.get("timeout", 600.0)),
        is_named=run_id != "none" or args.run_dir is not None or config.run_dir is not None,
        names=_names(args, config, run_dir),
        resumes_other=args.resume_from_other_run,
        notes=(*_describe_spares(num_slots, max_nodes), *ignored),
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _read_config(path: str | None) -> Config:
    """Return the run's settings from the file of ``--config``."""
    if path is None:
        return Config()
    from outlast.config.files import load_config

    return load_config(path)


def _health(args: argparse.Namespace, config: Config, run_dir: Path) -> tuple[HealthConfig | None, tuple[str, ...]]:
    """Return what this node must have, and where the run writes on it."""
    places = [str(run_dir)]
    if args.no_health_check:
        _require(
            config.health is None, "--no-health-check and [health] of --config contradict each other; leave one out"
        )
        return None, ()
    if args.config is None:
        return HealthConfig(), tuple(places)
    from outlast.health.node import places_of

    places += [place for place in places_of(config) if place != config.run_dir]
    return config.health or HealthConfig(), tuple(dict.fromkeys(places))


def _parse_nnodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    _require(
        0 < bounds[0] <= bounds[1],
        f"--nnodes={text!r} is not N or MIN:MAX with 0 < MIN <= MAX; write for example 4:5",
    )
    return bounds


def _check_nproc(text: str) -> None:
    if text.lstrip("-").isdigit():
        _require(int(text) > 0, f"--nproc-per-node={text} must be at least 1")
    else:
        _require(
            text in ("auto", "cpu", "gpu", "xpu"),
            f"--nproc-per-node={text!r} is neither a number nor auto, cpu, gpu or xpu",
        )


def _check_script(args: argparse.Namespace) -> None:
    script = args.training_script
    _require(not (args.no_python and args.module), "--no-python and --module contradict each other; leave one out")
    if args.no_python:
        _require(
            shutil.which(script) is not None,
            f"{script!r} is no program that can be run; check its path and mode",
        )
    elif not args.module:
        _require(os.path.exists(script), f"the script {script!r} does not exist; check its path")
        _require(os.access(script, os.R_OK), f"the script {script!r} cannot be read; check its mode")


def _describe_spares(num_slots: int, max_nodes: int) -> tuple[str, ...]:
    """Say which nodes train, where torchrun would train on all of them."""
    if num_slots == max_nodes:
        return ()
    spares = max_nodes - num_slots
    train = "1 node trains" if num_slots == 1 else f"{num_slots} nodes train"
    wait = "1 more waits as a spare" if spares == 1 else f"up to {spares} more wait as spares"
    return (
        f"--nnodes={num_slots}:{max_nodes}: {train}, {wait}; to train on {max_nodes} and go on with {num_slots} where "
        f"one is lost, write --nnodes={max_nodes} --ft-min_nodes={num_slots}",
    )


def _parse_conf(text: str) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the timeouts of ``--rdzv-conf``, and a line on what else it holds.

    Quotes around the whole may have come through from a script or a YAML file; torchrun takes them, too.
    """
    values: dict[str, float] = {}
    others: list[str] = []
    for part in filter(None, (part.strip() for part in text.strip(" '\"").split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        _require(bool(name and equals and value), f"--rdzv-conf: {part!r} is not in the form name=value")
        if name not in ("join_timeout", "timeout"):
            others.append(name)
            continue
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"--rdzv-conf: {name}={value!r} is no number of seconds") from None
        _require(values[name] > 0, f"--rdzv-conf: {name}={value} must be above 0 seconds")
    if not others:
        return values, ()
    return values, (f"--rdzv-conf: {', '.join(others)}: without effect; outlast's rendezvous knows join_timeout",)


def _names(args: argparse.Namespace, config: Config, run_dir: Path) -> tuple[str, ...]:
    """Return the names that somebody gave to the run."""
    named = () if args.standalone else env.name_of_run(args.rdzv_id)
    has_directory = args.run_dir is not None or config.run_dir is not None
    return (*named, *([f"directory {run_dir}"] if has_directory else []))


def _fresh_run_id() -> str:
    now = datetime.datetime.fromtimestamp(clock.wall_ns() / 1e9)
    return f"{now:%Y%m%d-%H%M%S}-{os.getpid()}"


def _make_run_dir(given: str | None, run_id: str) -> Path:
    path = Path(given) if given else Path("outlast-runs") / env.clean_name(run_id)
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"--run-dir={path} is not a folder; name another") from None
    except OSError as error:
        raise ConfigError(f"--run-dir={path} cannot be made ({error.strerror}); name one that is writable") from None
    try:
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--run-dir={path} is not writable ({error.strerror}); name one that is") from None
    return path
