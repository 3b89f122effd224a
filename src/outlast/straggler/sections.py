"""Sections of a step: context managers, decorators, and what finds them in modules and optimizers by itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from outlast.errors import OutlastError
from outlast.straggler.recorder import Recorder

__all__ = ["LeftOut", "Section", "Waiting", "Wrappings"]

P = ParamSpec("P")
R = TypeVar("R")


class Section:
    """Times what is within it: a context manager, and a decorator; within itself it is part of the one around it.

    One object serves every use of a section's name.
    """

    __slots__ = ("_index", "_recorder")

    def __init__(self, recorder: Recorder, index: int) -> None:
        self._recorder = recorder
        self._index = index

    def __enter__(self) -> None:
        self._recorder.enter(self._index)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self._recorder.leave(self._index, failed=kind is not None)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with every call of it timed.

        Raises:
            TypeError: The function returns before its work is done (a coroutine or generator function).
        """
        return _marked(function, self)


class Waiting:
    """Marks waiting for other ranks: the time within is no section's."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.begin_waiting()

    def __exit__(self, *_: object) -> None:
        self._recorder.end_waiting()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with every call of it taken for waiting; as for :class:`Section`."""
        return _marked(function, self)


class LeftOut:
    """Marks what has nothing to do with a step, such as a save or an evaluation: no section in it is timed."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder.begin_left_out()

    def __exit__(self, *_: object) -> None:
        self._recorder.end_left_out()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with every call of it left out; as for :class:`Section`."""
        return _marked(function, self)


def _marked(function: Callable[P, R], mark: Section | Waiting | LeftOut) -> Callable[P, R]:
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise TypeError(f"{function.__qualname__} returns before its work is done: use 'with' in it")

    @functools.wraps(function)
    def marked(*args: P.args, **kwargs: P.kwargs) -> R:
        with mark:
            return function(*args, **kwargs)

    return marked


class Wrappings:
    """What was put around other people's callables, modules and optimizers, and is taken away again.

    Args:
        recorder: What times the sections.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, attribute: str, mark: Section | Waiting) -> None:
        """Replace a callable attribute of an object, a class or a module by one that is timed.

        Raises:
            OutlastError: There is no such callable.
        """
        function = getattr(owner, attribute, None)
        if not callable(function):
            raise OutlastError(f"{owner!r} has no callable {attribute!r} to time")
        is_own = attribute in vars(owner) if hasattr(owner, "__dict__") else False
        previous = vars(owner)[attribute] if is_own else None
        if isinstance(previous, staticmethod | classmethod):
            raise OutlastError(f"{attribute!r} of {owner!r} is a static or class method; time its body instead")
        setattr(owner, attribute, mark(function))

        def undo() -> None:
            if is_own:
                setattr(owner, attribute, previous)
            else:
                delattr(owner, attribute)

        self._undo.append(undo)

    def watch(self, state: Any, section: Callable[[str], Section]) -> None:
        """Time the forward of modules and the step of optimizers, by hooks.

        Args:
            state: A module, an optimizer, or a mapping of them; everything else in it is ignored. Of a module in
                ``DistributedDataParallel`` the module within is timed, which waits for nobody.
            section: Makes a section of a name.
        """
        import torch

        for value in state.values() if isinstance(state, Mapping) else (state,):
            if isinstance(value, torch.nn.parallel.DistributedDataParallel):
                value = value.module
            if isinstance(value, torch.nn.Module):
                self._watch_module(value, section)
            elif isinstance(value, torch.optim.Optimizer):
                self._watch_optimizer(value, section)

    def undo(self) -> None:
        """Take everything away again, newest first. Idempotent."""
        while self._undo:
            self._undo.pop()()

    def _watch_module(self, module: Any, section: Callable[[str], Section]) -> None:
        section("forward")
        index = self._recorder.index("forward")
        enter, leave = self._recorder.enter, self._recorder.leave

        def before(*_: Any) -> None:
            enter(index)

        def after(*_: Any) -> None:
            leave(index)

        for handle in (module.register_forward_pre_hook(before), module.register_forward_hook(after)):
            self._undo.append(handle.remove)

    def _watch_optimizer(self, optimizer: Any, section: Callable[[str], Section]) -> None:
        section("optimizer")
        index = self._recorder.index("optimizer")
        enter, leave = self._recorder.enter, self._recorder.leave

        def before(*_: Any) -> None:
            enter(index)

        def after(*_: Any) -> None:
            leave(index)

        for handle in (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)):
            self._undo.append(handle.remove)
