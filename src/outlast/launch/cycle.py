"""One cycle on one node: prepare and watch its workers, end them, and report why they ended.

:meth:`Cycle.prepare` makes the workers' environments, heartbeat memory and log files. The watchdog detects hangs;
:mod:`outlast.launch.in_process_recovery` follows in-process restarts. After the workers' end
:meth:`Cycle.describe_failure` identifies the first failure, and :meth:`Cycle.facts` is the report for the coordinator.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import msgspec
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.utils.api import macros

from outlast import clock, env
from outlast.config.launching import AGENTS_OWN
from outlast.config.sources import SCRIPT, LayeredSettings, ft_option
from outlast.decoding import MAX_STATE_BYTES, open_file, parse_json, read_file
from outlast.errors import ConfigError, ExitReason
from outlast.incidents import Cause, Incident, IncidentKind
from outlast.launch import protocol as m
from outlast.launch.agent_events import HangSeen, WatchdogFailed
from outlast.launch.decisions import highest_committed, highest_durable
from outlast.launch.in_process_recovery import InProcessRecovery
from outlast.launch.options import NO_TERMINATION_SIGNAL, RunOptions
from outlast.launch.worker_logs import WorkerLogs, open_logs
from outlast.launch.workers import WorkerProcess
from outlast.monitor.examination import examine
from outlast.monitor.learned_timeouts import LearnedTimeouts, enforceable, observe
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.causes import (
    AGREED_EXIT_S,
    OWN_DECISIONS,
    PLAIN_START_S,
    Ended,
    find_first,
    permanent_cause,
    same_fault_s,
    wait_s,
)
from outlast.policy.deadlines import FIELD_OF_SETTING, Timeouts, describe_hangs
from outlast.policy.inprocess_protocol import InProcessState
from outlast.policy.recovery_point import Exclusion, Load, tier_of_load
from outlast.policy.rerun import Diagnosis, Replay
from outlast.policy.root_cause import Position
from outlast.runtime.board import Board, EndRequest, KeptDurability
from outlast.runtime.diagnoses import read_diagnosis
from outlast.runtime.files import in_time, make_private_folder, open_private, write_optional
from outlast.runtime.fork_server import Exited, Spawn, Started
from outlast.runtime.postmortem import Postmortem

log = logging.getLogger(__name__)
_FATAL_SIGNALS = {
    "Segmentation fault": -signal.SIGSEGV,
    "Aborted": -signal.SIGABRT,
    "Bus error": -signal.SIGBUS,
    "Floating-point exception": -signal.SIGFPE,
    "Floating point exception": -signal.SIGFPE,
    "Illegal instruction": -signal.SIGILL,
}
"""Signals as ``faulthandler`` calls them."""
_KEYS_PER_CYCLE = 1 << 16
_LAST_LINES, _MAX_LINE, _MAX_TAIL = 20, 300, 16 * 1024
ALONE_S = 5.0
"""How long workers that are shutting down may run once one of them ended without having saved."""
_WITHOUT_EFFECT = {
    **{
        name: f"agents need it before the script runs; give outlast run {ft_option(name)}, or "
        "--config with a file that has it"
        for name in AGENTS_OWN
    },
    **dict.fromkeys(("rank_termination_signal", "rank_termination_grace"), NO_TERMINATION_SIGNAL),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLaunch:
    """How this node's workers are started, in every cycle."""

    options: RunOptions
    kind: str
    """As in :class:`outlast.runtime.fork_server.Spawn`."""
    argv: tuple[str, ...]
    env: dict[str, str]
    """Environment of every worker."""
    spec: WorkerSpec
    logs: LogsSpecs

    def argv_of(self, local_rank: int) -> tuple[str, ...]:
        """Return the command line of one worker."""
        argv = tuple(macros.substitute(list(self.argv), str(local_rank)))  # ${local_rank}
        if self.kind != "exec" or (binding := self.options.torchrun.numa_binding) is None:
            return argv
        # torch 2.8 has neither the option nor the module.
        from torch.numa.binding import AffinityMode, NumaOptions, _maybe_wrap_command_args_with_numa_binding

        options = NumaOptions(affinity_mode=AffinityMode(binding))
        return _maybe_wrap_command_args_with_numa_binding(argv, gpu_index=local_rank, numa_options=options)

    def ranks_env(self, start: m.Start, local_rank: int) -> dict[str, str]:
        """Return the variables that torch's scripts expect in one worker's environment."""
        spec, rank = self.spec, start.base_rank + local_rank
        values = {
            "RANK": rank,
            "GROUP_RANK": start.node_rank,
            "ROLE_RANK": rank,
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "WORLD_SIZE": start.world_size,
            "GROUP_WORLD_SIZE": start.num_nodes,
            "ROLE_WORLD_SIZE": start.world_size,
            "MASTER_ADDR": start.master_addr,
            "MASTER_PORT": start.master_port,
            "TORCHELASTIC_RESTART_COUNT": start.cycle,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": self.options.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_SIGNALS_TO_HANDLE": self.options.torchrun.signals_to_handle,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.environ().get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        }
        texts = {name: str(value) for name, value in values.items()}
        # torch's own rule for LOCAL_RANK and the visible devices, which respects --virtual-local-rank.
        if hasattr(LocalElasticAgent, "_set_local_rank_env"):
            LocalElasticAgent._set_local_rank_env(None, texts, local_rank, spec)  # type: ignore[arg-type]
        else:  # torch 2.8
            texts["LOCAL_RANK"] = str(local_rank)
        return texts

    def line_prefixes(self, start: m.Start) -> dict[int, str] | None:
        """Return the console prefix of each local rank's lines; ``None``: torch's own."""
        if not (template := env.environ().get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")):
            return None
        names, base = Template(template), start.base_rank
        return {
            rank: names.safe_substitute(role_name=self.spec.role, rank=base + rank, local_rank=rank)
            for rank in range(self.spec.local_world_size)
        }


@dataclass(slots=True)
class Cycle:
    """The workers of one cycle on this node; :meth:`prepare` makes it.

    Thread: the agent's main thread.
    """

    start: m.Start
    options: RunOptions
    job: str
    node: str
    board: Board
    logs: WorkerLogs
    workers: dict[int, WorkerProcess]
    """By key in the fork server's messages."""
    spawns: list[tuple[Spawn, Sequence[int]]]
    """Requests to the fork server that start the workers, with the descriptors of their output."""
    in_process: InProcessRecovery
    postmortem: Postmortem
    """What the workers recorded about their ends."""
    watchdog: Watchdog | None = None
    layers: LayeredSettings = field(init=False)
    """The settings in force: the launcher's, and the script's once a rank has reported them."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """The enforced timeouts."""
    _origins: dict[str, str] = field(default_factory=dict)
    """Source of each setting of :attr:`timeouts`."""
    script_settings: str | None = None
    """The settings of the script's config, as text; ``None`` while no rank has attached to the heartbeat memory."""
    calculated: str = ""
    """The timeouts that the script calculated, as text."""
    _before_calculated: Timeouts = field(default_factory=Timeouts)
    """The timeouts without the calculated ones."""
    _settings_of: dict[int, str] = field(default_factory=dict)
    """The last report of each local rank."""
    _superseded: set[str] = field(default_factory=set)
    """Settings that were in force before."""
    _differing: set[int] = field(default_factory=set)
    """Local ranks whose settings differ from those in force."""
    over: bool = False
    """The cycle has ended: later events of its workers are ignored."""

    def __post_init__(self) -> None:
        self.layers = self.options.layers

    # -- laying it out -----------------------------------------------------------------------------------------

    @classmethod
    def prepare(
        cls,
        launch: WorkerLaunch,
        start: m.Start,
        *,
        job: str,
        node: str,
        writer: str,
        relay: str,
        kept: Sequence[KeptDurability] = (),
    ) -> Cycle:
        """Prepare a cycle's environments, heartbeat memory and logs; nothing runs yet.

        Args:
            launch: How the workers are started.
            start: The coordinator's message.
            job: Name of the job.
            node: Name of this node.
            writer: Address of the node's checkpoint writer; empty: none.
            relay: Address of the node's relay for in-process restarts; empty: none.
            kept: Durability records of the job's previous cycle, by local rank.

        Raises:
            OSError: A file cannot be made.
            OutlastError: The heartbeat memory cannot be made.
        """
        options, nproc = launch.options, launch.spec.local_world_size
        workers = {
            start.cycle * _KEYS_PER_CYCLE + rank: WorkerProcess(local_rank=rank, global_rank=start.base_rank + rank)
            for rank in range(nproc)
        }
        with ExitStack() as stack:
            board = Board.create(num_ranks=nproc, kept=kept)
            stack.callback(board.close)
            envs = {rank: launch.ranks_env(start, rank) for rank in range(nproc)}
            in_process = InProcessRecovery(
                board, workers, is_alone=start.num_nodes == 1, job=job, cycle=start.cycle, node=node
            )
            stack.callback(in_process.close)
            postmortem = Postmortem(nproc)
            stack.callback(postmortem.close)
            prefixes = launch.line_prefixes(start)
            logs, envs = open_logs(launch.logs, envs, options.torchrun, options.run_dir, prefixes)
            shared = {
                **launch.env,
                env.RUN_ID: options.run_id,
                env.RUN_DIR: str(options.run_dir),
                env.NAMES: json.dumps(options.names),
                env.RESUME_OTHER: "1" if options.torchrun.resume_from_other_run else "",
                env.JOB: job,
                env.CYCLE: str(start.cycle),
                env.NODE: node,
                env.BOARD: board.path,
                env.CONFIG: options.layers.launcher.to_json(),
                env.CONFIG_FILE: options.layers.file_name,
                env.WRITER: writer,
                env.RELAY: relay,
                env.UNTRUSTED: _as_text(start.excluded),
                env.REPLAY: _as_text(start.replay),
                env.DURABLE_ITERATION: "" if start.durable_iteration is None else str(start.durable_iteration),
            }
            spawns: list[tuple[Spawn, Sequence[int]]] = []
            for key, worker in workers.items():
                rank = worker.local_rank
                stdout, stderr = logs.outputs_of(rank)
                variables = {**shared, **envs[rank], env.POSTMORTEM: postmortem.path(rank)}
                request = Spawn(
                    key=key,
                    kind=launch.kind,
                    argv=tuple(map(os.fsencode, launch.argv_of(rank))),
                    env={os.fsencode(name): os.fsencode(value) for name, value in variables.items()},
                    stdout=stdout is not None,
                    stderr=stderr is not None,
                    on_start="" if launch.kind == "exec" else "outlast.monitor.stacks:register",
                )
                spawns.append((request, [fd for fd in (stdout, stderr) if fd is not None]))
            stack.pop_all()
        return cls(start, options, job, node, board, logs, workers, spawns, in_process, postmortem)

    @property
    def number(self) -> int:
        return self.start.cycle

    # -- watching it -------------------------------------------------------------------------------------------

    def watch(self, deliver: Callable[[object], None]) -> None:
        """Start the watchdog and the copies of the output; ``deliver`` receives the watchdog's events in its thread."""
        self.logs.start()
        if self.layers.config.enable_ft_package:
            self.watchdog = Watchdog(
                self.board,
                None,
                node=self.node,
                on_hang=lambda report: deliver(HangSeen(self.number, report)),
                on_error=lambda error: deliver(WatchdogFailed(error)),
            )
            self.watchdog.start()

    def note_started(self, event: Started) -> bool:
        """Note that a worker runs; return whether all do.

        A worker that started while its cycle was being ended is ignored: it is killed with the others.
        """
        worker = None if self.over else self.workers.get(event.key)
        if worker is None:
            return False
        worker.pid, worker.started_ns = event.pid, clock.now_ns()
        self.board.assign(worker.local_rank, pid=event.pid, global_rank=worker.global_rank, cycle=self.number)
        return all(other.pid for other in self.workers.values())

    def apply_script_settings(self) -> None:
        """Enforce the settings that ranks have reported through the heartbeat memory.

        The first rank with settings counts; another rank whose settings differ is logged. A rank attaches again if a
        session follows a monitor that its script made: its new settings replace the old ones.
        """
        for local_rank in range(self.board.num_ranks):
            text = self.board.settings(local_rank)
            before = self._settings_of.get(local_rank)
            if text is None or text == before:
                continue
            self._settings_of[local_rank] = text
            in_force = self.script_settings
            # A worker may attach without settings first, and again with those of its session.
            if text != in_force and (not in_force or (text and before == in_force)):
                self.script_settings = text
                self._superseded.add(in_force or "")
                self._enforce(text)
        differing = {
            rank
            for rank, text in self._settings_of.items()
            if text not in (self.script_settings, "") and text not in self._superseded
        }
        for local_rank in sorted(differing - self._differing):
            log.warning(
                "the fault tolerance settings of local rank %d differ from another rank's, which are in "
                "force; give all ranks the same config",
                local_rank,
            )
        self._differing |= differing

    def _enforce(self, text: str) -> None:
        try:
            self.layers = self.layers.with_script(text or "{}")
        except ConfigError as error:
            log.warning("the fault tolerance settings of the script's config are not used: %s", error)
        config, source = self.layers.config, self.layers.source
        for name, why in _WITHOUT_EFFECT.items():
            if source(name) == SCRIPT:
                log.warning("fault_tolerance.%s of the script's config has no effect: %s", name, why)
        if self.watchdog is None:
            return
        if not config.enable_ft_package:
            self.watchdog.stop()
            self.watchdog = None
            return
        timeouts = configured = Timeouts.from_config(config, with_defaults=True)
        if (folder := LearnedTimeouts.folder(config, self.options.run_dir)) is not None:
            try:
                learned = in_time(folder, partial(LearnedTimeouts.load, folder))
                timeouts = learned.apply_to(configured)
            except TimeoutError as error:
                log.warning("the timeouts learned so far are not used: %s", error)

        def origin(name: str) -> str:
            field = FIELD_OF_SETTING[name]
            return "learned" if getattr(timeouts, field) != getattr(configured, field) else source(name)

        self.timeouts, self._origins = timeouts, {name: origin(name) for name in FIELD_OF_SETTING}
        self._before_calculated, self.calculated = timeouts, ""
        self.watchdog.enforce(timeouts, timeouts.describe(origin))
        self.apply_calculated_timeouts()

    def apply_calculated_timeouts(self) -> None:
        """Enforce the timeouts that the script calculated, if they have changed; the lowest local rank's count."""
        if self.over or self.watchdog is None or self.script_settings is None:
            return
        texts = ((rank, self.board.timeouts(rank)) for rank in range(self.board.num_ranks))
        local_rank, text = next(((rank, text) for rank, text in texts if text != ""), (0, ""))
        if text is None or text == self.calculated:
            return  # being written: the worker wakes the agent afterwards
        self.calculated, before = text, self._before_calculated
        folder = LearnedTimeouts.counts_in(self.layers.config, self.options.run_dir)
        self.timeouts = enforceable(before, text, rank=local_rank, folder=folder)
        changed = {name for name, of in FIELD_OF_SETTING.items() if getattr(self.timeouts, of) != getattr(before, of)}
        self._origins |= dict.fromkeys(changed, "calculated by the script")
        self.watchdog.enforce(self.timeouts, self.timeouts.describe(self._origins.__getitem__))

    @property
    def had_session(self) -> bool:
        """Whether a worker of this node has, or had, a session or a monitor."""
        return any(state.attached or state.in_process != InProcessState.OFF for state in self.board.read_all())

    def describe_hang_detection(self, *, is_early: bool = False) -> str:
        """Describe the hang detection for people; ``is_early``: a script without a session may still open one."""
        return describe_hangs(
            self.timeouts if self.watchdog is not None else None,
            self.layers.source("enable_ft_package"),
            has_session=None if is_early else self.watchdog is None or self.had_session,
            origins=self._origins,
        )

    @property
    def session_protection(self) -> str:
        """What the session of this node's first rank protects against; empty: not reported yet."""
        return "" if self.over else self.board.protection(0)

    def look(self) -> None:
        """Make the watchdog judge the workers again: their state has changed."""
        if self.watchdog is not None:
            self.watchdog.look()

    # -- its workers' ends -------------------------------------------------------------------------------------

    def note_exit(self, event: Exited) -> WorkerProcess | None:
        """Note that a worker ended; ``None`` if it belongs to another cycle."""
        worker = self.workers.get(event.key)
        if worker is not None:
            worker.exit_code, worker.ended_ns = event.exit_code, event.mono_ns
        return worker

    @property
    def exit_codes(self) -> list[int | None]:
        """Exit codes by local rank; ``None``: the worker runs."""
        return [worker.exit_code for worker in self.workers.values()]

    @property
    def all_ended(self) -> bool:
        return None not in self.exit_codes

    @property
    def can_be_resumed(self) -> bool:
        """Whether there is a checkpoint to resume from: of this cycle, or an earlier one that is perhaps still being
        loaded.

        The exit codes of orderly workers prove a save if all needed workers have them; of killed workers the heartbeat
        memory does.
        """
        if self.start.has_checkpoint or self.durable_iteration is not None:
            return True
        codes = {worker.exit_code for worker in self.workers.values() if worker.lost is None}
        return ExitReason.PREEMPTED in codes and codes <= {ExitReason.PREEMPTED, ExitReason.FINISHED}

    @property
    def has_started(self) -> bool:
        return any(worker.pid for worker in self.workers.values())

    @property
    def lacks_a_rank(self) -> bool:
        """Whether a worker ended without having saved, so that the others cannot save together any more."""
        orderly = (None, ExitReason.FINISHED, ExitReason.PREEMPTED)
        return any(worker.lost is None and worker.exit_code not in orderly for worker in self.workers.values())

    def continues_without(self, worker: WorkerProcess) -> bool:
        """Return whether the others continue in process without a worker that failed."""
        assert worker.exit_code
        return self.in_process.lose(worker, self._describe_exit(worker, worker.exit_code))

    def has_lost(self, rank: int | None) -> bool:
        """Return whether the cycle continues without a rank that ended."""
        return any(worker.lost is not None for worker in self.workers.values() if worker.global_rank == rank)

    @property
    def wait_for_others_s(self) -> float:
        """Seconds to wait for other workers of this node before a failure is reported; 0: the failure is clear."""
        failing = self._failing()
        done = (ExitReason.FINISHED, ExitReason.PREEMPTED)
        num_ended = sum(worker.lost is not None or worker.exit_code in done for worker in self.workers.values())
        return wait_s(
            failing,
            ran_s=self.ran_s,
            num_running=len(self.workers) - len(failing) - num_ended,
            is_before_first_step=self._is_before_first_step,
            has_session=self.had_session,
            is_alone=self.start.num_nodes == 1,
            is_one_leaving=self.in_process.is_one_leaving,
            is_agreed=not OWN_DECISIONS.isdisjoint(self.exit_codes),
        )

    @property
    def follow_s(self) -> float:
        """Seconds for this node's workers to exit by themselves, like those of the node that ended the cycle."""
        return same_fault_s(self.ran_s) if self._is_before_first_step else AGREED_EXIT_S

    def describe_failure(self) -> Incident:
        """Return the incident of the worker that failed first.

        A worker that judged a result invalid is the cause, even if a peer that missed it failed earlier.
        """
        decided = self._describe_request() or self._describe_decision()
        if (other := decided or self.in_process.unrecovered_loss) is not None:
            return other
        failing = self._failing()
        first = find_first(failing).rank
        for worker in self.workers.values():
            if worker.global_rank != first and any(worker.global_rank == one.rank for one in failing):
                self._keep_postmortem(worker)
        worker = next(worker for worker in self.workers.values() if worker.global_rank == first)
        if (code := worker.exit_code) is None:  # about to end
            cause = self.postmortem.read(worker.local_rank).cause
            code = self.board.read(worker.local_rank).leaving_with or 1  # written by its session
            if cause is not None and cause.type == "fatal signal":
                code = _FATAL_SIGNALS.get(cause.text, 1)
        return self._describe_exit(worker, code)

    def _failing(self) -> list[Ended]:
        """Return the workers that failed, and those that recorded why they are about to."""
        failing = []
        for worker in self.workers.values():
            if worker.lost is not None or worker.exit_code in (ExitReason.FINISHED, ExitReason.PREEMPTED):
                continue
            cause = self.postmortem.read(worker.local_rank).cause
            if worker.exit_code is not None or cause is not None:
                failing.append(Ended(rank=worker.global_rank, cause=cause, ended_ns=worker.ended_ns))
        return failing

    @property
    def _is_before_first_step(self) -> bool:
        """Whether no rank of this node began a step in this job, as far as its ranks report."""
        if self.number:
            return False
        states = self.board.read_all()
        if self.had_session:
            sections = {section.name for state in states for section in state.sections}
            closed = {name for state in states for name in state.counts}
            return "step" not in sections | closed and not any(state.num_heartbeats for state in states)
        return self._is_young

    @property
    def _is_young(self) -> bool:
        """Whether a script that reports no steps is assumed to be before its first one."""
        return self.ran_s < PLAIN_START_S

    @property
    def ran_s(self) -> float:
        """Seconds since the first worker of this node started."""
        now_ns = clock.now_ns()
        started_ns = min((worker.started_ns for worker in self.workers.values() if worker.started_ns), default=now_ns)
        return (now_ns - started_ns) / 1e9

    @property
    def has_trained(self) -> bool:
        """Whether a rank of this node has completed a step, or may have: scripts need not report steps."""
        states = self.board.read_all()
        if any(state.counts.get("step") or state.num_heartbeats for state in states):
            return True
        return self.has_started and not self._is_young and not any(state.attached for state in states)

    @property
    def _permanent_cause(self) -> Cause | None:
        """The same cause with which all workers of this node fail, if a restart cannot help; some may still be
        ending."""
        if not self._is_before_first_step:
            return None
        causes = [self.postmortem.read(worker.local_rank).cause for worker in self.workers.values()]
        return permanent_cause(causes, has_session=self.had_session)

    def _describe_decision(self) -> Incident | None:
        """Return the incident of a worker that exits for an invalid result or a slow rank; ``None``: there is none.

        If all ranks exit for it, the incident is that of the rank with the result, or of the slow rank, if it is on
        this node.
        """
        first: tuple[WorkerProcess, int, Diagnosis | None] | None = None
        for worker in self.workers.values():
            code = worker.exit_code or self.board.read(worker.local_rank).leaving_with
            if code not in OWN_DECISIONS:
                continue
            diagnosis = read_diagnosis(self.options.run_dir, self.job, self.number, worker.global_rank)
            if diagnosis is not None and diagnosis.rank == worker.global_rank:
                return self._describe_exit(worker, code, diagnosis)
            if first is None or (first[2] is None and diagnosis is not None):
                first = worker, code, diagnosis
        if first is None:
            return None
        worker, code, diagnosis = first
        seers = [other for other in self.workers.values() if diagnosis and diagnosis.rank == other.global_rank]
        return self._describe_exit(seers[0] if seers else worker, code, diagnosis)

    def _describe_request(self) -> Incident | None:
        """Return the incident of a worker that requested a reaction to a failure; ``None``: none did.

        A request has priority over another worker's failure, and a request to stop over one to replace the node.
        """
        asked = ((self.board.read(worker.local_rank).requested, worker) for worker in self.workers.values())
        requested, worker = max(asked, key=lambda one: one[0])
        if requested == EndRequest.NONE:
            return None
        if requested == EndRequest.STOP:
            return self._describe_exit(worker, ExitReason.NO_PROGRESS)
        incident = self._describe_exit(worker, worker.exit_code or 1)
        summary = f"rank {worker.global_rank} requested a replacement of its node"
        evidence = {**incident.evidence, "summary": summary}
        return msgspec.structs.replace(incident, kind=IncidentKind.NODE_UNHEALTHY, evidence=evidence)

    def _describe_exit(self, worker: WorkerProcess, exit_code: int, diagnosis: Diagnosis | None = None) -> Incident:
        state = self.board.read(worker.local_rank)
        evidence = self._keep_postmortem(worker)
        iteration = state.iteration if state.reports_iteration else None
        if diagnosis is not None:
            evidence.pop("cause", None)  # an intended exit, which the diagnosis explains
            evidence |= {"summary": diagnosis.describe(), "diagnosis": msgspec.to_builtins(diagnosis)}
            iteration = diagnosis.iteration
        return Incident(
            kind=IncidentKind.WORKER_DIED if exit_code < 0 else IncidentKind.WORKER_FAILED,
            job=self.job,
            cycle=self.number,
            node=self.node,
            rank=worker.global_rank,
            pid=worker.pid,
            section="/".join(section.name for section in state.sections) or None,
            iteration=iteration,
            exit_code=exit_code,
            evidence=evidence,
        )

    def _keep_postmortem(self, worker: WorkerProcess) -> dict[str, Any]:
        """Write down what a worker left behind; return the evidence for an incident."""
        remains = self.postmortem.read(worker.local_rank)
        cause, output = remains.cause, remains.output or self._redirected_output(worker.local_rank)
        last = next((line.strip() for line in reversed(output) if line.strip()), "")
        if cause is not None and cause.type == "SystemExit" and not cause.text:
            text = last[:_MAX_LINE] if cause.is_usage_error else f"the last output was {last[:_MAX_LINE]!r}"
            cause = msgspec.structs.replace(cause, text=text if last else "")
        evidence: dict[str, Any] = {}
        if cause is not None:
            evidence["cause"] = msgspec.to_builtins(cause)
        elif text := self._read_error(worker.local_rank):
            evidence["summary"] = text
        elif last and (worker.exit_code or 0) > 0:
            evidence["summary"] = f"the last output was {last[:_MAX_LINE]!r}"
        if output:
            evidence["output"] = [line[:_MAX_LINE] for line in output[-_LAST_LINES:]]
        if cause is not None or output:
            folder = self.options.run_dir / "failures" / f"{env.clean_name(self.job)}-cycle-{self.number}"
            path = folder / f"rank-{worker.global_rank}.txt"
            head = f"rank {worker.global_rank} (node {self.node}, pid {worker.pid}), exit code {worker.exit_code}"
            parts = [head, remains.trace, remains.fault, "last output:", "\n".join(output)]

            def keep() -> bool:
                make_private_folder(folder.parent)
                make_private_folder(folder)
                with open(path, "w", errors="replace", opener=open_private) as file:
                    file.write("\n\n".join(filter(None, parts)) + "\n")
                return True

            if write_optional("reports of failed workers", folder.parent, keep):
                evidence["file"] = str(path)
        return evidence

    def _redirected_output(self, local_rank: int) -> tuple[str, ...]:
        """Return the last lines of a worker's log files, stderr's last; empty if its output was not redirected."""
        destinations, lines = self.logs.destinations, list[str]()
        for path in dict.fromkeys((destinations.stdouts.get(local_rank), destinations.stderrs.get(local_rank))):
            try:
                tail = in_time(path or os.devnull, partial(_read_tail, path or os.devnull))
                lines += tail.splitlines()[-_LAST_LINES:]
            except OSError as error:
                log.debug("%s cannot be read: %s", path, error)
        return tuple(lines)

    # -- what it was -------------------------------------------------------------------------------------------

    def examine(self, report: HangReport | None) -> tuple[Position, ...]:
        """Examine the positions of the ranks and dump their stacks, except for lost workers.

        Blocks: up to about two seconds.
        """
        positions = examine(
            self.board,
            node=self.node,
            stacks_dir=self.options.run_dir / "stacks" / f"cycle-{self.number}",
            expired=report.expired if report else (),
        )
        lost = {worker.pid for worker in self.workers.values() if worker.lost is not None}
        return tuple(one for one in positions if one.pid not in lost)

    def facts(self, incident: Incident | None, positions: tuple[Position, ...] = ()) -> m.CycleFacts:
        """Return what this node knows of the cycle."""
        states = [state for state in self.board.read_all() if state.attached]
        return m.CycleFacts(
            cycle=self.number,
            incident=incident if incident is not None else self._describe_decision(),
            load=self._load(),
            durable_iteration=self.durable_iteration,
            committed_iteration=self.committed_iteration,
            progress_known=self.progress_known,
            had_session=self.had_session,
            has_trained=self.has_trained,
            positions=positions,
            observation=observe(states) if states else None,
            permanent=self._permanent_cause,
        )

    @property
    def durable_iteration(self) -> int | None:
        """Highest iteration that a worker of this node knows to survive the end of the job; ``None``: none yet."""
        return highest_durable(self.board.read_all())

    @property
    def committed_iteration(self) -> int | None:
        """Highest iteration that a worker of this node knows to be committed in any tier; ``None``: none yet."""
        return highest_committed(self.board.read_all())

    @property
    def kept(self) -> tuple[KeptDurability, ...]:
        """Durability records for the next cycle's workers, by local rank."""
        return tuple(state.kept for state in self.board.read_all())

    @property
    def progress_known(self) -> bool:
        return any(state.reports_progress for state in self.board.read_all())

    def _load(self) -> Load | None:
        loaded = [state.loaded for state in self.board.read_all() if state.loaded is not None]
        if not loaded:
            return None
        return Load(
            cycle=f"{env.clean_name(self.job)}-{self.number}",
            checkpoint=loaded[0].checkpoint,
            attempt=loaded[0].attempt,
            tier=tier_of_load([str(one.tier) for one in loaded]),
            suspect_window=loaded[0].suspect_window,
        )

    def iterations(self) -> dict[str, int]:
        """Return the last iteration of every rank that reported one."""
        return {str(s.global_rank): s.iteration for s in self.board.read_all() if s.reports_iteration}

    def close(self, *, wait_for_logs: bool = False) -> None:
        """Stop the watchdog, end the log tails and free the heartbeat memory; the fork server ends the workers."""
        self.over = True
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None
        self.logs.stop(wait=wait_for_logs)
        self.in_process.close()
        self.postmortem.close()
        self.board.close()

    def _read_error(self, local_rank: int) -> str:
        """Return the message in torch's error file, which scripts decorated with ``@record`` write."""
        path = Path(self.logs.destinations.error_files.get(local_rank) or "/nonexistent")
        try:
            message = parse_json(in_time(path, lambda: read_file(path, max_bytes=MAX_STATE_BYTES)))["message"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        message = message.get("message", "") if isinstance(message, dict) else message
        return str(message).splitlines()[0] if message else ""


def _read_tail(path: str) -> str:
    with open(open_file(path), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MAX_TAIL))
        return file.read(_MAX_TAIL).decode(errors="replace")


def _as_text(value: Replay | tuple[Exclusion, ...] | None) -> str:
    return msgspec.json.encode(value).decode() if value else ""
