"""The options of ``outlast run``: torchrun's, and those that outlast adds."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import ipaddress
import math
import os
import re
import secrets
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

from outlast import clock, env, logs
from outlast.config import Config, FaultToleranceConfig, HealthConfig
from outlast.config.base import require
from outlast.config.sources import LayeredSettings, load_config
from outlast.errors import ConfigError
from outlast.launch.run_parser import RunCommand, find_event_handlers, parse_command
from outlast.policy.recovery_policy import failures_in_a_row
from outlast.runtime.addresses import Endpoint, interface_addresses, parse_endpoints, parse_port_range
from outlast.runtime.device import why_absent
from outlast.runtime.files import in_time
from outlast.wording import count

NO_TERMINATION_SIGNAL = "outlast run ends a hung worker with SIGKILL; leave it out"
"""Why ``rank_termination_signal`` has no effect."""
NODE_PORTS, WORKER_PORTS = 3, 3
"""Listening ports: of a node the stores of a cycle and of the next one, and the writer; of a worker the monitor, the
store of a call, and the consensus while it connects."""
_FOLDER_S = 10.0
"""How long a folder that the run writes to may take to respond."""
_BACKENDS = ("static", "c10d", "outlast")
_NEVER_EMPTY = (
    "config",
    "run_dir",
    "node_name",
    "run_key_file",
    "rdzv_id",
    "rdzv_endpoint",
    "master_addr",
    "log_dir",
    "metrics_address",
    "interface",
    "port_range",
)
_NOT_NEGATIVE = (
    *("max_restarts", "max_restarts_total", "restart_grace", "workers_stop_timeout", "shutdown_timeout"),
    "metrics_linger",
)
_A_PORT = "write a number from 1 to 65535, or 0 for a free one"
_STREAMS = re.compile(r"[0-3]|\d:[0-3](,\d:[0-3])*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A command line with valid values, checked without regard to the machine."""

    command: RunCommand
    config: Config
    """Contents of the file of ``--config``."""
    layers: LayeredSettings
    """The fault tolerance settings by source."""
    num_slots: int
    max_nodes: int
    endpoints: str
    """Where the agents meet."""
    is_alone: bool
    """There is only one agent, and no other agent connects to it."""
    join_timeout_s: float
    resolve_timeout_s: float
    """How long all hosts of the endpoints may be unknown at the start."""
    any_command: bool
    """The agents' commands may differ."""
    notes: tuple[str, ...]
    """Lines to log at the start, on settings that differ from torchrun's meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(Checked):
    """The options of ``outlast run``, checked on this machine."""

    run_id: str
    run_dir: Path
    node_name: str
    wish: int | None
    health: HealthConfig | None
    """Limits that the node must meet; ``None``: no health checks."""
    health_places: tuple[str, ...]
    """Directories and URLs that the run writes to on this node."""
    preload: tuple[str, ...]
    workers_stop_timeout_s: float
    is_named: bool
    """The user gave the run an id or a directory, so that a later job resumes it; a finished run is not trained
    again."""
    names: tuple[str, ...]
    """The id and the directory that the user gave the run."""
    metrics: Endpoint | None
    """Address of this agent's metrics endpoint; ``None``: no endpoint."""
    log_level: str | None
    """Level of ``--log-level`` or ``--quiet``; ``None``: the environment's."""
    new_folders: tuple[Path, ...]
    """Folders of logs and run that parsing created, innermost first."""

    @property
    def torchrun(self) -> SimpleNamespace:
        """The parsed options of torchrun and of the launcher."""
        return self.command.args

    @property
    def fault_tolerance(self) -> FaultToleranceConfig:
        """The settings in force before the script runs."""
        return self.layers.config

    def remove_new_folders(self) -> None:
        """Remove the folders that parsing created, as far as they are empty: the run was refused before it began."""
        _remove_empty(self.new_folders)


