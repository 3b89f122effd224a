"""Interruption of the wrapped function in the main thread."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outlast.errors import ConfigError
from outlast.inprocess.call import RestartRequested
from outlast.runtime.interruption import SignalInterruption, set_async_exception


def boundary(
    interruption: SignalInterruption, function: Callable[[], Any], has_entered: threading.Event | None = None
) -> BaseException | None:
    """Call the function as the wrapper does; return what it raised. Outside of this frame nothing is interrupted."""
    error = None
    assert interruption.enter(0)
    try:
        if has_entered is not None:
            has_entered.set()
        function()
    except BaseException as caught:  # noqa: BLE001
        error = caught
    interruption.leave()
    return error


@contextlib.contextmanager
def poked(interruption: SignalInterruption, *, order_first: bool = True) -> Iterator[threading.Event]:
    """Once the yielded event is set, order an interruption, and signal until the main thread has left the function."""
    has_entered, is_over = threading.Event(), threading.Event()

    def poke() -> None:
        has_entered.wait(60)
        if order_first:
            interruption.order(0)
        while not is_over.wait(0.005):
            interruption.poke()

    thread = threading.Thread(target=poke, daemon=True)
    thread.start()
    try:
        yield has_entered
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def interruption() -> Iterator[SignalInterruption]:
    created = SignalInterruption(RestartRequested, boundary.__code__)
    created.install()
    yield created
    created.leave()
    created.uninstall()


def interrupt_function(
    interruption: SignalInterruption, function: Callable[[], Any], *, order_first: bool = True
) -> BaseException | None:
    with poked(interruption, order_first=order_first) as has_entered:
        return boundary(interruption, function, has_entered)


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(3600)


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_queue() -> None:
    queue.Queue[int]().get()


def swallow_sleeping() -> None:
    while True:
        try:
            time.sleep(3600)
        except:  # noqa: E722
            pass


def swallow_in_a_with() -> None:
    with contextlib.ExitStack():
        while True:
            try:
                time.sleep(3600)
            except BaseException:  # noqa: BLE001
                continue


def swallow_twice() -> None:
    while True:
        try:
            swallow_sleeping()
        except:  # noqa: E722
            pass


@pytest.mark.parametrize(
    "function",
    [spin, sleep, wait_for_lock, wait_for_queue, swallow_sleeping, swallow_in_a_with, swallow_twice],
)
def test_any_code_is_interrupted(interruption: SignalInterruption, function: Callable[[], None]) -> None:
    """Loops, sleeps and waits are interrupted, also in code that suppresses every exception."""
    assert isinstance(interrupt_function(interruption, function), RestartRequested)
    assert sys.exc_info() == (None, None, None), "an exception is left behind, with all its frames"
    assert sys.gettrace() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_interruption_works_with_a_pending_exception_elsewhere(interruption: SignalInterruption) -> None:
    """A pending exception for another thread keeps the interpreter checking for it, but does not prevent the
    interruption."""
    lock, is_inside = threading.Lock(), threading.Event()
    lock.acquire()
    thread = threading.Thread(target=lambda: (is_inside.set(), lock.acquire()))
    thread.start()
    assert is_inside.wait(60)
    set_async_exception(thread.ident or 0, RuntimeError)
    try:
        assert isinstance(interrupt_function(interruption, swallow_twice), RestartRequested)
    finally:
        lock.release()
        thread.join()


def test_a_running_update_is_finished(interruption: SignalInterruption, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running update is completed and interrupted at its end; a new update does not begin."""
    monkeypatch.setattr("outlast.runtime.interruption._UPDATE_NS", 60_000_000_000)  # for a busy machine
    done = []

    def work() -> None:
        interruption.begin_update()
        interruption.order(0)
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            done.append("inside")
        interruption.begin_update()  # of a second optimizer
        done.append("second")
        interruption.end_update()
        done.append("after")

    assert isinstance(interrupt_function(interruption, work, order_first=False), RestartRequested)
    assert done[-1] == "second"
    assert interruption.enter(1)
    interruption.order(1)
    with pytest.raises(RestartRequested):
        interruption.begin_update()


def test_an_update_that_does_not_end_is_interrupted(interruption: SignalInterruption) -> None:
    """An update that takes longer than the limit is interrupted."""

    def work() -> None:
        interruption.begin_update()
        interruption.order(0)
        time.sleep(3600)

    assert isinstance(interrupt_function(interruption, work, order_first=False), RestartRequested)


def test_an_atomic_section_is_finished(interruption: SignalInterruption) -> None:
    """Nothing is raised within an atomic section, however deeply nested, but at its end."""
    done = []

    def work() -> None:
        interruption.enter_atomic()
        interruption.enter_atomic()
        interruption.order(0)
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            pass
        interruption.leave_atomic()
        done.append("inner")
        interruption.leave_atomic()
        done.append("never")

    assert isinstance(interrupt_function(interruption, work, order_first=False), RestartRequested)
    assert done == ["inner"]


def test_an_atomic_section_does_not_begin_after_an_order(interruption: SignalInterruption) -> None:
    """After an order to interrupt, no atomic section begins."""
    begun = []

    def work() -> None:
        interruption.order(0)
        interruption.enter_atomic()
        begun.append(1)

    assert isinstance(boundary(interruption, work), RestartRequested)
    interruption.leave()
    assert begun == []


def test_an_order_before_the_call_prevents_the_call(interruption: SignalInterruption) -> None:
    """An order that arrives before the function is called is not lost."""
    interruption.order(2)
    assert not interruption.enter(2)
    assert interruption.enter(3)
    interruption.leave()


def test_nothing_is_raised_outside_the_function(interruption: SignalInterruption) -> None:
    """Signals that arrive after the function has ended have no effect."""
    with poked(interruption) as has_entered:
        boundary(interruption, sleep, has_entered)
        interruption.leave()
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass


def test_other_threads_are_rejected() -> None:
    """Installation in a thread other than the main thread is a ConfigError."""
    errors: list[BaseException] = []

    def install() -> None:
        try:
            SignalInterruption(RestartRequested, boundary.__code__).install()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
