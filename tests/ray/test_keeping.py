"""The state of actors over incarnations: who keeps it, who loads it and from where, and that nothing torn is kept."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from shells import LIMIT_S, Crew, Wrapped, wait_until

from outlast.config import CheckpointConfig
from outlast.ray.keepers import NodeKeepers
from outlast.ray.protocol import CallFailed, FailureKind, Mesh

pytestmark = [pytest.mark.process]
MESH = Mesh(dp=2)


@pytest.fixture
def config(tmp_path: Path) -> CheckpointConfig:
    return CheckpointConfig(directory=str(tmp_path / "run"), save_interval=1)


@pytest.fixture
def crews(ray_cluster: Cluster) -> Iterator[list[Crew]]:
    """Crews of a test, closed at its end."""
    made: list[Crew] = []
    yield made
    for crew in made:
        crew.close()


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: Cluster) -> list[Any]:
    """What both ranks have after so many steps that nothing disturbs."""
    crew = Crew(MESH)
    try:
        crew.join()
        found = []
        for iteration in range(1, 6):
            found.append([(weights, seen) for weights, seen, _ in crew.call("look")])
            crew.call("train", iteration)
    finally:
        crew.close()
    return found


@pytest.mark.extended
@pytest.mark.slow
def test_survivors_keep_their_state_and_only_the_new_actor_loads(
    crews: list[Crew], config: CheckpointConfig, undisturbed: list[Any]
) -> None:
    """A replaced rank reads what it needs, its peer nothing; the end is that of a run which nothing disturbed."""
    expected = undisturbed[4]
    crew = Crew(MESH, num_spares=2, checkpoint=config)
    crews.append(crew)
    assert [one.origin for one in crew.join()] == ["new", "new"]
    for iteration in (1, 2):
        crew.call("train", iteration)
    before = crew.pids()
    calls = crew.begin_call("hang", "all_reduce", 1)
    crew.wait_in_sections()
    crew.replace(1)
    (aborted,) = crew.abort([0])
    assert (aborted.call_ended, aborted.iteration) == (True, 2)
    crew.outcomes(calls[:1])
    joined = crew.join(has=[aborted.iteration, None])
    assert [one.origin for one in joined] == ["kept", "global"]
    assert [one.loaded for one in joined] == [False, True]
    assert [(one.iteration, one.checkpoint) for one in joined] == [(2, 2), (2, 2)]
    assert crew.pids()[0] == before[0]
    crew.call("train", 3)

    # In the middle of an update nothing is whole: that rank loads, too, and the one that never got there keeps.
    answers = crew.outcomes(crew.begin_call("train", 4, tear=True))
    assert {(one.kind, one.iteration) for one in answers if isinstance(one, CallFailed)} == {(FailureKind.RAISED, None)}
    aborted_all = crew.abort([0, 1])
    assert [one.iteration for one in aborted_all] == [None, None]
    joined = crew.join(has=[None, 3])  # whatever the driver believes
    assert [(one.origin, one.iteration) for one in joined] == [("global", 3)] * 2
    crew.call("train", 4)
    assert [(weights, seen) for weights, seen, _ in crew.call("look")] == expected


@pytest.mark.campaign
def test_who_waits_for_a_commit_that_cannot_come_is_freed(crews: list[Crew], config: CheckpointConfig) -> None:
    """A survivor in the middle of a save is got out of it, keeps its process and its state, and saves again."""
    crew = Crew(MESH, num_spares=1, checkpoint=dataclasses.replace(config, save_interval=0))
    crews.append(crew)
    crew.join()
    crew.call("train", 1)
    before = crew.pids()
    calls = crew.begin_call("save_without", 1, 1)
    wait_until(lambda: [name for name, _ in crew.statuses()[0].sections] == ["step"], "the wait for a commit")
    wait_until(lambda: crew.statuses()[1].sections, "the other rank's sleep")
    crew.replace(1)
    (aborted,) = crew.abort([0])
    assert (aborted.call_ended, aborted.iteration) == (True, 1), aborted
    (answer,) = crew.outcomes(calls[:1])
    assert isinstance(answer, CallFailed)
    assert answer.kind == FailureKind.ABORTED
    joined = crew.join(has=[1, None])
    assert [(one.origin, one.iteration) for one in joined] == [("new", 0)] * 2
    crew.call("train", 1)
    crew.call("save_without", 9, 1)
    assert crew.pids()[0] == before[0]


@pytest.mark.campaign
def test_a_wrapper_is_made_anew_around_what_is_kept(crews: list[Crew], tmp_path: Path) -> None:
    """A survivor of a backward pass of ``DistributedDataParallel`` keeps its state, and so does the end."""
    ends = []
    for name in ("undisturbed", "disturbed"):
        config = CheckpointConfig(directory=str(tmp_path / name), save_interval=1)
        crew = Crew(MESH, actor=Wrapped, num_spares=1, checkpoint=config)
        crews.append(crew)
        crew.join()
        crew.call("train_wrapped", 1, 9)
        if name == "disturbed":
            before = crew.pids()
            crew.begin_call("train_wrapped", 2, 1)
            crew.wait_in_sections()
            crew.replace(1)
            (aborted,) = crew.abort([0])
            assert (aborted.call_ended, aborted.iteration) == (True, 1), aborted
            assert [one.origin for one in crew.join(has=[1, None])] == ["kept", "global"]
            assert crew.pids()[0] == before[0]
        crew.call("train_wrapped", 2, 9)
        ends.append(crew.call("look"))
        crew.close()
    assert ends[0] == ends[1]


@pytest.mark.campaign
def test_nothing_grows_while_state_is_kept(crews: list[Crew], config: CheckpointConfig) -> None:
    """Saving, aborting and going on, twelve times over, leaves no descriptor and no thread behind."""
    crew = Crew(MESH, checkpoint=config)
    crews.append(crew)
    crew.join()
    seen = []
    for iteration in range(1, 13):
        crew.call("train", iteration)
        seen.append(crew.call("resources"))
        aborted = crew.abort([0, 1])
        assert [(one.call_ended, one.iteration) for one in aborted] == [(True, iteration)] * 2
        assert [one.origin for one in crew.join(has=[iteration] * 2)] == ["kept"] * 2
    for rank in (0, 1):
        fds, threads, _ = zip(*(one[rank] for one in seen), strict=True)
        assert max(fds[-4:]) <= max(fds[2:6]) + 4, fds
        assert max(threads[-4:]) <= max(threads[2:6]) + 4, threads


@pytest.mark.campaign
def test_without_a_checkpoint_all_start_over_unless_all_have_the_same_state(
    crews: list[Crew], undisturbed: list[Any]
) -> None:
    """State that was never saved is kept where nobody lacks it; where somebody does, nobody goes on from it."""
    expected = undisturbed[3]
    crew = Crew(MESH, num_spares=1)
    crews.append(crew)
    crew.join()
    for iteration in (1, 2):
        crew.call("train", iteration)
    crew.outcomes(crew.begin_call("fail", 1))
    assert [one.iteration for one in crew.abort([0, 1])] == [2, 2]
    joined = crew.join(has=[2, 2])
    assert [(one.origin, one.iteration, one.checkpoint) for one in joined] == [("kept", 2, None)] * 2
    crew.call("train", 3)
    assert [(weights, seen) for weights, seen, _ in crew.call("look")] == expected

    crew.replace(0)
    assert [one.iteration for one in crew.abort([1])] == [3]
    joined = crew.join(has=[None, 3])
    assert [(one.origin, one.iteration) for one in joined] == [("new", 0)] * 2
    for iteration in (1, 2, 3):
        crew.call("train", iteration)
    assert [(weights, seen) for weights, seen, _ in crew.call("look")] == expected


@pytest.mark.campaign
def test_an_object_store_holds_the_state(crews: list[Crew], tmp_path: Path, undisturbed: list[Any]) -> None:
    """State goes to ``s3://`` and comes back from there, for the one that is new and for those that begin again."""
    expected = undisturbed[3]
    server = s3_server("actors", tmp_path / "record.json")
    try:
        config = CheckpointConfig(directory="s3://actors/run", save_interval=1)
        crew = Crew(MESH, num_spares=1, checkpoint=config, environment=server.environment)
        crews.append(crew)
        crew.join()
        for iteration in (1, 2):
            crew.call("train", iteration)
        crew.replace(0)
        (aborted,) = crew.abort([1])
        joined = crew.join(has=[None, aborted.iteration])
        assert [(one.origin, one.iteration) for one in joined] == [("global", 2), ("kept", 2)]
        crew.call("train", 3)
        assert [(weights, seen) for weights, seen, _ in crew.call("look")] == expected
        assert any("step-3/" in name for name in server.objects("run/"))
    finally:
        for crew in crews:
            crew.close()
        server.kill()


