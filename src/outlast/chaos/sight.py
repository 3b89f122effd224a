"""What an injector knows of a run: its journal as it grows, its agents' processes, and its ranks' boards.

All that is kept is what the newest job's newest cycle is like. Nothing is ever written.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from outlast.chaos.plan import FaultTier
from outlast.incidents import Event, EventKind, IncidentKind
from outlast.journal import read_on
from outlast.policy.lease import Process
from outlast.runtime.board import held_pages
from outlast.runtime.processes import is_alive

log = logging.getLogger(__name__)
_MAX_CHUNKS = 256
"""Of a journal file that are read at once: 1 GiB."""


class JournalTail:
    """Read a growing journal: each event once, files that are added meanwhile, too.

    Args:
        run_dir: The run directory; may not exist yet.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "journal"
        self._done: dict[str, int] = {}
        self._refused: set[Path] = set()

    def read_new(self) -> list[Event]:
        """Return the events since the last call, by wall time; a line that is not whole yet comes the next time."""
        found: list[Event] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            for _ in range(_MAX_CHUNKS):
                try:
                    events, self._done[path.name], has_more = read_on(path, self._done.get(path.name, 0))
                except FileNotFoundError:  # removed meanwhile
                    break
                except OSError as error:
                    if path not in self._refused:
                        self._refused.add(path)
                        log.warning("%s cannot be read: %s", path, error.strerror)
                    break
                found += events
                if not has_more:
                    break
        return sorted(found, key=lambda event: event.wall_ns)


@dataclass(slots=True)
class Sight:
    """A run at one moment."""

    job: str = ""
    run_id: str = ""
    cycle: int = -1
    """The newest that has workers; -1 = none yet."""
    master: str = ""
    """Where its ranks meet."""
    world_size: int = 0
    agents: dict[str, Process] = field(default_factory=dict)
    """Each node's newest agent, which may have ended."""
    ranks: dict[int, str] = field(default_factory=dict)
    """Rank to its node, in the newest cycle."""
    coordinator: str | None = None
    """The node that hosts it."""
    trained: set[int] = field(default_factory=set)
    """Ranks that have done an iteration in the newest cycle."""
    iteration: int = 0
    """The highest that any rank was seen to have done in the newest cycle."""
    is_ending: bool = False
    """Something was decided about the newest cycle."""
    committed: dict[str, set[int]] = field(default_factory=dict)
    """Tier to the generations that are committed there, over all jobs."""
    committed_now: set[int] = field(default_factory=set)
    """Generations that are committed in the newest cycle, to any tier."""
    awaits_global: set[tuple[int | None, int]] = field(default_factory=set)
    """Ranks, and generations that are being written from their memory to the global tier, in the newest cycle."""
    directory: str | None = None
    local_directory: str | None = None

    def take(self, event: Event) -> None:
        """Learn from an event, in the order in which they came."""
        data = event.data
        if event.proc == "coordinator" and (event.cycle is None or event.cycle >= self.cycle or event.job != self.job):
            self.coordinator = event.node  # one that was stopped, and has an heir, still writes about an earlier cycle
        match event.kind:
            case EventKind.JOB_STARTED:
                self.agents[event.node] = Process(
                    event.node, str(data.get("machine", "")), int(data.get("pid", 0)), int(data.get("pid_started", 0))
                )
            case EventKind.SESSION_STARTED:
                self.directory = data.get("directory") or self.directory
                self.local_directory = data.get("local_directory") or self.local_directory
            case EventKind.CYCLE_STARTED:
                master = str(data.get("master", ""))
                if (event.job, event.cycle, master) != (self.job, self.cycle, self.master):
                    # A coordinator that did not know of its heir's cycles may give a number again.
                    self.master = master
                    self.job, self.run_id, self.cycle = event.job, event.run_id, event.cycle or 0
                    self.ranks, self.trained = {}, set()
                    self.iteration, self.committed_now, self.is_ending = 0, set(), False
                    self.awaits_global = set()
                self.world_size = data["world_size"]
                self.ranks |= dict.fromkeys(data["ranks"], event.node)
        if event.kind == EventKind.SAVE_COMMITTED and (generation := generation_of(event)) is not None:
            for tier in data.get("tiers", ()):
                self.committed.setdefault(tier, set()).add(generation)
        if (event.job, event.cycle) == (self.job, self.cycle):
            self._take_of_cycle(event)

    def _take_of_cycle(self, event: Event) -> None:
        if event.kind in (EventKind.PROGRESS, EventKind.RESTORED):
            self.iteration = max(self.iteration, event.iteration or 0)
        if event.kind == EventKind.PROGRESS and event.rank is not None:
            self.trained.add(event.rank)
        elif event.kind == EventKind.SAVE_COMMITTED and (generation := generation_of(event)) is not None:
            self.committed_now.add(generation)
            if FaultTier.GLOBAL in event.data.get("tiers", ()):
                # One that a newer save has taken the place of is not written any more.
                self.awaits_global = {one for one in self.awaits_global if one[0] != event.rank or one[1] > generation}
        elif event.kind == EventKind.SAVE_SCHEDULED and FaultTier.GLOBAL in event.data.get("tiers", ()):
            self.awaits_global.add((event.rank, event.iteration or 0))
        elif event.kind == EventKind.INCIDENT and event.data["incident"].get("kind") == IncidentKind.SAVE_FAILED:
            self.awaits_global.discard((event.rank, event.iteration or 0))
        elif event.kind in (EventKind.VERDICT, EventKind.CYCLE_ENDED, EventKind.JOB_ENDED, EventKind.NOTICE):
            self.is_ending = True

    @property
    def is_training(self) -> bool:
        """Whether every rank of the newest cycle has done an iteration, and nothing was decided about it."""
        return self.world_size > 0 and len(self.trained) == self.world_size and not self.is_ending

    def look_at_boards(self) -> None:
        """Learn from the boards of this machine's agents how far their ranks are."""
        for node in sorted(set(self.ranks.values())):
            process = self.agents.get(node)
            if process is not None and is_alive(process):
                for page in held_pages(process.pid):
                    if page.cycle == self.cycle:
                        self.iteration = max(self.iteration, page.iteration)

    def living(self) -> list[str]:
        """Return the nodes whose agents live, on this machine."""
        return sorted(node for node, process in self.agents.items() if is_alive(process))

    def own_ranks(self, node: str) -> set[int]:
        """Return the ranks of a node in the newest cycle."""
        return {rank for rank, holder in self.ranks.items() if holder == node}


def generation_of(event: Event) -> int | None:
    """Return the generation of an event of a save."""
    if event.iteration is not None:
        return event.iteration
    generation = event.data.get("generation")
    return generation if isinstance(generation, int) else None
