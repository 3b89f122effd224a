"""A partner that does not answer costs a save its copy, and nothing else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from gated_nodes import GatedNodes, empty_memory
from obedient_ranks import Ranks

from outlast import clock
from outlast.incidents import EventKind, IncidentKind
from outlast.journal import read

NODES = ("one", "two")


@pytest.mark.process
def test_a_stopped_partner_costs_a_copy_and_one_incident(tmp_path: Path) -> None:
    """While node two's writer is stopped, node one's rank gives its copy up: the save is committed nevertheless, said
    to lack a copy in one incident, and when node one is lost the earlier checkpoint, which lacks none, is loaded."""
    config: dict[str, Any] = {
        "directory": os.fspath(tmp_path / "global"),
        "replication_timeout": 3.0,
        "save_timeout": 60.0,
    }
    run = os.fspath(tmp_path / "run")
    with GatedNodes.open(NODES, tmp_path) as nodes, Ranks(nodes.writers, tmp_path / "log") as ranks:
        first = ranks.tell(do="begin", config=config, iteration=1, num_more=0, journal=run)
        for name in NODES:
            nodes.let_one_pass(name)
        ranks.tell(do="finish", leave=False)
        # Both ranks have returned from their save before a byte of it is written: none of them waits for a partner.
        second = ranks.tell(do="begin", config=config, iteration=2, num_more=1, journal=run)
        assert not any(told["done"] for told in second)
        stopped = psutil.Process(nodes.writers["two"].pid)
        stopped.send_signal(signal.SIGSTOP)
        try:
            nodes.let_one_pass("one")
            _wait_until_given_up(nodes.writers["one"].pid)
        finally:
            stopped.send_signal(signal.SIGCONT)
        nodes.let_one_pass("two")
        assert ranks.tell(do="finish", leave=True) == [{"error": None}] * 2

        (event,) = [event for event in read(run) if event.kind == EventKind.INCIDENT]
        incident = event.data["incident"]
        assert incident["kind"] == IncidentKind.REPLICATION_FAILED
        assert (incident["rank"], incident["iteration"], incident["evidence"]["partner"]) == (0, 2, "two")

        (tmp_path / "global").rename(tmp_path / "away")
        assert [told["iteration"] for told in ranks.tell(do="load", config=config)] == [2, 2]
        empty_memory(nodes.writers["one"])
        for rank, told in enumerate(ranks.tell(do="load", config=config)):
            assert told["iteration"] == 1
            assert told["tiers"] == ["replica", "memory"]
            assert told["digest"] == first[rank]["saved"]


def _wait_until_given_up(pid: int) -> None:
    """Wait until a process has connected somewhere, and has no such connection any more."""
    process, was_connected = psutil.Process(pid), False
    end_ns = clock.now_ns() + int(60e9)
    while clock.now_ns() < end_ns:
        connected = any(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))
        if was_connected and not connected:
            return
        was_connected = was_connected or connected
        time.sleep(0.01)
    raise AssertionError("the copy was not given up")
