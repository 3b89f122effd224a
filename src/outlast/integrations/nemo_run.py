"""Plug-ins for NeMo-Run, with the names and defaults of Megatron-Bridge's and NeMo's; they launch by ``outlast run``.

NeMo-Run's launcher for fault tolerance, ``run.FaultTolerance``, calls a program ``ft_launcher``. The plug-in puts
outlast's first on the task's ``PATH``. Settings for which that launcher has no field (timeouts of sections, no restart
at all) are passed by environment variables, which :mod:`outlast.integrations.ft_launcher` and torchrun's options read.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import inspect
import logging
import os
import shlex
import signal
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outlast.config import FaultToleranceConfig, PreemptionConfig
from outlast.config.base import parse_text, require
from outlast.errors import ConfigError
from outlast.integrations.ft_launcher import SETTING, as_option_value, render_shim, with_none_written, write_shims

try:
    import nemo_run
    from nemo_run.config import get_nemorun_home
except ImportError as error:
    if error.name is None or error.name.partition(".")[0] != "nemo_run":
        raise
    raise ImportError(
        "outlast.integrations.nemo_run needs NeMo-Run, which is not installed: pip install 'outlast[nemo-run]'",
        name="nemo_run",
    ) from None

__all__ = [
    "FaultTolerancePlugin",
    "FaultTolerancePluginScriptArgs",
    "PreemptionPlugin",
    "PreemptionPluginScriptArgs",
    "straggler_det_callback",
]

log = logging.getLogger(__name__)


@dataclass
class FaultTolerancePluginScriptArgs:
    """Input of a converter to script arguments."""

    enable_ft_package: bool
    calc_ft_timeouts: bool


@dataclass
class PreemptionPluginScriptArgs:
    """Input of a converter to script arguments."""

    enable_exit_handler: bool
    enable_exit_handler_for_data_loader: bool


def straggler_det_callback(
    straggler_report_time_interval: float = 300,
    stop_if_detected_straggler: bool = True,
    gpu_relative_perf_threshold: float = 0.7,
    gpu_individual_perf_threshold: float = 0.7,
) -> Any:
    """Return the ``run.Config`` of a callback that detects slow ranks, for a recipe's ``trainer.callbacks``.

    A trainer itself takes :func:`outlast.integrations.lightning.straggler_det_callback`.

    Args:
        straggler_report_time_interval: Seconds between reports.
        stop_if_detected_straggler: Save and exit with code 18 once a rank is slow, so that a spare takes its place.
        gpu_relative_perf_threshold: Score, 0 to 1, below which a rank is a straggler.
        gpu_individual_perf_threshold: The same for the score of a rank against its own past.

    Raises:
        ConfigError: A value is invalid.
    """
    given = dict(locals())
    from outlast.integrations.lightning import straggler_det_callback as make

    make(**given)  # refuse an invalid value here, not on the cluster
    return nemo_run.Config(make, **given)


def _convert_fault_tolerance(args: FaultTolerancePluginScriptArgs) -> list[str]:
    return [f"ft.{name}={str(value).lower()}" for name, value in vars(args).items()]


def _convert_preemption(args: PreemptionPluginScriptArgs) -> list[str]:
    return [
        f"train.exit_signal_handler={args.enable_exit_handler}",
        f"train.exit_signal_handler_for_dataloader={args.enable_exit_handler_for_data_loader}",
    ]


@dataclass(kw_only=True)
class FaultTolerancePlugin(nemo_run.Plugin):
    """Launch a task by ``outlast run``: hangs and deaths of ranks are detected, and the ranks restarted.

    A ``run.Partial`` with an argument ``trainer``, as in NeMo's recipes, gets a ``FaultToleranceCallback`` in
    ``trainer.callbacks``, with ``log.log_dir`` as its ``exp_dir``.

    A ``run.Script`` gets ``ft.enable_ft_package=true ft.calc_ft_timeouts=true`` appended to its arguments, or the
    result of ``script_args_converter_fn``; a ``run.Partial`` with an argument ``config`` gets them as
    ``config.ft.enable_ft_package`` and so on (of an ``outlast.Config``: ``config.fault_tolerance``).

    Raises:
        ConfigError: A value is out of range or contradicts another; from ``setup``, which NeMo-Run calls.
    """

    enable_ft_package: bool = True
    """Monitor heartbeats and sections of the ranks; off: only their deaths are detected."""
    calc_ft_timeouts: bool = True
    """Learn timeouts from observed durations, and keep them for the next cycle and job."""
    num_in_job_restarts: int = 3
    """Restarts in a row without progress in between; 0 = none."""
    num_job_retries_on_failure: int = 2
    """Failed jobs in a row that are requeued (Slurm); 0 = none."""
    initial_rank_heartbeat_timeout: float | None = 1800
    """Longest time in seconds from a rank's start to its first heartbeat; ``None`` = the launcher's default."""
    rank_heartbeat_timeout: float | None = 300
    """Longest time in seconds between two heartbeats of a rank; ``None`` = the launcher's default."""
    script_args_converter_fn: Callable[[FaultTolerancePluginScriptArgs], list[str]] | None = None
    """Returns the arguments for a ``run.Script``; ``None`` = hydra-style overrides."""
    rank_section_timeouts: Mapping[str, float | None] | str | None = None
    """Longest time in seconds in each section, as a mapping or as ``setup:600,step:180``; ``None`` = the script's."""
    rank_out_of_section_timeout: float | None = None
    """Longest time in seconds outside all sections; ``None`` = the script's."""
    shims: str | None = None
    """Folder with ``ft_launcher`` on the machine of the task, written by ``outlast shims``, for the front of ``PATH``.
    ``None`` = a ``LocalExecutor`` creates one, otherwise ``PATH`` is unchanged."""

    def setup(self, task: Any, executor: Any) -> None:
        """Set launcher, retries and environment of the executor, and the arguments or the config of the task."""
        for name in ("num_in_job_restarts", "num_job_retries_on_failure"):
            value = getattr(self, name)
            require(value >= 0, f"{name}={value} must not be negative; write 0 or more")
        values: dict[str, Any] = {
            "enable_ft_package": self.enable_ft_package,
            "calc_ft_timeouts": self.calc_ft_timeouts,
            **_given(self, "rank_section_timeouts", "rank_out_of_section_timeout"),
        }
        if isinstance(self.rank_section_timeouts, str):
            hint = typing.get_type_hints(FaultToleranceConfig)["rank_section_timeouts"]
            text = with_none_written(self.rank_section_timeouts)
            values["rank_section_timeouts"] = parse_text(hint, text, where="rank_section_timeouts")
        heartbeats = _given(self, "initial_rank_heartbeat_timeout", "rank_heartbeat_timeout")
        checked = FaultToleranceConfig(**values, **heartbeats)
        executor.launcher = nemo_run.FaultTolerance(max_restarts=self.num_in_job_restarts, **heartbeats)
        executor.retries = self.num_job_retries_on_failure
        variables = {f"{SETTING}{name.upper()}": as_option_value(name, getattr(checked, name), name) for name in values}
        if self.num_in_job_restarts == 0:  # NeMo-Run does not pass on 0
            variables["PET_MAX_RESTARTS"] = "0"
        is_slurm = isinstance(executor, nemo_run.SlurmExecutor)
        for name, value in variables.items():
            executor.env_vars[name] = (
                shlex.quote(value) if is_slurm else value
            )  # there it is a line of the batch script
        self._put_on_path(executor)
        convert = self.script_args_converter_fn or _convert_fault_tolerance
        switches = {"enable_ft_package": self.enable_ft_package, "calc_ft_timeouts": self.calc_ft_timeouts}
        if isinstance(task, nemo_run.Script):
            _append(task, convert(FaultTolerancePluginScriptArgs(**switches)), self)
            return
        is_set = _override(task, {"ft": switches, "fault_tolerance": switches})
        if self.enable_ft_package and _has_trainer(task):
            from outlast.integrations.lightning import FaultToleranceCallback

            folder = getattr(getattr(task, "log", None), "log_dir", None)
            more = {} if folder is None else {"exp_dir": folder}
            values = {"autoresume": True, "calculate_timeouts": self.calc_ft_timeouts, **more}
            _add_callbacks(task, [nemo_run.Config(FaultToleranceCallback, **values)])
        elif not is_set:
            log.info("FaultTolerancePlugin: the task has no config with ft; its launcher alone gets the settings")

    def _put_on_path(self, executor: Any) -> None:
        if self.shims is not None:
            folder = self.shims
        elif isinstance(executor, nemo_run.LocalExecutor):
            # One folder per interpreter: several environments share NeMo-Run's home.
            digest = hashlib.sha256(render_shim().encode()).hexdigest()[:12]
            folder = os.path.join(get_nemorun_home(), "outlast-shims", digest)
            write_shims(folder)
        else:
            log.info("FaultTolerancePlugin: ft_launcher is the one on PATH where the task runs; see `outlast shims`")
            return
        if isinstance(executor, nemo_run.LocalExecutor):
            before = executor.env_vars.get("PATH")  # NeMo-Run appends this process's PATH
            parts = [folder, *(part for part in (before or "").split(os.pathsep) if part and part != folder)]
            executor.env_vars["PATH"] = os.pathsep.join(parts)
        else:
            before = executor.env_vars.get("PATH", "$PATH")
            if not before.startswith(f"{folder}:"):
                executor.env_vars["PATH"] = f"{shlex.quote(folder)}:{before}"


