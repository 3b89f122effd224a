"""The handle that the wrapped function gets."""

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
def with_unresolved(other: Unknown, call: inprocess.Handle) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def without(steps: int, call: object = None) -> None: ...


@pytest.mark.parametrize(
    ("function", "name"),
    [(with_class, "call"), (with_option, "call"), (with_unresolved, "call"), (without, None), (print, None)],
)
def test_the_parameter_is_found_by_its_annotation(function: typing.Any, name: str | None) -> None:
    """A class, an optional class and text are found, also with annotations that cannot be resolved."""
    assert handle_parameter(function) == name


@pytest.fixture
def page() -> Iterator[Page]:
    created = Page.create()
    yield created
    created.close()


def make_interruption() -> SignalInterruption:
    return SignalInterruption(RestartRequested, make.__code__)


def make(page: Page, kept: dict[str, Any], pinged: list[int], interruption: SignalInterruption | None = None) -> Handle:
    state = State(
        initial_rank=1, initial_world_size=3, rank=0, world_size=2, active_world_size=2, iteration=4, node="n"
    )
    return Handle(
        state,
        interruption=interruption or make_interruption(),
        page=page,
        on_first_ping=lambda: pinged.append(1),
        kept=kept,
    )


def test_a_kept_object_is_created_once(page: Page) -> None:
    """The next call's handle returns the object of the call before."""
    kept: dict[str, Any] = {}
    first = make(page, kept, []).keep("model", list)
    assert make(page, kept, []).keep("model", list) is first


def test_callbacks_run_once_in_reverse_order(page: Page) -> None:
    """Callbacks are returned in reverse order of their registration, and only once."""
    handle = make(page, {}, [])
    for number in range(3):
        handle.on_leave(lambda number=number: called.append(number))  # type: ignore[misc]
    called: list[int] = []
    for callback in handle.take_callbacks():
        callback()
    assert called == [2, 1, 0]
    assert handle.take_callbacks() == []


def test_pings_are_progress(page: Page) -> None:
    """A ping counts as progress at once, and the first ping is reported, because from then on only pings count."""
    pinged: list[int] = []
    handle = make(page, {}, pinged)
    before = page.progress_ns
    handle.ping()
    handle.ping()
    assert page.progress_ns > before
    assert pinged == [1]


def test_protected_sections_are_visible_from_outside(page: Page) -> None:
    """The agent process sees that hang protection is off, and the monitor thread sees that an atomic section runs."""
    interruption = make_interruption()
    handle = make(page, {}, [], interruption)
    with handle.disable_hang_protection(), handle.disable_hang_protection():
        assert page.is_paused
    assert not page.is_paused
    with handle.atomic():
        assert interruption.is_atomic
    assert not interruption.is_atomic


def test_no_handle_outside_a_wrapped_function() -> None:
    """``current_handle()`` is None outside of a wrapped function."""
    assert inprocess.current_handle() is None
