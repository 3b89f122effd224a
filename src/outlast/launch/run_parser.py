"""The command line of ``outlast run``: one table of options for parsing, help, completion and docs.

The table contains the options of the installed torch's ``torchrun``, those of :class:`LauncherSettings`, and one
``--ft-<field>`` per field of :class:`FaultToleranceConfig`. Importing ``torch.distributed.run`` would delay ``--help``
and errors by a second, so the function that lists torchrun's options is compiled from torch's source and run with a
stand-in parser; if that fails, torch is imported.

Scripts for torchrun rely on three habits of argparse that click lacks: unambiguous abbreviations, ``_`` for ``-`` in
names, and ``PET_<NAME>`` environment variables. :func:`read_options` handles the first two, and click the rest.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.shell_completion import CompletionItem

from outlast import env
from outlast.config import FaultToleranceConfig
from outlast.config.base import FieldDoc, closest, describe_fields, parse_text, strip_none
from outlast.config.sources import ft_option
from outlast.errors import ConfigError

log = logging.getLogger(__name__)

_RUN, _NODES, _RESTARTS, _FAULTS = "run", "spares and nodes", "restarts", "fault tolerance"
_HEALTH, _OUTPUT, _SIMULATION, _OTHERS = "health", "output", "fault simulation", "torchrun's other options"
_GROUPS = {
    _RUN: "the workers of this node, and where the run is stored",
    _NODES: "the nodes that train, and the spares that replace lost ones",
    _RESTARTS: "number of restarts, and termination of workers",
    _FAULTS: "monitoring and timeouts; these options cannot be abbreviated",
    _HEALTH: "",
    _OUTPUT: "",
    _SIMULATION: "inject a fault, for tests; not in production",
    _OTHERS: "as the installed torch describes them",
}
"""The sections of the help, in this order."""


class Value(click.ParamType):  # type: ignore[type-arg]
    """The value of an option: text that is converted to the type of a setting.

    Args:
        hint: The setting's type, or a function that parses the text.
        choices: The valid values.
        words: Values for shell completion; others are valid, too.
        path: ``file`` or ``dir``, for shell completion.
    """

    name = "value"

    def __init__(
        self, hint: Any = str, *, choices: Sequence[str] = (), words: Sequence[str] = (), path: str | None = None
    ) -> None:
        self._hint, self._choices, self._words, self._path = hint, choices, words or choices, path

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the setting's value.

        Raises:
            ConfigError: The text is not valid for the type; the option is named as typed.
        """
        if not isinstance(value, str):
            return value
        if isinstance(self._hint, types.FunctionType):
            return self._hint(value)
        name = ctx.obj.name(param.name) if param is not None and ctx is not None else "value"
        if self._choices and value not in self._choices:
            raise ConfigError(f"{name}={value!r} is none of {', '.join(self._choices)}; write one of these")
        return parse_text(self._hint, value, where=name)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the completions of a value, or let the shell complete a path."""
        if self._path is not None:
            return [CompletionItem(incomplete, type=self._path)]
        return [CompletionItem(word) for word in self._words if word.startswith(incomplete)]


class Option(click.Option):
    """One option of ``outlast run``, spelled as in the help.

    Args:
        names: Its names, with dashes.
        group: The section of the help.
        text: Its help.
        value: Placeholder of its value in the help; ``None``: a switch, which accepts a truth value after ``=``.
        kind: Type of the value.
        default: The value if the option is not given.
        variable: Environment variable with the value if the command line has none.
        is_torchruns: Has priority if an abbreviation also matches other options.
    """

    def __init__(
        self,
        *names: str,
        group: str,
        text: str,
        value: str | None = None,
        kind: Value | None = None,
        default: Any = None,
        variable: str | None = None,
        is_torchruns: bool = False,
    ) -> None:
        is_switch = value is None
        super().__init__(names, is_flag=is_switch, type=click.BOOL if is_switch else kind, default=default, help=text)
        self.group, self.value, self.variable, self.is_torchruns = group, value, variable, is_torchruns

    @property
    def long_name(self) -> str:
        return next(name for name in self.opts if name.startswith("--"))

    @property
    def usage(self) -> str:
        """The names and the value's placeholder for the help."""
        names = ", ".join(sorted(self.opts, key=len))
        return names if self.value is None else f"{names} {self.value}"


