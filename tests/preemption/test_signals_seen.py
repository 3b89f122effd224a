"""Notices are seen at once, told apart, passed on, and leave nothing behind."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from outlast.errors import OutlastError
from outlast.preemption import Notice, ShutdownListener


def test_a_notice_is_seen_while_the_main_thread_is_in_c_code() -> None:
    """A signal is seen although the main thread holds no bytecode until long after."""
    seen: list[Notice] = []
    listener = ShutdownListener([signal.SIGUSR1], on_notice=seen.append)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        # One C call of about a second that no Python signal handler can interrupt, as a collective is.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
        left_c_code_ns = time.monotonic_ns()
    finally:
        listener.close()
    assert seen
    assert seen[0].signal == signal.SIGUSR1
    assert seen[0].seen_ns < left_c_code_ns


def test_a_second_notice_is_told_apart_from_an_echo() -> None:
    """The same signal right after the first is its echo; a later one is the second notice."""
    seen: list[int] = []
    listener = ShutdownListener(
        [signal.SIGUSR1], on_notice=lambda notice: seen.append(notice.ordinal), echo_s=20, impatience_s=300
    )
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.wait(60)
        first = listener.first
        assert first is not None
        listener._on_signal(signal.SIGUSR1, first.seen_ns + 19 * 10**9)
        assert not listener.wait(0, ordinal=2)
        listener._on_signal(signal.SIGUSR1, first.seen_ns + 21 * 10**9)
        assert listener.wait(60, ordinal=2)
    finally:
        listener.close()
    assert seen == [1, 2]
    assert listener.first is not None
    assert listener.first.ordinal == 1


def test_an_earlier_handler_is_called_and_comes_back() -> None:
    """Who handled the signal before still gets it, and owns it again after close()."""
    got: list[int] = []

    def earlier(number: int, _frame: object) -> None:
        got.append(number)

    before = signal.signal(signal.SIGUSR1, earlier)
    try:
        listener = ShutdownListener([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.wait(60)
        assert got == [signal.SIGUSR1]
        listener.close()
        listener.close()
        assert signal.getsignal(signal.SIGUSR1) is earlier
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_earlier_wakeup_descriptor_keeps_getting_its_bytes() -> None:
    """An event loop that uses the wake-up descriptor is still woken, and has it back after close()."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.settimeout(60)
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        listener = ShutdownListener([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert reader.recv(1) == bytes([signal.SIGUSR1])
        listener.close()
        assert signal.set_wakeup_fd(before) == writer.fileno()
    finally:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()


@pytest.mark.parametrize("order", ["as made", "reversed"])
def test_two_listeners_are_closed_in_any_order(order: str) -> None:
    """Each hears the signal while it is open; after both are closed the signal does what it did before."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: got.append(number))
    earlier, fd_before = signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)
    try:
        listeners = [ShutdownListener([signal.SIGUSR1], echo_s=0, impatience_s=300) for _ in range(3)]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert all(listener.wait(60) for listener in listeners)
        for heard, listener in enumerate(listeners if order == "as made" else listeners[::-1], 2):
            listener.close()
            others = [one for one in listeners if not one._closing.is_set()]
            os.kill(os.getpid(), signal.SIGUSR1)
            assert all(one.wait(60, ordinal=heard) for one in others)
            assert not any(one.wait(0, ordinal=heard + 1) for one in others)
            assert len(got) == heard
        assert signal.getsignal(signal.SIGUSR1) is earlier
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.set_wakeup_fd(fd_before)


def test_a_signal_named_twice_is_heard_once() -> None:
    """A listener for one signal twice is a listener for that signal."""
    got: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: got.append(number))
    try:
        with ShutdownListener([signal.SIGUSR1, signal.SIGUSR1], echo_s=0) as listener:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert listener.wait(60)
            assert got == [signal.SIGUSR1]
            assert listener.wait(0)
            assert not listener.wait(0, ordinal=2)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.process
def test_a_handler_that_comes_back_late_lets_the_signal_end_the_process() -> None:
    """Code that saves the handler and puts it back after close() does not make the process deaf to SIGTERM."""
    script = """
import os, signal
from outlast.preemption import ShutdownListener
listener = ShutdownListener([signal.SIGTERM])
kept = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: None)
listener.close()
signal.signal(signal.SIGTERM, kept)
os.kill(os.getpid(), signal.SIGTERM)
while True:
    signal.pause()
"""
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=300).returncode == -signal.SIGTERM


def test_only_the_main_thread_may_watch() -> None:
    """Anywhere else the error says what to do."""
    errors: list[BaseException] = []

    def make() -> None:
        try:
            ShutdownListener()
        except OutlastError as error:
            errors.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])


@pytest.mark.process
def test_a_forked_child_dies_of_the_signal_and_its_parent_hears_nothing() -> None:
    """A data loader's worker that is ended with SIGTERM ends, and is no notice for its parent."""
    script = """
import os, signal
from outlast.preemption import ShutdownListener
listener = ShutdownListener([signal.SIGTERM], echo_s=0)
ready, told = os.pipe()
child = os.fork()
if child == 0:
    os.write(told, b"x")
    while True:
        signal.pause()
os.read(ready, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM, status
os.kill(os.getpid(), signal.SIGTERM)
assert listener.wait(60)
assert listener.wait(0) and not listener.wait(0, ordinal=2)
listener.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
