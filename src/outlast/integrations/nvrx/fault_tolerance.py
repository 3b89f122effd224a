"""``nvidia_resiliency_ext.fault_tolerance``: heartbeats, sections and calculated timeouts over a rank monitor.

A process has one :class:`~outlast.monitor.RankMonitor`. The client uses the session's monitor if there is a session.
Otherwise it creates one, which a later session replaces and whose open sections it continues. So the client may be
created before the process group, shut down and created again, with or without a session. Measured durations belong to
one client, as in the extension.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import signal
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from outlast import clock
from outlast.config import FaultToleranceConfig
from outlast.config.base import from_mapping, parse_text
from outlast.config.sources import ft_option, load_values
from outlast.errors import ConfigError, OutlastError
from outlast.integrations.ft_launcher import find_section, with_none_written
from outlast.integrations.hosted_session import log_on_rank_0
from outlast.integrations.nvrx.exchange import WorldExchange
from outlast.monitor.learned_timeouts import read_learned
from outlast.monitor.rank_monitor import RankMonitor, open_monitor
from outlast.policy.deadlines import FLOOR_S, Learned
from outlast.runtime.board import EndRequest

log = logging.getLogger(__name__)


class RankMonitorClientError(OutlastError):
    """A call of the client is out of order or cannot be carried out."""


@dataclass
class HeartbeatTimeouts:
    """Enforced timeouts of heartbeats, in seconds; ``None`` = not enforced."""

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool | None = None

    @property
    def are_valid(self) -> bool:
        return self.initial is not None and self.subsequent is not None


@dataclass
class SectionTimeouts:
    """Enforced timeouts of sections, in seconds; ``None`` = not enforced."""

    section: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: set[str] = field(default_factory=set)
    is_out_of_section_calculated: bool = False

    def __post_init__(self) -> None:
        self.calculated_sections = set(self.calculated_sections)

    @property
    def are_valid(self) -> bool:
        return None not in self.section.values() and self.out_of_section is not None

    @property
    def were_calculated(self) -> bool:
        return self.calculated_sections == set(self.section) and self.is_out_of_section_calculated


class WorkloadAction(Enum):
    """Action that is requested from the launcher."""

    Continue = 0
    ExcludeThisNode = 1
    ShutdownWorkload = 2


class WorkloadControlRequest:
    """A requested action, and the reason."""

    def __init__(self, action: WorkloadAction, description: str = "<not set>") -> None:
        self.action = action
        self.description = description

    def __str__(self) -> str:
        return f"{self.action.name} ({self.description})"


_WITHOUT_EFFECT = {
    "workload_check_interval": "a hang is detected when its timeout passes",
    "node_health_check_interval": "set health.node_interval of outlast's config",
    "restart_check_interval": "a restart inside the processes is reported, not polled",
}
"""Settings that are accepted and logged, since outlast has nothing that they set."""
_REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("enable_nic_monitor", "pci_topo_file", "link_down_path_template", "link_state_path_template"),
        "name the links in health.network_interfaces of outlast's config",
    ),
    **dict.fromkeys(
        ("enable_dist_storage_healthcheck", "storage_healthcheck_path"),
        "the tiers' folders are checked; add others to health.commands",
    ),
    **dict.fromkeys(
        ("attribution_endpoint", "attribution_stop_action", "attribution_export_url"),
        "outlast identifies the root cause itself; leave it out",
    ),
    "enable_nic_healthcheck": "to skip all checks before a node joins set health.before_joining=false",
    "segment": "spares are not chosen by NVLink domain; leave it out",
    "numa_bind_strict": "use --numa-binding of outlast run",
    "check_remaining_processes": "outlast run waits for the processes of a worker always; leave it out",
    "min_progress_iterations": "any newer committed checkpoint is progress; leave it out",
    "checkpoint_iteration_file": "report progress with monitor.set_durable_iteration()",
    "install_exception_hook": "outlast run keeps the error of each rank always; leave it out",
    "cycle_info_dir": "the journal has each cycle; read it with outlast status RUN_DIR --json",
    "segment_health_check_dir": "add a command that reads the folder to health.commands of outlast's config",
}
"""Settings for which only the default is supported, and what to use instead of another value."""
_SHARED = (
    *("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_section_timeouts"),
    *("rank_out_of_section_timeout", "safety_factor", "num_warmup_iterations"),
)
"""Settings that outlast has under the same names."""
_OF_LAUNCHER = (
    *("gpu_memory_reclaim_timeout", "gpu_memory_tolerance_mb", "gpu_memory_poll_interval", "max_no_progress_cycles"),
)
"""Settings that the launcher reads; only values other than the defaults are passed on."""


@dataclass
class NvrxFaultToleranceConfig:
    """The extension's monitoring settings, with the names of 0.6 and 0.7 and their defaults.

    Where the two differ (``max_no_progress_cycles``), the default is that of 0.7. :meth:`to_outlast` returns outlast's.

    Raises:
        ConfigError: A value is invalid, or a setting is not supported; the message names the replacement.
    """

    workload_check_interval: float = 5.0
    """Without effect: a hang is detected when its timeout passes."""
    initial_rank_heartbeat_timeout: float | None = None
    """Seconds. If it is below ``rank_heartbeat_timeout``, that timeout is enforced instead."""
    rank_heartbeat_timeout: float | None = None
    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    """``None`` = no section has a timeout."""
    rank_out_of_section_timeout: float | None = None
    node_health_check_interval: float = 5.0
    """Without effect: nodes are checked before they join and after a fault."""
    safety_factor: float = 5.0
    rank_termination_signal: signal.Signals = signal.SIGKILL
    log_level: int = logging.INFO
    """Level of the extension's own components; outlast's level is set with ``--log-level`` of ``outlast run``."""
    restart_check_interval: float = 60.0
    """Without effect: restarts are reported, not polled."""
    enable_nic_monitor: bool = False
    enable_nic_healthcheck: bool = True
    enable_dist_storage_healthcheck: bool = False
    storage_healthcheck_path: str | None = None
    pci_topo_file: str | None = None
    link_down_path_template: str | None = None
    link_state_path_template: str | None = None
    skip_section_response: bool = True
    """No effect: a section is a write into shared memory, which needs no response, and errors are raised at once."""
    segment: int | None = None
    numa_bind_strict: bool = True
    gpu_memory_reclaim_timeout: float = 50.0
    """A setting of the launcher, like the next two and ``max_no_progress_cycles``: without effect in a script, which a
    session logs."""
    gpu_memory_tolerance_mb: float = 512.0
    gpu_memory_poll_interval: float = 2.0
    check_remaining_processes: bool = False
    max_no_progress_cycles: int = 3
    """At least 1; to disable the limit write a large number."""
    min_progress_iterations: int = 1
    checkpoint_iteration_file: str | None = None
    install_exception_hook: bool = False
    num_warmup_iterations: int = 5
    attribution_endpoint: str | None = None
    attribution_stop_action: str | None = None
    attribution_export_url: str | None = None
    cycle_info_dir: str | None = None
    segment_health_check_dir: str | None = None

    def __post_init__(self) -> None:
        self._check()
        changed = [f"{name} ({why})" for name, why in _WITHOUT_EFFECT.items() if self._is_changed(name)]
        if changed:
            log_on_rank_0(log, "fault tolerance settings without effect here: %s", "; ".join(changed))
        if self._is_first_shorter():
            text = "initial_rank_heartbeat_timeout=%g is below rank_heartbeat_timeout=%g, which is enforced instead"
            log_on_rank_0(log, text, self.initial_rank_heartbeat_timeout, self.rank_heartbeat_timeout)

    def _is_changed(self, name: str) -> bool:
        return bool(getattr(self, name) != getattr(NvrxFaultToleranceConfig, name))

    def _check(self) -> None:
        given: Any = self.rank_termination_signal
        try:
            named = isinstance(given, str)
            self.rank_termination_signal = signal.Signals[given.upper()] if named else signal.Signals(given)
        except (KeyError, ValueError):
            raise ConfigError(f"rank_termination_signal={given!r} is not a signal; write for example SIGKILL") from None
        level: Any = self.log_level
        levels = {**logging.getLevelNamesMapping(), "DBG": logging.DEBUG}
        known = levels.get(level.upper()) if isinstance(level, str) else level
        if not isinstance(known, int) or not logging.DEBUG <= known <= logging.CRITICAL:
            raise ConfigError(f"log_level={level!r} is not a level; write for example INFO")
        self.log_level = known
        sections: Any = self.rank_section_timeouts
        self.rank_section_timeouts = {} if sections is None else sections
        for name, instead in _REFUSED.items():
            if self._is_changed(name):
                value, only = getattr(self, name), getattr(NvrxFaultToleranceConfig, name)
                raise ConfigError(f"{name}={value!r} is not supported, only {only!r} is: {instead}")
        self.to_outlast()

    @property
    def is_progress_tracking_enabled(self) -> bool:
        """Whether cycles without progress are counted: always, as ``max_no_progress_cycles`` is at least 1."""
        return self.max_no_progress_cycles > 0

    @staticmethod
    def from_kwargs(ignore_not_recognized: bool = True, **kwargs: Any) -> NvrxFaultToleranceConfig:
        """Create a config from keyword arguments.

        Args:
            ignore_not_recognized: Log unknown names; otherwise they are an error.
            kwargs: The settings.

        Raises:
            ConfigError: A value or a name is invalid.
        """
        known = {one.name for one in dataclasses.fields(NvrxFaultToleranceConfig)}
        if others := sorted(set(kwargs) - known):
            text = f"fault tolerance settings that are not used here: {', '.join(others)}"
            if not ignore_not_recognized:
                raise ConfigError(f"{text}; remove them")
            log.warning("%s", text)
        return NvrxFaultToleranceConfig(**{name: value for name, value in kwargs.items() if name in known})

    @staticmethod
    def from_yaml_file(cfg_path: str, ignore_not_recognized: bool = True) -> NvrxFaultToleranceConfig:
        """Read the section ``fault_tolerance`` of a YAML file, at the top or within another section.

        Raises:
            ConfigError: There is no such section, or a setting is invalid.
        """
        found = find_section(load_values(cfg_path, otherwise="yaml")[0])
        if found is None:
            raise ConfigError(f"{cfg_path}: there is no section 'fault_tolerance'; add one")
        return NvrxFaultToleranceConfig.from_kwargs(ignore_not_recognized=ignore_not_recognized, **found)

    @staticmethod
    def from_args(args: argparse.Namespace) -> NvrxFaultToleranceConfig:
        """Create a config from parsed options ``--ft-<field>``, which take precedence over ``--ft-cfg-path``.

        Args:
            args: A namespace with attributes ``ft_<field>`` and ``ft_cfg_path``; ``None`` = not given.

        Raises:
            ConfigError: A value is invalid. A file without the section ``fault_tolerance`` counts as empty.
        """
        path = getattr(args, "ft_cfg_path", None)
        settings = dict((find_section(load_values(path, otherwise="yaml")[0]) if path is not None else None) or {})
        hints = typing.get_type_hints(FaultToleranceConfig)
        for one in dataclasses.fields(NvrxFaultToleranceConfig):
            value = getattr(args, f"ft_{one.name}", None)
            if value is None:
                continue
            is_text = isinstance(value, str) and one.name in hints and one.name != "rank_termination_signal"
            if is_text:
                text = with_none_written(value) if one.name == "rank_section_timeouts" else value
                value = parse_text(hints[one.name], text, where=ft_option(one.name))
            settings[one.name] = value
        return NvrxFaultToleranceConfig.from_kwargs(**settings)

    def to_yaml_file(self, cfg_path: str) -> None:
        """Write a YAML file with the section ``fault_tolerance``, which :meth:`from_yaml_file` reads.

        Raises:
            ConfigError: A value became invalid after it was checked, or the file cannot be written.
        """
        self._check()
        settings = dataclasses.asdict(self)
        settings["rank_termination_signal"] = self.rank_termination_signal.name
        lines = [f"  {name}: {json.dumps(value)}\n" for name, value in settings.items()]  # JSON values are valid YAML
        try:
            with open(cfg_path, "w") as file:
                file.write("".join(["fault_tolerance:\n", *lines]))
        except OSError as error:
            raise ConfigError(f"{cfg_path} cannot be written ({error.strerror}); check path and permissions") from None

    def to_outlast(self) -> FaultToleranceConfig:
        """Return the settings that ``outlast.Config`` takes as ``fault_tolerance``.

        Raises:
            ConfigError: A value is out of range, or contradicts another.
        """
        names = (*_SHARED, *(name for name in _OF_LAUNCHER if self._is_changed(name)))
        values = {name: getattr(self, name) for name in names}
        values |= {"enable_ft_package": True, "rank_termination_signal": self.rank_termination_signal.name}
        if self._is_first_shorter():
            values["initial_rank_heartbeat_timeout"] = self.rank_heartbeat_timeout
        return from_mapping(FaultToleranceConfig, values, where="FaultToleranceConfig")

    def _is_first_shorter(self) -> bool:
        first, later = self.initial_rank_heartbeat_timeout, self.rank_heartbeat_timeout
        return isinstance(first, int | float) and isinstance(later, int | float) and 0 < first < later


class _Measured:
    """The longest durations that a client measured, in seconds, and its open sections."""

    def __init__(self) -> None:
        self.began_ns = self._left_ns = clock.now_ns()
        self._heartbeat_ns: int | None = None
        self.open: dict[str, int] = {}
        self.sections: dict[str, float] = {}
        self.outside = self.initial = self.subsequent = 0.0

    def heartbeat(self) -> None:
        now = clock.now_ns()
        if self._heartbeat_ns is None:
            self.initial = (now - self.began_ns) / 1e9
        else:
            self.subsequent = max(self.subsequent, (now - self._heartbeat_ns) / 1e9)
        self._heartbeat_ns = now

    def start(self, name: str) -> None:
        self.note_outside()
        self.open[name] = clock.now_ns()

    def end(self, name: str) -> None:
        now = clock.now_ns()
        self.sections[name] = max(self.sections.get(name, 0.0), (now - self.open.pop(name)) / 1e9)
        if not self.open:
            self._left_ns = now

    def note_outside(self) -> None:
        """Count the time since the last section, unless a section is open."""
        if not self.open:
            self.outside = max(self.outside, (clock.now_ns() - self._left_ns) / 1e9)

    def values(self) -> dict[str, float]:
        """Return the durations by kind; the time outside sections has the name ``""``."""
        times = {f"section {name}": seconds for name, seconds in self.sections.items()}
        return {**times, "": self.outside, "initial": self.initial, "subsequent": self.subsequent}


class RankMonitorClient:
    """Send heartbeats, mark sections and calculate timeouts, with the extension's calls.

    Differences: sections need no entry in a config (one without a timeout is measured); a calculated timeout is at
    least 10 s and never shortens a configured one; without ``outlast run`` the agent process of the node monitors the
    rank.

    Thread: the thread of the training loop; heartbeats from any thread.
    """

    CURRENT_TIMEOUTS_STATE_KEY = "current_timeouts"

    def __init__(self) -> None:
        self.is_initialized = False
        self.cfg: NvrxFaultToleranceConfig | None = None
        """The settings in force; ``None`` until the client is initialised."""
        self.hb_timeouts: HeartbeatTimeouts | None = None
        self.section_timeouts: SectionTimeouts | None = None
        self.logger = logging.getLogger("RankMonitorClient")
        self._calculated = Learned()
        self._measured = _Measured()
        self._exchange = WorldExchange("the calculation of timeouts")
        self._num_warmup: int | None = None
        self._own: RankMonitor | None = None
        self._used: RankMonitor | None = None

    # -- monitoring ------------------------------------------------------------------------------------------------

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Start monitoring of this rank; needs no process group.

        Args:
            num_warmup_iters: The first sections ``step``, this many, are not enforced; ``None`` = as configured.

        Raises:
            RankMonitorClientError: It was called before.
            ConfigError: The number is negative, or the configs contradict each other.

        Blocks: some milliseconds.
        """
        if self.is_initialized:
            raise RankMonitorClientError(
                "init_workload_monitoring() was called before; call shutdown_workload_monitoring() first"
            )
        self._num_warmup, self._measured = num_warmup_iters, _Measured()
        self.is_initialized = True
        try:
            self._monitor()
        except BaseException:
            self.is_initialized = False
            raise
        self._set(self._calculated)

    def shutdown_workload_monitoring(self) -> None:
        """Close the sections of this client, and the monitor if the client created it. Idempotent.

        Blocks: some milliseconds.
        """
        if not self.is_initialized:
            return
        self.is_initialized = False
        used, own = self._used, self._own
        self._used = self._own = None
        if used is not None and used is not own and used is open_monitor():
            for name in reversed(self._measured.open):
                used.end_section(name)
        if own is not None:
            own.close()
        self._exchange.close()

    def send_heartbeat(self) -> None:
        """Send a heartbeat.

        Raises:
            RankMonitorClientError: The client is not initialised.

        Thread: any.
        """
        self._monitor().heartbeat()
        self._measured.heartbeat()

    def start_section(self, section: str) -> None:
        """Enter a section; different sections may overlap.

        Raises:
            RankMonitorClientError: The section is open already, or the client is not initialised.
            ConfigError: The name is empty or longer than 39 bytes.
        """
        monitor = self._monitor()
        if section in self._measured.open:
            raise RankMonitorClientError(f"section {section!r} is open already; end it before it starts again")
        monitor.start_section(section)
        self._measured.start(section)

    def end_section(self, section: str) -> None:
        """End a section.

        Raises:
            RankMonitorClientError: The section is not open, or the client is not initialised.
        """
        monitor = self._monitor()
        if section not in self._measured.open:
            raise RankMonitorClientError(f"section {section!r} is not open; start it before it ends")
        monitor.end_section(section)
        self._measured.end(section)

    def end_all_sections(self) -> None:
        """End every section that this client has open.

        Raises:
            RankMonitorClientError: The client is not initialised.
        """
        self._monitor()
        for name in list(self._measured.open):
            self.end_section(name)

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Request an action of the launcher for the next failure of this rank, or of another rank of its node.

        ``ExcludeThisNode``: a spare takes the node's slot. ``ShutdownWorkload``: nothing is restarted; the launcher
        exits with 93. ``Continue``: cancels an earlier request. The journal records the failure as the cause.

        Raises:
            RankMonitorClientError: The client is not initialised, or ``outlast run`` did not start this process.
        """
        monitor = self._monitor()
        if monitor.env.board is None:
            raise RankMonitorClientError(
                f"{req} needs outlast's launcher, which did not start this process: use outlast run"
            )
        wanted = {
            WorkloadAction.Continue: EndRequest.NONE,
            WorkloadAction.ExcludeThisNode: EndRequest.REPLACE_NODE,
            WorkloadAction.ShutdownWorkload: EndRequest.STOP,
        }
        monitor.page.request(wanted[req.action])
        level = logging.INFO if req.action == WorkloadAction.Continue else logging.WARNING
        log.log(level, "the script requests: %s", req)

    # -- timeouts --------------------------------------------------------------------------------------------------

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Calculate the timeouts of heartbeats from the longest times of all ranks, and enforce them.

        Returns:
            Whether enough was measured; ``False`` only with ``skip_if_not_ready``.

        Raises:
            RankMonitorClientError: Not enough was measured.
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks.
        Blocks: until all ranks have arrived, up to 10 min.
        """
        longest = self._gather()
        if not (longest.get("initial") and longest.get("subsequent")):
            return self._refuse("two heartbeats of a rank", skip_if_not_ready)
        before = self._calculated
        initial = self._merge(longest["initial"], before.initial_heartbeat_s)
        later = self._merge(longest["subsequent"], before.heartbeat_s)
        self._set(msgspec.structs.replace(before, initial_heartbeat_s=max(initial, later), heartbeat_s=later))
        return True

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """Calculate timeouts of sections from the longest times of all ranks, and enforce them.

        Args:
            selected_sections: The sections to calculate, the same on all ranks; ``None`` = those that are configured,
                and those that any rank has closed.
            calc_out_of_section: Also calculate the timeout outside sections.
            skip_if_not_ready: Do nothing if not enough was measured; otherwise it is an error.

        Returns:
            Whether enough was measured; ``False`` only with ``skip_if_not_ready``.

        Raises:
            RankMonitorClientError: Not enough was measured.
            PeerLost: A peer exited, or did not arrive in time.

        Collective: all ranks.
        Blocks: until all ranks have arrived, up to 10 min.
        """
        longest = self._gather()
        seen = {name.removeprefix("section "): seconds for name, seconds in longest.items() if " " in name}
        if selected_sections is None:
            selected_sections = {*seen, *self._monitor().config.rank_section_timeouts}
        missing = sorted(name for name in selected_sections if not seen.get(name))
        if missing or (calc_out_of_section and not longest.get("")):
            return self._refuse(", ".join(missing) or "the time outside sections", skip_if_not_ready)
        before = self._calculated
        sections = {name: self._merge(seen[name], before.sections.get(name)) for name in selected_sections}
        outside = before.out_of_section_s
        if calc_out_of_section:
            outside = self._merge(longest[""], outside)
        self._set(msgspec.structs.replace(before, sections={**before.sections, **sections}, out_of_section_s=outside))
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the calculated timeouts, the same on all ranks, in the extension's form, which JSON can represent."""
        current: dict[str, Any] = {}
        heartbeats, sections = self.hb_timeouts, self.section_timeouts
        if heartbeats is not None and heartbeats.were_calculated and heartbeats.are_valid:
            current["heartbeat"] = dataclasses.asdict(heartbeats)
        if sections is not None and (sections.calculated_sections or sections.is_out_of_section_calculated):
            current["section"] = {
                **dataclasses.asdict(sections),
                "calculated_sections": sorted(sections.calculated_sections),
            }
        return {self.CURRENT_TIMEOUTS_STATE_KEY: current}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore calculated timeouts, and enforce them as soon as the client is initialised.

        Args:
            state: A result of :meth:`state_dict`, or the contents of outlast's ``ft_state.json``.

        Raises:
            ConfigError: It is neither.
        """
        try:
            calculated = read_learned(msgspec.json.encode(state))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise ConfigError(
                f"invalid fault tolerance state ({error}); remove ft_state.json to learn the timeouts again"
            ) from None
        if self.is_initialized:
            self._set(calculated)
        else:
            self._calculated = calculated

    # -- details ---------------------------------------------------------------------------------------------------

    def _monitor(self) -> RankMonitor:
        """Return the process's monitor; create one if there is none."""
        if not self.is_initialized:
            raise RankMonitorClientError("the client is not initialised; call init_workload_monitoring() first")
        there = open_monitor()
        if there is None:
            config = None
            if self._num_warmup is not None:
                config = FaultToleranceConfig(num_warmup_iterations=self._num_warmup)
            there = self._own = RankMonitor(config)
            there.on_replaced = self._follow
        if there is not self._used:
            self._follow(there)
        return there

    def _follow(self, monitor: RankMonitor) -> None:
        """Use another monitor from now on: open sections are opened in it, and calculated timeouts enforced."""
        if self._own is not None and monitor is not self._own:
            log.debug("the session's monitor takes the place of the client's")
            self._own = None
        is_first, self._used = self._used is None, monitor
        wanted, there = self._num_warmup, monitor.config.num_warmup_iterations
        if wanted is not None and wanted != there:
            log.warning("num_warmup_iters=%d is not used: num_warmup_iterations=%d is configured", wanted, there)
        for name in self._measured.open:
            monitor.start_section(name)
        if not is_first:
            self._set(self._calculated)

    def _gather(self) -> dict[str, float]:
        """Return the longest times of all ranks. Collective: all ranks."""
        self._monitor()
        self._measured.note_outside()
        gathered = self._exchange.gather(self._measured.values(), dict[str, float])
        names = {name for times in gathered for name in times}
        return {name: max(times.get(name, 0.0) for times in gathered) for name in names}

    def _merge(self, longest_s: float, before_s: float | None) -> float:
        new = max(FLOOR_S, longest_s * self._monitor().config.safety_factor)
        return new if before_s is None else (new + before_s) / 2

    @staticmethod
    def _refuse(what: str, skip: bool) -> bool:
        if not skip:
            raise RankMonitorClientError(f"not enough was seen to calculate timeouts: no rank has closed {what}")
        return False

    def _set(self, calculated: Learned) -> None:
        """Enforce calculated timeouts, and update the public attributes."""
        self._calculated = calculated
        monitor = self._monitor()
        if calculated != Learned():
            monitor.watch.enforce(calculated)
        config = monitor.config
        self.cfg = NvrxFaultToleranceConfig(
            rank_termination_signal=signal.Signals[config.rank_termination_signal],
            **{name: getattr(config, name) for name in _SHARED},
        )
        initial, later = calculated.initial_heartbeat_s, calculated.heartbeat_s
        self.hb_timeouts = HeartbeatTimeouts(
            initial=config.initial_rank_heartbeat_timeout if initial is None else initial,
            subsequent=config.rank_heartbeat_timeout if later is None else later,
            were_calculated=later is not None,
        )
        outside = calculated.out_of_section_s
        self.section_timeouts = SectionTimeouts(
            section={**config.rank_section_timeouts, **calculated.sections},
            out_of_section=config.rank_out_of_section_timeout if outside is None else outside,
            calculated_sections=set(calculated.sections),
            is_out_of_section_calculated=outside is not None,
        )
