"""``ft_launcher``: the command line of NVIDIA's resiliency extension, translated to that of ``outlast run``.

Both take torchrun's options and ``--ft-<field>`` for the same settings, so only differences are translated: spellings
(``--ft-rank_section_timeouts``, ``--ft-param-...``), names (``--term-timeout``, ``--ft-log-level``), the format of the
config file, and options without a counterpart, which one log line names. Unknown options are passed on, and ``outlast
run`` refuses them. :func:`translate` is pure except for reading the config file.

Batch scripts for ``ft_launcher`` decide by a flag file whether to requeue a job; :func:`settle_exit` sets that file and
the exit code accordingly.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from outlast import env
from outlast.config import Config, FaultToleranceConfig
from outlast.config.base import KNOWN_NAMES, closest, from_mapping, parse_text
from outlast.config.sources import ft_option, load_values
from outlast.decoding import read_file
from outlast.errors import ConfigError, ExitReason
from outlast.integrations.hosted_session import touch_finished_flag
from outlast.launch.run_parser import Given, Option, RunParser, Value, names_of, read_options

log = logging.getLogger(__name__)

CFG_PATH = "FAULT_TOL_CFG_PATH"
"""A config file; a missing one is ignored: NeMo-Run sets the variable without writing the file."""
SETTING = "OUTLAST_FT_"
"""``OUTLAST_FT_RANK_SECTION_TIMEOUTS`` is ``--ft-rank-section-timeouts`` for users who cannot change the command line.
"""
NAME = "ft_launcher"


def _keys_of_sections() -> Iterator[tuple[str, frozenset[str] | None]]:
    for name, hint in typing.get_type_hints(Config).items():
        kinds = [kind for kind in (hint, *typing.get_args(hint)) if is_dataclass(kind)]
        yield name, frozenset(field.name for field in fields(kinds[0])) if kinds else None


_SECTIONS = dict(_keys_of_sections())
"""Keys of outlast's config file, and the keys of each section; ``None``: the key is not a section."""
_FIELDS = tuple(field.name for field in fields(FaultToleranceConfig))
_HINTS = typing.get_type_hints(FaultToleranceConfig)
_OPTION_OF_PATH = "PET_FT_CFG_PATH"
_LEVELS = {
    **{"debug": "debug", "dbg": "debug", "10": "debug", "info": "info", "20": "info", "warning": "warning"},
    **{"warn": "warning", "30": "warning", "error": "error", "40": "error", "critical": "error", "50": "error"},
}
_BY_HEALTH = "set network_interfaces of [health] in a config file"
_NO_EFFECT: Mapping[str, tuple[str, Collection[str]]] = {
    "workload_check_interval": ("a hang is detected when its timeout passes, not at the next check", ()),
    "node_health_check_interval": ("set node_interval of [health] in a config file", ()),
    "restart_check_interval": ("a restart inside the processes is reported, not looked for", ()),
    "enable_nic_monitor": (_BY_HEALTH, ("FALSE",)),
    "pci_topo_file": (_BY_HEALTH, ()),
    "link_down_path_template": (_BY_HEALTH, ()),
    "restart_policy": ("every failure ends the cycle on all nodes", ("ANY-FAILED",)),
    "rank_termination_signal": (
        "a hung worker is ended with SIGKILL",
        ("SIGKILL", "KILL", str(int(signal.SIGKILL)), "SIGNALS.SIGKILL"),
    ),
}
"""The extension's settings without effect here: the replacement, and values that match outlast's behaviour anyway."""
_THEIRS = (
    "--term-timeout",
    "--ft-log-level",
    "--ft-cfg-path",
    *(f"--ft-{name}".replace("_", "-") for name in _NO_EFFECT),
)
"""The extension's options with a value that ``outlast run`` has under another name, or not at all."""
_OTHER_NAMES = {
    "--fault-tol-cfg-path": "--ft-cfg-path",
    "--restart-policy": "--ft-restart-policy",
    "--ignore-missing-fault-tol-cfg": "--ft-ignore-missing-cfg",
}


