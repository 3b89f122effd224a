"""Which rank writes what: properties of the pure assignment and of what is composed from it."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outlast.checkpoint.dcp.layout import Inventory, PlainValue, TensorPart, WriteReport, assign, compose
from outlast.checkpoint.dcp.manifest import FileEntry, Where
from outlast.errors import CheckpointError


def _part(
    name: str, digest: str = "d", *, shape: tuple[int, ...] = (8,), whole: tuple[int, ...] | None = None, at: int = 0
) -> TensorPart:
    offset = (at, *(0 for _ in shape[1:]))
    return TensorPart(
        f"state.{name}", name, (name,), "F32", shape, whole or shape, offset, 4 * math.prod(shape), digest
    )


@st.composite
def _inventories(draw: st.DrawFn) -> list[Inventory]:
    """Ranks with shared tensors, in one or two versions, and row-sharded ones, perhaps with empty shards."""
    world = draw(st.integers(1, 6))
    parts: list[list[TensorPart]] = [[] for _ in range(world)]
    for index in range(draw(st.integers(0, 5))):
        shape = (draw(st.integers(0, 50)),)
        for rank in range(world):
            if rank == 0 or draw(st.booleans()):
                parts[rank].append(_part(f"shared{index}", draw(st.sampled_from("xy")), shape=shape))
    for index in range(draw(st.integers(0, 3))):
        rows = [draw(st.integers(0, 4)) for _ in range(world)]
        for rank in range(world):
            at = sum(rows[:rank])
            parts[rank].append(_part(f"sharded{index}", "", shape=(rows[rank], 3), whole=(sum(rows), 3), at=at))
    values = [
        tuple(PlainValue(f"value{index}", (f"value{index}",)) for index in range(draw(st.integers(0, 3))))
        for _ in parts
    ]
    return [Inventory(tuple(mine), mine_values) for mine, mine_values in zip(parts, values, strict=True)]


@given(_inventories())
def test_everything_is_written_once_and_every_rank_finds_its_own(inventories: list[Inventory]) -> None:
    """Each element of each tensor is written by one rank; each part of each rank is, with equal bytes, either what all
    share or its own; each plain value is written once."""
    duties = assign(inventories)
    written: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
    elements: dict[str, int] = {}
    for inventory, duty in zip(inventories, duties, strict=True):
        for index in duty.parts:
            part = inventory.parts[index]
            key = (part.item, part.offset, part.shape)
            assert key not in written
            written[key] = part.digest
            elements[part.item] = elements.get(part.item, 0) + math.prod(part.shape)
    for inventory, duty in zip(inventories, duties, strict=True):
        for index, part in enumerate(inventory.parts):
            assert elements.get(part.item, 0) == math.prod(part.global_shape)
            if index not in duty.own and part.num_bytes:
                assert written[part.item, part.offset, part.shape] == part.digest
    names = [inventory.values[i].item for inventory, duty in zip(inventories, duties, strict=True) for i in duty.values]
    assert sorted(names) == sorted({value.item for inventory in inventories for value in inventory.values})


@given(_inventories())
@example(
    [
        Inventory((_part("lopsided", "", shape=(3, 3)),), ()),
        Inventory((_part("lopsided", "", shape=(0, 3), whole=(3, 3), at=3),), ()),
    ]
)
@settings(max_examples=300)
def test_the_manifest_leads_every_rank_to_its_parts(inventories: list[Inventory]) -> None:
    """What is composed of all ranks' reports names for each part of each rank the one place where it was written."""
    duties = assign(inventories)
    reports, spot = [], {}
    for rank, (inventory, duty) in enumerate(zip(inventories, duties, strict=True)):
        places = iter(range(10_000))

        def place(rank: int = rank, places: object = places) -> Where:
            start = next(places)  # type: ignore[call-overload]
            return Where(0, start, 1, start, 1)

        tree = place()
        report = WriteReport(
            (FileEntry(name=f"f{rank}", num_bytes=1, chunks=("x",)),),
            True,
            tree,
            tuple(place() for _ in duty.parts),
            tuple(place() for _ in duty.own),
            tuple(place() for _ in duty.values),
        )
        reports.append(report)
        for index, where in zip(duty.parts, report.parts, strict=True):
            part = inventory.parts[index]
            spot[part.item, part.offset, part.shape] = (rank, where.start)

    composed = compose(inventories, duties, reports)

    items = {item.name: item for item in composed.items}
    for rank, (inventory, duty) in enumerate(zip(inventories, duties, strict=True)):
        assert composed.ranks[rank].tree == Where(rank, 0, 1, 0, 1)
        own = {tensor.name for tensor in composed.ranks[rank].tensors}
        assert own == {inventory.parts[index].name for index in duty.own}
        for index, part in enumerate(inventory.parts):
            if index in duty.own:
                continue
            pieces = [piece for piece in items[part.item].pieces if not piece.ranks or rank in piece.ranks]
            assert [(piece.offset, piece.shape) for piece in pieces] == [(part.offset, part.shape)]
            where = pieces[0].where
            if part.num_bytes:
                assert where is not None
                assert (where.file, where.start) == spot[part.item, part.offset, part.shape]


@given(st.integers(1, 16), st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_shared_work_is_shared_evenly(world: int, sizes: list[int]) -> None:
    """No rank writes more of what all have than an equal share and the largest tensor."""
    parts = tuple(_part(f"t{index}", shape=(size,)) for index, size in enumerate(sizes))
    duties = assign([Inventory(parts, ())] * world)
    loads = [sum(parts[index].num_bytes for index in duty.parts) for duty in duties]
    assert sum(loads) == 4 * sum(sizes)
    assert max(loads) <= 4 * sum(sizes) / world + 4 * max(sizes)


def test_a_tensor_with_a_hole_is_refused() -> None:
    """Parts that do not make up the whole are an error that names the tensor, not a generation with a hole."""
    first = _part("w", "", shape=(2, 3), whole=(5, 3))
    second = _part("w", "", shape=(2, 3), whole=(5, 3), at=2)
    with pytest.raises(CheckpointError, match=r"tensor 'w': the ranks' parts have 12 elements of 15"):
        assign([Inventory((first,), ()), Inventory((second,), ())])


def test_ranks_with_different_tensors_of_one_name_keep_their_own() -> None:
    """The lowest rank's counts for all; the other, of another shape, is that rank's own."""
    duties = assign([Inventory((_part("w", shape=(2,)),), ()), Inventory((_part("w", shape=(3,)),), ())])
    assert (duties[0].parts, duties[0].own) == ((0,), ())
    assert (duties[1].parts, duties[1].own) == ((), (0,))
