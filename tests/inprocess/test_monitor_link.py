"""The rank's end of the link to its agent process."""

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
    task = monitor_task(pid=os.getpid(), thread_interval_s=1.0, termination_grace_s=1.0)
    return MonitorLink(task, WorkerEnv(), page)


@pytest.fixture
def link() -> Iterator[MonitorLink]:
    page = Page.create()
    link = start(page)
    yield link
    link.close()
    page.close()


def wait_for_messages(link: MonitorLink) -> list[m.Listening | p.Order]:
    poll = select.poll()
    poll.register(link, select.POLLIN)
    found: list[m.Listening | p.Order] = []
    while not found:
        assert poll.poll(TIMEOUT_MS)
        found += link.receive()
    return found


def test_orders_follow_the_address(link: MonitorLink) -> None:
    """A single rank gets its agent process's address, a request for the assignment of ranks, and the order to go."""
    (listening,) = wait_for_messages(link)
    assert isinstance(listening, m.Listening)
    link.send(m.Connect(addresses=(listening.address,), offer=listening.offer))
    link.send(p.RankReady(restart_count=0, store_address="127.0.0.1 1"))
    (question,) = wait_for_messages(link)
    assert isinstance(question, p.Assign)
    link.send(p.Assigned(ordinal=question.ordinal, ranks={0: 0}))
    (order,) = wait_for_messages(link)
    assert isinstance(order, p.Go)


def test_receive_does_not_block(link: MonitorLink) -> None:
    """Without messages, receive returns an empty list at once."""
    wait_for_messages(link)
    assert link.receive() == []


def test_close_ends_the_process_and_frees_the_descriptors() -> None:
    """After close, neither the process nor a descriptor is left, even if a forked process has a copy of the socket."""
    page = Page.create()
    before = len(os.listdir("/proc/self/fd"))
    link = start(page)
    wait_for_messages(link)
    copy = os.dup(link.fileno())
    process = psutil.Process(link.pid)
    link.close()
    os.close(copy)
    process.wait(100)
    assert len(os.listdir("/proc/self/fd")) == before
    page.close()


def test_the_agent_process_does_not_import_torch(link: MonitorLink) -> None:
    """The agent process is small because torch is not loaded."""
    wait_for_messages(link)
    assert not any("site-packages/torch/" in entry.path for entry in psutil.Process(link.pid).memory_maps())