_ADAPTED: Mapping[str, tuple[str, str | None, str]] = {
    "nproc_per_node": (_RUN, "N", "Workers on this node: a number, auto, gpu, xpu or cpu."),
    "rdzv_id": (_RUN, "ID", "Name of the run, by which a later job resumes it; default a new name."),
    "nnodes": (_NODES, "N|MIN:MAX", "Nodes; of MIN:MAX, MIN train and the others wait as spares; default 1."),
    "rdzv_endpoint": (
        _NODES,
        "HOST:PORT,...",
        "Where the agents of several nodes meet: at the first endpoint that responds.",
    ),
    "max_restarts": (
        *(_RESTARTS, "N"),
        "Restarts in a row without progress in between (torchrun: in all); default 3, more for over 4096 nodes.",
    ),
    "rdzv_backend": (_OTHERS, None, "static, c10d and outlast all mean outlast's own rendezvous."),
    "rdzv_conf": (
        *(_OTHERS, None),
        "join_timeout=SECONDS: how long agents wait for each other; default 600. resolve_timeout=SECONDS: how long no "
        "host of --rdzv-endpoint may be known at the start; default 0. any_command=1: the agents' commands may differ.",
    ),
    "standalone": (_OTHERS, None, "One node, alone: no endpoint is needed, and the run has a new name."),
    "monitor_interval": (_OTHERS, None, "Without effect: a worker's exit is detected at once."),
    "start_method": (_OTHERS, None, "Without effect: see --no-warm-start."),
    "node_rank": (_OTHERS, None, "Slot that this node should get, from 0; default the order in which the nodes join."),
    "master_addr": (
        *(_OTHERS, None),
        "Host at which agents meet where --rdzv-endpoint is not given; default 127.0.0.1.",
    ),
    "master_port": (_OTHERS, None, "Port at which agents meet where --rdzv-endpoint is not given; default 29500."),
    "local_addr": (
        *(_OTHERS, None),
        "Address under which the other nodes reach this one; default the one towards --rdzv-endpoint.",
    ),
    "log_dir": (*(_OTHERS, "DIR"), ""),
    "print_completion": (_OTHERS, None, "Refused: it completes torchrun alone; see outlast completion --help."),
    "shutdown_timeout": (_OTHERS, None, "The same as --workers-stop-timeout, and before it."),
}
"""torchrun's options with another meaning here: section, placeholder and help by attribute."""
_UNSET = ("max_restarts", "node_rank", "master_port")
"""torchrun's options whose default here depends on others, or differs from the same value if given."""
_NEWER: Mapping[str, Any] = {
    "duplicate_stdout_filters": (),
    "duplicate_stderr_filters": (),
    "numa_binding": None,
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "shutdown_timeout": None,
    "virtual_local_rank": False,
}
"""torchrun's options that torch 2.8 lacks, with the values of options that are not given."""


