"""The groups of a mesh with expert axes are those of Megatron-Core."""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from typing import Any

import pytest
from test_mesh_layout import expert_meshes

from outlast.ray import Mesh
from outlast.ray.protocol import AXES, EXPERT_AXES

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def parallel_state() -> Any:
    """Import Megatron-Core, which warns about each missing optional package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
    return parallel_state


def generators(parallel_state: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Return Megatron-Core's generators of ranks for a mesh, constructed as in ``initialize_model_parallel``."""
    order = inspect.signature(parallel_state.initialize_model_parallel).parameters["order"].default
    etp = mesh.etp or mesh.tp  # its default: None means the size of tp
    edp = mesh.size // (etp * mesh.ep * mesh.pp)
    return (
        parallel_state.RankGenerator(tp=mesh.tp, ep=1, dp=mesh.dp, pp=mesh.pp, cp=mesh.cp, order=order),
        parallel_state.RankGenerator(tp=etp, ep=mesh.ep, dp=edp, pp=mesh.pp, cp=1, order=order),
    )


@pytest.mark.slow
def test_groups_equal_those_of_megatron_core(parallel_state: Any) -> None:
    """On every mesh of up to 16 actors the peers along each axis, expert axes included, are the members of
    Megatron-Core's groups in its default order."""
    num_meshes = 0
    for mesh in expert_meshes():
        num_meshes += 1
        places = [mesh.place(rank) for rank in range(mesh.size)]
        dense, expert = generators(parallel_state, mesh)
        for axes, generator, names in (
            (AXES, dense, dict(zip(AXES, AXES, strict=True))),
            (EXPERT_AXES, expert, dict(zip(EXPERT_AXES, ("pp", "dp", "ep", "tp"), strict=True))),
        ):
            for axis in axes:
                groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
                for place in places:
                    groups[tuple(getattr(place, other) for other in axes if other != axis)].append(place.rank)
                assert sorted(groups.values()) == sorted(generator.get_ranks(names[axis])), (mesh, axis)
                assert {getattr(place, f"{axis}_size") for place in places} == {len(one) for one in groups.values()}
    assert num_meshes > 500
