"""Settings of the environment of a training script: monitoring, health requirements of nodes, and shutdown."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from outlast.config.base import (
    Settings,
    from_mapping,
    nearest,
    require,
    require_above_zero,
    require_at_least,
    require_finite,
    require_one_of,
)
from outlast.decoding import parse_json

AGENTS_OWN = (
    *("node_heartbeat_timeout", "gpu_memory_reclaim_timeout", "gpu_memory_tolerance_mb", "gpu_memory_poll_interval"),
)
"""Fields that agents need before the script runs: they have no effect in a script's own config."""
LAUNCHERS_OWN = (
    *("max_no_progress_cycles", "max_restart_delay", "max_node_faults", "min_nodes", "shutdown_grace", "exit_timeout"),
    *AGENTS_OWN,
)
"""Fields for a launcher: they have no effect without ``outlast run``."""


class FaultToleranceConfig(Settings):
    """Timeouts of the monitoring, and limits of the restarts of a job.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    enable_ft_package: bool = False
    """Monitor heartbeats and sections of the workers; off = only their deaths are detected. By default ``outlast run``
    monitors, and a session under another launcher does if a timeout is given. On under another launcher, and no timeout
    given: a session's first heartbeat is due after 1800 s, each further one after 300 s."""

    calc_ft_timeouts: bool = False
    """Learn timeouts of sections and heartbeats from observed durations, and keep them in ft_state.json for the next
    cycle and job. A learned timeout never ends a run that a configured one would not end."""

    state_directory: str | None = None
    """Folder of ft_state.json; none = next to the checkpoints, where a session's ``checkpoint.directory`` is a path,
    else the run directory."""

    initial_rank_heartbeat_timeout: float | None = None
    """Longest time in seconds from a worker's start to its first heartbeat; none = not enforced. By default ``outlast
    run`` enforces 1800 s, or ``rank_heartbeat_timeout`` if that is longer, on ranks with a session. If the timeout of
    their section, or the one outside sections, is longer or none, that applies instead."""

    rank_heartbeat_timeout: float | None = None
    """Longest time in seconds between two heartbeats of a worker; none = not enforced. By default ``outlast run``
    enforces 1800 s on ranks with a session, while they are in its loop. If the timeout of their section, or the one
    outside sections, is longer or none, that applies instead. An evaluation within the loop sends no heartbeats:
    sections detect a hang much sooner."""

    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    """Longest time in seconds in each section, as setup:600,step:180,checkpointing:420; other sections are measured,
    but not enforced."""

    rank_out_of_section_timeout: float | None = None
    """Longest time in seconds that a worker that uses sections may spend outside all of them; none = not
    enforced."""

    exit_timeout: float | None = None
    """Longest time in seconds that a worker may run after the first worker of its cycle exited with 0, counted from its
    last heartbeat if that is later; none = not enforced. By default ``outlast run`` enforces 1800 s on workers whose
    processes use no CPU time. A worker that is ended for this reason counts as hung. After 30 s its stack is logged."""

    safety_factor: float = 5.0
    """A learned timeout is the longest observed duration times this."""

    num_warmup_iterations: int = 1
    """Number of first iterations of a cycle in which the timeout of the section step is not enforced; 0 = always
    enforced."""

    rank_termination_signal: str = "SIGKILL"
    """Signal that ends a hung worker that was not started by ``outlast run`` (SIGKILL, SIGTERM, ...)."""

    rank_termination_grace: float = 30.0
    """Seconds from ``rank_termination_signal`` to SIGKILL, in which a handler of the script runs; 0 = none."""

    max_no_progress_cycles: int = 3
    """Consecutive cycles that may end without a new durable checkpoint, if progress can be determined; then the job
    stops with exit code 93. By default ``outlast run`` allows one more for each 4,096 nodes beyond the first 4,096, as
    for ``--max-restarts``."""

    max_restart_delay: float = 60.0
    """Longest delay in seconds before a restart. Without progress, consecutive restarts wait 0, 1, 5, 15, 30, then 60
    seconds, so that a temporary failure of a disk or file server does not use up all restarts; 0 = no delay."""

    max_node_faults: int = 3
    """Faults after which a spare replaces the node, if there is one; 0 = never. A node on which two or more consecutive
    failures began, all without progress, is replaced before the last restart of a budget."""

    min_nodes: int | None = None
    """Smallest number of nodes that the script can train with when no spares are left; none = never shrink."""

    node_heartbeat_timeout: float = 5.0
    """Seconds without a heartbeat of a node's agent after which the node is declared lost."""

    shutdown_grace: float = 60.0
    """Seconds that workers get to save after their agent received SIGTERM or Ctrl-C; 0 = none."""

    gpu_memory_reclaim_timeout: float = 50.0
    """Longest time in seconds that the next workers of a node wait for the GPU memory of killed workers to be released;
    0 = no wait."""

    gpu_memory_tolerance_mb: float = 512.0
    """MiB of each GPU that may be in use after that wait, beyond what was in use before the first workers."""

    gpu_memory_poll_interval: float = 0.1
    """Seconds between two queries of the GPUs' memory."""

    simulate_fault: bool = False
    """Inject one fault, once per run."""

    simulated_fault_type: str = "random"
    """rank_hung (SIGSTOP), rank_killed (SIGKILL), or random (one of the two)."""

    simulated_fault_rank: int | None = None
    """Global rank in which the fault is injected; none = drawn at random, the same on all nodes."""

    simulated_fault_base_delay: float = 0.0
    """Minimum delay in seconds from the session's start to the fault."""

    def _check(self) -> None:
        require_finite(self)
        timeouts = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout")
        require_above_zero(
            self, *timeouts, "exit_timeout", "node_heartbeat_timeout", what=" seconds; write none to switch it off"
        )
        require_above_zero(self, "gpu_memory_poll_interval")
        require_at_least(self, 0, "gpu_memory_reclaim_timeout", what="; 0 = nothing is waited for")
        require_at_least(self, 0, "gpu_memory_tolerance_mb")
        for name, seconds in self.rank_section_timeouts.items():
            require(
                seconds is None or seconds > 0,
                f"rank_section_timeouts[{name!r}]={seconds} must be above 0 seconds; write none to switch it off",
            )
            require(0 < len(name.encode()) <= 39, f"section name {name!r} must have 1 to 39 bytes; shorten it")
        require_at_least(self, 1, "safety_factor", "max_no_progress_cycles", "min_nodes")
        require_at_least(self, 0, "max_restart_delay", "num_warmup_iterations", "max_node_faults", "shutdown_grace")
        require_at_least(self, 0, "rank_termination_grace")
        require_at_least(self, 0, "simulated_fault_rank", "simulated_fault_base_delay")
        require(
            self.rank_termination_signal in signal.Signals.__members__,
            f"rank_termination_signal={self.rank_termination_signal!r} is not a signal; write for example SIGKILL",
        )
        require_one_of(self, "simulated_fault_type", ("rank_hung", "rank_killed", "random"))
        initial, steady = self.initial_rank_heartbeat_timeout, self.rank_heartbeat_timeout
        require(
            initial is None or steady is None or initial >= steady,
            f"initial_rank_heartbeat_timeout={initial} must be at least rank_heartbeat_timeout={steady}: "
            "the first heartbeat also waits for start-up",
        )

    def to_json(self) -> str:
        """Return the given fields as JSON, for another process."""
        return json.dumps(self.given)

    @classmethod
    def from_json(cls, text: str) -> FaultToleranceConfig:
        """Read the result of :meth:`to_json`.

        Raises:
            ConfigError: The text is something else, or was cut.
        """
        try:
            values = parse_json(text)
        except ValueError:
            values = None
        require(isinstance(values, dict), f"{text[:80]!r} are not fault tolerance settings; run one outlast everywhere")
        return from_mapping(cls, values, where="fault tolerance settings")


