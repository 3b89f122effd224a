"""Settings of what surrounds a training script: what is watched, what a node needs, and when a run leaves."""

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
    """What is watched, for how long, and how often a job may be restarted.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    enable_ft_package: bool = False
    """Watch heartbeats and sections of the workers; off: only their deaths are detected. Where it is not given,
    ``outlast run`` watches, and a session under another launcher does if a timeout is given. On under another launcher,
    and no timeout given: a session's first heartbeat is due after 1800 s, each further one after 300 s."""

    calc_ft_timeouts: bool = False
    """Learn timeouts of sections and heartbeats from observed durations, and keep them in ft_state.json for the next
    cycle and job. A learned timeout ends no run that a given one would not end."""

    state_directory: str | None = None
    """Folder of ft_state.json; none = next to the checkpoints, where a session's ``checkpoint.directory`` is a path,
    else the run directory."""

    initial_rank_heartbeat_timeout: float | None = None
    """Longest time in seconds from a worker's start to its first heartbeat; none = not enforced. Where it is not given,
    ``outlast run`` enforces 1800 s, or ``rank_heartbeat_timeout`` if that is longer, on ranks with a session. Where
    their section is given a longer timeout or none, or the time outside sections a longer one, that holds instead."""

    rank_heartbeat_timeout: float | None = None
    """Longest time in seconds between two heartbeats of a worker; none = not enforced. Where it is not given, ``outlast
    run`` enforces 1800 s on ranks with a session, while they are in its loop. Where their section is given a longer
    timeout or none, or the time outside sections a longer one, that holds instead. An evaluation within the loop sends
    none: sections find a hang much sooner."""

    rank_section_timeouts: Mapping[str, float | None] = field(default_factory=dict)
    """Longest time in seconds in each section, as setup:600,step:180,checkpointing:420; a section that is not
    named is measured, not enforced."""

    rank_out_of_section_timeout: float | None = None
    """Longest time in seconds that a worker that uses sections may spend outside all of them; none = not
    enforced."""

    exit_timeout: float | None = None
    """Longest time in seconds that a worker may run after the first worker of its cycle exited with 0, counted from its
    last heartbeat if that is later; none = not enforced. Where it is not given, ``outlast run`` enforces 1800 s on
    workers whose processes use no processor. A worker that is ended for it counts as hung. After 30 s it is reported
    with its stack."""

    safety_factor: float = 5.0
    """A learned timeout is the longest observed duration times this."""

    num_warmup_iterations: int = 1
    """In a cycle's first iterations, this many, the section step is not enforced; 0 = enforced from the
    first."""

    rank_termination_signal: str = "SIGKILL"
    """Signal that ends a hung worker when no launcher of ours does (SIGKILL, SIGTERM, ...)."""

    rank_termination_grace: float = 30.0
    """Seconds from ``rank_termination_signal`` to SIGKILL, in which a handler of the script runs; 0 = none."""

    max_no_progress_cycles: int = 3
    """Cycles in a row that may end without a new durable checkpoint, where progress can be known; then the
    job stops with exit code 93. Where it is not given, ``outlast run`` allows one more for each 4,096 nodes beyond the
    first 4,096, as it does for ``--max-restarts``."""

    max_restart_delay: float = 60.0
    """Longest time in seconds that a restart waits. Without progress, restarts in a row wait 0, 1, 5, 15, 30, then 60
    seconds, so that a disk or file server that fails for a while does not use all of them; 0 = no restart waits."""

    max_node_faults: int = 3
    """Faults after which a node gives its slot to a spare, where there is one; 0 = never. A node on which two or more
    failures in a row began, all without progress, gives its slot to a spare before the last restart of a budget."""

    min_nodes: int | None = None
    """Smallest number of nodes that the script can train with once spares are spent; none = never shrink."""

    node_heartbeat_timeout: float = 5.0
    """Seconds without a heartbeat after which a node counts as lost."""

    shutdown_grace: float = 60.0
    """Seconds that workers get to save after SIGTERM or Ctrl-C reached their agent; 0 = none."""

    gpu_memory_reclaim_timeout: float = 50.0
    """Longest time in seconds that a node's next workers wait for the GPU memory of those that were killed; 0 = they do
    not wait."""

    gpu_memory_tolerance_mb: float = 512.0
    """MiB of each GPU that may be in use then, beyond what was in use before the first workers."""

    gpu_memory_poll_interval: float = 0.1
    """Seconds from one look at the GPUs' memory to the next."""

    simulate_fault: bool = False
    """Cause one fault on purpose, once a run."""

    simulated_fault_type: str = "random"
    """rank_hung (SIGSTOP), rank_killed (SIGKILL), or random (one of the two)."""

    simulated_fault_rank: int | None = None
    """Global rank that the fault applies to; none = drawn at random, the same everywhere."""

    simulated_fault_base_delay: float = 0.0
    """Seconds after the session's start before which the fault does not come."""

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
        """Return the fields that were given as JSON, for another process."""
        return json.dumps(self.given)

    @classmethod
    def from_json(cls, text: str) -> FaultToleranceConfig:
        """Read what :meth:`to_json` wrote.

        Raises:
            ConfigError: It is something else, or was cut.
        """
        try:
            values = parse_json(text)
        except ValueError:
            values = None
        require(isinstance(values, dict), f"{text[:80]!r} are not fault tolerance settings; run one outlast everywhere")
        return from_mapping(cls, values, where="fault tolerance settings")


