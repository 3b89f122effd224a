"""The rank's end of its agent process."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import psutil
import pytest
from fake_ranks import monitor_task

from outlast.env import WorkerEnv
from outlast.inprocess import protocol as m
from outlast.inprocess.monitor_client import MonitorLink
from outlast.inprocess.progress import Page
from outlast.policy import inprocess_protocol as p

pytestmark = pytest.mark.process
TIMEOUT_MS = 100_000


def start(page: Page) -> MonitorLink:
    """Start an agent process for this process."""
    task = monitor_task(pid=os.getpid(), thread_interval_s=1.0, termination_grace_s=1.0)
    return MonitorLink(task, WorkerEnv(), page)


@pytest.fixture
def link() -> Iterator[MonitorLink]:
    page = Page.create()
    link = start(page)
    yield link
    link.close()
    page.close()


def hear(link: MonitorLink) -> list[m.Listening | p.Order]:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    found: list[m.Listening | p.Order] = []
    while not found:
        assert poll.poll(TIMEOUT_MS)
        found += link.receive()
    return found


def test_address_comes_first_and_an_order_follows(link: MonitorLink) -> None:
    """A rank alone connects its agent process to itself, is asked for the ranks, and may go."""
    (listening,) = hear(link)
    assert isinstance(listening, m.Listening)
    link.send(m.Connect(addresses=(listening.address,), offer=listening.offer))
    link.send(p.RankReady(restart_count=0, store_address="127.0.0.1 1"))
    (question,) = hear(link)
    assert isinstance(question, p.Assign)
    link.send(p.Assigned(ordinal=question.ordinal, ranks={0: 0}))
    (order,) = hear(link)
    assert isinstance(order, p.Go)


def test_receive_never_waits(link: MonitorLink) -> None:
    """With nothing said, it returns nothing at once."""
    hear(link)
    assert link.receive() == []


def test_close_ends_the_process_and_frees_the_descriptors() -> None:
    """After it, neither the process nor a descriptor is left, though a forked process has the socket, too."""
    page = Page.create()
    before = len(os.listdir("/proc/self/fd"))
    link = start(page)
    hear(link)
    copy = os.dup(link.fileno())
    process = psutil.Process(link.pid)
    link.close()
    os.close(copy)
    process.wait(100)
    assert len(os.listdir("/proc/self/fd")) == before
    page.close()


def test_process_imports_no_torch(link: MonitorLink) -> None:
    """It is small: torch is not in it."""
    hear(link)
    assert not any("site-packages/torch/" in entry.path for entry in psutil.Process(link.pid).memory_maps())