def _names() -> dict[str, Option]:
    """Return the options of ``outlast run`` and of the extension, by every name."""
    theirs = [Option(name, group="", text="", value="VALUE", kind=Value()) for name in _THEIRS]
    switch = Option("--ft-ignore-missing-cfg", group="", text="")
    names = names_of(RunParser().options) | {one.long_name: one for one in (*theirs, switch)}
    names |= {other: names[name] for other, name in _OTHER_NAMES.items()}
    old = {name.replace("--ft-", "--ft-param-"): option for name, option in names.items() if name.startswith("--ft-")}
    return names | old


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A command line of ``outlast run``, and notes to log."""

    arguments: tuple[str, ...]
    notes: tuple[str, ...] = ()


class _Line:
    """State of a translation."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.notes: list[str] = []
        self.dropped: dict[str, str] = {}
        self.path: tuple[str, str] | None = None
        """The config file, and its source."""
        self.may_miss = False

    def add(self, given: Given) -> None:
        """Translate one option; unknown options are kept.

        Raises:
            ConfigError: A value is missing or invalid.
        """
        option = given.options[0] if len(given.options) == 1 else None
        setting = str(option.name).removeprefix("ft_") if option is not None else ""
        if setting == "ignore_missing_cfg":
            self.may_miss = True
        elif option is None or option.long_name not in _THEIRS:
            first = re.sub("^--ft[-_]param[-_]", "--ft-", given.words[0])
            *words, last = (first, *given.words[1:])
            self.words += [*words, with_none_written(last) if setting == "rank_section_timeouts" else last]
        elif not given.value:
            fault = "lacks its value" if given.value is None else "is empty"
            raise ConfigError(f"{given.name} {fault}; write {given.name}=VALUE, or leave it out")
        elif setting == "term_timeout":
            grace_s = parse_text(_HINTS["shutdown_grace"], given.value, where=given.name)
            self.words.append(_as_option("shutdown_grace", grace_s, given.name))
        elif setting == "cfg_path":
            self.path = given.value, given.name
        elif setting == "log_level":
            self.words.append(f"--log-level={_level(given.value, given.name)}")
        else:
            self.leave_out(setting, given.name, given.value)

    def leave_out(self, setting: str, name: str, value: str) -> None:
        """Note an option without a counterpart, unless its value matches outlast's behaviour anyway."""
        instead, as_here = _NO_EFFECT[setting]
        if value.strip().upper() not in as_here:
            self.dropped[name] = instead


def translate(argv: Sequence[str], environment: Mapping[str, str]) -> Translation:
    """Translate a command line of ``ft_launcher`` to the arguments of ``outlast run``.

    Later sources take precedence: the config file, the environment (``OUTLAST_FT_...``), the command line.

    Args:
        argv: The arguments of ``ft_launcher``.
        environment: The process's environment.

    Raises:
        ConfigError: A value or the config file is invalid. Unknown options are left to ``outlast run``.
    """
    given, script = read_options(_names(), argv)
    values = {str(one.options[0].name): one.value for one in given if len(one.options) == 1}
    line = _Line()
    for one in given:
        is_run_id = [option.name for option in one.options] == ["rdzv_id"]
        if not (is_run_id and _is_drawn_for_each_start(values, environment)):
            line.add(one)
    typed, line.words = line.words, []
    _read_config_file(line, environment)
    _read_environment(line, environment)
    if line.dropped:
        listed = "; ".join(f"{name} ({why})" for name, why in line.dropped.items())
        line.notes.append(f"{NAME}: without effect here: {listed}")
    return Translation(arguments=(*line.words, *typed, *script), notes=tuple(line.notes))


def _is_drawn_for_each_start(values: Mapping[str, str | None], environment: Mapping[str, str]) -> bool:
    """Return whether the run id is a random number: NeMo-Run draws one of 10000 for each start.

    Another start with the same number would count as a job of the same run, which may have finished. In a Slurm job the
    number stays the same when the job is requeued, and its folder is separate.
    """
    is_one_node = (values.get("nnodes") or environment.get("PET_NNODES", "1")) in ("1", "1:1")
    is_number = str(values["rdzv_id"]).isdigit()
    return is_number and is_one_node and "run_dir" not in values and "SLURM_JOB_ID" not in environment