def _option(group: str, value: str | None = None, default: Any = None) -> Any:
    metadata = {"group": group, "value": value}
    return dataclasses.field(default=False if value is None else default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSettings:
    """The options that ``outlast run`` has in addition to torchrun's; the text under each is its help."""

    run_dir: str | None = _option(_RUN, "DIR")
    """Run directory (journal, stacks, ladder.json); default outlast-runs/ID."""

    config: str | None = _option(_RUN, "FILE")
    """The run's settings: [fault_tolerance] has a lower priority than the --ft-* options and a higher one than the
    script's own config; tiers and [health] limits are checked before this node joins; run_dir is that of --run-dir."""

    resume_from_other_run: bool = _option(_RUN)
    """Resume from checkpoints that another run saved, in this launch; as checkpoint.resume_from_other_run."""

    preload: str = _option(_RUN, "MODULE,...", default="")
    """Modules to import before the workers are forked, in addition to torch."""

    no_warm_start: bool = _option(_RUN)
    """Start workers as fresh interpreters instead of forking them from a process that has imported torch."""

    node_name: str | None = _option(_NODES, "NAME")
    """Name of this node, unique in the job; default Slurm's, without it the host's."""

    run_key_file: str | None = _option(_NODES, "FILE")
    """File with the run's secret, at least 16 bytes, by which its processes authenticate each other; default
    OUTLAST_RUN_KEY, else run.key of a shared run directory, else derived from the run's id."""

    interface: str | None = _option(_NODES, "NAME,...")
    """Network interface at which other nodes reach this one, the first existing one of the list; default
    OUTLAST_INTERFACE, else the one towards --rdzv-endpoint."""

    port_range: str | None = _option(_NODES, "LOW-HIGH")
    """Ports at which the processes of this node listen, in addition to the port of --rdzv-endpoint; default
    OUTLAST_PORT_RANGE, else any."""

    max_restarts_total: int | None = _option(_RESTARTS, "N")
    """Restarts in the whole run, with or without progress; default no limit."""

    restart_grace: float = _option(_RESTARTS, "SECONDS", default=0.0)
    """Seconds between SIGTERM and SIGKILL for the survivors of a failed cycle; default 0: SIGKILL at once."""

    workers_stop_timeout: float = _option(_RESTARTS, "SECONDS", default=15.0)
    """Seconds between SIGTERM and SIGKILL at an orderly end other than a preemption; default 15."""

    no_health_check: bool = _option(_HEALTH)
    """Run no health checks of this node, before it joins or later."""

    log_level: str | None = _option(_OUTPUT, "LEVEL")
    """Minimum level of outlast's log lines, in all processes of this node: debug, info, warning or error; default
    OUTLAST_LOG_LEVEL, else info."""

    metrics_port: int | None = _option(_OUTPUT, "PORT")
    """Serve this node's metrics for Prometheus at this port, over HTTP; 0 = a free port, which is logged; default
    OUTLAST_METRICS_PORT, else no metrics."""

    metrics_address: str | None = _option(_OUTPUT, "ADDRESS")
    """IP address at which --metrics-port listens; default OUTLAST_METRICS_ADDRESS, else 127.0.0.1, which other machines
    cannot reach."""

    metrics_linger: float = _option(_OUTPUT, "SECONDS", default=0.0)
    """Seconds for which --metrics-port may stay open after the job's end, until it has been scraped once with the exit
    code; not after a shutdown request; default 0."""

    quiet: bool = _option(_OUTPUT)
    """Log warnings, errors and the last line only: --log-level=warning."""


_FT_GROUPS = {
    "min_nodes": _NODES,
    "max_node_faults": _NODES,
    "node_heartbeat_timeout": _NODES,
    "max_no_progress_cycles": _RESTARTS,
    "max_restart_delay": _RESTARTS,
    "shutdown_grace": _RESTARTS,
    "gpu_memory_reclaim_timeout": _RESTARTS,
    "gpu_memory_tolerance_mb": _RESTARTS,
    "gpu_memory_poll_interval": _RESTARTS,
}
_WORDS = {
    "nproc_per_node": ("auto", "gpu", "cpu", "xpu"),
    "rdzv_backend": ("c10d", "static", "outlast"),
    "simulated_fault_type": ("rank_hung", "rank_killed", "random"),
    "rank_termination_signal": ("SIGKILL", "SIGTERM", "SIGINT", "SIGABRT"),
}
"""Values for shell completion."""
_PATHS = {"FILE": "file", "DIR": "dir"}
_OTHER_NAMES = {"--health-config": "--config", "--ft-cfg-path": "--config"}
"""Names that the help omits; the second is that of ft_launcher."""
_SCRIPTS_OWN = frozenset(
    (
        "config",
        "help",
        "local-addr",
        "log-dir",
        "log-level",
        "module",
        "preload",
        "quiet",
        "role",
        "run-dir",
        "run-path",
    )
)
"""Options that scripts commonly have themselves: after the script they are not reported as misplaced."""
_USAGE = """\
usage: outlast run [OPTION]... SCRIPT [ARGUMENT]...

Launch a training script on this node and keep it alive. SCRIPT gets all
ARGUMENTs; options of outlast stand before it.

examples:
  outlast run --nproc-per-node=8 train.py --lr 3e-4
  outlast run --nproc-per-node=8 --config=outlast.toml \\
      --ft-rank-section-timeouts=setup:600,step:180,checkpointing:420 train.py
  outlast run --nnodes=4:5 --nproc-per-node=8 --rdzv-endpoint=$HEAD:29400 \\
      --rdzv-id=gpt --run-dir=/shared/runs/gpt train.py

The third line is given on five nodes: four train, and one waits as a spare.
Options may be abbreviated, other than --ft-*; torchrun's environment variables
(PET_NNODES, ...) count.
"""


@dataclass(frozen=True, slots=True)
class Given:
    """One option of a command line, as typed."""

    name: str
    value: str | None
    """``None``: a switch without a truth value, or a missing value."""
    words: tuple[str, ...]
    options: tuple[Option, ...]
    """The options that the name may mean: one, none if unknown, or several if ambiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """A parsed command line of ``outlast run``; only the types of its values are checked."""

    args: SimpleNamespace
    """Every option's value, by attribute."""
    typed: Mapping[str, str]
    """The option as typed, or its environment variable, by attribute."""
    texts: Mapping[str, str | None]
    """The value as typed, by attribute; ``None``: a switch without a value."""
    strays: tuple[str, ...]
    """Options of ``outlast run`` among the script's arguments."""

    def name(self, attribute: str) -> str:
        """Return an option's name: as typed, otherwise as in the help."""
        return self.typed.get(attribute) or f"--{attribute.replace('_', '-')}"

    @property
    def fault_tolerance(self) -> dict[str, Any]:
        """The given ``--ft-*`` options: value by field."""
        return {name[3:]: getattr(self.args, name) for name in self.typed if name.startswith("ft_")}

    @property
    def fault_tolerance_typed(self) -> dict[str, str]:
        """The same as typed, such as ``--ft-safety-factor=3``, by field."""
        written = {name: f"={text}" for name, text in self.texts.items() if text is not None}
        return {name[3:]: typed + written.get(name, "") for name, typed in self.typed.items() if name[:3] == "ft_"}

    @property
    def hint(self) -> str | None:
        """A hint at options after the script, which the script receives."""
        return hint_at(self.strays, self.args.training_script, "outlast run")


@dataclass(frozen=True, slots=True)
class OptionGroup:
    title: str
    text: str
    options: tuple[Option, ...]


class RunParser(click.Command):
    """The command ``outlast run``; parses only: the context's object is a :class:`RunCommand`."""

    def __init__(self) -> None:
        script = click.Argument(["training_script"], required=False, type=Value(path="file"))
        rest = click.Argument(["training_script_args"], nargs=-1, type=Value(path="file"))
        settings = {"ignore_unknown_options": True, "allow_interspersed_args": False}
        self.options = _list_options()
        super().__init__("run", params=[*self.options, script, rest], add_help_option=False, context_settings=settings)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse a command line.

        Raises:
            ConfigError: An option is unknown, a value is not valid, or the script is missing.
        """
        given, script = read_options(names_of(self.options), args)
        known = [one for one in given if len(one.options) == 1 and (one.value is not None or one.options[0].is_flag)]
        typed, texts = dict[str, str](), dict[str, str | None]()
        for one in known:
            name = str(one.options[0].name)
            typed.pop(name, None)
            typed[name], texts[name] = one.name, one.value
        if "help" in typed and not ctx.resilient_parsing:
            click.echo(self.get_help(ctx))
            ctx.exit()
        if not ctx.resilient_parsing:
            self._refuse(given, script)
        variables = {str(option.name): option.variable for option in self.options if option.variable}
        values = {name: env.environ().get(variable) for name, variable in variables.items() if name not in typed}
        from_environment = {name: value for name, value in values.items() if value}
        ctx.obj = command = RunCommand(
            args=SimpleNamespace(**_NEWER),
            typed={**{name: variables[name] for name in from_environment}, **typed},
            texts={**from_environment, **texts},
            strays=self._find_strays(script[1:]),
        )
        words = script[2:] if script[1:2] == ["--"] else script[1:]
        found: dict[str, Any] = {"training_script_args": tuple(words)}
        found |= {"training_script": script[0]} if script else {}
        for option in self.options:
            if (name := str(option.name)) in command.texts:
                text = command.texts[name]
                is_bare = option.is_flag and text is None
                found[name] = is_bare or (parse_text(bool, text, where=command.name(name)) if option.is_flag else text)
        for param in self.get_params(ctx):
            param.handle_parse_result(ctx, found, [])
        ctx.params.update(training_script=script[0] if script else None, training_script_args=words)
        vars(command.args).update(ctx.params)
        ctx.args = list(args)
        return ctx.args

    def _find_strays(self, words: Iterable[str]) -> tuple[str, ...]:
        names = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", words)]
        ours = {name for name in names_of(self.options) if name.startswith("--")}
        plain = [name.replace("_", "-") for name in names]
        return tuple(
            dict.fromkeys(n for n, p in zip(names, plain, strict=True) if p in ours and p[2:] not in _SCRIPTS_OWN)
        )

    def _refuse(self, given: Sequence[Given], script: Sequence[str]) -> None:
        """Raise for the first mistake, in the words that were typed."""
        for one in given:
            if not one.options:
                raise ConfigError(f"unknown option {one.name}; {self._nearest(one.name)}")
            if len(one.options) > 1:
                names = " or ".join(sorted(option.long_name for option in one.options))
                raise ConfigError(f"{one.name} may be {names}; write it in full")
            option = one.options[0]
            if option.name == "print_completion":
                raise ConfigError(
                    f"{one.name} prints what completes torchrun, not outlast; write: outlast completion bash"
                )
            if one.value is None and not option.is_flag:
                raise ConfigError(f"{one.name} lacks its value; write {one.name}={option.value}")
        if script:
            return
        example = "for example: outlast run --nproc-per-node=2 train.py"
        if given and len(given[-1].words) > 1:
            raise ConfigError(
                f"there is no script to run: {given[-1].value!r} is taken for the value of {given[-1].name}; name the "
                f"script after it, {example}"
            )
        raise ConfigError(f"there is no script to run; name one after the options, {example}")

    def _nearest(self, name: str) -> str:
        known = [name.lstrip("-") for name in names_of(self.options) if name.startswith("--")]
        close = closest(name.lstrip("-").replace("_", "-"), known, likeness=0.65)
        return f"did you mean --{close}?" if close else "see outlast run --help"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the options that begin with ``incomplete``, with its ``_`` kept; none after the script."""
        if ctx.params["training_script"] is not None:
            return []
        items = super().shell_complete(ctx, incomplete.replace("_", "-"))
        if "_" in incomplete:
            rests = [str(item.value)[len(incomplete) :].replace("-", "_") for item in items]
            return [CompletionItem(incomplete + rest) for rest in rests]
        return items

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the usage and all options."""
        formatter.write(_USAGE)
        for group in describe_options(self.options):
            with formatter.section(group.title):
                if group.text:
                    formatter.write_text(group.text)
                    formatter.write_paragraph()
                for option in group.options:
                    lines = textwrap.wrap(str(option.help), formatter.width - 24, break_on_hyphens=False)
                    begin = f"  {option.usage}"
                    indented = [f"{'':24}{line}" for line in lines]
                    fits = len(begin) < 23
                    formatter.write(
                        "\n".join([f"{begin:<24}{lines[0]}", *indented[1:]] if fits else [begin, *indented])
                    )
                    formatter.write("\n")


def parse_command(argv: Sequence[str]) -> RunCommand:
    """Parse the arguments of ``outlast run``.

    Raises:
        ConfigError: An option is unknown, a value is not valid, or the script is missing.
    """
    command: RunCommand = RunParser().make_context("outlast run", list(argv)).obj
    return command


def given_options(argv: Sequence[str]) -> dict[str, str]:
    """Return the options given on a command line as typed, by attribute; without the script's own.

    Raises:
        ConfigError: As :func:`parse_command`.
    """
    return {name: typed for name, typed in parse_command(argv).typed.items() if typed.startswith("-")}


def describe_options(options: Iterable[Option] | None = None) -> tuple[OptionGroup, ...]:
    """Return the options as the help groups them; torchrun's other options come last."""
    listed = _list_options() if options is None else tuple(options)
    return tuple(
        OptionGroup(title, text, tuple(option for option in listed if option.group == title))
        for title, text in _GROUPS.items()
    )


def names_of(options: Iterable[Option]) -> dict[str, Option]:
    """Return all options by name, including names that the help omits."""
    names = {name: option for option in options for name in option.opts}
    return names | {other: names[name] for other, name in _OTHER_NAMES.items() if name in names}


def find_options(names: Mapping[str, Option], name: str) -> tuple[Option, ...]:
    """Return the options that a name or abbreviation may mean: one, several, or none if unknown.

    Abbreviations of torchrun's options keep their meaning, whatever options outlast adds. Names that begin with
    ``--ft`` cannot be abbreviated: many begin with the same words, and a shortened one could mean another timeout.
    """
    name = name.replace("_", "-")
    if name in names:
        return (names[name],)
    if not name.startswith("--") or name.startswith("--ft"):
        return ()
    found = {option: None for one, option in names.items() if one.startswith(name) and not one.startswith("--ft-")}
    torchruns = tuple(option for option in found if option.is_torchruns)
    return torchruns if len(torchruns) == 1 else tuple(found)


def read_options(names: Mapping[str, Option], argv: Sequence[str]) -> tuple[list[Given], list[str]]:
    """Return the options before the script, and the words from the script on."""
    given, at = list[Given](), 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] not in ("-", "--"):
        word, following = argv[at], argv[at + 1 : at + 2]
        name, equals, text = word.partition("=")
        found = find_options(names, name)
        if not found and word[1] != "-" and word[:2] in names:  # -t3
            name, equals, text, found = word[:2], "=", word[2:], (names[word[:2]],)
        takes_next = len(found) == 1 and not found[0].is_flag and not equals
        if following and re.match(r"-[^\d.]", following[0]):  # the next word is an option
            takes_next = False
        words = (word, *following) if takes_next else (word,)
        value = text if equals else following[0] if takes_next and following else None
        given.append(Given(name, value, words, found))
        at += len(words)
    return given, list(argv[at + 1 :] if argv[at : at + 1] == ["--"] else argv[at:])


