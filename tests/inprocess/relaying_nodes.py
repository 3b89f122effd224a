"""The relays of some nodes and the in-process restart coordinator, for ranks that are started without an agent.

Run as a script with the number of nodes as argument: first prints the relays' addresses, then ``ok`` for each
command on its standard input, and exits at its end. The transport between a relay and the coordinator (mailboxes,
one connection) is left out; the messages are encoded and decoded as they are there.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from outlast import clock
from outlast.launch import protocol as m
from outlast.launch.in_process_restarts import InProcessRestarts
from outlast.launch.rank_relay import RankRelay


class Nodes:
    """State of the script's process."""

    def __init__(self, num: int) -> None:
        self.relays = {f"n{number}": RankRelay() for number in range(num)}
        self.coordinator: InProcessRestarts | None = InProcessRestarts()
        self.cycle, self.term = 0, 0
        self.loses_mid_order = False
        """The coordinator is lost once one of several nodes has the order."""
        self.begin(0)

    def begin(self, cycle: int) -> None:
        self.coordinator, self.cycle, self.loses_mid_order = InProcessRestarts(), cycle, False
        self.coordinator.begin(cycle, self.term)
        for relay in self.relays.values():
            relay.begin_cycle(cycle)
            relay.serve()

    def adopt(self) -> None:
        """Let another coordinator take over."""
        self.term += 1
        self.coordinator = InProcessRestarts()
        for node, relay in self.relays.items():
            for message in relay.introduce(self.term):
                self.coordinator.keep(self.carry(node, message))
        self.coordinator.take_over(self.cycle, self.term, self.relays, clock.now_s())
        self.deliver()

    def carry(self, node: str, message: m.FromNode) -> Any:
        carried = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=m.OnControl)
        return msgspec.structs.replace(carried, node=node, epoch="e")

    def deliver(self) -> None:
        if self.coordinator is None:
            return
        orders, self.coordinator.out = self.coordinator.out, []
        is_partial = self.loses_mid_order and len({node for node, _, _ in orders}) > 1
        for node, _, order in orders:
            self.relays[node].obey(msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=m.OnAgent))
            if is_partial:
                self.loses_mid_order = False
                self.adopt()
                return

    def turn(self) -> None:
        for node, relay in self.relays.items():
            for message in relay.serve():
                if self.coordinator is not None:  # otherwise the message is lost with the connection
                    self.coordinator.take(self.carry(node, message), clock.now_s())
        if self.coordinator is not None:
            self.coordinator.look(clock.now_s())
            self.deliver()

    def until_s(self) -> float:
        due = [relay.deadline_s for relay in self.relays.values()]
        due.append(None if self.coordinator is None else self.coordinator.deadline_s)
        return min((one for one in due if one is not None), default=clock.now_s() + 1.0)

    def command(self, word: str, *rest: str) -> None:
        if word == "cycle":
            self.begin(int(rest[0]))
        elif word == "lose":
            self.coordinator = None
        elif word == "adopt":
            self.adopt()
        elif word == "tear":
            self.loses_mid_order = True


class RelayingNodes:
    """The process with the relays; a context manager that ends the process."""

    def __init__(self, num: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(num)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.addresses: list[str] = json.loads(self._process.stdout.readline())

    def send_command(self, command: str) -> None:
        """Send a command; return once it is done."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "ok\n"

    def __enter__(self) -> RelayingNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Serve until standard input ends."""
    nodes = Nodes(int(sys.argv[1]))
    print(json.dumps([relay.address for relay in nodes.relays.values()]), flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.buffer, selectors.EVENT_READ)
        for relay in nodes.relays.values():
            selector.register(relay, selectors.EVENT_READ)
        while True:
            ready = selector.select(max(0.0, nodes.until_s() - clock.now_s()))
            nodes.turn()
            if any(key.fileobj is sys.stdin.buffer for key, _ in ready):
                if not (line := sys.stdin.buffer.readline()):
                    return
                nodes.command(*line.decode().split())
                print("ok", flush=True)


if __name__ == "__main__":
    main()
