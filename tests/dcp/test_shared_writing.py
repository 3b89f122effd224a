"""The assignment of tensors to the ranks that write them, and the manifest that is composed from the ranks' reports."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outlast.checkpoint.dcp.assemble import Range
from outlast.checkpoint.dcp.layout import (
    Inventory,
    InventoryRoot,
    Order,
    Packed,
    Packing,
    PartDigests,
    PlainValue,
    TensorPart,
    WriteReport,
    WrittenFile,
    assign,
    compose,
    join,
    pack,
)
from outlast.errors import CheckpointError

FILE_BYTES = 4096


def _part(
    name: str,
    digest: str = "d" * 16,
    *,
    shape: tuple[int, ...] = (8,),
    whole: tuple[int, ...] | None = None,
    at: int = 0,
) -> TensorPart:
    offset = (at, *(0 for _ in shape[1:]))
    return TensorPart(
        f"state.{name}", name, (name,), "F32", shape, whole or shape, offset, 4 * math.prod(shape), digest
    )


def _parts_of(one: Inventory) -> tuple[TensorPart, ...]:
    digests = {index: digest.hex() for private in (False, True) for index, _, digest in one.rows(private=private)}
    return tuple(
        TensorPart(
            *(row.name, row.item, row.path, row.dtype, *one.table.boxes[row.box], one.offsets[row.box]),
            row.num_bytes,
            digests[index],
        )
        for index, row in enumerate(one.table.rows)
    )


def _exchanged(inventories: list[Inventory]) -> list[Inventory]:
    """Return inventories as rank 0 has them after all ranks sent theirs: equal ones are one object."""
    tables = {repr(one.table): one.table for one in inventories}
    digests = {one.digests.hex(): PartDigests(one.digests) for one in inventories}
    roots = [InventoryRoot(repr(one.table), one.digests.hex(), one.offsets, one.private) for one in inventories]
    return join(roots, tables, digests)


@st.composite
def _inventories(draw: st.DrawFn) -> list[Inventory]:
    """Ranks with shared tensors, in one or two versions, and row-sharded tensors, some with empty shards."""
    world = draw(st.integers(1, 6))
    parts: list[list[TensorPart]] = [[] for _ in range(world)]
    for index in range(draw(st.integers(0, 5))):
        shape = (draw(st.integers(0, 50)),)
        for rank in range(world):
            if rank == 0 or draw(st.booleans()):
                parts[rank].append(_part(f"shared{index}", draw(st.sampled_from(["a" * 16, "b" * 16])), shape=shape))
    for index in range(draw(st.integers(0, 3))):
        rows = [draw(st.integers(0, 4)) for _ in range(world)]
        for rank in range(world):
            at = sum(rows[:rank])
            parts[rank].append(_part(f"sharded{index}", "", shape=(rows[rank], 3), whole=(sum(rows), 3), at=at))
    for rank in range(world):
        if draw(st.booleans()):
            random = _part("random", draw(st.sampled_from(["a" * 16, "b" * 16])))
            parts[rank].insert(draw(st.integers(0, len(parts[rank]))), msgspec.structs.replace(random, path=()))
    values = [
        tuple(PlainValue(f"value{index}", (f"value{index}",)) for index in range(draw(st.integers(0, 3))))
        for _ in parts
    ]
    return _exchanged([Inventory.of(*one) for one in zip(parts, values, strict=True)])


@given(_inventories())
def test_each_element_is_written_once(inventories: list[Inventory]) -> None:
    """Each element of each tensor and each plain value is written by one rank; each part of each rank is written
    with equal bytes, either as the shared version or as the rank's own."""
    duties = assign(inventories)
    written: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
    elements: dict[str, int] = {}
    for inventory, duty in zip(inventories, duties, strict=True):
        for index in duty.parts:
            part = _parts_of(inventory)[index]
            key = (part.item, part.offset, part.shape)
            assert key not in written
            written[key] = part.digest
            elements[part.item] = elements.get(part.item, 0) + math.prod(part.shape)
    for inventory, duty in zip(inventories, duties, strict=True):
        for index, part in enumerate(_parts_of(inventory)):
            assert elements.get(part.item, 0) == math.prod(part.global_shape)
            if index not in duty.own and part.num_bytes:
                assert written[part.item, part.offset, part.shape] == part.digest
    tables = [inventory.table for inventory in inventories]
    names = [table.values[i].item for table, duty in zip(tables, duties, strict=True) for i in duty.values]
    assert sorted(names) == sorted({value.item for table in tables for value in table.values})