def hint_at(strays: Sequence[str], script: str, command: str) -> str | None:
    """Return a hint at options after the script; ``None``: there are none.

    Args:
        strays: The options as typed.
        script: The training script.
        command: The command that they may be meant for.
    """
    if not strays:
        return None
    names = " and ".join(filter(None, (", ".join(strays[:-1]), strays[-1])))
    stands, it, is_meant = ("stands", "it", "it is") if len(strays) == 1 else ("stand", "them", "they are")
    return (
        f"{names} {stands} after the script, so the script gets {it}; put {it} before {script} if {is_meant} meant for "
        f"{command}"
    )


def _list_options() -> tuple[Option, ...]:
    ours, types_ = describe_fields(LauncherSettings), typing.get_type_hints(LauncherSettings)
    metadata = {field.name: field.metadata for field in dataclasses.fields(LauncherSettings)}
    hints = typing.get_type_hints(FaultToleranceConfig)
    return (
        *list_torchrun_options(),
        *(_from_field(one, strip_none(types_[one.name]), **metadata[one.name]) for one in ours),
        Option("-h", "--help", group=_RUN, text="Show this help.", is_torchruns=True),
        *(_from_ft_field(one, hints[one.name]) for one in describe_fields(FaultToleranceConfig)),
    )


def _from_field(field: FieldDoc, hint: Any, *, group: str, value: str | None) -> Option:
    kind = Value(hint, path=_PATHS.get(value or ""))
    name = f"--{field.name.replace('_', '-')}"
    return Option(name, group=group, text=field.text, value=value, kind=kind, default=field.default)


