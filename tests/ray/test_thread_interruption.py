"""Interruption of user code in a thread that is not the main one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from outlast.runtime.interruption import Abandoned, AsyncInterruption, CallOutcome

LIMIT_S = 100.0


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    """Provide one thread, like the one in which an actor's methods run."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


def begin(
    worker: ThreadPoolExecutor, interruption: AsyncInterruption, function: Callable[[], Any]
) -> Future[CallOutcome]:
    """Run a function of incarnation 0; return once the function has begun."""
    inside = threading.Event()

    def run() -> Any:
        inside.set()
        return function()

    running = worker.submit(interruption.run, 0, run)
    assert inside.wait(LIMIT_S)
    return running


def interrupt(interruption: AsyncInterruption, number: int = 0) -> None:
    interruption.order(number)
    for _ in range(int(LIMIT_S / 0.01)):
        interruption.poke()
        if interruption.wait_outside(0.01):
            return
    raise AssertionError("the thread does not come out")


def spin() -> None:
    while True:
        sum(range(10))


def spin_and_swallow() -> None:
    while True:
        try:
            sum(range(10))
        except Exception:  # noqa: BLE001 - what users write
            pass


def spin_and_swallow_all() -> None:
    for _ in range(3):
        try:
            spin()
        except BaseException:  # noqa: BLE001 - what users write
            pass
    spin()


@pytest.mark.parametrize("function", [spin, spin_and_swallow, spin_and_swallow_all])
def test_a_loop_is_interrupted(worker: ThreadPoolExecutor, function: Callable[[], None]) -> None:
    """A Python loop ends with the order, also if it catches exceptions; the thread then serves the next call."""
    interruption = AsyncInterruption()
    running = begin(worker, interruption, function)
    interrupt(interruption)
    assert isinstance(running.result(LIMIT_S).error, Abandoned)
    for number in range(1, 200):
        outcome = worker.submit(interruption.run, number, lambda: "fine").result(LIMIT_S)
        assert (outcome.value, outcome.error) == ("fine", None)
    sys.settrace(lambda *_: None)
    try:
        (lambda: None)()  # does not run while CPython 3.11 has an undelivered exception
    finally:
        sys.settrace(None)


def test_a_result_after_the_order_is_discarded(worker: ThreadPoolExecutor) -> None:
    """A function that returns after the order has no result: it may have mistaken an aborted wait for a message."""
    interruption, gate = AsyncInterruption(), threading.Event()
    running = begin(worker, interruption, lambda: gate.wait(LIMIT_S) and "garbage")
    interruption.order(0)
    gate.set()
    outcome = running.result(LIMIT_S)
    assert outcome.value is None
    assert isinstance(outcome.error, Abandoned)


def test_functions_of_an_aborted_incarnation_never_run(worker: ThreadPoolExecutor) -> None:
    """After an order, functions of that incarnation and older ones are not called; newer ones are."""
    interruption = AsyncInterruption()
    interruption.order(3)
    called: list[int] = []
    for number in range(6):
        worker.submit(interruption.run, number, partial(called.append, number)).result(LIMIT_S)
    assert called == [4, 5]


def test_an_update_completes_before_the_interruption(worker: ThreadPoolExecutor) -> None:
    """An update is not interrupted within its first second; it completes, and then the call is abandoned."""
    interruption, within, gate = AsyncInterruption(), threading.Event(), threading.Event()
    done = []

    def update() -> None:
        with interruption.update():
            within.set()
            while not gate.is_set():
                sum(range(10))
            done.append("whole")
        done.append("after")

    running = begin(worker, interruption, update)
    assert within.wait(LIMIT_S)
    interruption.order(0)
    interruption.poke()
    gate.set()
    assert isinstance(running.result(LIMIT_S).error, Abandoned)
    assert done == ["whole"]


def test_exceptions_of_the_function_are_returned(worker: ThreadPoolExecutor) -> None:
    """An exception that the function raises is its outcome, whatever its type."""
    interruption = AsyncInterruption()
    for kind in (ValueError, SystemExit, KeyboardInterrupt):

        def fail(kind: type[BaseException] = kind) -> None:
            raise kind("of its own")

        assert type(worker.submit(interruption.run, 0, fail).result(LIMIT_S).error) is kind


def test_an_order_never_interrupts_later_code(worker: ThreadPoolExecutor) -> None:
    """In any interleaving of a call and its interruption the thread continues, and later code is not interrupted."""
    interruption = AsyncInterruption()

    def step() -> int:
        return sum(range(200))

    def run(number: int) -> int:
        interruption.run(number, step)
        return sum(range(1000))

    for number in range(400):
        running = worker.submit(run, number)
        interruption.order(number)
        for _ in range(number % 7):
            interruption.poke()
        assert running.result(LIMIT_S) == sum(range(1000))