def check_values(argv: Sequence[str]) -> Checked:
    """Parse a command line and check everything that does not depend on the machine.

    Raises:
        ConfigError: An option is unknown, a value is out of range, or options contradict each other.
    """
    command = parse_command(argv)
    args, name = command.args, command.name
    for attribute in _NEVER_EMPTY:
        require(
            attribute not in command.typed or getattr(args, attribute) != "",
            f"{name(attribute)} is empty; give it a value, or leave it out (is a shell variable unset?)",
        )
    _log_level(args)
    num_slots, max_nodes = _parse_nnodes(args.nnodes, name("nnodes"))
    config = Config()
    if args.config is not None:
        config = load_config(args.config)
    layers = LayeredSettings(
        options=command.fault_tolerance,
        typed=command.fault_tolerance_typed,
        file=config.fault_tolerance.given if config.fault_tolerance is not None else {},
        file_name=args.config or "",
        derived={"max_no_progress_cycles": failures_in_a_row(num_slots)},
    )
    if args.max_restarts is None:
        args.max_restarts = failures_in_a_row(num_slots)
    fewest = layers.config.min_nodes
    for attribute in _NOT_NEGATIVE:
        value = getattr(args, attribute)
        require(value is None or value >= 0, f"{name(attribute)}={value} must not be negative; write 0 or more")
        require(value is None or value < math.inf, f"{name(attribute)}={value} has no end; write a number of seconds")
    require(
        args.rdzv_backend in _BACKENDS,
        f"{name('rdzv_backend')}={args.rdzv_backend}: outlast run has its own rendezvous; leave the option out",
    )
    require(
        fewest is None or fewest <= num_slots,
        f"{layers.written('min_nodes')} is more than the {count(num_slots, 'node')} of {name('nnodes')}; lower it",
    )
    _check_nproc(args.nproc_per_node, name("nproc_per_node"))
    port = args.metrics_port
    require(port is None or 0 <= port < 65536, f"{name('metrics_port')}={port} is not a valid port; {_A_PORT}")
    _check_streams(command)
    require(
        not (args.no_python and args.module),
        f"{name('no_python')} and {name('module')} contradict each other; leave one out",
    )
    require(
        not args.no_health_check or config.health is None,
        f"{name('no_health_check')} and [health] of {args.config} contradict each other; leave one out",
    )
    alone = args.standalone or (max_nodes == 1 and not args.rdzv_endpoint and args.master_port is None)
    require(
        not alone or num_slots == 1,
        f"{name('standalone')} is for one node, and {name('nnodes')}={args.nnodes} for several; leave one out",
    )
    require(
        alone or args.node_rank is None or 0 <= args.node_rank < max_nodes,
        f"{name('node_rank')}={args.node_rank} is not a rank of {count(max_nodes, 'node')}; write a number from 0 "
        f"to {max_nodes - 1}, or leave it out",
    )
    timeouts, any_command, ignored = _parse_conf(args.rdzv_conf, name("rdzv_conf"))
    return Checked(
        command=command,
        config=config,
        layers=layers,
        num_slots=num_slots,
        max_nodes=max_nodes,
        endpoints="localhost:0" if alone else _check_endpoints(command, num_slots),
        is_alone=alone,
        join_timeout_s=timeouts.get("join_timeout", timeouts.get("timeout", 600.0)),
        resolve_timeout_s=timeouts.get("resolve_timeout", 0.0),
        any_command=any_command,
        notes=tuple(filter(None, (command.hint, _describe_spares(num_slots, max_nodes), ignored))),
    )