def _from_ft_field(field: FieldDoc, hint: Any) -> Option:
    group = _SIMULATION if "simulate" in field.name else _FT_GROUPS.get(field.name, _FAULTS)
    default = "none" if field.default in (None, {}) else str(field.default)
    text = f"{field.text.replace('``', '').rstrip('.')} (default: {default})"
    value = "N" if "int" in field.type_name else "NAME"
    if "Mapping" in field.type_name:
        value = "NAME:SECONDS,..."
    elif "float" in field.type_name:
        value = {"factor": "FACTOR", "mb": "MIB"}.get(field.name.rpartition("_")[2], "SECONDS")
    kind = Value(hint, words=_WORDS.get(field.name, ()))
    is_switch = field.type_name == "bool"
    return Option(ft_option(field.name), group=group, text=text, value=None if is_switch else value, kind=kind)


def list_torchrun_options() -> tuple[Option, ...]:
    """Return every option of the installed ``torchrun``."""
    found: list[Option] = []

    def add_argument(
        *names: str,
        action: str = "",
        type: Any = str,
        default: Any = None,
        choices: Iterable[str] | None = None,
        help: str = "",
        nargs: object = None,
    ) -> None:
        if not names[0].startswith("-"):
            return
        attribute = next(name for name in names if name.startswith("--"))[2:].replace("-", "_")
        group, value, text = _ADAPTED.get(attribute, (_OTHERS, None, ""))
        words = tuple(choices or ())
        found.append(
            Option(
                *(name for name in names if "_" not in name),
                group=group,
                text=text or help,
                value=None if action == "check_env" else value or "|".join(words) or attribute.upper(),
                kind=Value(type, choices=words, words=_WORDS.get(attribute, ()), path=_PATHS.get(value or "")),
                default=False if action == "check_env" else None if attribute in _UNSET else default,
                variable=f"PET_{attribute.upper()}" if action in ("env", "check_env") else None,
                is_torchruns=True,
            )
        )

    parser = SimpleNamespace(add_argument=add_argument)
    stand_ins = {
        "ArgumentParser": lambda **_: parser,
        "REMAINDER": "...",
        "env": "env",
        "check_env": "check_env",
        "_PrintCompletionAction": "print",
    }
    try:
        root = torch_folder()
        functions: dict[str, Any] = {**stand_ins, "_AffinityMode": _read_affinity_modes(root / "numa" / "binding.py")}
        exec(
            _find(root / "distributed" / "run.py", "def get_args_parser"), functions
        )  # a function of the installed torch
        functions["get_args_parser"]()
    except (OSError, ImportError, SyntaxError, LookupError, NameError, AttributeError, TypeError) as error:
        log.debug("torchrun's options could not be read from its source (%s); importing torch", error)
        from torch.distributed import run

        found.clear()
        types.FunctionType(run.get_args_parser.__code__, {**vars(run), **stand_ins})()
    return tuple(found)


def find_event_handlers() -> frozenset[str]:
    """Return the valid names for ``--event-log-handler`` of the installed torch; empty: not known."""
    try:
        text = (torch_folder() / "distributed" / "elastic" / "events" / "handlers.py").read_text()
    except (OSError, ImportError):
        return frozenset()
    table = re.search(r"^_log_handlers\b[^{]*\{(.*?)\}", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r"^\s*\"(\w+)\":", table[1], re.MULTILINE)) if table is not None else frozenset()


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("torch is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _read_affinity_modes(path: Path) -> list[SimpleNamespace]:
    if not path.exists():
        return []  # torch 2.8
    values = re.findall(r'^    \w+ = "(.+)"$', _find(path, "class AffinityMode"), re.MULTILINE)
    return [SimpleNamespace(value=value) for value in values]


def _find(path: Path, name: str) -> str:
    """Return the source of a function or class of a module."""
    found = re.search(rf"^{name}\b.*?\n(?=[^\s)#]|\Z)", path.read_text(), re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{path} has no {name}")
    return found[0]