def _read_config_file(line: _Line, environment: Mapping[str, str]) -> None:
    named = line.path or next(
        ((environment[name], name) for name in (_OPTION_OF_PATH, CFG_PATH) if environment.get(name)), None
    )
    if named is None:
        return
    path, source = named
    if not os.path.exists(path) and (line.may_miss or source == CFG_PATH):
        line.notes.append(f"{source}: there is no {path}; it is not read")
        return
    values, _ = load_values(path)
    section = find_section(values)
    if _is_ours(path, values):
        line.words.append(f"--config={path}")  # outlast run checks it
        return
    if section is None:
        line.notes.append(f"{NAME}: {path} has no section fault_tolerance; nothing of it is used")
        return
    if others := sorted(values.keys() & _SECTIONS.keys() - {"fault_tolerance"}):
        listed = ", ".join(others)
        line.notes.append(f"{NAME}: {path}: only its section fault_tolerance is used; not a setting here: {listed}")
    given: dict[str, Any] = {}
    unknown = []
    for key, value in section.items():
        name = str(key).replace("-", "_")
        if name == "log_level":
            line.words.append(f"--log-level={_level(str(value), f'{path}: log_level')}")
        elif name in _NO_EFFECT:
            if value is not None:
                line.leave_out(name, f"{name} of {path}", str(value))
        elif name in _FIELDS:
            given[name] = value
        else:
            unknown.append(name)
    if unknown:
        hints = [f"{name} (or {near}?)" if (near := closest(name, _FIELDS, likeness=0.8)) else name for name in unknown]
        line.notes.append(f"{NAME}: {path} has settings that outlast does not know: {', '.join(hints)}")
    checked = from_mapping(FaultToleranceConfig, given, where=path)
    line.words += [_as_option(name, getattr(checked, name), path) for name in given]


def _is_ours(path: str, values: Mapping[str, Any]) -> bool:
    """Return whether a config file is outlast's: it has more than fault tolerance, and only keys that outlast knows.

    A script's own file may have a section ``fault_tolerance`` next to its own ``checkpoint``. The extension's is YAML.
    """
    if Path(path).suffix.lower() not in (".yaml", ".yml"):
        return True
    known: Mapping[str, Collection[str] | None] = {**_SECTIONS, **dict.fromkeys(KNOWN_NAMES.keys() - _SECTIONS.keys())}

    def is_known(name: str, value: Any) -> bool:
        inner = known.get(name, ())
        keys = {str(key).replace("-", "_") for key in value} if isinstance(value, Mapping) else set()
        return name in known and (inner is None or keys <= set(inner))

    named = {str(key).replace("-", "_"): value for key, value in values.items()}
    return named.keys() != {"fault_tolerance"} and all(is_known(name, value) for name, value in named.items())


def with_none_written(timeouts: str) -> str:
    """Return timeouts of sections, ``name:seconds,...``, with ``none`` for a missing number."""
    return re.sub(r":\s*(?=,|$)", ":none", timeouts)


def _read_environment(line: _Line, environment: Mapping[str, str]) -> None:
    for variable in sorted(environment):
        if not variable.startswith(SETTING) or not environment[variable]:
            continue
        name = variable.removeprefix(SETTING).lower()
        if name not in _FIELDS:
            near = closest(name, _FIELDS, likeness=0.8)
            hint = f"did you mean {SETTING}{near.upper()}?" if near else "unset it"
            raise ConfigError(f"{variable}: there is no such setting; {hint}")
        text = environment[variable]
        if name == "rank_section_timeouts":
            text = with_none_written(text)
        value = parse_text(_HINTS[name], text, where=variable)
        line.words.append(_as_option(name, value, variable))


def find_section(values: Any) -> Mapping[str, Any] | None:
    """Return the section ``fault_tolerance`` of a config file, at the top or within another section or list."""
    if isinstance(values, Mapping):
        if isinstance(section := values.get("fault_tolerance"), Mapping):
            return section
        inner: Sequence[Any] = tuple(values.values())
    else:
        inner = values if isinstance(values, list) else ()
    return next((section for value in inner if (section := find_section(value)) is not None), None)


def as_option_value(name: str, value: Any, where: str) -> str:
    """Return a fault tolerance setting as the text of its option.

    Raises:
        ConfigError: A section's name cannot be written in that form.
    """
    if isinstance(value, Mapping):
        for key in value:
            if re.search(r"[:,=]|^\s|\s$", key):
                raise ConfigError(f"{where}: {name}: section name {key!r} has one of ':,='; rename the section")
        return ",".join(f"{key}:{'none' if seconds is None else seconds}" for key, seconds in value.items())
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_option(name: str, value: Any, where: str) -> str:
    return f"{ft_option(name)}={as_option_value(name, value, where)}"


def _level(text: str, name: str) -> str:
    level = _LEVELS.get(text.strip().lower())
    if level is None:
        raise ConfigError(f"{name}={text} is not a log level; write debug, info, warning or error")
    return level