class HealthConfig(Settings):
    """Health requirements of a node, and the checks that verify them.

    Raises:
        ConfigError: A value is out of range; the message names it.
    """

    check_timeout: float = 30.0
    """Seconds that one check may take; a check that takes longer fails."""

    device_timeout: float = 120.0
    """The same for a check of a GPU; the first one starts its driver."""

    min_free_disk_gib: float = 1.0
    """Free space required on the disk of each tier and of the run directory, in GiB."""

    min_free_shm_gib: float = 0.0
    """Free space required in /dev/shm, in GiB, for the script's use: batches of DataLoader workers, buffers of NCCL; 0
    = no requirement; outlast stores nothing there."""

    min_free_memory_gib: float = 0.5
    """Memory that must be available on the node, or in this container, in GiB; heartbeats, staged checkpoints and the
    memory tier are allocated from it."""

    min_open_files: int = 1024
    """Number of files that a process must be able to open. ``outlast run`` raises the soft limit to the hard one
    (``ulimit -Hn``) for itself and its workers, so the hard limit decides."""

    max_clock_skew: float = 30.0
    """Largest difference in seconds between this node's clock and that of a tier's file server."""

    network_interfaces: tuple[str, ...] = ()
    """Interfaces that must be up (``eth0``, ``ib0``, or an InfiniBand device such as ``mlx5_0``); none = any except the
    loopback."""

    commands: tuple[str, ...] = ()
    """Custom checks, run by the shell: an exit code other than 0 fails the check, and the last line of output is the
    reason."""

    gpu_memory_test_gib: float = 1.0
    """Memory of each GPU that is written and read back, in GiB; 0 = none."""

    before_joining: bool = True
    """Check a node before it joins a job of ``outlast run``; a node that fails does not join. The checks run while
    torch is imported, and take a fraction of a second."""

    after_fault: bool = True
    """Check a node again after a fault that began on it, while its workers are ended, before others start there."""

    gpus: bool = True
    """Include the node's GPUs in these checks, if there are any: before joining, and from the node's second fault on.
    Takes seconds."""

    retry_interval: float = 0.0
    """Seconds after which an unhealthy node is checked again, to join once it is healthy; 0 = its agent exits with exit
    code 19."""

    node_interval: float = 0.0
    """Seconds between two checks of a node during training, without its GPUs; 0 = none."""

    process_group_interval: int = 0
    """Steps between two checks that all ranks of the process group respond; 0 = never."""

    process_group_timeout: float = 60.0
    """Seconds within which all ranks must respond to that check; must be larger than the time by which ranks are apart
    in a step."""

    simulate_wrong_gemm: str | None = None
    """Name of a node in whose matrix product one bit is flipped, to test the health check; none = no node."""

    def _check(self) -> None:
        require_finite(self)
        require_above_zero(self, "check_timeout", "device_timeout", "process_group_timeout")
        require_at_least(self, 0, "max_clock_skew", "min_open_files")
        require_at_least(self, 0, "retry_interval", "node_interval", "process_group_interval")
        require_at_least(self, 0, "min_free_disk_gib", "min_free_shm_gib", "min_free_memory_gib", "gpu_memory_test_gib")
        for name in ("network_interfaces", "commands"):
            require(all(getattr(self, name)), f"{name} has an empty entry; leave it out")


