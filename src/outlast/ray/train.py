"""Ray Train with hang detection and verified checkpoints: a callback for the trainer, a session for its workers.

Ray Train restarts a group when a worker dies or raises, but does not detect a train function that hangs, and restarts
from the directory that was reported last. With :class:`TrainCallback` among ``RunConfig.callbacks`` a monitor on each
machine ends a worker that hangs, so that Ray Train restarts the group; and :func:`session` in the train function loads
the newest checkpoint that all ranks can verify::

    def train():
        with outlast.ray.train.session() as run:
            for iteration in run.steps({"model": model, "optimizer": optimizer}, total=1000):
                ...

    TorchTrainer(train, run_config=RunConfig(
        failure_config=FailureConfig(max_failures=-1),
        callbacks=[TrainCallback(
            fault_tolerance=FaultToleranceConfig(rank_section_timeouts={"step": 60}),
            checkpoint=CheckpointConfig(directory="s3://bucket/run", save_interval=100),
        )],
    ))

``max_failures=-1`` is still bounded: ``FaultToleranceConfig.max_no_progress_cycles`` attempts in a row without a new
durable checkpoint stop the run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback, WorkerGroupCallback

from outlast import env, logs
from outlast.config import CheckpointConfig, Config, FaultToleranceConfig
from outlast.config.base import require
from outlast.config.launching import AGENTS_OWN
from outlast.errors import BudgetExhausted, OutlastError
from outlast.incidents import Incident, IncidentKind, RecoveryLevel
from outlast.launch.decisions import highest_committed, highest_durable
from outlast.launch.protocol import CycleFacts
from outlast.policy.recovery_policy import CycleEnd, Limits, RecoveryState, decide
from outlast.ray.keepers import start_on
from outlast.ray.replies import await_replies, describe_error
from outlast.ray.train_watch import TrainWatch, WorkerPlace, answers_of
from outlast.session import Session, init

__all__ = ["TrainCallback", "session"]

log = logging.getLogger(__name__)
_UNLIMITED = 1 << 30
_START_S = 60.0
"""Limit for a watch to start, or for a worker to receive its place; each imports this package in about one second."""
_ANSWER_S = 10.0
_config: Config | None = None


def session() -> Session:
    """Start this worker's session, with the settings of the run's :class:`TrainCallback`.

    Returns the session of :func:`outlast.init`: ``steps()`` loads, sends heartbeats and saves; ``section()`` marks code
    with its own timeout. Use the session as a context manager.

    Raises:
        OutlastError: The run has no :class:`TrainCallback`, or the caller is not a train function.

    Collective: all workers.
    Blocks: until all workers have joined.
    """
    if _config is None:
        raise OutlastError(
            "session() belongs into the train function of a run with RunConfig(callbacks=[TrainCallback(...)])"
        )
    return init(_config)


class TrainCallback(WorkerGroupCallback, ControllerCallback, ReportCallback):
    """Monitor the workers of a Ray Train run, limit restarts without progress, and load verified checkpoints.

    Args:
        config: Settings for the workers' sessions; the other arguments take precedence.
        fault_tolerance: Timeouts of sections and heartbeats, and ``max_no_progress_cycles``.
        checkpoint: Where and how often to save; ``None`` = as in ``config``, else nothing is saved.
        run_dir: Directory of the journal and the stacks of hung workers, shared by the machines or created on each;
            ``None`` = as in ``config``, else no journal, and stacks in a temporary directory.

    Raises:
        ConfigError: A setting is invalid, or cannot be used here.

    Thread: Ray Train's controller calls the methods.
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        fault_tolerance: FaultToleranceConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        run_dir: str | None = None,
    ) -> None:
        given = {"fault_tolerance": fault_tolerance, "checkpoint": checkpoint, "run_dir": run_dir}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.config = dataclasses.replace(config or Config(), **changes)
        """The workers' settings."""
        self._fault_tolerance = self.config.fault_tolerance or FaultToleranceConfig()
        require(
            not self._fault_tolerance.calc_ft_timeouts,
            "calc_ft_timeouts is not for Ray Train, where timeouts are not learned; name them in rank_section_timeouts",
        )
        own = (
            "safety_factor",
            "state_directory",
            "exit_timeout",
            "max_node_faults",
            "max_restart_delay",
            "min_nodes",
            *AGENTS_OWN,
        )
        for name in own:
            require(
                name not in self._fault_tolerance.given,
                f"fault_tolerance.{name} is not for Ray Train, which places the workers itself; leave it out",
            )
        for name in self.config.health.given if self.config.health is not None else ():
            require(
                name.startswith("process_group_"),
                f"health.{name} is not for Ray Train, where no agent looks at nodes; leave it out",
            )
        require(
            not self.config.in_process,
            "in_process_restart is not for Ray Train, which replaces all workers; switch it off",
        )
        restart = self.config.in_process_restart
        require(
            restart is None or not restart.given or restart.given.get("enabled") is False,
            "in_process_restart is not for Ray Train, which replaces all workers; leave the section out",
        )
        self._attempt = -1
        self._was_watched = self._is_preempting = self._has_warned = False
        self._recovery_state = RecoveryState()
        self._run_id = self._job = ""
        self._watches: dict[str, Any] = {}
        """By machine address. Ray nodes on one machine share a watch, as they share Ray Train's local ranks."""
        self._names: dict[str, str] = {}
        self._in_use: tuple[str, ...] = ()

    # -- the run -----------------------------------------------------------------------------------------------

    def after_controller_start(self, train_run_context: Any) -> None:
        logs.configure("train controller", least=logging.WARNING, is_shared=True)
        self._run_id = train_run_context.get_run_config().name or train_run_context.run_id
        self._job = train_run_context.run_id[:12]

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Record whether workers are being preempted, which does not count as a failure."""
        self._is_preempting = type(current_state).__name__ == "PreemptingState"

    def before_controller_execute_failure_decision(self, failure_decision: Any, *_: Any, **__: Any) -> None:
        """Stop a run that restarts repeatedly without progress.

        Raises:
            BudgetExhausted: ``max_no_progress_cycles`` attempts in a row ended without a new durable checkpoint.
        """
        if not self._was_watched:
            return
        self._was_watched = False
        found: list[CycleFacts] = self._ask_all("facts", "report the attempt")
        incident = next((one.incident for one in found if one.incident is not None), None)
        if incident is not None:
            log.error("attempt %d: %s", self._attempt, incident.describe())
        if failure_decision.name != "RETRY" or self._is_preempting:
            return
        end = CycleEnd(
            cycle=self._attempt,
            incident=incident or Incident(kind=IncidentKind.WORKER_FAILED, cycle=self._attempt),
            durable_iteration=highest_durable(found),
            committed_iteration=highest_committed(found),
            progress_known=any(one.progress_known for one in found),
        )
        limits = Limits(
            max_restarts=_UNLIMITED,  # FailureConfig.max_failures bounds these
            max_no_progress_cycles=self._fault_tolerance.max_no_progress_cycles,
            max_node_faults=0,
        )
        self._recovery_state, decision = decide(self._recovery_state, end, limits)
        if decision.recovery_level == RecoveryLevel.STOP:
            raise BudgetExhausted(decision.reason)

    def after_report(self, training_report: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Log the first reported loss that is NaN or infinite, once: without a session nothing else shows it."""
        losses = (
            (rank, name, value)
            for rank, reported in enumerate(metrics)
            for name, value in reported.items()
            if "loss" in str(name).lower() and isinstance(value, float) and not math.isfinite(value)
        )
        if not self._has_warned and (bad := next(losses, None)) is not None:
            self._has_warned = True
            rank, name, value = bad
            log.warning(
                "%s is %s on rank %d, and training continues with it; this is reported once. A train function with "
                "session() does not end as finished with weights that are NaN",
                *(name, value, rank),
            )

    async def before_controller_shutdown(self) -> None:
        """End the watches."""
        self.before_controller_abort()

    def before_controller_abort(self) -> None:
        """End the watches. Idempotent. Blocks: up to ten seconds."""
        self._in_use = tuple(self._watches)
        self._ask_all("close", "close")
        for watch in self._watches.values():
            ray.kill(watch)
        self._watches, self._in_use = {}, ()

    # -- one attempt -------------------------------------------------------------------------------------------

    def before_init_train_context(self, workers: Sequence[Any]) -> Mapping[str, list[Any]]:
        """Start watches on the workers' machines in the background, while the workers connect."""
        for address, there in _by_machine(workers).items():
            if address not in self._watches:
                self._start_watch(address, there[0])
        return {}

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Monitor the workers and send them their places.

        Workers of a machine without a watch get no heartbeat memory, and start an agent process.

        Blocks: up to a minute, while watches start; usually they have started.
        """
        self._attempt += 1
        machines = _by_machine(worker_group.get_workers())
        posts = self._begin_watching(machines)
        self._in_use, self._was_watched = tuple(posts), True
        watches = [self._watches[address] for address in posts]
        answers_of([watch.meet.remote(watches) for watch in watches], _ANSWER_S, "meet the others")
        asked = [
            worker.execute_async(_take_place, self.config, self._variables(address, worker, posts.get(address, {})))
            for address, there in machines.items()
            for worker in there
        ]
        ray.get(asked, timeout=_START_S)  # Ray Train replaces a worker that died or hangs meanwhile

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        """Stop monitoring before the workers are ended."""
        self._was_watched = False
        self._ask_all("stop", "stop watching")
        self._in_use = ()

    def before_worker_group_abort(self, worker_group_context: Any) -> None:
        """Stop monitoring before the workers are ended."""
        self.before_worker_group_shutdown(None)

    # -- details -----------------------------------------------------------------------------------------------

    def _ask_all(self, method: str, what: str) -> list[Any]:
        asked = [getattr(self._watches[address], method).remote() for address in self._in_use]
        return answers_of(asked, _ANSWER_S, what)

    def _start_watch(self, address: str, worker: Any) -> None:
        if address not in self._names:
            taken = worker.metadata.hostname in self._names.values()
            self._names[address] = f"{worker.metadata.hostname}-{address}" if taken else worker.metadata.hostname
        self._watches[address] = start_on(
            worker.metadata.node_id,
            TrainWatch,
            {
                "node": self._names[address],
                "config": self._fault_tolerance,
                "run_id": self._run_id,
                "job": self._job,
                "run_dir": self.config.run_dir,
                "keeps_writer": self.config.checkpoint is not None,
            },
            max_concurrency=8,
        )

    def _begin_watching(self, machines: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, str | None]]:
        """Return the variables from each machine's watch; a dead watch is replaced once."""
        posts: dict[str, dict[str, str | None]] = {}
        for is_last in (False, True):
            asked = {}
            for address, there in machines.items():
                if address in posts:
                    continue
                if is_last:
                    self._start_watch(address, there[0])
                ranks = [worker.distributed_context for worker in there]
                places = [
                    WorkerPlace(local_rank=rank.local_rank, global_rank=rank.world_rank, pid=worker.metadata.pid)
                    for rank, worker in zip(ranks, there, strict=True)
                ]
                asked[address] = self._watches[address].begin.remote(self._attempt, places)
            for address, reply in await_replies(asked, _START_S).items():
                if reply.fault is None:
                    posts[address] = reply.value
                    continue
                ray.kill(self._watches[address])
                if is_last:
                    del self._watches[address]
                    text = describe_error(reply.error)
                    log.error("machine %s is not watched as a whole: %s", self._names[address], text)
        return posts

    def _variables(self, address: str, worker: Any, post: Mapping[str, str | None]) -> dict[str, str | None]:
        rank, run_dir = worker.distributed_context, self.config.run_dir
        return {
            env.RUN_ID: self._run_id,
            env.RUN_DIR: run_dir,
            env.NAMES: json.dumps([f"directory {run_dir}"] if run_dir else []),
            env.JOB: self._job,
            env.CYCLE: str(self._attempt),
            env.NODE: self._names[address],
            env.CONFIG: self._fault_tolerance.to_json(),
            **{env.BOARD: None, env.WRITER: None, **post},
            "RANK": str(rank.world_rank),
            "WORLD_SIZE": str(rank.world_size),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(rank.local_world_size),
            "GROUP_RANK": str(rank.node_rank),
        }


def _take_place(config: Config, variables: Mapping[str, str | None]) -> None:
    """Store settings and place in the worker, before its train function runs."""
    global _config
    _config = config
    env.update(variables)


def _by_machine(workers: Sequence[Any]) -> dict[str, list[Any]]:
    machines: dict[str, list[Any]] = {}
    for worker in workers:
        machines.setdefault(worker.metadata.node_ip, []).append(worker)
    return machines