@dataclass(kw_only=True)
class PreemptionPlugin(nemo_run.Plugin):
    """Make a Slurm job save and exit before its time limit, and on any other SIGTERM.

    A ``run.Partial`` with an argument ``trainer``, as in NeMo's recipes, gets a ``PreemptionCallback`` in
    ``trainer.callbacks``.

    A ``run.Script`` gets ``train.exit_signal_handler=True train.exit_signal_handler_for_dataloader=False`` appended to
    its arguments, or the result of ``script_args_converter_fn``; a ``run.Partial`` with an argument ``config`` gets
    them as ``config.train.exit_signal_handler`` and so on (of an ``outlast.Config``: ``config.preemption``, with
    ``preempt_time``). A ``SlurmExecutor`` gets ``signal="TERM@<preempt_time>"``.

    With ``enable_exit_handler=False`` the job gets no signal, and a session, which listens otherwise, does not: in a
    ``run.Script`` the script must implement the argument.

    Raises:
        ConfigError: A value is out of range, or cannot be carried out; from ``setup``, which NeMo-Run calls.
    """

    preempt_time: int = 60
    """Seconds before the time limit at which Slurm sends SIGTERM; 0 = no signal."""
    enable_exit_handler: bool = True
    """Save and exit on the signal."""
    enable_exit_handler_for_data_loader: bool = False
    """Workers of a ``DataLoader`` ignore the signal while their rank lives."""
    sig: signal.Signals = signal.SIGTERM
    """The signal that the task handles; on Slurm, and for a ``run.Script``, only SIGTERM."""
    callbacks: Sequence[Any] | None = None
    """Replacement of the ``PreemptionCallback`` of a recipe's trainer: a ``run.Config`` of each callback."""
    script_args_converter_fn: Callable[[PreemptionPluginScriptArgs], list[str]] | None = None
    """Returns the arguments for a ``run.Script``; ``None`` = hydra-style overrides."""

    def setup(self, task: Any, executor: Any) -> None:
        """Set the signal of the executor, and the arguments or the config of the task."""
        text = f"preempt_time={self.preempt_time} must not be negative; 0 = no signal is sent"
        require(self.preempt_time >= 0, text)
        handles, for_loader = self.enable_exit_handler, self.enable_exit_handler_for_data_loader
        text = "enable_exit_handler_for_data_loader=True has no effect with enable_exit_handler=False; drop one"
        require(handles or not for_loader, text)
        preempt_time = self.preempt_time if handles else 0
        sig = signal.Signals(self.sig)
        checked = PreemptionConfig(exit_signal=sig.name)
        if self.callbacks is not None and not (handles and _has_trainer(task)):
            raise ConfigError(
                "callbacks has no effect: it needs a run.Partial with an argument trainer, and "
                "enable_exit_handler=True; drop it"
            )
        is_slurm, is_script = isinstance(executor, nemo_run.SlurmExecutor), isinstance(task, nemo_run.Script)
        if sig != signal.SIGTERM and (is_slurm or is_script):
            why = "the launcher only passes on SIGTERM" if is_slurm else "a script's arguments have no name for it"
            raise ConfigError(f"sig={sig.name} is not supported here: {why}; use SIGTERM")
        if is_script:
            convert = self.script_args_converter_fn or _convert_preemption
            _append(task, convert(PreemptionPluginScriptArgs(handles, for_loader)), self)
        else:
            switches: dict[str, Any] = {
                "exit_signal_handler": handles,
                "exit_signal_handler_for_dataloader": for_loader,
            }
            own: dict[str, Any] = {**switches, "preempt_time": float(preempt_time)}
            if sig != signal.SIGTERM and handles:
                switches, own = {**switches, "exit_signal": sig}, {**own, "exit_signal": checked.exit_signal}
            is_set = _override(task, {"train": switches, "preemption": own})
            if handles and _has_trainer(task):
                from outlast.integrations.lightning import PreemptionCallback

                _add_callbacks(task, self.callbacks or [nemo_run.Config(PreemptionCallback, sig=int(sig))])
                is_set = is_set or not for_loader
            if not is_set:
                if for_loader or not handles or sig != signal.SIGTERM:
                    loader = "enable_exit_handler_for_data_loader=True"
                    what = "enable_exit_handler=False" if not handles else loader if for_loader else f"sig={sig.name}"
                    raise ConfigError(
                        f"{what} cannot be set: the task has no argument config with train or preemption; give it one"
                    )
                log.info("PreemptionPlugin: the task has no config with train; a session listens as it is")
        if is_slurm and preempt_time:
            executor.signal = f"TERM@{preempt_time}"