def parse_options(argv: Sequence[str]) -> RunOptions:
    """Parse and check the command line before anything starts; create the run directory once all is valid.

    Raises:
        ConfigError: An option is unknown, invalid or contradictory, or cannot be used on this machine.
    """
    checked = check_values(argv)
    command, config = checked.command, checked.config
    args = command.args
    _check_network(command)
    _check_devices(command)
    _check_plugins(command)
    _check_script(command)
    metrics = _metrics_endpoint(command)
    run_id = args.rdzv_id
    if run_id == "none" or args.standalone:
        now = datetime.datetime.fromtimestamp(clock.wall_ns() / 1e9)
        run_id = f"{now:%Y%m%d-%H%M%S}-{os.getpid()}" if checked.is_alone or checked.max_nodes == 1 else "none"
    run_dir = Path(args.run_dir or config.run_dir or Path("outlast-runs") / env.clean_name(run_id)).absolute()
    has_directory = args.run_dir is not None or config.run_dir is not None
    health, places = _health(command, config, run_dir)
    # Last, so that a refused command line leaves nothing behind.
    source = f"run_dir of {args.config}" if config.run_dir else "the run directory"
    new_folders = _make_folder(run_dir, command.name("run_dir") if args.run_dir else source)
    if args.log_dir is not None:
        try:
            new_folders = (*_make_folder(Path(args.log_dir).absolute(), command.name("log_dir")), *new_folders)
        except ConfigError:
            _remove_empty(new_folders)
            raise
    return RunOptions(
        **{name: getattr(checked, name) for name in Checked.__slots__},
        run_id=run_id,
        run_dir=run_dir,
        node_name=env.clean_name(args.node_name or env.node_name()),
        wish=None if checked.is_alone else args.node_rank,
        health=health,
        health_places=places,
        preload=tuple(part for part in args.preload.split(",") if part),
        workers_stop_timeout_s=args.workers_stop_timeout if args.shutdown_timeout is None else args.shutdown_timeout,
        is_named=run_id != "none" or has_directory,
        names=(
            *(() if args.standalone else env.name_of_run(args.rdzv_id)),
            *([f"directory {run_dir}"] if has_directory else []),
        ),
        metrics=metrics,
        log_level=_log_level(args),
        new_folders=new_folders,
    )


def _health(command: RunCommand, config: Config, run_dir: Path) -> tuple[HealthConfig | None, tuple[str, ...]]:
    """Return the limits that this node must meet, and where the run writes on it."""
    args, places = command.args, [str(run_dir)]
    if args.no_health_check:
        return None, ()
    if args.config is None:
        return HealthConfig(), tuple(places)
    from outlast.health.node import places_of

    places += [place for place in places_of(config) if place != config.run_dir]
    return config.health or HealthConfig(), tuple(dict.fromkeys(places))


