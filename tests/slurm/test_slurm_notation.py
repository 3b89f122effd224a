"""Slurm's compressed counts and node lists are parsed, and other text is rejected."""

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
def test_counts_are_expanded(text: str, counts: tuple[int, ...]) -> None:
    """Each form of a list of counts yields one number per node."""
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(x)", "4(2)", "4(x2", "4;3", "-1", "4(x2)3", "1(x99999999)"])
def test_invalid_counts_are_rejected(text: str) -> None:
    """Invalid counts are rejected, never guessed."""
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
def test_node_lists_are_expanded(text: str, nodes: tuple[str, ...]) -> None:
    """Each form of a node list yields its names, in order, with their leading zeros."""
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", ["n[1-", "n1]", "n[[1]]", "n[a-b]", "n[3-1]", ",n1", "n[]", "n[1-99999999]"])
def test_invalid_node_lists_are_rejected(text: str) -> None:
    """Invalid node lists are rejected, never guessed."""
    with pytest.raises(ConfigError):
        expand_nodes(text)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.data())
def test_compressed_counts_round_trip(counts: list[int], data: st.DataObject) -> None:
    """Each node gets its own count, whether or not equal neighbours are joined."""
    parts = []
    for count, run in itertools.groupby(counts):
        remaining = len(list(run))
        while remaining:
            times = data.draw(st.integers(1, remaining))
            parts.append(f"{count}(x{times})" if times > 1 or data.draw(st.booleans()) else str(count))
            remaining -= times
    assert expand_counts(",".join(parts)) == tuple(counts)


@given(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 5)), min_size=1, max_size=6), st.integers(1, 4))
def test_node_ranges_round_trip(ranges: list[tuple[int, int]], width: int) -> None:
    """Each range in brackets yields its names in order, with the width of its first number."""
    text = ",".join(f"{first:0{width}d}" + (f"-{first + more:0{width}d}" if more else "") for first, more in ranges)
    names = [f"n{number:0{width}d}x" for first, more in ranges for number in range(first, first + more + 1)]
    assert expand_nodes(f"n[{text}]x") == tuple(names)


@given(st.text(alphabet="n12[](x),-4 ", max_size=20))
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    """Any text is parsed or raises ConfigError, and no other error."""
    for expand in (expand_counts, expand_nodes):
        with contextlib.suppress(ConfigError):
            expand(text)