USAGE = f"""\
usage: {NAME} [OPTION]... SCRIPT [ARGUMENT]...

The command line of NVIDIA's resiliency extension, for outlast run: it takes
torchrun's options and --ft-* as that launcher does, and then is outlast run.

examples:
  {NAME} --nproc-per-node=8 --ft-rank_heartbeat_timeout=300 train.py
  {NAME} --rdzv_backend=c10d --rdzv_endpoint=$HOST:$PORT --nnodes=2 \\
      --nproc-per-node=8 --ft-rank_out_of_section_timeout=300 \\
      --ft-rank_section_timeouts=setup:600,step:180,checkpointing:420 train.py
  {NAME} --ft-cfg-path=ft.yaml --nproc-per-node=8 train.py

Options that differ from outlast run:
  --ft-cfg-path FILE    YAML with a section fault_tolerance, at the top or
                        within another; also --fault-tol-cfg-path, {CFG_PATH}.
  --ft-param-NAME       The same as --ft-NAME.
  --ft-log-level LEVEL  --log-level.
  --term-timeout SECONDS
                        --ft-shutdown-grace.
  --ignore-missing-fault-tol-cfg
                        A config file that is not there is none.
Without effect here, which one line at the start names:
  --ft-workload-check-interval, --ft-node-health-check-interval,
  --ft-restart-check-interval, --ft-enable-nic-monitor, --ft-pci-topo-file,
  --ft-link-down-path-template, --ft-restart-policy=min-healthy
All others: outlast run --help.
"""


def settle_exit(code: int, *, others_may_continue: bool = False) -> int:
    """Set the flag file for a batch script of ``ft_launcher``; return the exit code for it.

    Such a script requeues the job unless the flag file exists, and counts it as failed unless the exit code is 0. So
    the file is created for a finished run, and for failures that another job cannot fix (17, 19, 93). A job that was
    shut down and can be resumed (75) is requeued; in Slurm its exit code becomes 0, since it would count as failed
    otherwise.

    Args:
        code: The job's exit code.
        others_may_continue: The job can continue without this node, so an unhealthy node alone does not end it.
    """
    flag = env.finished_flag_file()
    if flag is None:
        return code
    final = {ExitReason.FINISHED, ExitReason.FAILED_VALIDATION, ExitReason.NO_PROGRESS}
    if not others_may_continue:
        final.add(ExitReason.UNHEALTHY_NODE)
    if code in final:
        touch_finished_flag()
        if os.path.exists(flag):
            log.info("%s made: this job is not to go back to the queue (exit code %d)", flag, code)
    elif code == ExitReason.PREEMPTED and "SLURM_JOB_ID" in env.environ():
        log.info("exit code 75 becomes 0, without %s: the job goes back to the queue, and counts as no failure", flag)
        return int(ExitReason.FINISHED)
    return code


_MARK = "# Written by `outlast shims`; do not edit."


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShim:
    """A program that ``outlast shims`` has written."""

    path: str
    changed: bool
    """The file was created or replaced."""


def render_shim(python: str | None = None) -> str:
    """Return the program ``ft_launcher``.

    Args:
        python: The interpreter with outlast; ``None`` = this one.
    """
    code = "from outlast.cli.shims import ft_launcher; ft_launcher()"
    command = shlex.join([python or sys.executable, "-P", "-c", code])
    return f'#!/bin/sh\n{_MARK}\nexec {command} "$@"\n'


def write_shims(folder: str | os.PathLike[str]) -> tuple[WrittenShim, ...]:
    """Write ``ft_launcher`` into a folder, for the front of ``PATH``; an identical file is kept.

    Raises:
        ConfigError: Another program has that name, or the folder cannot be written.
    """
    from outlast.runtime.files import write_atomically

    path, text = Path(folder).absolute() / NAME, render_shim()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = read_file(path, follows_links=True) if os.path.lexists(path) else None
        if there is not None and _MARK.encode() not in there[:200]:
            raise ConfigError(f"{path} is another program; name another folder, or move it away")
        changed = there != text.encode() or not os.access(path, os.X_OK)
        if changed:
            write_atomically(path, text.encode(), mode=0o755)
            path.chmod(path.stat().st_mode | 0o111)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror or error}); name another folder") from None
    return (WrittenShim(path=str(path), changed=changed),)
