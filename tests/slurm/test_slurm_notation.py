"""Slurm's short forms of counts and node lists are understood, and nothing else is."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.env import expand_counts, expand_nodes
from outlast.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("4", (4,)),
        ("4(x2)", (4, 4)),
        ("4(x2),3", (4, 4, 3)),
        ("2,1(x3)", (2, 1, 1, 1)),
        ("8(x1),7,8(x2)", (8, 7, 8, 8)),
    ],
)
def test_counts(text: str, counts: tuple[int, ...]) -> None:
    """Each form of a list of counts is one number for each node."""
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(x)", "4(2)", "4(x2", "4;3", "-1", "4(x2)3", "1(x99999999)"])
def test_no_counts(text: str) -> None:
    """What is no list of counts is refused, never guessed."""
    with pytest.raises(ConfigError):
        expand_counts(text)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("login", ("login",)),
        ("n1,n2", ("n1", "n2")),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("gpu[07-09,12],login1", ("gpu07", "gpu08", "gpu09", "gpu12", "login1")),
        ("gpu[098-101]", ("gpu098", "gpu099", "gpu100", "gpu101")),
        ("gpu[1-2]-ib", ("gpu1-ib", "gpu2-ib")),
        ("rack[1-2]n[01-02]", ("rack1n01", "rack1n02", "rack2n01", "rack2n02")),
        ("a[1],b-[2,4]", ("a1", "b-2", "b-4")),
    ],
)
def test_nodes(text: str, nodes: tuple[str, ...]) -> None:
    """Each form of a node list is its names, in order, with their leading zeros."""
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["n[1-", "n1]", "n[[1]]", "n[a-b]", "n[3-1]", ",n1", "n[]", "n[1-99999999]"])
def test_no_nodes(text: str) -> None:
    """What is no node list is refused, never guessed."""
    with pytest.raises(ConfigError):
        expand_nodes(text)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.data())
def test_counts_come_back_from_every_short_form(counts: list[int], data: st.DataObject) -> None:
    """However Slurm joins equal neighbours, or does not, each node gets its own number back."""
    parts = []
    for count, run in itertools.groupby(counts):
        left = len(list(run))
        while left:
            times = data.draw(st.integers(1, left))
            parts.append(f"{count}(x{times})" if times > 1 or data.draw(st.booleans()) else str(count))
            left -= times
    assert expand_counts(",".join(parts)) == tuple(counts)


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 5)), min_size=1, max_size=6), st.integers(1, 4))
def test_nodes_come_back_from_ranges(ranges: list[tuple[int, int]], width: int) -> None:
    """Each range in brackets is its names in order, as wide as its first number is written."""
    text = ",".join(f"{first:0{width}d}" + (f"-{first + more:0{width}d}" if more else "") for first, more in ranges)
    names = [f"n{number:0{width}d}x" for first, more in ranges for number in range(first, first + more + 1)]
    assert expand_nodes(f"n[{text}]x") == tuple(names)


@given(st.text(alphabet="n12[](x),-4 ", max_size=20))
def test_any_text_is_understood_or_refused(text: str) -> None:
    """No text leads to another error than the one that says what is wrong."""
    for expand in (expand_counts, expand_nodes):
        with contextlib.suppress(ConfigError):
            expand(text)