@given(_inventories())
@example(
    [
        Inventory.of([_part("lopsided", "", shape=(3, 3))], []),
        Inventory.of([_part("lopsided", "", shape=(0, 3), whole=(3, 3), at=3)], []),
    ]
)
@settings(max_examples=300)
def test_the_manifest_locates_every_part_of_every_rank(inventories: list[Inventory]) -> None:
    """The composed manifest has the one location where each part of each rank was written."""
    duties = assign(inventories)
    reports, packs, spot = list[WriteReport](), list[Packed](), {}
    for rank, (inventory, duty) in enumerate(zip(inventories, duties, strict=True)):
        packing = Packing(FILE_BYTES)
        values = [bytes(10 + rank) for _ in duty.values]
        offsets = {part.name: 64 * number for number, part in enumerate(_parts_of(inventory))}
        packed = pack(packing, inventory, duty, Range(0, 7 + rank % 2), values, offsets)
        packs.append(packed)
        files = tuple(WrittenFile(size, bytes(8)) for size in packed.sizes)
        reports.append(WriteReport(files, True, 7 + rank % 2, tuple(map(len, values))))
        for index, where in zip(duty.parts, packed.parts, strict=True):
            part = _parts_of(inventory)[index]
            spot[part.item, part.offset, part.shape] = (f"f{rank}.{where.file}", where.start)

    composed = compose(inventories, duties, reports, file_bytes=FILE_BYTES, name_of=lambda rank, n: f"f{rank}.{n}")

    names = [file.name for file in composed.files]
    items = {item.name: item for item in composed.items}
    for rank, (inventory, duty) in enumerate(zip(inventories, duties, strict=True)):
        tree = composed.ranks[rank].tree
        assert (names[tree.file], tree.start) == (f"f{rank}.{packs[rank].tree.file}", packs[rank].tree.start)
        own = {tensor.name for tensor in composed.ranks[rank].tensors}
        assert own == {_parts_of(inventory)[index].name for index in duty.own}
        for index, part in enumerate(_parts_of(inventory)):
            if index in duty.own:
                continue
            pieces = [piece for piece in items[part.item].pieces if not piece.ranks or rank in piece.ranks]
            assert [(piece.offset, piece.shape) for piece in pieces] == [(part.offset, part.shape)]
            where = pieces[0].where
            if part.num_bytes:
                assert where is not None
                assert (names[where.file], where.start) == spot[part.item, part.offset, part.shape]


def test_a_file_of_unexpected_length_is_rejected() -> None:
    """A rank's report is rejected if its files do not have the length of its parts."""
    inventory = Inventory.of([_part("w")], [])
    (duty,) = assign([inventory])
    report = WriteReport((WrittenFile(9, bytes(8)),), True, 7, ())
    with pytest.raises(CheckpointError, match="not as long as they should be"):
        compose([inventory], [duty], [report], file_bytes=FILE_BYTES, name_of=lambda rank, n: "f")


@given(_inventories())
def test_inventory_and_order_round_trip(inventories: list[Inventory]) -> None:
    """An inventory keeps the parts that it was made of, and an order keeps the duty."""
    for inventory, duty in zip(inventories, assign(inventories), strict=True):
        assert Inventory.of(_parts_of(inventory), inventory.table.values) == inventory
        assert Order.of(duty).duty == duty


def test_an_inventory_that_contradicts_its_table_is_rejected() -> None:
    """Too few digests or offsets are an error that identifies the rank."""
    one = Inventory.of([_part("w")], [])
    digests = {"d": PartDigests(one.digests), "none": PartDigests(b"")}
    for root in (
        InventoryRoot("t", "none", one.offsets),
        InventoryRoot("t", "d", ()),
        InventoryRoot("t", "d", one.offsets, b"x"),
    ):
        with pytest.raises(CheckpointError, match="rank 1: what it has contradicts its table"):
            join([InventoryRoot("t", "d", one.offsets), root], {"t": one.table}, digests)


@given(st.integers(1, 16), st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_shared_tensors_are_balanced_over_ranks(world: int, sizes: list[int]) -> None:
    """No rank writes more shared bytes than an equal share plus the largest tensor."""
    parts = tuple(_part(f"t{index}", shape=(size,)) for index, size in enumerate(sizes))
    duties = assign([Inventory.of(parts, [])] * world)
    loads = [sum(parts[index].num_bytes for index in duty.parts) for duty in duties]
    assert sum(loads) == 4 * sum(sizes)
    assert max(loads) <= 4 * sum(sizes) / world + 4 * max(sizes)


def test_an_incomplete_tensor_is_rejected() -> None:
    """Parts that do not cover the tensor are an error with the tensor's name."""
    first = _part("w", "", shape=(2, 3), whole=(5, 3))
    second = _part("w", "", shape=(2, 3), whole=(5, 3), at=2)
    with pytest.raises(CheckpointError, match=r"tensor 'w': the ranks' parts have 12 elements of 15"):
        assign([Inventory.of([first], []), Inventory.of([second], [])])


def test_ranks_keep_different_tensors_of_one_name() -> None:
    """The lowest rank's tensor is the shared one; another rank's tensor of a different shape is that rank's own."""
    duties = assign([Inventory.of([_part("w", shape=(2,))], []), Inventory.of([_part("w", shape=(3,))], [])])
    assert (duties[0].parts, duties[0].own) == ((0,), ())
    assert (duties[1].parts, duties[1].own) == ((), (0,))