def _parse_nnodes(text: str, name: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        bounds = int(low), int(high or low)
    except ValueError:
        bounds = 0, 0
    require(
        0 < bounds[0] <= bounds[1], f"{name}={text!r} is not N or MIN:MAX with 0 < MIN <= MAX; write for example 4:5"
    )
    return bounds


def _log_level(args: SimpleNamespace) -> str | None:
    level = None if args.log_level is None else args.log_level.lower()
    require(
        level is None or level in logs.LEVELS, f"--log-level={args.log_level} is not one of {', '.join(logs.LEVELS)}"
    )
    if args.quiet:
        require(
            level in (None, "warning"), f"--quiet and --log-level={args.log_level} contradict each other; leave one out"
        )
        return "warning"
    return level


def _check_nproc(text: str, name: str) -> None:
    if text.lstrip("-").isdigit():
        require(int(text) > 0, f"{name}={text} must be at least 1")
        return
    require(text in ("auto", "cpu", "gpu", "xpu"), f"{name}={text!r} is neither a number nor auto, cpu, gpu or xpu")


def _check_network(command: RunCommand) -> None:
    """Reject an interface that does not exist, and a port range that is invalid or too small for this node."""
    args = command.args
    interface, ports = args.interface or env.interface(), args.port_range or env.port_range()
    if interface is not None:
        interface_addresses(interface)
    if ports is not None:
        nproc = int(args.nproc_per_node) if args.nproc_per_node.isdecimal() else 1
        where = command.name("port_range") if args.port_range else env.PORT_RANGE
        parse_port_range(ports, where=where, needed=NODE_PORTS + WORKER_PORTS * nproc)


def _metrics_endpoint(command: RunCommand) -> Endpoint | None:
    """Return the address of the metrics endpoint; reject an invalid one, and a missing package."""
    args, name = command.args, command.name
    given_address, given_port = env.metrics_endpoint()
    port, source = args.metrics_port, name("metrics_port")
    if port is None and given_port is not None:
        source = env.METRICS_PORT
        port = int(given_port) if given_port.isdecimal() else -1
        require(0 <= port < 65536, f"{source}={given_port} is not a valid port; {_A_PORT}")
    if port is None:
        for attribute, is_given in (
            ("metrics_address", args.metrics_address is not None),
            ("metrics_linger", "metrics_linger" in command.typed),
        ):
            text = f"{name(attribute)} has no effect without --metrics-port; add that, or leave it out"
            require(not is_given, text)
        return None
    address = args.metrics_address or given_address or "127.0.0.1"
    where = name("metrics_address") if args.metrics_address else env.METRICS_ADDRESS
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise ConfigError(
            f"{where}={address} is not an IP address; write 127.0.0.1, or the address of an interface"
        ) from None
    require(
        importlib.util.find_spec("prometheus_client") is not None,
        f"{source} needs prometheus-client, which is not installed: pip install 'outlast[prometheus]'",
    )
    return Endpoint(address, port)


def _check_devices(command: RunCommand) -> None:
    """Reject workers on devices that do not exist, before torch is imported."""
    args, name = command.args, command.name
    text, binding = args.nproc_per_node, args.numa_binding
    why = why_absent(text) if text in ("gpu", "xpu") else None
    require(why is None, f"{name('nproc_per_node')}={text}: {why}; write the number of workers, or auto")
    why = why_absent("gpu") if binding is not None else None
    require(why is None, f"{name('numa_binding')}={binding} needs GPUs, and {why}; leave it out")


def _check_streams(command: RunCommand) -> None:
    """Reject log options that torch would reject later."""
    args, name = command.args, command.name
    for attribute in ("redirects", "tee"):
        text = getattr(args, attribute)
        require(
            _STREAMS.fullmatch(text) is not None,
            f"{name(attribute)}={text!r} is not a choice of streams; write 0 (none), 1 (stdout), 2 (stderr), 3 (both), "
            "or one for each local rank, such as 0:3,1:2",
        )
    ranks = args.local_ranks_filter
    require(
        not ranks or all(rank.strip().isdigit() for rank in ranks.split(",")),
        f"{name('local_ranks_filter')}={ranks!r} is not a list of local ranks; write numbers, such as 0,1",
    )


def _check_plugins(command: RunCommand) -> None:
    """Reject plugins that are not installed; torch would do so seconds later."""
    args, name = command.args, command.name
    handlers = find_event_handlers()
    require(
        not handlers or args.event_log_handler in handlers,
        f"{name('event_log_handler')}={args.event_log_handler} is not an event handler of torch; write console or null",
    )
    if args.logs_specs is not None:
        from importlib.metadata import entry_points

        require(
            args.logs_specs in entry_points(group="torchrun.logs_specs").names,
            f"{name('logs_specs')}={args.logs_specs}: no installed package has log specs of this name; leave it out",
        )


def _check_script(command: RunCommand) -> None:
    """Reject a training script that cannot be started from here."""
    args, script = command.args, command.args.training_script
    if args.no_python:
        require(shutil.which(script) is not None, f"{script!r} is not an executable program; check its path and mode")
    elif args.module:
        module, top = command.name("module"), script.partition(".")[0]
        require(not script.endswith(".py"), f"{module} takes a module's name; write {script[:-3]}, without .py")
        known = "PYTHON_EXEC" in env.environ() or PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is not None
        require(known, f"{module}: there is no module {top!r} in this folder or installed; check its name")
    else:
        require(os.path.exists(script), f"the script {script!r} does not exist; {why_not_there(script)}")
        require(os.access(script, os.R_OK), f"the script {script!r} cannot be read; check its mode")
        is_program = not os.path.isdir(script) or os.path.exists(os.path.join(script, "__main__.py"))
        require(is_program, f"{script!r} is a folder without __main__.py; name the script in it")


def why_not_there(script: str) -> str:
    """Return how to correct the name of a script that does not exist."""
    if re.fullmatch(r"python[\d.]*", os.path.basename(script)) or script == "torchrun":
        return f"outlast run starts Python itself: leave {script!r} out"
    first = os.fsencode(script).decode(errors="replace")[:1]  # valid under any locale
    if first and first in "\u2010\u2011\u2012\u2013\u2014\u2212":
        return "it begins with a dash that only looks like '-': type it again"
    return "check its path"


def _check_endpoints(command: RunCommand, num_slots: int) -> str:
    """Return where the agents meet."""
    args, name = command.args, command.name
    source = "rdzv_endpoint" if args.rdzv_endpoint else "master_addr"
    text = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port or 29500}"
    endpoints = parse_endpoints(text, where=name(source))
    require(
        num_slots == 1 or all(endpoint.port for endpoint in endpoints),
        f"{name(source)}={text}: port 0 is another on each node, and {name('nnodes')}={args.nnodes} must meet; write a "
        "port, such as 29400",
    )
    return text