_EXIT_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT")


class PreemptionConfig(Settings):
    """Which events request a shutdown of a run, and how long the shutdown may take.

    Names and defaults are those of Megatron-LM, except for ``exit_signal_handler``: a session handles signals by
    default.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    exit_signal_handler: bool = True
    """Stop and save on a signal; off = a signal has the same effect as without a session."""

    exit_signal: str | None = None
    """The signal, or several separated by commas: SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT. None = SIGTERM, and
    SIGUSR1 unless the script handles it."""

    exit_signal_handler_for_dataloader: bool = False
    """Processes that this one forks, such as a DataLoader's workers, ignore these signals from other processes while
    this process lives, so that a signal to the whole process group does not stop them before the save is complete."""

    preempt_time: float = 60.0
    """Seconds before the end of the job's time limit, if the scheduler provides it (Slurm), at which the run stops and
    saves; 0 = ignore the time limit."""

    shutdown_timeout: float | None = 600.0
    """Seconds from the first shutdown request to the forced end of the process; state that is not saved by then is
    lost. 0 or none = no limit. Under ``outlast run`` its ``--ft-shutdown-grace`` also applies."""

    notice_file: str | None = None
    """File whose appearance requests a shutdown; one rank of each node polls it. A file that was there before the job
    started is reported and ignored until it is written again."""

    notice_url: str | None = None
    """Address (http, https) that is polled for a preemption notice by one rank of each node. A response with status 200
    and a text other than empty, ``none``, ``false`` and ``0`` requests a shutdown."""

    notice_url_header: str | None = None
    """Header of that HTTP request, ``Name: value``, such as ``Metadata-Flavor: Google``; do not put secrets in it."""

    notice_plugin: str | None = None
    """Custom source of preemption notices, ``package.module:name``: called without arguments, it returns an object with
    ``poll()``, which one rank of each node calls."""

    poll_interval: float = 5.0
    """Seconds between two polls of these sources."""

    exit_duration_in_mins: float | None = None
    """Minutes after its start at which the run stops and saves; none = no limit."""

    exit_interval: int | None = None
    """Stop and save when the iteration is a multiple of this number; none = never."""

    @classmethod
    def _settle(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Accept ``signal.SIGTERM`` itself as well as its name."""
        number = values.get("exit_signal")
        return {**values, "exit_signal": signal.Signals(number).name} if isinstance(number, int) else values

    def _check(self) -> None:
        require_finite(self)
        for name in self.signal_names or ():
            require(
                name in _EXIT_SIGNALS,
                f"exit_signal={self.exit_signal!r}: {name!r} is not one to leave on; {nearest(name, _EXIT_SIGNALS)}",
            )
        for switch in ("exit_signal", "exit_signal_handler_for_dataloader"):
            require(
                self.exit_signal_handler or not getattr(self, switch),
                f"{switch}={getattr(self, switch)!r} has no effect while exit_signal_handler is off; switch that on, "
                f"or leave {switch} out",
            )
        require_at_least(self, 0, "preempt_time", what="; 0 = the time limit is not looked at")
        require_at_least(self, 0, "shutdown_timeout", what="; 0 = as long as it takes")
        require_above_zero(self, "poll_interval")
        require(
            not self.preempt_time or self.poll_interval < self.preempt_time,
            f"poll_interval={self.poll_interval} must be below preempt_time={self.preempt_time}: the end of the time "
            "limit would be detected too late",
        )
        url = self.notice_url
        require(
            url is None or url.startswith(("http://", "https://")),
            f"notice_url={url!r} must begin with http:// or https://; for a file there is notice_file",
        )
        header = self.notice_url_header
        require(header is None or ":" in header, f"notice_url_header={header!r} must be of the form 'Name: value'")
        require(
            header is None or url is not None,
            f"notice_url_header={header!r} has no effect without notice_url; name one",
        )
        plugin = self.notice_plugin
        require(
            plugin is None or all(plugin.partition(":")[::2]),
            f"notice_plugin={plugin!r} must be of the form 'package.module:name'",
        )
        require_above_zero(self, "exit_duration_in_mins", what="; none = never")
        require_at_least(self, 1, "exit_interval", what="; none = never")

    @property
    def signal_names(self) -> tuple[str, ...] | None:
        """Names of the signals, each once; ``None`` = the default ones."""
        if self.exit_signal is None:
            return None
        return tuple(dict.fromkeys(name.strip() for name in self.exit_signal.split(",")))
