"""A rank without torch: follows the orders of its agent process and the commands on its standard input.

Prints one JSON object a line: each order, and its time.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

import msgspec

from outlast.env import read_worker
from outlast.inprocess import protocol as m
from outlast.inprocess.monitor_client import MonitorLink
from outlast.inprocess.progress import Page, RankPhase
from outlast.inprocess.protocol import MonitorTask
from outlast.policy import inprocess_protocol as p
from outlast.policy.inprocess_restart import add_earlier_faults


class FakeRank:
    def __init__(self, task: MonitorTask, active_world_size: int) -> None:
        self.task, self.active_world_size = task, active_world_size
        self.page = Page.create()
        self.link = MonitorLink(task, read_worker(), self.page)
        self.traits: set[str] = set()
        self.restart_count = -1
        self.restart: p.Restart | None = None
        self.input = ""

    def report(self, event: str, **facts: object) -> None:
        # in one write, because a log line may be written in between
        sys.stdout.write(json.dumps({"what": event, "at_ns": time.monotonic_ns(), **facts}) + "\n")

    def run(self) -> None:
        self.report("started", monitor=self.link.pid)
        poll = select.poll()
        poll.register(self.link, select.POLLIN)
        poll.register(sys.stdin, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(50)}
            self.page.heartbeat()
            if "hang" not in self.traits:
                self.page.stamp_progress()
            if self.link.fileno() in ready:
                before = self.link.pid
                for message in self.link.receive():
                    if self.obey(message):
                        return
                if self.link.pid != before:
                    self.report("monitor", monitor=self.link.pid)
            if sys.stdin.fileno() in ready:
                data = os.read(sys.stdin.fileno(), 4096).decode()
                if not data:
                    return
                *lines, self.input = (self.input + data).split("\n")
                for line in lines:
                    self.command(*line.split())

    def command(self, word: str, *rest: str) -> None:
        match word:
            case "connect":
                self.link.send(m.Connect(addresses=(f"{rest[0]} {rest[1]}",), offer=rest[2]) if rest else m.Connect())
                self.get_ready(0)
                self.report("connected")
            case "fault":
                self.page.set_phase(RankPhase.OUT)
                self.link.send(
                    p.RankFault(
                        initial_rank=self.task.initial_rank,
                        restart_count=self.restart_count,
                        kind=p.RankFaultKind.EXCEPTION,
                        summary="told to",
                    )
                )
            case "complete":
                self.page.set_phase(RankPhase.COMPLETED)
                self.link.send(p.Completed(restart_count=self.restart_count))
            case trait:
                self.traits.add(trait)
                self.report("trait")

    def get_ready(self, restart_count: int) -> None:
        self.page.set_phase(RankPhase.OUT)
        if "unready" in self.traits:
            return
        self.page.set_phase(RankPhase.WAITING)
        self.link.send(
            p.RankReady(restart_count=restart_count, store_address=f"store-{self.task.initial_rank}-{restart_count} 1")
        )

    def obey(self, message: m.Listening | p.Order) -> bool:
        if isinstance(message, p.Restart):
            self.restart = message
        if isinstance(message, p.Go):
            message = add_earlier_faults(message, self.restart)
        facts = msgspec.structs.asdict(message)
        if isinstance(message, p.Go):
            facts["ranks"] = message.ranks
        if isinstance(message, p.Go | p.Restart):
            facts["faults"] = [msgspec.structs.asdict(fault) for fault in message.faults]
        self.report(type(message).__name__, **msgspec.to_builtins(facts, str_keys=True))
        match message:
            case p.Restart(restart_count=restart_count):
                if "stubborn" in self.traits:
                    self.page.set_phase(RankPhase.LEAVING)
                else:
                    self.get_ready(restart_count)
            case p.Assign() as question:
                self.link.send(self.assign(question))
            case p.Go() as go:
                self.restart_count = go.restart_count
                if self.task.initial_rank not in go.ranks:
                    self.link.close()
                    return True
                if go.ranks[self.task.initial_rank] is not None:
                    self.page.set_phase(RankPhase.STARTING, go.restart_count)
                    self.page.set_phase(RankPhase.IN_FN)
            case p.Finish() | p.Abort() | p.Expel():
                self.page.set_phase(RankPhase.OUT)
                self.link.close()
                return True
        return False

    def assign(self, question: p.Assign) -> p.Assigned:
        living = [member for member in question.members if member.alive]
        ranks = {member.initial_rank: member.rank for member in living}
        free = sorted(set(range(self.active_world_size)) - set(ranks.values()))
        for rank in sorted(ranks):
            if ranks[rank] is None and free:
                ranks[rank] = free.pop(0)
        if free:
            return p.Assigned(ordinal=question.ordinal, error="no spare is left")
        return p.Assigned(ordinal=question.ordinal, ranks=ranks)


if __name__ == "__main__":
    template = msgspec.json.decode(sys.argv[1], type=MonitorTask)
    own = int(os.environ["RANK"])
    log_path = os.path.join(sys.argv[3], "monitor.log") if sys.argv[3] else ""
    relay = os.environ.get("OUTLAST_RELAY", "")
    node = os.environ["OUTLAST_NODE"]
    task = msgspec.structs.replace(
        template, pid=os.getpid(), initial_rank=own, node=node, log_path=log_path, relay=relay
    )
    FakeRank(task, int(sys.argv[2])).run()
