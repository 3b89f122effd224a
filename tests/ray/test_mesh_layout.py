"""The positions of ranks in a mesh of actors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outlast.errors import ConfigError
from outlast.ray import Mesh
from outlast.ray.protocol import AXES, EXPERT_AXES, shrunk


def meshes(max_actors: int = 16) -> Iterator[Mesh]:
    """Yield every factorisation of every mesh size up to ``max_actors``."""
    for pp in range(1, max_actors + 1):
        for dp in range(1, max_actors // pp + 1):
            for cp in range(1, max_actors // (pp * dp) + 1):
                for tp in range(1, max_actors // (pp * dp * cp) + 1):
                    yield Mesh(pp=pp, dp=dp, cp=cp, tp=tp)


def test_rank_coordinates_equal_those_of_torch() -> None:
    """Every rank of every mesh has the coordinates that ``init_device_mesh`` with the same sizes assigns."""
    for mesh in meshes():
        layout = torch.arange(mesh.size).reshape(mesh.sizes)
        for rank in range(mesh.size):
            place = mesh.place(rank)
            assert layout[tuple(getattr(place, axis) for axis in AXES)] == rank
            assert (place.rank, place.world_size) == (rank, mesh.size)
            assert tuple(getattr(place, f"{axis}_size") for axis in AXES) == mesh.sizes


def test_peers_equal_torchs_submesh_ranks() -> None:
    """The ranks that differ along one axis only are a row of torch's mesh along that axis."""
    for mesh in meshes():
        layout = torch.arange(mesh.size).reshape(mesh.sizes)
        for number, axis in enumerate(AXES):
            rows = layout.movedim(number, -1).reshape(-1, mesh.sizes[number]).tolist()
            for row in rows:
                place = mesh.place(row[0])
                others = {other: getattr(place, other) for other in AXES if other != axis}
                assert mesh.ranks(**others) == row


def test_shrinking_removes_complete_data_shards() -> None:
    """A smaller mesh is the largest that the actors can fill, with an unchanged model parallelism."""
    for mesh in meshes():
        for num_actors in range(mesh.size):
            smaller = shrunk(mesh, num_actors)
            if smaller is None:
                assert mesh.dp == 1 or num_actors < mesh.size // mesh.dp
                continue
            assert (smaller.pp, smaller.cp, smaller.tp) == (mesh.pp, mesh.cp, mesh.tp)
            assert smaller.size <= num_actors
            assert smaller.dp == mesh.dp - 1 or smaller.size + mesh.size // mesh.dp > num_actors


def test_a_mesh_is_printed_as_its_axes() -> None:
    """Log lines have only the axes in use."""
    assert str(Mesh(dp=2, tp=2)) == "dp2 x tp2"
    assert str(Mesh()) == "1 actor"
    assert str(Mesh(dp=2, tp=2).place(3)) == "rank 3 (dp 1, tp 1)"
    assert str(Mesh().place(0)) == "rank 0"


def test_a_mesh_can_be_a_dict_of_sizes() -> None:
    """Axes that a dict omits have size 1, and a mesh is returned unchanged."""
    assert Mesh.of({"tp": 2, "dp": 4}) == Mesh(dp=4, tp=2)
    assert Mesh.of(Mesh(pp=3)) == Mesh(pp=3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pd": 2}, "unknown axis 'pd'; the axes are pp, dp, cp, tp, ep, etp"),
        ({"dp": 0}, "dp=0 must be a whole number of at least 1"),
        ({"tp": 2.0}, "tp=2.0 must be a whole number"),
        ({"cp": True}, "cp=True must be a whole number"),
        (4, "mesh=4 must name its axes"),
        ({"dp": 4, "ep": -1}, "ep=-1 must be a whole number of at least 0"),
        ({"dp": 4, "ep": 3}, r"ep=3 times etp=1 does not divide the 4 actors of a stage \(dp=4 \* cp=1 \* tp=1\)"),
        ({"dp": 4, "pp": 2, "ep": 8}, "ep=8 times etp=1 does not divide the 4 actors of a stage"),
        ({"dp": 3, "tp": 2, "ep": 2}, "ep=2 times etp=2 does not divide"),
        ({"dp": 2, "edp": 2}, "edp is what ep and etp leave"),
    ],
)
def test_an_invalid_mesh_is_rejected(sizes: object, message: str) -> None:
    """The error names the invalid axis or size and what is accepted."""
    with pytest.raises(ConfigError, match=message):
        Mesh.of(sizes)  # type: ignore[arg-type]


def test_unknown_ranks_and_axes_are_errors() -> None:
    """Ranks and axes outside a mesh are errors, not empty results."""
    with pytest.raises(IndexError, match="rank 4"):
        Mesh(dp=2, tp=2).place(4)
    with pytest.raises(IndexError, match="rank -1"):
        Mesh(dp=2).place(-1)
    with pytest.raises(ConfigError, match="unknown axis 'sp'"):
        Mesh(dp=2).ranks(sp=0)


def expert_meshes(max_actors: int = 16) -> Iterator[Mesh]:
    """Yield every mesh of up to ``max_actors`` actors with all possible expert axes."""
    for mesh in meshes(max_actors):
        model = mesh.size // mesh.pp
        for ep in range(1, model + 1):
            for etp in range(model // ep + 1):
                if model % (ep * (etp or mesh.tp)) == 0:
                    yield Mesh(pp=mesh.pp, dp=mesh.dp, cp=mesh.cp, tp=mesh.tp, ep=ep, etp=etp)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_expert_axes_have_consistent_coordinates(data: st.DataObject) -> None:
    """Looking up ranks by coordinates inverts the coordinates of ranks, and every rank has one position in both
    meshes."""
    mesh = data.draw(st.sampled_from(list(expert_meshes(12))))
    for axes, sizes in ((AXES, mesh.sizes), (EXPERT_AXES, mesh.expert_sizes)):
        for rank, point in enumerate(itertools.product(*map(range, sizes))):
            assert mesh.ranks(**dict(zip(axes, point, strict=True))) == [rank]


def test_expert_axes_exist_only_when_given() -> None:
    """Giving one expert axis creates both; the other has Megatron-Core's default size."""
    assert not Mesh(dp=4, tp=2).has_experts
    assert Mesh(dp=4, tp=2).by_axis == {"pp": 1, "dp": 4, "cp": 1, "tp": 2}
    mesh = Mesh.of({"dp": 4, "tp": 2, "ep": 2})
    assert mesh.by_axis == {"pp": 1, "dp": 4, "cp": 1, "tp": 2, "edp": 2, "ep": 2, "etp": 2}
    assert str(mesh) == "dp4 x tp2 (experts: edp2 x ep2 x etp2)"
    assert str(mesh.place(7)) == "rank 7 (dp 3, tp 1, ep 1)"
    assert Mesh(dp=2, tp=2, etp=1).expert_sizes == (1, 4, 1, 1)


def test_shrinking_keeps_the_expert_axes() -> None:
    """Sizes that do not fit the expert axes are skipped."""
    mesh = Mesh(dp=8, ep=4)
    assert shrunk(mesh, 7) == Mesh(dp=4, ep=4)
    assert shrunk(mesh, 3) is None
    assert shrunk(Mesh(dp=3, tp=2, ep=2, etp=1), 5) == Mesh(dp=2, tp=2, ep=2, etp=1)
