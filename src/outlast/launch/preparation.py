"""The preparation of a cycle on one node: environments, board and logs, before anything runs."""

from __future__ import annotations

import json
from contextlib import ExitStack
from string import Template
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import Worker, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.utils.api import macros

from outlast import env
from outlast.launch import protocol as m
from outlast.launch.cycle import Cycle
from outlast.launch.in_process import InProcess
from outlast.launch.logs import CycleLogs
from outlast.launch.options import RunOptions
from outlast.launch.worker_process import WorkerProcess
from outlast.policy.quarantine import encode_distrusted
from outlast.policy.rerun import encode_replay
from outlast.runtime.board import Board
from outlast.runtime.postmortem import Postmortem
from outlast.runtime.zygote import Spawn

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

__all__ = ["prepare", "torch_workers"]

_KEYS_PER_CYCLE = 1 << 16


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
    shared = {
        **base_env,
        env.RUN_ID: options.run_id,
        env.RUN_DIR: str(options.run_dir),
        env.NAMES: json.dumps(options.names),
        env.RESUME_OTHER: "1" if options.resumes_other else "",
        env.JOB: job,
        env.CYCLE: str(start.cycle),
        env.NODE: node,
        env.BOARD: board.path,
        env.CONFIG: options.layers.launcher.to_json(),
        env.CONFIG_FILE: options.layers.file_name,
        env.WRITER: writer,
        env.UNTRUSTED: encode_distrusted(start.distrusted) if start.distrusted else "",
        env.REPLAY: encode_replay(start.replay) if start.replay is not None else "",
    }
    with ExitStack() as stack:
        stack.callback(board.close)
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
        workers: dict[int, WorkerProcess] = {}
        in_process = InProcess(board, workers, is_alone=start.num_nodes == 1)
        stack.callback(in_process.close)
        postmortem = Postmortem(spec.local_world_size)
        stack.callback(postmortem.close)
        logs = CycleLogs(logs_specs, envs, options.torchrun, prefixes)
        stack.pop_all()
    spawns: list[Spawn] = []
    kind, argv = command
    for local_rank, worker_env in envs.items():
        key = start.cycle * _KEYS_PER_CYCLE + local_rank
        global_rank = start.base_rank + local_rank
        workers[key] = WorkerProcess(local_rank=local_rank, global_rank=global_rank)
        in_python = kind != "exec"
        own_argv = tuple(macros.substitute(list(argv), str(local_rank)))  # ${local_rank}
        spawns.append(
            Spawn(
                key=key,
                kind=kind,
                argv=_with_numa(own_argv, local_rank, spec) if kind == "exec" else own_argv,
                env={**shared, **worker_env, env.POSTMORTEM: postmortem.path(local_rank)},
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
        in_process=in_process,
        postmortem=postmortem,
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
