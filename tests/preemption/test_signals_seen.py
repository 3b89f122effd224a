"""Signals are detected at once, told from echoes, passed on to earlier handlers, and leave nothing behind after
close()."""

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


def test_signal_is_detected_while_the_main_thread_is_in_c() -> None:
    """A signal is detected although the main thread runs no bytecode until much later."""
    notices: list[Notice] = []
    listener = ShutdownListener([signal.SIGUSR1], on_notice=notices.append)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        # One C call of about a second that no Python signal handler can interrupt, as a collective is.
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000)
        left_c_code_ns = time.monotonic_ns()
    finally:
        listener.close()
    assert notices
    assert notices[0].signal == signal.SIGUSR1
    assert notices[0].seen_ns < left_c_code_ns


def test_second_signal_differs_from_an_echo() -> None:
    """The same signal shortly after the first is its echo; a later one is a second notice."""
    notices: list[int] = []
    listener = ShutdownListener(
        [signal.SIGUSR1], on_notice=lambda notice: notices.append(notice.ordinal), echo_s=20, impatience_s=300
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
    assert notices == [1, 2]
    assert listener.first is not None
    assert listener.first.ordinal == 1


def test_earlier_handler_is_called_and_restored() -> None:
    """The earlier handler of the signal is still called, and is restored by close()."""
    received: list[int] = []

    def earlier(number: int, _frame: object) -> None:
        received.append(number)

    before = signal.signal(signal.SIGUSR1, earlier)
    try:
        listener = ShutdownListener([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.wait(60)
        assert received == [signal.SIGUSR1]
        listener.close()
        listener.close()
        assert signal.getsignal(signal.SIGUSR1) is earlier
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_earlier_wakeup_descriptor_still_gets_its_bytes() -> None:
    """An event loop that uses the wake-up descriptor is still woken, and has its descriptor back after close()."""
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
def test_listeners_may_be_closed_in_any_order(order: str) -> None:
    """Each receives the signal while it is open; after all are closed the signal has its earlier effect."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: received.append(number))
    earlier, fd_before = signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)
    try:
        listeners = [ShutdownListener([signal.SIGUSR1], echo_s=0, impatience_s=300) for _ in range(3)]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert all(listener.wait(60) for listener in listeners)
        others = list(listeners if order == "as made" else reversed(listeners))
        for ordinal_expected in (2, 3, 4):
            others.pop(0).close()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert all(one.wait(60, ordinal=ordinal_expected) for one in others)
            assert not any(one.wait(0, ordinal=ordinal_expected + 1) for one in others)
            assert len(received) == ordinal_expected
        assert signal.getsignal(signal.SIGUSR1) is earlier
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.set_wakeup_fd(fd_before)


def test_signal_listed_twice_is_received_once() -> None:
    """A listener for a signal that is listed twice is a listener for that signal."""
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: received.append(number))
    try:
        with ShutdownListener([signal.SIGUSR1, signal.SIGUSR1], echo_s=0) as listener:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert listener.wait(60)
            assert received == [signal.SIGUSR1]
            assert listener.wait(0)
            assert not listener.wait(0, ordinal=2)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.process
def test_handler_restored_after_close_does_not_block_sigterm() -> None:
    """Code that saves the handler and restores it after close() does not make the process ignore SIGTERM."""
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


def test_listener_outside_the_main_thread_is_rejected() -> None:
    """The error has the remedy."""
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
def test_signal_to_a_forked_child_does_not_reach_its_parent() -> None:
    """A data loader worker that gets SIGTERM ends, and its parent gets no notice."""
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
