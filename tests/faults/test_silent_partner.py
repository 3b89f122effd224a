"""A partner that does not respond costs a save its replica, and nothing else."""

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
def test_a_stopped_partner_costs_one_replica_and_one_incident(tmp_path: Path) -> None:
    """While a partner's writer is stopped, the save is committed without a replica, and one incident reports that.

    If the node is then lost, the older checkpoint, which has a replica, is loaded.
    """
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
        # Both ranks return from save() before a byte is written: neither waits for a partner.
        second = ranks.tell(do="begin", config=config, iteration=2, num_more=1, journal=run)
        assert not any(result["done"] for result in second)
        stopped_writer = psutil.Process(nodes.writers["two"].pid)
        stopped_writer.send_signal(signal.SIGSTOP)
        try:
            nodes.let_one_pass("one")
            _wait_until_given_up(nodes.writers["one"].pid)
        finally:
            stopped_writer.send_signal(signal.SIGCONT)
        nodes.let_one_pass("two")
        assert ranks.tell(do="finish", leave=True) == [{"error": None}] * 2

        (event,) = [event for event in read(run) if event.kind == EventKind.INCIDENT]
        incident = event.data["incident"]
        assert incident["kind"] == IncidentKind.REPLICATION_FAILED
        assert (incident["rank"], incident["iteration"], incident["evidence"]["partner"]) == (0, 2, "two")

        (tmp_path / "global").rename(tmp_path / "away")
        assert [result["iteration"] for result in ranks.tell(do="load", config=config)] == [2, 2]
        empty_memory(nodes.writers["one"])
        for rank, result in enumerate(ranks.tell(do="load", config=config)):
            assert result["iteration"] == 1
            assert result["tiers"] == ["replica", "memory"]
            assert result["digest"] == first[rank]["saved"]


def _wait_until_given_up(pid: int) -> None:
    """Wait until a process has had a TCP connection and has none any more."""
    process, was_connected = psutil.Process(pid), False
    end_ns = clock.now_ns() + int(60e9)
    while clock.now_ns() < end_ns:
        connected = any(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))
        if was_connected and not connected:
            return
        was_connected = was_connected or connected
        time.sleep(0.01)
    raise AssertionError("the copy was not given up")
