"""A process of the crowd: holds simulated agents and does what the crowd tells it."""

from __future__ import annotations

import os
import resource
import sys
from multiprocessing.connection import Connection

import msgspec

from outlast import clock
from outlast.bench.simulated_agents import C10dAgent, OutlastAgent, SimulatedAgent
from outlast.decoding import from_json
from outlast.errors import OutlastError

__all__ = ["Answer", "Order", "main"]

_KINDS = {"outlast": OutlastAgent, "c10d": C10dAgent}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of the crowd is to do."""

    do: str
    """``gather``: make agents and connect them; ``join``: let them meet; ``finish``: their work is done;
    ``leave``: end them."""
    timeout_s: float
    kind: str = "outlast"
    first: int = 0
    """Number of the process's first agent; 0 hosts the store."""
    count: int = 0
    num_agents: int = 0
    """Agents in all processes."""
    port: int = 0
    run_id: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    error: str | None = None
    ranks: tuple[int, ...] = ()
    last_ns: int = 0
    """When the last agent had its rank."""


def main() -> None:
    """Do what comes through the connection until it is closed; argument: its descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    crowd = Connection(int(sys.argv[1]))
    agents: list[SimulatedAgent] = []
    while True:
        try:
            order = from_json(crowd.recv_bytes(), Order)
        except EOFError:
            break
        try:
            answer = _carry_out(order, agents)
        except (OutlastError, OSError, RuntimeError) as error:
            answer = Answer(error=f"{type(error).__name__}: {error}")
        crowd.send_bytes(msgspec.json.encode(answer))
    sys.stdout.flush()
    os._exit(0)  # threads of torch's handlers and stores must not be waited for


def _carry_out(order: Order, agents: list[SimulatedAgent]) -> Answer:
    deadline_s = clock.now_s() + order.timeout_s
    match order.do:
        case "gather":
            kind = _KINDS[order.kind]
            for number in range(order.first, order.first + order.count):
                agents.append(kind(number, num_agents=order.num_agents, port=order.port, run_id=order.run_id))
                # One by one: torch looks up a name for each connection, and one machine asking for hundreds at
                # once is more than some name servers answer. It is not what is measured.
                agents[-1].wait_until_connected(deadline_s)
            return Answer()
        case "join":
            for agent in agents:
                agent.join()
            for agent in agents:
                agent.wait_until_ranked(deadline_s)
            return Answer(
                ranks=tuple(agent.rank for agent in agents),
                last_ns=max((agent.ranked_ns for agent in agents), default=0),
            )
        case "finish":
            for agent in agents:
                agent.finish()
            return Answer()
        case "leave":
            for agent in agents:
                agent.close(deadline_s)
            agents.clear()
            return Answer()
        case _:
            raise AssertionError(f"unknown order {order.do!r}")


if __name__ == "__main__":
    main()
