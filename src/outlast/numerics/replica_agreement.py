"""What a comparison of replicas found: whether they agree, who does not, and where."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Agreement", "Replica"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One rank's replica that differs from others."""

    rank: int
    """Global rank."""
    node: str
    """Its node."""
    device: str
    """What it computes on, as :func:`outlast.runtime.device.device_name` names it."""
    tensor: str
    """The first tensor that differs; empty = not looked for, as too many replicas differ."""

    def __str__(self) -> str:
        where = f" in {self.tensor}" if self.tensor else ""
        return f"rank {self.rank} on node {self.node} (device {self.device}){where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a check found.

    Whether replicas agree, and who does not, is the same on all ranks; the numbers are this rank's own.
    """

    iteration: int
    """Number of optimizer steps done."""
    agrees: bool
    """Whether all replicas on all ranks are bit-identical."""
    num_replicas: int
    """Largest number of replicas of a tensor of this rank; 1 = there is nothing to compare."""
    num_bytes: int
    """Bytes of this rank that were compared."""
    num_single_bytes: int
    """Bytes of this rank that no other rank holds, as shards are; nothing can be compared with them."""
    culprits: tuple[Replica, ...] = ()
    """Replicas that differ from the majority of at least three, by rank."""
    undecided: tuple[Replica, ...] = ()
    """Replicas that differ without a majority, as two always do, by rank: one of them is bad, or several."""

    @property
    def tensor(self) -> str:
        """The first tensor that differs; empty = none."""
        return next((replica.tensor for replica in (*self.culprits, *self.undecided) if replica.tensor), "")

    def describe(self) -> str:
        """Return one line for people."""
        if not self.agrees:
            line = f"replicas differ at iteration {self.iteration}: "
            if self.culprits:
                line += f"from the majority {', '.join(map(str, self.culprits))}"
            if self.undecided:
                line += f"{'; ' if self.culprits else ''}without a majority {', '.join(map(str, self.undecided))}"
            return line
        line = f"replicas agree at iteration {self.iteration}"
        if self.num_replicas == 1:
            return (
                f"{line}: nothing to compare, as no other rank holds any of this rank's {self.num_single_bytes} bytes"
            )
        line += f": {self.num_bytes} bytes, up to {self.num_replicas} replicas"
        return line + (f"; {self.num_single_bytes} bytes are on no other rank" if self.num_single_bytes else "")