def _describe_spares(num_slots: int, max_nodes: int) -> str | None:
    """Return which nodes train, as torchrun would train on all of them."""
    if num_slots == max_nodes:
        return None
    spares = max_nodes - num_slots
    train = f"{count(num_slots, 'node')} {'trains' if num_slots == 1 else 'train'}"
    wait = "1 more waits as a spare" if spares == 1 else f"up to {spares} more wait as spares"
    return (
        f"--nnodes={num_slots}:{max_nodes}: {train}, {wait}; to train on {max_nodes} and continue with {num_slots} "
        f"where one is lost, write --nnodes={max_nodes} --ft-min-nodes={num_slots}"
    )


def _parse_conf(text: str, option: str) -> tuple[dict[str, float], bool, str | None]:
    """Return the timeouts of ``--rdzv-conf``, whether commands may differ, and a line on unknown settings.

    Like torchrun, accept quotes around the whole, which may come from a script or a YAML file.
    """
    values: dict[str, float] = {}
    others: list[str] = []
    any_command = False
    for part in filter(None, (part.strip() for part in text.strip(" '\"").split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        require(
            bool(name and equals and value),
            f"{option}: {part!r} is not in the form name=value; write for example join_timeout=600",
        )
        if name == "any_command":
            require(value in ("0", "1"), f"{option}: any_command={value!r} is neither 0 nor 1; write any_command=1")
            any_command = value == "1"
            continue
        if name not in ("join_timeout", "timeout", "resolve_timeout"):
            others.append(name)
            continue
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"{option}: {name}={value!r} is not a number of seconds; write for example {name}=600"
            ) from None
        require(values[name] > 0, f"{option}: {name}={value} must be above 0 seconds")
    known = "join_timeout, resolve_timeout and any_command"
    ignored = f"{option}: {', '.join(others)}: without effect; outlast's rendezvous knows {known}"
    return values, any_command, ignored if others else None


def _make_folder(path: Path, source: str) -> tuple[Path, ...]:
    """Create a folder to write to; return the created folders, innermost first.

    Blocks: up to 10 s if the file system does not respond.
    """
    remedy = "name another" if source != "the run directory" else "name another with --run-dir"
    named = f"{source}={path}" if source.startswith("-") else f"{source}, {path},"
    try:
        return in_time(path, partial(_make_missing, path, named, remedy), _FOLDER_S)
    except TimeoutError:
        raise ConfigError(f"{named} does not respond within {_FOLDER_S:g} s; check its mount, or {remedy}") from None


def _make_missing(path: Path, named: str, remedy: str) -> tuple[Path, ...]:
    new = tuple(folder for folder in (path, *path.parents) if not folder.exists())
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{ascii(named)[1:-1]} is not UTF-8, as what is written there must be; {remedy}") from None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"{named} is not a folder; {remedy}") from None
    except OSError as error:
        _remove_empty(new)
        raise ConfigError(f"{named} cannot be made ({error.strerror}); {remedy} that is writable") from None
    try:
        probe = path / f".probe-{secrets.token_hex(8)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        _remove_empty(new)
        raise ConfigError(f"{named} is not writable ({error.strerror}); {remedy} that is") from None
    return new


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # not empty, or removed by another process
            folder.rmdir()
