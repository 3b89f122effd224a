"""The story: one line for people for each event that matters to them."""

from __future__ import annotations

from outlast.decoding import convert
from outlast.demo.sources import count_bytes
from outlast.errors import ExitReason
from outlast.incidents import Event, EventKind, Incident, Rung, Verdict

__all__ = ["tell"]


def tell(event: Event) -> str | None:
    """Return the line for an event; ``None`` when it is none of the story."""
    data = event.data
    match event.kind:
        case EventKind.NODE_JOINED if data.get("spare"):
            return f"{data['name']} waits as a spare"
        case EventKind.CYCLE_STARTED:
            first, last = min(data["ranks"]), max(data["ranks"])
            ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
            return f"cycle {event.cycle}: {event.node} runs {ranks} of {data['world_size']}"
        case EventKind.FAULT_SIMULATED:
            spoiled = "" if data.get("copies_spoiled") is None else f", {data['copies_spoiled']} copies damaged"
            target = f"rank {event.rank}, {data['tensor']}" if "tensor" in data else data["target"]
            return f"FAULT: {data['fault']}: {target}, at iteration {event.iteration}{spoiled}"
        case EventKind.INCIDENT:
            decided = f"; decided: {data['verdict']['reason']}" if "verdict" in data else ""
            return f"noticed by {event.node}: {convert(data['incident'], Incident).describe()}{decided}"
        case EventKind.VERDICT:
            verdict = convert(data["verdict"], Verdict)
            return f"decided: {verdict.reason}" if verdict.rung != Rung.STOP or verdict.exit_code else None
        case EventKind.NOTICE:
            who = event.node if event.rank is None else f"rank {event.rank}"
            why = data.get("reason") or f"signal {data['signal']}"
            return f"noticed by {who}: told to leave ({why})"
        case EventKind.SESSION_ENDED if data["exit_code"] == ExitReason.PREEMPTED:
            return f"rank {event.rank}: saved, and left after iteration {event.iteration} with exit code 75"
        case EventKind.JOB_ENDED if data["exit_code"] == ExitReason.PREEMPTED:
            return f"{event.node}: the job is over, exit code 75"
        case EventKind.RESTORED:
            read = sum(data["bytes_read"].values())
            return f"rank {event.rank}: restored iteration {event.iteration} from {data['tier']}, {count_bytes(read)}"
        case _:
            return None