def s3_server(bucket: str, record: Path) -> Any:
    """Start the server that the tests of object stores use."""
    path = Path(__file__).parent.parent / "dcp" / "s3_server.py"
    spec = importlib.util.spec_from_file_location("s3_server_of_dcp", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.S3Server(bucket, record)


@pytest.mark.campaign
def test_memory_of_nodes_outlives_actors_and_replicas_outlive_nodes(
    crews: list[Crew], ray_cluster: Cluster, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """An actor that died is replaced from its node's memory; one whose node is lost, from the other node's copy."""
    expected = undisturbed[4]
    config = CheckpointConfig(local_directory=str(tmp_path / "local"), save_interval=1, replication_timeout=5.0)
    added = [ray_cluster.add_node(num_cpus=3, object_store_memory=100 << 20) for _ in range(2)]
    ray_cluster.wait_for_nodes()
    keepers = NodeKeepers()
    try:
        nodes = [node.node_id for node in added]
        crew = Crew(MESH, checkpoint=config, nodes=nodes)
        crews.append(crew)
        spares = [crew.make(node) for node in (nodes[1], nodes[0])]
        assert [one.node_id for one in crew.identities()] == nodes
        assert len({one.node for one in crew.identities()}) == 2
        addresses = keepers.ensure(nodes, LIMIT_S)
        assert sorted(addresses) == sorted(nodes)
        writers = [addresses[node] for node in nodes]
        crew.join(writers=writers)
        for iteration in (1, 2):
            crew.call("train", iteration)

        crew.spares = spares
        crew.replace(1)
        (aborted,) = crew.abort([0])
        joined = crew.join(has=[aborted.iteration, None], writers=writers)
        assert [(one.origin, one.iteration) for one in joined] == [("kept", 2), ("memory", 2)]
        crew.call("train", 3)

        ray_cluster.remove_node(added.pop())
        keepers.forget(nodes[1])
        crew.slots[1] = crew.spares.pop(0)
        (aborted,) = crew.abort([0])
        joined = crew.join(has=[aborted.iteration, None], writers=[addresses[nodes[0]]] * 2)
        assert joined[0].origin == "kept"
        assert joined[1].origin in ("memory", "replica", "local")
        assert [one.iteration for one in joined] == [3, 3]
        crew.call("train", 4)
        assert [(weights, seen) for weights, seen, _ in crew.call("look")] == expected
    finally:
        keepers.close()
        for crew in crews:
            crew.close()
        for node in added:
            ray_cluster.remove_node(node)
    assert ray.is_initialized()
