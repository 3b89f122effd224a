"""The command line of ``outlast run``: torchrun's options and ours, their help, and what exactly was typed.

Every option of the installed torch's ``torchrun`` is accepted, but the one that prints torchrun's completion. Importing
``torch.distributed.run`` for its parser would cost a second before ``--help`` or a mistyped option could be answered,
so the one function that makes the parser is compiled from torch's source; if that fails (torch moved it), torch is
imported.

torchrun's parser is argparse's, so ours is too. argparse's messages name attributes and all spellings at once; here
each fault becomes one line in the words of whoever typed it.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import logging
import re
import runpy
import shutil
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

from outlast import env
from outlast.config.sources import add_ft_arguments, ft_config_from, unknown_flag_message
from outlast.errors import ConfigError

log = logging.getLogger(__name__)


def make_torchrun_parser() -> argparse.ArgumentParser:
    """Return a parser with every option of the installed ``torchrun``.

    Raises:
        ConfigError: An environment variable of torchrun's for an option without a value is neither 0 nor 1.
    """
    try:
        return _make_from_source()
    except (OSError, ImportError, SyntaxError, LookupError, NameError, AttributeError, TypeError) as error:
        log.debug("torchrun's parser could not be made from its source (%s); importing torch", error)
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def find_event_handlers() -> frozenset[str]:
    """Return the names that the installed torch knows for ``--event-log-handler``; empty = not known."""
    try:
        text = (_torch() / "distributed" / "elastic" / "events" / "handlers.py").read_text()
    except (OSError, ImportError):
        return frozenset()
    table = re.search(r"^_log_handlers\b[^{]*\{(.*?)\}", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r"^\s*\"(\w+)\":", table[1], re.MULTILINE)) if table is not None else frozenset()


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("torch is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _make_from_source() -> argparse.ArgumentParser:
    root = _torch()
    actions = runpy.run_path(str(root / "distributed" / "argparse_util.py"))
    path = root / "distributed" / "run.py"
    function = _find(path, ast.FunctionDef, "get_args_parser")
    namespace: dict[str, Any] = {
        "ArgumentParser": argparse.ArgumentParser,
        "REMAINDER": argparse.REMAINDER,
        "env": actions["env"],
        "check_env": _named_in_errors(actions["check_env"]),
        "_AffinityMode": _read_affinity_modes(root / "numa" / "binding.py"),
        "_PrintCompletionAction": _RefuseCompletion,
    }
    exec(compile(ast.Module([function], []), str(path), "exec"), namespace)  # a function of the installed torch
    return cast(argparse.ArgumentParser, namespace["get_args_parser"]())


def _read_affinity_modes(path: Path) -> list[SimpleNamespace]:
    if not path.exists():
        return []  # torch 2.8
    body = cast(ast.ClassDef, _find(path, ast.ClassDef, "AffinityMode")).body
    return [
        SimpleNamespace(value=statement.value.value)
        for statement in body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    ]


class _RefuseCompletion(argparse.Action):
    """Stands in for the action by which torch 2.15's parser prints torchrun's own completion."""

    def __call__(self, *_: object) -> NoReturn:
        raise ConfigError(
            f"{option_name(self)} prints what completes torchrun, not outlast; write: outlast completion bash"
        )


def _named_in_errors(action: type[argparse.Action]) -> type[argparse.Action]:
    """Return torchrun's action for options without a value; its environment variable is named when it is no number."""

    class Switch(action):  # type: ignore[valid-type, misc]
        def __init__(self, dest: str, **kwargs: Any) -> None:
            try:
                super().__init__(dest=dest, **kwargs)
            except ValueError:
                name = f"PET_{dest.upper()}"
                raise ConfigError(f"{name}={env.environ()[name]!r} is neither 0 nor 1; write one of them") from None

    return Switch