class HealthConfig(Settings):
    """What a node must have to train, and how it is looked at.

    Raises:
        ConfigError: A value is out of range; the message names it.
    """

    check_timeout: float = 30.0
    """Seconds that one check may take; one that takes longer has failed."""

    device_timeout: float = 120.0
    """The same for a check of a GPU; the first one starts its driver."""

    min_free_disk_gib: float = 1.0
    """Space that each tier's disk, and the run directory's, must have left, in GiB."""

    min_free_shm_gib: float = 0.0
    """Space that /dev/shm must have left, in GiB, for what your script puts there: batches of DataLoader workers,
    buffers of NCCL; 0 = any will do, as nothing of outlast's lies there."""

    min_free_memory_gib: float = 0.5
    """Memory that must be available on the node, or in this container, in GiB; heartbeats, staged generations and the
    memory tier take theirs from it."""

    min_open_files: int = 1024
    """Files that a process may have open. ``outlast run`` raises the soft limit to the hard one (``ulimit -Hn``) for
    itself and its workers, so the hard limit decides."""

    max_clock_skew: float = 30.0
    """Seconds that this node's clock may differ from that of a tier's file server."""

    network_interfaces: tuple[str, ...] = ()
    """Interfaces that must be up (``eth0``, ``ib0``, or an InfiniBand device such as ``mlx5_0``); none = any but the
    loopback."""

    commands: tuple[str, ...] = ()
    """Checks of your own, run by the shell: another exit code than 0 fails, the last line of output says why."""

    gpu_memory_test_gib: float = 1.0
    """Memory of each GPU that is written and read back, in GiB; 0 = none."""

    before_joining: bool = True
    """Look at a node before it joins a job of ``outlast run``; one that fails does not join. It is done while torch is
    being imported, and takes a fraction of a second."""

    after_fault: bool = True
    """Look at a node again after a fault that began on it, while its workers are being ended, before others start
    there."""

    gpus: bool = True
    """Then look at its GPUs too, where there are any: before joining, and from the node's second fault on. It takes
    seconds."""

    retry_interval: float = 0.0
    """Seconds after which a node that was kept out is looked at again, to join once it is fit; 0 = its agent ends with
    exit code 19."""

    node_interval: float = 0.0
    """Seconds between two looks at a node while it trains, at all but its GPUs; 0 = none."""

    process_group_interval: int = 0
    """Steps after which all ranks ask each other whether they are there; 0 = never."""

    process_group_timeout: float = 60.0
    """Seconds that all ranks may take to answer then, the latest included: more than ranks are apart in a step."""

    simulate_wrong_gemm: str | None = None
    """Name of a node whose matrix product gets one bit flipped, to see what follows; none = no node."""

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
    """Which notices end a run, and how long that may take.

    The names are those of Megatron-LM, and so are their defaults, but for ``exit_signal_handler``: a session listens
    unless that is switched off.

    Raises:
        ConfigError: A value is out of range or contradicts another; the message names both.
    """

    exit_signal_handler: bool = True
    """Stop and save on a signal; off = a signal does what it does without a session."""

    exit_signal: str | None = None
    """The signal, or several with commas between: SIGTERM, SIGUSR1, SIGUSR2, SIGHUP, SIGINT. None = SIGTERM, and
    SIGUSR1 unless the script does something with it."""

    exit_signal_handler_for_dataloader: bool = False
    """Processes that this one forks, such as a DataLoader's workers, ignore the signals of others while this process
    lives: one sent to the whole process group leaves them at work until the save is done."""

    preempt_time: float = 60.0
    """Seconds before the end of the job's time limit, where the scheduler tells it (Slurm), at which the run stops and
    saves; 0 = the limit is not looked at."""

    shutdown_timeout: float | None = 600.0
    """Seconds from the first notice within which the process has ended, whatever it is doing; what is not saved by
    then is lost. 0 or none = as long as it takes. Under ``outlast run`` its ``--ft-shutdown-grace`` holds, too."""

    notice_file: str | None = None
    """File whose appearance requests a shutdown; one rank of each node polls it. A file that was there before the job
    started is reported and ignored until it is written again."""

    notice_url: str | None = None
    """Address (http, https) whose answer may mean: leave. It does with status 200 and a text other than nothing,
    ``none``, ``false`` and ``0``. Asked by one rank of each node."""

    notice_url_header: str | None = None
    """Header to ask with, ``Name: value``, such as ``Metadata-Flavor: Google``; no place for secrets."""

    notice_plugin: str | None = None
    """A source of your own, ``package.module:name``: called without arguments, it returns an object with ``poll()``.
    Asked by one rank of each node."""

    poll_interval: float = 5.0
    """Seconds from one look at those sources to the next."""

    exit_duration_in_mins: float | None = None
    """Minutes after its start at which the run stops and saves; none = never for that reason."""

    exit_interval: int | None = None
    """Stop and save after every iteration that this divides; none = never for that reason."""

    @classmethod
    def _settle(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values with ``signal.SIGTERM`` itself as its name."""
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
        """The signals by name, each once; ``None`` = the default ones."""
        if self.exit_signal is None:
            return None
        return tuple(dict.fromkeys(name.strip() for name in self.exit_signal.split(",")))
