"""Where actors are placed: one bundle of resources for each, which a successor takes over."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outlast import clock
from outlast.config.base import nearest
from outlast.errors import ConfigError, SparesExhausted

__all__ = ["STRATEGIES", "Placement"]

_LOOK_S = 0.5
STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class Placement:
    """Reserve a bundle for each actor, spares included; release all of them.

    When a node is lost, Ray moves its bundles to others that have room, and what is to be started there waits for it.

    Args:
        num_actors: Bundles.
        num_cpus: CPUs of each.
        num_gpus: GPUs of each.
        resources: Custom resources of each.
        strategy: How bundles are spread over nodes, one of ``STRATEGIES``; or a placement group of the caller's own
            with bundles enough, which is not removed in the end.

    Raises:
        ConfigError: There is no such strategy, or the caller's group has too few bundles.

    Thread: one.
    """

    def __init__(
        self,
        num_actors: int,
        *,
        num_cpus: float,
        num_gpus: float,
        resources: Mapping[str, float],
        strategy: str | PlacementGroup,
    ) -> None:
        bundle = {"CPU": num_cpus, "GPU": num_gpus, **resources}
        self._bundle = {name: amount for name, amount in bundle.items() if amount}
        self._num_actors = num_actors
        self._owned = not isinstance(strategy, PlacementGroup)
        self._group: Any = None
        if isinstance(strategy, PlacementGroup):
            if len(strategy.bundle_specs) < num_actors:
                raise ConfigError(
                    f"placement: the group has {len(strategy.bundle_specs)} bundles, but mesh and spares are "
                    f"{num_actors} actors; give each actor one"
                )
            self._group = strategy
        else:
            if strategy not in STRATEGIES:
                raise ConfigError(f"placement={strategy!r} is unknown; {nearest(str(strategy), STRATEGIES)}")
            if self._bundle:  # actors that need nothing can be placed anywhere, and Ray has no empty bundles
                self._group = placement_group([dict(self._bundle)] * num_actors, strategy=strategy)

    def wait(self, timeout_s: float, idle: Callable[[], None]) -> None:
        """Wait until everything is reserved.

        Args:
            timeout_s: Longest wait in seconds.
            idle: Called while it waits; may raise to end the wait, and everything is released.

        Raises:
            SparesExhausted: The cluster has not enough resources; what was reserved is released.

        Blocks: up to ``timeout_s``.
        """
        if self._group is None:
            return
        deadline_s = clock.now_s() + timeout_s
        is_reserved = False
        try:
            while not is_reserved and (left_s := deadline_s - clock.now_s()) > 0:
                idle()
                is_reserved = self._group.wait(min(_LOOK_S, left_s))
        finally:
            if not is_reserved:
                self.close()
        if not is_reserved:
            raise SparesExhausted(
                f"the cluster has no room for {self._num_actors} actors with {self._bundle} each, not within "
                f"{timeout_s:g} s; it has {ray.cluster_resources()}: use fewer actors or spares, or smaller ones"
            )

    def options(self, bundle: int) -> dict[str, Any]:
        """Return the options with which an actor is created in a bundle."""
        options: dict[str, Any] = {
            "num_cpus": self._bundle.get("CPU", 0),
            "num_gpus": self._bundle.get("GPU", 0),
            "resources": {name: amount for name, amount in self._bundle.items() if name not in ("CPU", "GPU")},
        }
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            )
        return options

    def close(self) -> None:
        """Release everything. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self._owned:
            with contextlib.suppress(ValueError):  # removed by somebody else
                remove_placement_group(group)
