"""The machines of a Ray Train run, as its controller knows them: a watch on each, and what their workers are told."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from outlast import env, logs
from outlast.ray.train_watch import Briefing, Post, Standing, TrainWatch, WorkerPlace

__all__ = ["Machines"]

log = logging.getLogger(__name__)

_START_S = 60.0
"""Seconds for a watch to start; a Ray worker process imports this package in about one."""
_ANSWER_S = 10.0


class Machines:
    """Keep a watch on every machine that has workers.

    Ray's nodes on one machine (in tests, say) share one watch, as they share Ray Train's local ranks.

    Args:
        briefing: What the watches are told of the run.

    Thread: that of Ray Train's controller.
    """

    def __init__(self, briefing: Briefing) -> None:
        logs.configure("train controller", least=logging.WARNING, is_shared=True)
        self._briefing = briefing
        self._watches: dict[str, Any] = {}
        """By address of the machine."""
        self._names: dict[str, str] = {}
        self._in_use: tuple[str, ...] = ()

    def start(self, workers: Sequence[Any]) -> None:
        """Have watches started where there is none yet, and wait for none of them.

        Args:
            workers: Ray Train's workers, with their ranks.
        """
        for address, there in _by_machine(workers).items():
            if address not in self._watches:
                self._watches[address] = self._start(address, there[0])

    def begin(self, attempt: int, workers: Sequence[Any]) -> dict[int, dict[str, str | None]]:
        """Have a new attempt's workers watched.

        Args:
            attempt: Number of the worker group, from 0.
            workers: Ray Train's workers, with their ranks.

        Returns:
            Variables for each worker's environment, by global rank. Where a machine could not be watched they lack a
            board: its workers start side processes then.

        Blocks: up to a minute, while watches start; usually they have by now.
        """
        machines = _by_machine(workers)
        posts = self._post(attempt, machines)
        self._in_use = tuple(posts)
        watches = [self._watches[address] for address in posts]
        self._ask([watch.meet.remote(watches) for watch in watches], _ANSWER_S)
        return {
            worker.distributed_context.world_rank: self._variables(attempt, address, worker, posts.get(address))
            for address, there in machines.items()
            for worker in there
        }

    def standing(self) -> Standing:
        """Return what the watches know of the attempt together; those that are gone know nothing."""
        found = self._ask([self._watches[address].standing.remote() for address in self._in_use], _ANSWER_S)
        known = [one.durable_iteration for one in found if one.durable_iteration is not None]
        return Standing(
            durable_iteration=max(known, default=None),
            progress_known=any(one.progress_known for one in found),
            incident=next((one.incident for one in found if one.incident is not None), None),
        )

    def rest(self) -> None:
        """Have the watches look away, as the workers are about to be ended."""
        self._ask([self._watches[address].rest.remote() for address in self._in_use], _ANSWER_S)
        self._in_use = ()

    def close(self) -> None:
        """End the watches. Idempotent. Blocks: up to ten seconds."""
        watches, self._watches, self._in_use = tuple(self._watches.values()), {}, ()
        self._ask([watch.close.remote() for watch in watches], _ANSWER_S)
        for watch in watches:
            ray.kill(watch)

    # -- details -----------------------------------------------------------------------------------------------

    def _start(self, address: str, worker: Any) -> Any:
        if address not in self._names:
            taken = worker.metadata.hostname in self._names.values()
            self._names[address] = f"{worker.metadata.hostname}-{address}" if taken else worker.metadata.hostname
        here = NodeAffinitySchedulingStrategy(worker.metadata.node_id, soft=False)
        watch = ray.remote(num_cpus=0, max_concurrency=8)(TrainWatch)
        return watch.options(scheduling_strategy=here).remote(self._names[address], self._briefing)

    def _post(self, attempt: int, machines: Mapping[str, Sequence[Any]]) -> dict[str, Post]:
        """Return what each machine's watch has for its workers; a watch that is gone is replaced once."""
        posts: dict[str, Post] = {}
        for is_last in (False, True):
            missing = {address: there for address, there in machines.items() if address not in posts}
            asked = {}
            for address, there in missing.items():
                if is_last:
                    self._watches[address] = self._start(address, there[0])
                ranks = [worker.distributed_context for worker in there]
                places = [
                    WorkerPlace(local_rank=rank.local_rank, global_rank=rank.world_rank, pid=worker.metadata.pid)
                    for rank, worker in zip(ranks, there, strict=True)
                ]
                num_ranks = max(rank.local_rank for rank in ranks) + 1
                asked[address] = self._watches[address].begin.remote(attempt, places, num_ranks)
            for address, reference in asked.items():
                try:
                    posts[address] = ray.get(reference, timeout=_START_S)
                except ray.exceptions.RayError as error:
                    ray.kill(self._watches[address])
                    if is_last:
                        del self._watches[address]
                        log.error("machine %s is not watched as a whole: %s", self._names[address], error)
        return posts

    def _variables(self, attempt: int, address: str, worker: Any, post: Post | None) -> dict[str, str | None]:
        rank, told = worker.distributed_context, self._briefing
        return {
            env.RUN_ID: told.run_id,
            env.RUN_DIR: told.run_dir,
            env.NAMES: json.dumps([f"directory {told.run_dir}"] if told.run_dir else []),
            env.JOB: told.job,
            env.CYCLE: str(attempt),
            env.NODE: self._names[address],
            env.CONFIG: told.fault_tolerance,
            env.BOARD: None if post is None else post.board,
            env.WRITER: None if post is None else post.writer or None,
            "RANK": str(rank.world_rank),
            "WORLD_SIZE": str(rank.world_size),
            "LOCAL_RANK": str(rank.local_rank),
            "LOCAL_WORLD_SIZE": str(rank.local_world_size),
            "GROUP_RANK": str(rank.node_rank),
        }

    def _ask(self, asked: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return the answers that come in time; a watch that is gone is no reason to stop training."""
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
        answers = []
        for reference in ready:
            try:
                answers.append(ray.get(reference))
            except ray.exceptions.RayError as error:
                log.warning("the watch of a machine does not answer: %s", error)
        return answers


def _by_machine(workers: Sequence[Any]) -> dict[str, list[Any]]:
    machines: dict[str, list[Any]] = {}
    for worker in workers:
        machines.setdefault(worker.metadata.node_ip, []).append(worker)
    return machines
