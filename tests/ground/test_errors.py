"""Errors form one tree that is documented in its module, with structured facts."""

from __future__ import annotations

import inspect
import re

import pytest

from outlast import errors
from outlast.errors import ExitReason, OutlastError

TREE = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, BaseException)]


def test_documented_tree_lists_exactly_all_errors() -> None:
    """The tree in the module's docstring contains every error and nothing else."""
    text = errors.__doc__ or ""
    drawn = re.findall(r"(?:^    |\+-- )([A-Z]\w+)", text, re.MULTILINE)
    assert sorted(drawn) == sorted(cls.__name__ for cls in TREE)
    assert all(issubclass(cls, OutlastError) for cls in TREE)
    assert {cls.__name__ for cls in TREE} | {"ExitReason"} == set(errors.__all__)


@pytest.mark.parametrize("cls", TREE)
def test_errors_carry_rank_node_and_iteration(cls: type[OutlastError]) -> None:
    """Rank, node and iteration are attributes of each error, and None unless given."""
    error = cls("broken; mend it", rank=3, node="b", iteration=57)
    assert (str(error), error.rank, error.node, error.iteration) == ("broken; mend it", 3, "b", 57)
    assert cls("x").rank is None


def test_errors_derive_from_builtin_exceptions() -> None:
    """An invalid setting is a ValueError and an exceeded deadline a TimeoutError."""
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)


def test_exit_codes_are_fixed() -> None:
    """Schedulers and scripts rely on these numbers: they never change."""
    assert {reason.name: reason.value for reason in ExitReason} == {
        "FINISHED": 0,
        "FAILED": 1,
        "BAD_INPUT": 2,
        "RESUME_TO_DISAMBIGUATE": 16,
        "FAILED_VALIDATION": 17,
        "STRAGGLER": 18,
        "UNHEALTHY_NODE": 19,
        "PREEMPTED": 75,
        "NO_PROGRESS": 93,
    }