def _given(plugin: Any, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(plugin, name)) is not None}


def _has_trainer(task: Any) -> bool:
    return getattr(task, "trainer", None) is not None


def _add_callbacks(task: Any, callbacks: Sequence[Any]) -> None:
    """Append callbacks to a recipe's trainer; a class that is present already is not added."""
    trainer = task.trainer
    known = list(getattr(trainer, "callbacks", None) or [])
    kinds = [getattr(one, "__fn_or_cls__", type(one)) for one in known]
    added = [copy.deepcopy(one) for one in callbacks if getattr(one, "__fn_or_cls__", type(one)) not in kinds]
    _set(trainer, "callbacks", [*known, *added])


def _append(task: Any, arguments: list[str], plugin: Any) -> None:
    """Append arguments to a script; an inline script takes none."""
    name = type(plugin).__name__
    if task.inline:
        if arguments:
            log.info("%s: an inline script takes no arguments; not added: %s", name, " ".join(arguments))
        return
    task.args.extend(arguments)
    if arguments:
        log.info("%s added arguments: %s", name, " ".join(arguments))


def _override(task: Any, sections: Mapping[str, Mapping[str, Any]]) -> bool:
    """Set values in the first of some sections that a task's ``config`` has; return whether there is one."""
    config = getattr(task, "config", None)
    kind = _kind(config)
    if config is None or kind is None:
        return False
    for name, values in sections.items():
        if name not in inspect.signature(kind).parameters:
            continue
        section = getattr(config, name, None)
        if section is None:
            section = nemo_run.Config(_section_type(kind, name))
            _set(config, name, section)
        for key, value in values.items():
            _set(section, key, value)
        return True
    return False


def _kind(config: Any) -> Any:
    """Return the class of a config, built or configured."""
    made = getattr(config, "__fn_or_cls__", None)
    return made if made is not None else type(config) if dataclasses.is_dataclass(config) else None


def _section_type(kind: Any, name: str) -> Any:
    hint = typing.get_type_hints(kind).get(name)
    found = [one for one in (hint, *typing.get_args(hint)) if isinstance(one, type) and dataclasses.is_dataclass(one)]
    if not found:
        raise ConfigError(f"config.{name} is not set, and its type is not known; set it in the task")
    return found[0]


def _set(holder: Any, name: str, value: Any) -> None:
    try:
        setattr(holder, name, value)
    except (AttributeError, TypeError) as error:
        frozen = isinstance(error, dataclasses.FrozenInstanceError)
        remedy = "give the task a run.Config of it" if frozen else "is the config of another version?"
        raise ConfigError(f"{name}={value!r} cannot be set in the task's config ({error}); {remedy}") from None
