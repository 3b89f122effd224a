"""One cycle on one node: its workers, their board, watchdog and logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from outlast import env
from outlast.config import FaultToleranceConfig
from outlast.errors import ExitReason
from outlast.incidents import Incident, IncidentKind
from outlast.launch import messages as m
from outlast.launch.logs import CycleLogs
from outlast.launch.options import RunOptions
from outlast.monitor.examine import examine
from outlast.monitor.learned import LearnedTimeouts, observe
from outlast.monitor.watchdog import HangReport, Watchdog
from outlast.policy.culprit import Position
from outlast.policy.deadlines import Timeouts
from outlast.policy.quarantine import Load, encode_distrusted, tier_of_load
from outlast.policy.slots import OWN_VERDICTS
from outlast.runtime.board import Board, RankState
from outlast.runtime.zygote import Exited, Spawn

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

__all__ = ["Cycle", "WorkerProcess"]

log = logging.getLogger(__name__)
_KEYS_PER_CYCLE = 1 << 16


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """A worker of this cycle."""

    local_rank: int
    global_rank: int
    pid: int = 0
    exit_code: int | None = None


@dataclass(slots=True)
class Cycle:
    """The workers of one cycle on this node.

    Thread: the agent's main thread; the watchdog reports through ``on_hang``.
    """

    start: m.Start
    spec: WorkerSpec
    options: RunOptions
    job: str
    node: str
    board: Board
    logs: CycleLogs
    workers: dict[int, WorkerProcess]
    """Key in the zygote's messages to worker."""
    spawns: list[Spawn]
    fault_tolerance: FaultToleranceConfig
    """The timeouts in force, learned ones in the place of configured ones."""
    watchdog: Watchdog | None = None
    over: bool = False
    """Nothing that happens in it counts any more."""

    @property
    def number(self) -> int:
        """The cycle's number."""
        return self.start.cycle

    def watch(self, on_hang: Callable[[HangReport], None], on_error: Callable[[BaseException], None]) -> None:
        """Watch the workers, now that they were told to start, and copy their output."""
        self.logs.start()
        if self.options.fault_tolerance.enable_ft_package:
            timeouts = Timeouts.from_config(self.fault_tolerance)
            self.watchdog = Watchdog(self.board, timeouts, node=self.node, on_hang=on_hang, on_error=on_error)
            self.watchdog.start()

    def note_exit(self, news: Exited) -> WorkerProcess | None:
        """Note that a worker ended; ``None`` when it is none of this cycle's."""
        worker = self.workers.get(news.key)
        if worker is not None:
            worker.exit_code = news.exit_code
        return worker

    @property
    def exit_codes(self) -> list[int | None]:
        """Exit codes by local rank; ``None`` while a worker runs."""
        return [worker.exit_code for worker in self.workers.values()]

    @property
    def all_ended(self) -> bool:
        """Whether every worker ended."""
        return None not in self.exit_codes

    @property
    def is_saved(self) -> bool:
        """Whether all ended in order and some said that the state was saved before leaving."""
        codes = set(self.exit_codes)
        return ExitReason.PREEMPTED in codes and codes <= {ExitReason.PREEMPTED, ExitReason.FINISHED}

    def describe_death(self, worker: WorkerProcess) -> Incident:
        """Return the incident of a worker that ended with anything but 0.

        One that judged a result invalid is the cause, also where a peer that missed it was gone before it.
        """
        assert worker.exit_code
        if worker.exit_code not in OWN_VERDICTS and (incident := self._describe_verdict()) is not None:
            return incident
        return self._describe_exit(worker, worker.exit_code)

    def _describe_verdict(self) -> Incident | None:
        """Return the incident of a worker that said it leaves because of an invalid result; ``None`` = none did."""
        for worker in self.workers.values():
            if (code := self.board.read(worker.local_rank).leaving_with) in OWN_VERDICTS:
                return self._describe_exit(worker, code)
        return None

    def _describe_exit(self, worker: WorkerProcess, exit_code: int) -> Incident:
        state = self.board.read(worker.local_rank)
        text = self._read_error(worker.local_rank)
        return Incident(
            kind=IncidentKind.WORKER_DIED if exit_code < 0 else IncidentKind.WORKER_FAILED,
            job=self.job,
            cycle=self.number,
            node=self.node,
            rank=worker.global_rank,
            pid=worker.pid,
            section="/".join(section.name for section in state.sections) or None,
            iteration=state.iteration if state.attached else None,
            exit_code=exit_code,
            evidence={"summary": text} if text else {},
        )

    def describe_hang(self, report: HangReport) -> Incident:
        """Return the incident of the first rank that exceeded a timeout; the culprit is found later."""
        first = report.expired[0]
        state = self.board.read(first.local_rank)
        return Incident(
            kind=IncidentKind.WORKER_HUNG,
            job=self.job,
            cycle=self.number,
            node=self.node,
            rank=state.global_rank,
            pid=state.pid,
            section="/".join(section.name for section in state.sections) or None,
            iteration=state.iteration,
            detected_after_s=round(first.elapsed_s, 4),
            evidence={"summary": first.describe(self.node), "timeout_s": first.timeout_s},
        )

    def examine(self, report: HangReport | None) -> tuple[Position, ...]:
        """Look where the ranks are, and dump their stacks.

        Blocks: up to about half a second.
        """
        expired = tuple(report.expired) if report else ()
        return tuple(
            examine(
                self.board,
                node=self.node,
                stacks_dir=self.options.run_dir / "stacks" / f"cycle-{self.number}",
                expired=expired,
            )
        )

    def facts(self, incident: Incident | None, positions: tuple[Position, ...] = ()) -> m.CycleFacts:
        """Return what this node knows of the cycle."""
        states = [state for state in self.board.read_all() if state.attached]
        durable = [state.durable_iteration for state in states if state.durable_iteration is not None]
        return m.CycleFacts(
            cycle=self.number,
            incident=incident if incident is not None else self._describe_verdict(),
            load=self._load(states),
            durable_iteration=max(durable, default=None),
            progress_known=any(state.reports_progress for state in states),
            positions=positions,
            observation=observe(states) if states else None,
        )

    def _load(self, states: list[RankState]) -> Load | None:
        loaded = [state.loaded for state in states if state.loaded is not None]
        if not loaded:
            return None
        return Load(
            cycle=f"{env.clean_name(self.job)}-{self.number}",
            generation=loaded[0].generation,
            attempt=loaded[0].attempt,
            tier=tier_of_load([str(one.tier) for one in loaded]),
            suspect_window=loaded[0].suspect_window,
        )

    def iterations(self) -> dict[str, int]:
        """Return the last iteration of every rank that told one."""
        return {str(s.global_rank): s.iteration for s in self.board.read_all() if s.attached}

    def close(self, *, wait_for_logs: bool = False) -> None:
        """Stop watching, free the board and end the log tails; the workers are the zygote's to end."""
        self.over = True
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None
        self.logs.stop(wait=wait_for_logs)
        self.board.close()

    def _read_error(self, local_rank: int) -> str:
        """Return the message in torch's error file, if the script is decorated with ``@record``."""
        path = Path(self.logs.destinations.error_files.get(local_rank) or "/nonexistent")
        try:
            message = json.loads(path.read_text())["message"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        if isinstance(message, dict):
            message = message.get("message", "")
        return str(message).splitlines()[0] if message else ""


def prepare(
    start: m.Start,
    *,
    spec: WorkerSpec,
    options: RunOptions,
    job: str,
    node: str,
    base_env: dict[str, str],
    logs_specs: LogsSpecs,
    command: tuple[str, tuple[str, ...]],
    writer: str,
) -> Cycle:
    """Lay out a cycle's environments, board and logs; nothing runs yet.

    Args:
        start: What the coordinator said.
        spec: torch's description of the workers.
        options: The launcher's options.
        job: Name of the job.
        node: Name of this node.
        base_env: Environment that every worker gets.
        logs_specs: Where output goes.
        command: Kind and argv, as in :class:`outlast.runtime.zygote.Spawn`.
        writer: Address of the node's checkpoint writer; empty = there is none.
    """
    board = Board.create_anonymous(num_ranks=spec.local_world_size)
    fault_tolerance = options.fault_tolerance
    if fault_tolerance.calc_ft_timeouts:
        fault_tolerance = LearnedTimeouts.load(options.run_dir).apply(fault_tolerance)
    shared = {
        **base_env,
        env.RUN_ID: options.run_id,
        env.RUN_DIR: str(options.run_dir),
        env.JOB: job,
        env.CYCLE: str(start.cycle),
        env.NODE: node,
        env.BOARD: board.path,
        env.CONFIG: fault_tolerance.to_json(),
        env.WRITER: writer,
        env.UNTRUSTED: encode_distrusted(start.distrusted) if start.distrusted else "",
    }
    try:
        envs = {
            local_rank: _worker_env(start, local_rank, spec, options.run_id)
            for local_rank in range(spec.local_world_size)
        }
        template = env.environ().get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
        prefixes = None
        if template:
            prefixes = {
                rank: Template(template).safe_substitute(
                    role_name=spec.role, rank=start.base_rank + rank, local_rank=rank
                )
                for rank in envs
            }
        logs = CycleLogs(logs_specs, envs, options.torchrun, prefixes)
    except BaseException:
        board.close()
        raise
    workers: dict[int, WorkerProcess] = {}
    spawns: list[Spawn] = []
    kind, argv = command
    for local_rank, worker_env in envs.items():
        key = start.cycle * _KEYS_PER_CYCLE + local_rank
        global_rank = start.base_rank + local_rank
        workers[key] = WorkerProcess(local_rank=local_rank, global_rank=global_rank)
        in_python = kind != "exec"
        spawns.append(
            Spawn(
                key=key,
                kind=kind,
                argv=_with_numa(argv, local_rank, spec) if kind == "exec" else argv,
                env={**shared, **worker_env},
                stdout=logs.destinations.stdouts.get(local_rank) or "",
                stderr=logs.destinations.stderrs.get(local_rank) or "",
                on_start="outlast.monitor.stacks:register" if in_python else "",
            )
        )
    return Cycle(
        start=start,
        spec=spec,
        options=options,
        job=job,
        node=node,
        board=board,
        logs=logs,
        workers=workers,
        spawns=spawns,
        fault_tolerance=fault_tolerance,
    )


def torch_workers(start: m.Start, spec: WorkerSpec) -> list[Worker]:
    """Return torch's view of this node's workers."""
    return [
        Worker(
            local_rank=local_rank,
            global_rank=start.base_rank + local_rank,
            role_rank=start.base_rank + local_rank,
            world_size=start.world_size,
            role_world_size=start.world_size,
        )
        for local_rank in range(spec.local_world_size)
    ]


def _with_numa(argv: tuple[str, ...], local_rank: int, spec: WorkerSpec) -> tuple[str, ...]:
    if spec.numa_options is None:
        return argv
    from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding

    return _maybe_wrap_command_args_with_numa_binding(argv, gpu_index=local_rank, numa_options=spec.numa_options)


def _worker_env(start: m.Start, local_rank: int, spec: WorkerSpec, run_id: str) -> dict[str, str]:
    rank = start.base_rank + local_rank
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
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": env.environ().get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    texts = {name: str(value) for name, value in values.items()}
    # torch's own rule for LOCAL_RANK and the visible devices, with --virtual-local-rank too.
    LocalElasticAgent._set_local_rank_env(None, texts, local_rank, spec)  # type: ignore[arg-type]
    return texts