def _find(path: Path, kind: type[ast.stmt], name: str) -> ast.stmt:
    """Return a function or class of a module, without parsing what stands around it."""
    found = re.search(rf"^(?:def|class) {name}\b.*?\n(?=[^\s)#]|\Z)", path.read_text(), re.MULTILINE | re.DOTALL)
    if found is not None:
        for node in ast.parse(found[0]).body:
            if isinstance(node, kind):
                return node
    raise LookupError(f"{path} has no {name}")


_RUN, _NODES, _RESTARTS, _FAULTS = "run", "spares and nodes", "restarts", "fault tolerance"
_HEALTH, _OUTPUT, _SIMULATION = "health", "output", "fault simulation"
_NEWER: dict[str, Any] = {
    "duplicate_stdout_filters": (),
    "duplicate_stderr_filters": (),
    "numa_binding": None,
    "signals_to_handle": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "shutdown_timeout": None,
    "virtual_local_rank": False,
}
"""torchrun's options that torch 2.8 does not have: attribute to the value that stands for none given."""
_GROUPS = {
    _RUN: "what runs on this node, and where the run is kept",
    _NODES: "which nodes train, and which wait for a lost one's slot",
    _RESTARTS: "how often, and how workers are ended",
    _FAULTS: "what is watched, and for how long; written in full, never abbreviated",
    _HEALTH: "",
    _OUTPUT: "",
    _SIMULATION: "a fault on purpose, to test with; never in production",
}
"""What the help shows before torchrun's other options, in this order."""
_BORROWED = {
    "nproc_per_node": (_RUN, "N", "Workers on this node: a number, auto, gpu, xpu or cpu."),
    "rdzv_id": (_RUN, "ID", "Name of the run, by which a later job continues it; default a new name."),
    "nnodes": (_NODES, "N|MIN:MAX", "Nodes; of MIN:MAX, MIN train and the others wait as spares; default 1."),
    "rdzv_endpoint": (_NODES, "HOST:PORT,...", "Where the agents of several nodes meet: on the first one that lives."),
    "max_restarts": (
        _RESTARTS,
        "N",
        "Restarts in a row without progress in between (torchrun: in all); default 3, more for over 4096 nodes.",
    ),
}
"""torchrun's options that stand with ours: attribute to group, value, and what they mean here."""
_REWORDED = {
    "help": "Show this help.",
    "rdzv_backend": "static, c10d and outlast all mean outlast's own rendezvous.",
    "rdzv_conf": "join_timeout=SECONDS: how long agents wait for each other; default 600. resolve_timeout=SECONDS: how "
    "long no host of --rdzv-endpoint may be known at the start; default 0. any_command=1: the agents' "
    "commands may differ.",
    "standalone": "One node, alone: no endpoint is needed, and the run has a new name.",
    "monitor_interval": "Without effect: a worker's end is noticed at once.",
    "start_method": "Without effect: see --no-warm-start.",
    "node_rank": "Slot that this node should get, from 0; default the order in which the nodes come.",
    "master_addr": "Host at which agents meet where --rdzv-endpoint is not given; default 127.0.0.1.",
    "master_port": "Port at which agents meet where --rdzv-endpoint is not given; default 29500.",
    "local_addr": "Address under which the other nodes reach this one; default the one towards --rdzv-endpoint.",
    "print_completion": "Refused: it completes torchrun alone; see outlast completion --help.",
    "shutdown_timeout": "The same as --workers-stop-timeout, and before it.",
}
"""What torchrun's other options mean here, where torchrun's own help differs."""
_OURS: tuple[tuple[str, str, str | None, str | float | None, str], ...] = (
    (_RUN, "run-dir", "DIR", None, "Run directory (journal, stacks, ladder.json); default outlast-runs/ID."),
    (
        *(_RUN, "config", "FILE", None),
        "The run's settings: [fault_tolerance] comes after the --ft-* options and before the script's own config; "
        "tiers and [health] limits are checked before this node joins; run_dir is that of --run-dir.",
    ),
    (
        *(_RUN, "resume-from-other-run", None, None),
        "Resume from checkpoints that another run saved, in this launch; as checkpoint.resume_from_other_run.",
    ),
    (_RUN, "preload", "MODULE,...", "", "Modules that are imported before the workers are forked, beside torch."),
    (
        *(_RUN, "no-warm-start", None, None),
        "Start workers as fresh interpreters instead of forking them from a process that has imported torch.",
    ),
    (
        _NODES,
        "node-name",
        "NAME",
        None,
        "Name of this node, unique in the job; default Slurm's, without it the host's.",
    ),
    (
        *(_NODES, "run-key-file", "FILE", None),
        "File with the run's secret, at least 16 bytes, by which its processes know each other; default "
        "OUTLAST_RUN_KEY, else run.key of a shared run directory, else derived from the run's id.",
    ),
    (
        *(_NODES, "interface", "NAME,...", None),
        "Interface at which the other nodes reach this one, the first of the names that it has; default "
        "OUTLAST_INTERFACE, else the one towards --rdzv-endpoint.",
    ),
    (
        *(_NODES, "port-range", "LOW-HIGH", None),
        "Ports at which the processes of this node listen, beside the one of --rdzv-endpoint; default "
        "OUTLAST_PORT_RANGE, else any.",
    ),
    (
        *(_RESTARTS, "max-restarts-total", "N", None),
        "Restarts in the whole run, with or without progress; default no limit.",
    ),
    (
        *(_RESTARTS, "restart-grace", "SECONDS", 0.0),
        "Seconds between SIGTERM and SIGKILL for the survivors of a failed cycle; default 0: SIGKILL at once.",
    ),
    (
        *(_RESTARTS, "workers-stop-timeout", "SECONDS", 15.0),
        "Seconds between SIGTERM and SIGKILL at an orderly end that is no preemption; default 15.",
    ),
    (_HEALTH, "no-health-check", None, None, "Check this node neither before it joins nor later."),
    (
        *(_OUTPUT, "log-level", "LEVEL", None),
        "Least level of outlast's log lines, in all processes of this node: debug, info, warning or error; default "
        "OUTLAST_LOG_LEVEL, else info.",
    ),
    (
        *(_OUTPUT, "metrics-port", "PORT", None),
        "Show Prometheus this node's figures at this port, over HTTP; 0: a free one, which the log names; default "
        "OUTLAST_METRICS_PORT, else not at all.",
    ),
    (
        *(_OUTPUT, "metrics-address", "ADDRESS", None),
        "IP address at which --metrics-port listens; default OUTLAST_METRICS_ADDRESS, else 127.0.0.1, which other "
        "machines do not reach.",
    ),
    (
        *(_OUTPUT, "metrics-linger", "SECONDS", 0.0),
        "Seconds for which --metrics-port may stay open after the job's end, until it has been scraped once with the "
        "exit code; not after a shutdown request; default 0.",
    ),
    (_OUTPUT, "quiet", None, None, "Log warnings, errors and the last line only: --log-level=warning."),
)
"""Our own options: group, name, the value's name (``None``: a switch), default, help."""
_TYPES: dict[str, Callable[[str], Any]] = {"N": int, "PORT": int, "SECONDS": float}
_ALIASES = {"config": ("--health-config", "--health_config", "--ft-cfg-path", "--ft-cfg_path", "--ft_cfg_path")}
"""One option: the second name is our own former one, the others are those of ft_launcher."""
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
_COMMON_NAMES = ("config", "help", "local-addr", "log-dir", "log-level", "module")
_SCRIPTS_OWN = frozenset((*_COMMON_NAMES, "preload", "quiet", "role", "run-dir", "run-path"))
"""Names that scripts have for options of their own: behind the script they are taken for nothing else."""
_WIDTH = 80
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand:
    """A command line of ``outlast run``, parsed; nothing of it is checked beyond the form of its values."""

    args: argparse.Namespace
    typed: Mapping[str, str]
    """Attribute of ``args`` to the option as it was typed, or to the environment variable that it comes from."""
    strays: tuple[str, ...]
    """Options of ``outlast run`` among the script's arguments, as they stand there."""

    def name(self, attribute: str) -> str:
        """Return what an option is called: as it was typed, else as the help has it."""
        return self.typed.get(attribute) or f"--{attribute.replace('_', '-')}"

    @property
    def hint(self) -> str | None:
        """A hint at options behind the script, which go to the script."""
        return hint_at(self.strays, self.args.training_script, "outlast run")


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """A part of the help."""

    title: str
    text: str
    options: tuple[argparse.Action, ...]


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Each option in one spelling, within 80 columns."""

    def __init__(self, prog: str) -> None:
        width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
        super().__init__(prog, max_help_position=24, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = [name for name in action.option_strings if not name.startswith("--")] + [option_name(action)]
        return ", ".join(names) + (f" {_value_name(action)}" if takes_value(action) else "")

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


@dataclass(slots=True)
class _Options:
    """The parser in the making, with each option in its group."""

    parser: argparse.ArgumentParser = field(default_factory=make_torchrun_parser)
    groups: dict[str, list[argparse.Action]] = field(default_factory=lambda: {title: [] for title in _GROUPS})
    torchruns: frozenset[argparse.Action] = frozenset()
    abbreviated: Callable[[str], list[Any]] = field(init=False)
    typed: Mapping[str, str] = field(default_factory=dict)
    """The options of the command line that is being parsed."""
    swallowed: str = ""
    """Its last word, when an option before it has taken it as its value."""

    def __post_init__(self) -> None:
        parser = self.parser
        self.torchruns = frozenset(parser._actions)
        for action in parser._actions:
            if action.dest in _BORROWED:
                title, action.metavar, action.help = _BORROWED[action.dest]
                self.groups[title].append(action)
            action.help = _REWORDED.get(action.dest, action.help)
            if action.dest == "max_restarts" and action.default == 0:
                action.default = None  # it depends on the number of nodes
            elif (action.dest, action.default) in (("node_rank", 0), ("master_port", 29500)):
                action.default = None  # so that a given one differs from none
        known = {action.dest for action in parser._actions}
        parser.set_defaults(**{name: value for name, value in _NEWER.items() if name not in known})
        for group, name, value, default, text in _OURS:
            names = [f"--{name}", *([f"--{name.replace('-', '_')}"] if "-" in name else []), *_ALIASES.get(name, ())]
            if value is None:
                action = parser.add_argument(*names, action="store_true", help=text)
            else:
                kind = _TYPES.get(value, str)
                action = parser.add_argument(*names, default=default, type=kind, metavar=value, help=text)
            self.groups[group].append(action)
        self.groups[_RUN] += [action for action in parser._actions if action.dest == "help"]
        for name, action in add_ft_arguments(parser).items():
            self.groups[_SIMULATION if "simulate" in name else _FT_GROUPS.get(name, _FAULTS)].append(action)
        self.abbreviated = parser._get_option_tuples
        parser._get_option_tuples = self._complete  # type: ignore[assignment, method-assign]
        parser.prog = "outlast run"
        parser.error = self._refuse  # type: ignore[method-assign]
        parser.format_help = self.format_help  # type: ignore[method-assign]

    def _complete(self, text: str) -> list[Any]:
        """Return the option that an abbreviation stands for, in a list that is empty where that is not certain.

        What torchrun takes for one of its own options means that option here, too, whatever we have added. argparse
        asks this of the script's arguments as well, which must not be refused; so no error is raised here.
        """
        if text.startswith("--ft"):
            return []
        found = {match[0]: match for match in self.abbreviated(text)}
        matches = [match for action, match in found.items() if action in self.torchruns] or list(found.values())
        return matches if len(matches) == 1 else []

    def parse(self, argv: Sequence[str]) -> RunCommand:
        """Parse a command line; see :func:`parse_command`."""
        self.typed, position = words_before_script(self.parser, argv)
        self.swallowed = argv[-1] if position == len(argv) and argv and not argv[-1].startswith("-") else ""
        args, unknown = self.parser.parse_known_args(list(argv))
        if unknown:
            self._refuse_unknown(unknown[0])
        given = env.environ()
        from_environment = {
            action.dest: variable
            for action in self.torchruns
            if action.dest not in self.typed and (variable := f"PET_{action.dest.upper()}") in given
        }
        self.typed = {**from_environment, **self.typed}
        return RunCommand(args=args, typed=self.typed, strays=self._find_strays(argv[position + 1 :]))

    def _find_strays(self, words: Iterable[str]) -> tuple[str, ...]:
        names = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", words)]
        ours = {name for name in self.parser._option_string_actions if name.startswith("--")}
        return tuple(dict.fromkeys(n for n in names if n in ours and n[2:].replace("_", "-") not in _SCRIPTS_OWN))

    def _refuse(self, message: str) -> NoReturn:
        """Say in the words of whoever typed it what argparse has against the line."""
        if message.startswith("the following arguments are required"):
            self._refuse_scriptless()
        found = re.match(r"argument (?P<name>[^\s/]+)\S*: (?P<fault>.*)", message, re.DOTALL)
        action = self.parser._option_string_actions.get(found["name"]) if found else None
        if found is None or action is None:
            raise ConfigError(f"{message}; see outlast run --help")
        fault, variable = found["fault"], f"PET_{action.dest.upper()}"
        name = self.typed.get(action.dest) or (variable if variable in env.environ() else option_name(action))
        if (value := re.match(r"invalid (int|float) value: (.*)", fault)) is not None:
            kind = "whole number" if value[1] == "int" else "number"
            raise ConfigError(f"{name}={value[2]} is not a {kind}; write for example {name}=3")
        if (value := re.match(r"invalid choice: ('.*?'|\S+)", fault)) is not None:
            raise ConfigError(f"{name}={value[1]} is none of {', '.join(action.choices or ())}; write one of these")
        if fault.startswith("expected one argument"):
            raise ConfigError(f"{name} lacks its value; write {name}={_value_name(action)}")
        if (value := re.match(r"ignored explicit argument (.*)", fault)) is not None:
            given = value[1].strip("'")
            if name.startswith("--ft"):
                raise ConfigError(unknown_flag_message(f"{name}={given}"))
            raise ConfigError(f"{name} takes no value; leave out ={given}")
        raise ConfigError(f"{name}: {fault}; see outlast run --help")

    def _refuse_scriptless(self) -> NoReturn:
        example = "outlast run --nproc-per-node=2 train.py"
        if self.swallowed and self.typed:
            name = list(self.typed.values())[-1]
            raise ConfigError(
                f"there is no script to run: {self.swallowed!r} is taken for the value of {name}; name the script "
                f"after it, for example: {example}"
            )
        raise ConfigError(f"there is no script to run; name one after the options, for example: {example}")

    def _refuse_unknown(self, flag: str) -> NoReturn:
        if flag.startswith("--ft"):
            raise ConfigError(unknown_flag_message(flag))
        short = flag.partition("=")[0]
        candidates = {match[0] for match in self.abbreviated(short)} if short.startswith("--") else set()
        if len(candidates) > 1:
            raise ConfigError(f"{short} may be {' or '.join(sorted(map(option_name, candidates)))}; write it in full")
        known = {
            name.lstrip("-").replace("_", "-") for name in self.parser._option_string_actions if name.startswith("--")
        }
        close = difflib.get_close_matches(short.lstrip("-").replace("_", "-"), sorted(known), n=1, cutoff=0.7)
        hint = f"did you mean --{close[0].partition('=')[0]}?" if close else "see outlast run --help"
        raise ConfigError(f"unknown option {short}; {hint}")

    def describe(self) -> tuple[OptionGroup, ...]:
        """Return all options that the help shows, ours first."""
        shown = [OptionGroup(title, text, tuple(self.groups[title])) for title, text in _GROUPS.items()]
        ours = {action for group in shown for action in group.options}
        others = [
            action
            for action in self.parser._actions
            if action.option_strings and action not in ours and action.help != argparse.SUPPRESS
        ]
        rest = OptionGroup("torchrun's other options", "as the installed torch describes them", tuple(others))
        return tuple(group for group in (*shown, rest) if group.options)

    def format_help(self) -> str:
        """Return the help: examples, our options, torchrun's."""
        formatter = _Formatter("outlast run")
        formatter.add_text(_USAGE)
        for group in self.describe():
            formatter.start_section(group.title)
            formatter.add_text(group.text or None)
            formatter.add_arguments(group.options)
            formatter.end_section()
        return formatter.format_help()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``outlast run``; its ``error`` raises :class:`ConfigError`."""
    return _Options().parser


def describe_options() -> tuple[OptionGroup, ...]:
    """Return the options as the help groups them; torchrun's other ones come last."""
    return _Options().describe()


