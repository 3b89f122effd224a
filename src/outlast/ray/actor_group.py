"""A group of training actors that replaces what dies and goes on."""

from __future__ import annotations

import atexit
import inspect
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from outlast import logs
from outlast.config import CheckpointConfig, FaultToleranceConfig, RecoveryConfig
from outlast.errors import ConfigError
from outlast.ray.chronicle import Chronicle
from outlast.ray.conductor import Conductor, Order
from outlast.ray.dispatch import Dispatch, find_dispatch, takes_weights
from outlast.ray.mesh import Mesh
from outlast.ray.node_keeper import NodeKeepers
from outlast.ray.pending import Pending
from outlast.ray.placement import Placement
from outlast.ray.pool import Pool
from outlast.ray.report import RecoveryReport
from outlast.ray.shell import shell_class
from outlast.ray.train_actor import TrainActor
from outlast.ray.words import ShellSettings

__all__ = ["ActorGroup"]


class ActorGroup:
    """Actors that train together as the ranks of a mesh, with spares that take the seats of those that are lost.

    An actor that dies, is stopped, or hangs is noticed, whatever its peers wait in; it alone is replaced. The others
    keep their processes, and their state where it is that of the newest generation. Then the interrupted call is
    repeated.

    Args:
        actor_class: A subclass of :class:`~outlast.ray.TrainActor`, or any class of one's own; not a Ray actor.
        mesh: Sizes by axis (``dp``, ``cp``, ``tp``, ``pp``).
        args: Positional arguments of the class's constructor.
        kwargs: Keyword arguments of it.
        num_spares: Actors that start like the others, and wait. Where one was lost another one is started in the
            background.
        num_cpus: CPUs of each actor.
        num_gpus: GPUs of each actor.
        resources: Custom resources of each actor.
        placement: How actors are spread over nodes: ``PACK``, ``SPREAD``, ``STRICT_PACK``, ``STRICT_SPREAD``, or a
            placement group of one's own with a bundle for each.
        backend: Of the process groups; ``None``: NCCL beside gloo with GPUs, else gloo.
        checkpoint: Where and how often state is saved; ``None``: nowhere, so a lost actor means to begin anew.
        fault_tolerance: Timeouts of sections and heartbeats; ``None``: hangs are only found where actors do not answer
            at all. Limits of recoveries are ``recovery``'s: a field that nothing reads here is refused.
        recovery: Limits of recoveries; ``None``: the defaults.
        run_dir: Where the journal is written; ``None``: nowhere.
        runtime_env: As Ray takes it, for the actors.

    Raises:
        ConfigError: A setting is wrong; nothing was started.
        SparesExhausted: The cluster has no room for so many actors.
        ActorFailed: The class's constructor or ``setup`` raises.

    Blocks: until the first incarnation works.
    Thread: any; calls are carried out one after the other, in the order in which they were submitted.
    """

    def __init__(
        self,
        actor_class: type[Any],
        mesh: Mapping[str, int] | Mesh,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        num_spares: int = 0,
        num_cpus: float = 1,
        num_gpus: float = 0,
        resources: Mapping[str, float] | None = None,
        placement: Any = "PACK",
        backend: str | None = None,
        checkpoint: CheckpointConfig | None = None,
        fault_tolerance: FaultToleranceConfig | None = None,
        recovery: RecoveryConfig | None = None,
        run_dir: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        if not inspect.isclass(actor_class):
            raise ConfigError(
                f"actor_class={actor_class!r} is not a class; give the plain class, without @ray.remote, which is the "
                "group's own affair"
            )
        if checkpoint is not None and not issubclass(actor_class, TrainActor):
            raise ConfigError(
                f"checkpoint is given, but {actor_class.__name__} does not say what its state is; derive it from "
                "outlast.ray.TrainActor, or leave checkpoint out"
            )
        _check_is_read(fault_tolerance)
        if num_spares < 0:
            raise ConfigError(f"num_spares={num_spares} must not be negative")
        logs.configure("driver", least=logging.WARNING, is_shared=True)
        self._actor_class = actor_class
        wanted = Mesh.of(mesh)
        config = recovery or RecoveryConfig()
        name = f"{actor_class.__name__}-{uuid.uuid4().hex[:8]}"
        settings = ShellSettings(
            group=name,
            backend=backend or ("" if num_gpus else "gloo"),
            use_gpu=num_gpus > 0,
            checkpoint=checkpoint,
            fault_tolerance=fault_tolerance,
            run_dir=run_dir,
        )
        num_actors = wanted.size + num_spares
        shell = shell_class()
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
        if runtime_env:
            options["runtime_env"] = dict(runtime_env)

        def make_pool(idle: Callable[[], None]) -> Pool:
            bundles = Placement(
                num_actors, num_cpus=num_cpus, num_gpus=num_gpus, resources=resources or {}, strategy=placement
            )
            bundles.wait(config.start_timeout, idle)
            stored = ray.put(tuple(args)), ray.put(dict(kwargs or {}))
            return Pool(
                bundles,
                num_actors,
                lambda where: shell.options(**options, **where).remote(actor_class, *stored, settings),
                start_timeout_s=config.start_timeout,
                ping_interval_s=config.ping_interval,
                ping_timeout_s=config.ping_timeout,
            )

        self._conductor = Conductor(
            wanted,
            config,
            make_pool,
            keepers=None if checkpoint is None else NodeKeepers(),
            chronicle=Chronicle(run_dir, name),
        )
        self._mesh = wanted
        atexit.register(self._conductor.close)
        self._conductor.start()
        try:
            self._conductor.formed.result()
        except BaseException:
            self.close()
            raise

    def run(self, method: str, *args: Any, dispatch: str | Dispatch = "mesh", **kwargs: Any) -> Any:
        """Call a method on all actors and return the results, whatever dies meanwhile.

        Args:
            method: Name of the method.
            args: Its arguments, divided by the dispatch.
            dispatch: Who gets which part: ``mesh``, ``pass_through``, a name of one's own, or a dispatch.
            kwargs: Its keyword arguments, divided likewise.

        Returns:
            What the dispatch makes of the results; with ``mesh`` a list in the order of the data shards.

        Raises:
            ConfigError: There is no such method or dispatch, or the arguments cannot be divided; nothing was called.
            RolledBack: Actors were lost, and the group stands at another iteration than the call began from.
            ActorFailed: The method raised, and did so again when it was repeated; or too much is lost without progress.
            SparesExhausted: There is nobody to take a lost actor's seat.

        Blocks: until the call has ended, recoveries included. Ctrl-C ends the wait, not the call: what is called next
            begins after it, and the group can be closed.
        """
        return self.submit(method, *args, dispatch=dispatch, **kwargs).result()

    def submit(self, method: str, *args: Any, dispatch: str | Dispatch = "mesh", **kwargs: Any) -> Pending:
        """Call a method on all actors, and return at once what its result can be awaited with.

        Takes and raises what :meth:`run` does, the latter where the result is awaited. A call that ends with
        ``RolledBack`` or ``ActorFailed`` takes those with it that were submitted and have not begun.

        Blocks: never.
        """
        function = self._find_method(method)
        order = Order(
            method=method,
            args=args,
            kwargs=kwargs,
            dispatch=find_dispatch(dispatch),
            takes_weights=takes_weights(function),
        )
        self._conductor.submit(order)
        return Pending(method, order.future)

    @property
    def iteration(self) -> int | None:
        """Number of optimizer steps that the actors' state has done; ``None``: they keep none."""
        return self._conductor.iteration

    @property
    def mesh(self) -> Mesh:
        """The mesh that works now; smaller than at first where the group had to shrink."""
        crew = self._conductor.crew
        return self._mesh if crew is None else crew.mesh

    @property
    def pids(self) -> dict[int, int]:
        """Rank to process id."""
        crew = self._conductor.crew
        return {} if crew is None else {rank: actor.pid for rank, actor in sorted(crew.members.items())}

    @property
    def nodes(self) -> dict[int, str]:
        """Rank to Ray's id of the node."""
        crew = self._conductor.crew
        return {} if crew is None else {rank: actor.node for rank, actor in sorted(crew.members.items())}

    @property
    def spares(self) -> tuple[int, ...]:
        """Process ids of the actors that wait for a seat."""
        return self._conductor.spares

    @property
    def recoveries(self) -> list[RecoveryReport]:
        """What was recovered from until now, oldest first."""
        return list(self._conductor.recoveries)

    def close(self) -> None:
        """End all actors and release what was reserved for them. Idempotent.

        Calls that have not ended fail.

        Raises:
            DeadlineExceeded: It could not be done in time; Ray does it at this process's end.

        Blocks: usually some milliseconds; as long as a stopped actor resists, 5 seconds.
        """
        try:
            self._conductor.close()
        finally:
            atexit.unregister(self._conductor.close)

    def __enter__(self) -> ActorGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _find_method(self, name: str) -> Callable[..., Any]:
        function = getattr(self._actor_class, name, None)
        if name.startswith("_") or not callable(function):
            known = [one for one in dir(self._actor_class) if not one.startswith("_") and one not in dir(object)]
            raise ConfigError(f"{self._actor_class.__name__} has no method {name!r}; it has {', '.join(known)}")
        found: Callable[..., Any] = function
        return found


_READ = frozenset(
    {
        "enable_ft_package",
        "initial_rank_heartbeat_timeout",
        "rank_heartbeat_timeout",
        "rank_section_timeouts",
        "rank_out_of_section_timeout",
        "num_warmup_iterations",
    }
)
"""Fields of the fault tolerance settings that a group of actors uses."""
_INSTEAD = {
    "max_no_progress_cycles": "set recovery.max_recoveries",
    "node_heartbeat_timeout": "set recovery.ping_timeout",
    "min_nodes": "set recovery.allow_shrink",
    "shutdown_grace": "set recovery.close_timeout",
    "calc_ft_timeouts": "name the timeouts in rank_section_timeouts",
}


def _check_is_read(config: FaultToleranceConfig | None) -> None:
    for name in config.given if config is not None else ():
        if name not in _READ:
            instead = _INSTEAD.get(name, "leave it out")
            raise ConfigError(f"fault_tolerance.{name} is not for ActorGroup, where nothing reads it; {instead}")
