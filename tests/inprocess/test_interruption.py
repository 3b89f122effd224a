"""The main thread gets out of the function, wherever it is."""

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
    """Call the function as the wrapper does; return what it raised. Who leaves this frame is interrupted no more."""
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
    """Once the event that this yields is set, order to leave, and poke until the main thread is out."""
    has_entered, over = threading.Event(), threading.Event()

    def poke() -> None:
        has_entered.wait(60)
        if order_first:
            interruption.order(0)
        while not over.wait(0.005):
            interruption.poke()

    thread = threading.Thread(target=poke, daemon=True)
    thread.start()
    try:
        yield has_entered
    finally:
        over.set()
        thread.join()


@pytest.fixture
def interruption() -> Iterator[SignalInterruption]:
    made = SignalInterruption(RestartRequested, boundary.__code__)
    made.install()
    yield made
    made.leave()
    made.uninstall()


def get_out_of(
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
def test_it_gets_out(interruption: SignalInterruption, function: Callable[[], None]) -> None:
    """Loops, sleeps and waits are left, also those whose code swallows every exception."""
    assert isinstance(get_out_of(interruption, function), RestartRequested)
    assert sys.exc_info() == (None, None, None), "an exception is left behind, with all its frames"
    assert sys.gettrace() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_gets_out_though_an_exception_is_set_for_another_thread(interruption: SignalInterruption) -> None:
    """One that has not risen keeps the interpreter looking for it, which must not keep the main thread inside."""
    lock, is_inside = threading.Lock(), threading.Event()
    lock.acquire()
    thread = threading.Thread(target=lambda: (is_inside.set(), lock.acquire()))
    thread.start()
    assert is_inside.wait(60)
    set_async_exception(thread.ident or 0, RuntimeError)
    try:
        assert isinstance(get_out_of(interruption, swallow_twice), RestartRequested)
    finally:
        lock.release()
        thread.join()


def test_an_update_is_finished(interruption: SignalInterruption, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is under way ends, and is left at its end; one that has not begun does not begin."""
    monkeypatch.setattr("outlast.runtime.interruption._UPDATE_NS", 60_000_000_000)  # a busy machine's moment
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

    assert isinstance(get_out_of(interruption, work, order_first=False), RestartRequested)
    assert done[-1] == "second"
    assert interruption.enter(1)
    interruption.order(1)
    with pytest.raises(RestartRequested):
        interruption.begin_update()


def test_an_update_that_does_not_end_is_left(interruption: SignalInterruption) -> None:
    """What takes longer than a moment is interrupted where it is."""

    def work() -> None:
        interruption.begin_update()
        interruption.order(0)
        time.sleep(3600)

    assert isinstance(get_out_of(interruption, work, order_first=False), RestartRequested)


def test_atomic_parts_are_finished(interruption: SignalInterruption) -> None:
    """Nothing is raised within an atomic part, however often it is nested; at its end it is."""
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

    assert isinstance(get_out_of(interruption, work, order_first=False), RestartRequested)
    assert done == ["inner"]


def test_an_atomic_part_is_not_begun_any_more(interruption: SignalInterruption) -> None:
    """Once all are to leave, no atomic part begins."""
    begun = []

    def work() -> None:
        interruption.order(0)
        interruption.enter_atomic()
        begun.append(1)

    assert isinstance(boundary(interruption, work), RestartRequested)
    interruption.leave()
    assert begun == []


def test_a_call_that_is_over_is_not_entered(interruption: SignalInterruption) -> None:
    """An order that comes before the function does not get lost."""
    interruption.order(2)
    assert not interruption.enter(2)
    assert interruption.enter(3)
    interruption.leave()


def test_nothing_is_raised_outside(interruption: SignalInterruption) -> None:
    """Signals that come late, when the function has been left, do nothing."""
    with poked(interruption) as has_entered:
        boundary(interruption, sleep, has_entered)
        interruption.leave()
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass


def test_other_threads_are_refused() -> None:
    """Only the main thread can be interrupted, and that is said."""
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