def parse_command(argv: Sequence[str]) -> RunCommand:
    """Parse what follows ``outlast run``.

    Raises:
        ConfigError: An option is unknown, a value does not fit its option, or there is no script; one line.
    """
    command = _Options().parse(argv)
    ft_config_from(command.args, command.typed)
    return command


def given_options(argv: Sequence[str]) -> dict[str, str]:
    """Return which options a command line gives: attribute to the option as typed; the script's own do not count.

    Raises:
        ConfigError: As :func:`parse_command`.
    """
    return {name: typed for name, typed in parse_command(argv).typed.items() if typed.startswith("-")}


def words_before_script(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[dict[str, str], int]:
    """Return the options that stand before the script, and where the script stands.

    Returns:
        Attribute to the option as it was typed, in that order; and the script's position, that of the end without one.
    """
    typed: dict[str, str] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return typed, position + 1
        if not word.startswith("-") or word == "-":
            return typed, position
        position += 1
        action, name, has_value = _find_option(parser, word)
        if action is not None:
            typed.pop(action.dest, None)
            typed[action.dest] = name
            if takes_value(action) and not has_value:
                position += 1
    return typed, min(position, len(argv))


def _find_option(parser: argparse.ArgumentParser, word: str) -> tuple[argparse.Action | None, str, bool]:
    """Return the option that a word names, its name as it stands there, and whether its value stands in the word."""
    known = parser._option_string_actions
    name, equals, _ = word.partition("=")
    for whole in (word, name):
        if whole in known:
            return known[whole], name, bool(equals)
    if word.startswith("--"):
        matches = parser._get_option_tuples(name)
        return (matches[0][0] if len(matches) == 1 else None), name, bool(equals)
    return known.get(word[:2]), word[:2], len(word) > 2


def hint_at(strays: Sequence[str], script: str, command: str) -> str | None:
    """Return a hint at options behind the script; ``None`` = there are none.

    Args:
        strays: The options, as they stand there.
        script: The training script.
        command: What they would be options of.
    """
    if not strays:
        return None
    names = " and ".join(filter(None, (", ".join(strays[:-1]), strays[-1])))
    stands, it, is_meant = ("stands", "it", "it is") if len(strays) == 1 else ("stand", "them", "they are")
    return (
        f"{names} {stands} after the script, so the script gets {it}; put {it} before {script} if {is_meant} meant for "
        f"{command}"
    )


def takes_value(action: argparse.Action) -> bool:
    """Return whether a value follows an option."""
    return action.nargs != 0


def _value_name(action: argparse.Action) -> str:
    return str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper())


def option_name(action: argparse.Action) -> str:
    """Return how the help writes an option."""
    return next((name for name in action.option_strings if name.startswith("--")), action.dest)
