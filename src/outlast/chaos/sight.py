"""A run as an injector sees it: journal, agent processes and heartbeat memory; read-only."""

from __future__ import annotations

from outlast.incidents import Event
from outlast.policy.lease import Process
from outlast.policy.run_view import RunView, WorkersStart
from outlast.runtime.board import held_pages
from outlast.runtime.processes import is_alive


class Sight:
    """A run at one moment: the newest workers and the agents."""

    def __init__(self) -> None:
        self._view = RunView(keeps_samples=False)
        self.coordinator: str | None = None
        """The node that hosts the coordinator."""
        self._seen: tuple[WorkersStart | None, int] = None, 0
        """The highest iteration read from the heartbeat memory, and its workers."""

    def take(self, event: Event) -> None:
        """Take an event, in journal order."""
        is_newest = event.cycle is None or event.cycle >= self.cycle or event.job != self.job
        if event.proc == "coordinator" and is_newest:
            self.coordinator = event.node  # a superseded coordinator still writes about older cycles
        self._view.take(event)

    @property
    def workers(self) -> WorkersStart:
        """The newest workers; those of cycle -1 if none were started yet."""
        return self._view.starts[-1] if self._view.starts else WorkersStart("", "", -1, "", 0)

    @property
    def job(self) -> str:
        return self.workers.job

    @property
    def run_id(self) -> str:
        return self.workers.run_id

    @property
    def cycle(self) -> int:
        return self.workers.cycle

    @property
    def ranks(self) -> dict[int, str]:
        """Node by rank, in the newest cycle."""
        return self.workers.ranks

    @property
    def iteration(self) -> int:
        """The highest iteration that any rank is known to have completed in the newest cycle."""
        workers, seen = self._seen
        return max(self.workers.iteration, seen if workers is self.workers else 0)

    @property
    def is_training(self) -> bool:
        """Whether every rank has completed an iteration, and no decision has ended the cycle."""
        return self.workers.trained_ns is not None and not self.workers.is_ending

    @property
    def committed(self) -> dict[str, set[int]]:
        """Committed iterations by tier, over all jobs."""
        return self._view.committed

    @property
    def committed_now(self) -> set[int]:
        """Iterations committed in the newest cycle, in any tier."""
        return self.workers.committed

    @property
    def awaits_global(self) -> set[tuple[int | None, int]]:
        """Ranks, and iterations that are being written from their memory to the global tier, in the newest cycle."""
        return {(rank, one) for rank, iterations in self.workers.awaits_global.items() for one in iterations}

    @property
    def agents(self) -> dict[str, Process]:
        """Each node's newest agent, which may have ended."""
        events = {node: event for job in self._view.jobs for node, event in job.agents.items()}
        return {
            node: Process(
                node,
                str(event.data.get("machine", "")),
                int(event.data.get("pid", 0)),
                int(event.data.get("pid_started", 0)),
            )
            for node, event in events.items()
        }

    @property
    def directory(self) -> str | None:
        return next((job.directory for job in reversed(self._view.jobs) if job.directory), None)

    @property
    def local_directory(self) -> str | None:
        return next((job.local_directory for job in reversed(self._view.jobs) if job.local_directory), None)

    def look_at_boards(self) -> None:
        """Read the ranks' iterations from the heartbeat memory of this machine's agents."""
        agents = self.agents
        for node in set(self.ranks.values()) & set(agents):
            if is_alive(agents[node]):
                for page in held_pages(agents[node].pid):
                    if page.cycle == self.cycle:
                        self._seen = self.workers, max(self.iteration, page.iteration)

    def living(self) -> list[str]:
        """Return the nodes whose agents are alive."""
        return sorted(node for node, process in self.agents.items() if is_alive(process))

    def own_ranks(self, node: str) -> set[int]:
        return {rank for rank, holder in self.ranks.items() if holder == node}
