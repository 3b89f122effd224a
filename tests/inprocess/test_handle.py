"""The handle that the wrapped function is given."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

import pytest

from outlast import inprocess
from outlast.inprocess.call import Handle, RestartRequested, handle_parameter
from outlast.inprocess.plugins import State
from outlast.inprocess.progress import Page
from outlast.runtime.interruption import SignalInterruption


def with_class(steps: int, call: inprocess.Handle) -> None: ...
def with_option(call: Handle | None = None) -> None: ...
def with_unknown(other: Unknown, call: inprocess.Handle) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def without(steps: int, call: object = None) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [(with_class, "call"), (with_option, "call"), (with_unknown, "call"), (without, None), (print, None)],
)
def test_the_parameter_is_found_by_its_annotation(function: typing.Any, name: str | None) -> None:
    """A class, an optional one and text are found, also beside annotations that cannot be resolved."""
    assert handle_parameter(function) == name


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page.create()
    yield made
    made.close()


def make(page: Page, kept: dict[str, Any], pinged: list[int]) -> Handle:
    state = State(
        initial_rank=1, initial_world_size=3, rank=0, world_size=2, active_world_size=2, iteration=4, node="n"
    )
    return Handle(
        state,
        interruption=SignalInterruption(RestartRequested, make.__code__),
        page=page,
        on_first_ping=lambda: pinged.append(1),
        kept=kept,
    )


def test_what_is_kept_is_made_once(page: Page) -> None:
    """The next call's handle returns the object of the call before."""
    kept: dict[str, Any] = {}
    first = make(page, kept, []).keep("model", list)
    assert make(page, kept, []).keep("model", list) is first


def test_callbacks_go_from_last_to_first_and_once(page: Page) -> None:
    """What was set up last is taken down first."""
    handle = make(page, {}, [])
    for number in range(3):
        handle.on_leave(lambda number=number: called.append(number))  # type: ignore[misc]
    called: list[int] = []
    for callback in handle.take_callbacks():
        callback()
    assert called == [2, 1, 0]
    assert handle.take_callbacks() == []


def test_pings_count(page: Page) -> None:
    """A ping is progress at once, and the first one says that from now on only pings are."""
    pinged: list[int] = []
    handle = make(page, {}, pinged)
    before = page.progress_ns
    handle.ping()
    handle.ping()
    assert page.progress_ns > before
    assert pinged == [1]


def test_parts_are_seen_from_outside(page: Page) -> None:
    """The agent process sees that hang protection is off, and the monitor thread that an atomic part runs."""
    handle = make(page, {}, [])
    with handle.disable_hang_protection(), handle.disable_hang_protection():
        assert page.is_paused
    assert not page.is_paused
    with handle.atomic():
        assert handle._interruption.is_atomic
    assert not handle._interruption.is_atomic


def test_outside_there_is_no_handle() -> None:
    """Code can ask whether it runs in a wrapped function."""
    assert inprocess.current_handle() is None
