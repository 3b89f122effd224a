"""Protection: what a run is protected against, and what not, in one line for people."""

from __future__ import annotations

from dataclasses import dataclass

from outlast.policy.deadlines import Timeouts
from outlast.wording import count

__all__ = ["NO_SESSION", "Protection", "describe_hangs", "describe_nodes", "describe_saves"]

NO_SESSION = "the script has called neither outlast.init() nor RankMonitor()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What is known of a run's protection; each text begins with ``yes`` or ``no``."""

    max_restarts: int
    hangs: str
    nodes: str
    of_session: str = ""
    """What a session reports: its saves and its reaction to a notice; empty = no session reported anything."""

    @property
    def has_gap(self) -> bool:
        """Whether something that a long run needs is off: a spare node is not."""
        return not self.max_restarts or self.hangs.startswith("no") or "checkpoints no" in self.of_session

    def describe(self) -> str:
        """Return the line."""
        death = (
            f"death yes ({count(self.max_restarts, 'restart')})" if self.max_restarts else "death no (--max-restarts=0)"
        )
        session = self.of_session or f"checkpoints and preemption unknown ({NO_SESSION})"
        return f"protected: {death}; hang {self.hangs}; node loss {self.nodes}; {session}"


def describe_hangs(timeouts: Timeouts | None, where: str, *, has_session: bool, origins: dict[str, str]) -> str:
    """Return what notices hangs.

    Args:
        timeouts: What is enforced; ``None`` = hang detection is off.
        where: What switched it off.
        has_session: A rank shows signs of life.
        origins: Where each setting of a timeout comes from, by its name.
    """
    if timeouts is None:
        return f"no (enable_ft_package is false, {where})"
    if not has_session:
        return f"no ({NO_SESSION})"
    parts = []
    if timeouts.sections:
        named = ", ".join(f"{name} {seconds:g} s" for name, seconds in sorted(timeouts.sections.items()))
        parts.append(f"{named} from {origins['rank_section_timeouts']}")
    others = (
        ("outside of sections", timeouts.out_of_section_s, "rank_out_of_section_timeout"),
        ("first heartbeat", timeouts.initial_heartbeat_s, "initial_rank_heartbeat_timeout"),
        ("heartbeat", timeouts.heartbeat_s, "rank_heartbeat_timeout"),
    )
    parts += [f"{what} {seconds:g} s from {origins[name]}" for what, seconds, name in others if seconds is not None]
    return f"yes ({', '.join(parts)})" if parts else "no (set rank_section_timeouts)"


def describe_nodes(*, num_slots: int, max_nodes: int, min_nodes: int | None) -> str:
    """Return what the loss of a node leads to."""
    parts = []
    if (spares := max_nodes - num_slots) > 0:
        parts.append(count(spares, "spare"))
    if min_nodes is not None and min_nodes < num_slots:
        parts.append(f"continues with {min_nodes} of {num_slots} nodes")
    return f"yes ({', '.join(parts)})" if parts else "no (no spare node)"


def describe_saves(*, tiers: tuple[str, ...], interval: int | str, near_interval: int | str, is_told: bool) -> str:
    """Return what a session saves, and what a notice to leave leads to.

    Args:
        tiers: Where it saves to; none = nowhere.
        interval: Iterations between saves to all tiers; 0 = only at a shutdown, at the end, or by hand.
        near_interval: The same for the near tiers alone.
        is_told: A notice reaches it.
    """
    if not tiers:
        saves = "checkpoints no (set checkpoint.directory)"
    elif not interval and not near_interval:
        saves = f"checkpoints no (none before the end: set checkpoint.save_interval; to {' + '.join(tiers)})"
    else:
        often = [f"every {interval} iterations" if interval != "auto" else "at automatic intervals"] if interval else []
        if near_interval:
            near = "at automatic intervals" if near_interval == "auto" else f"every {near_interval} iterations"
            often.append(f"{near} to the near tiers")
        saves = f"checkpoints {' and '.join(often)} to {' + '.join(tiers)}"
    if not is_told:
        leaving = "preemption no (outlast.init() was not called in the main thread)"
    else:
        leaving = "preemption yes" if tiers else "preemption no (nothing is saved)"
    return f"{saves}; {leaving}"
