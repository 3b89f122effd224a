"""The state of actors across incarnations: which actors keep it, which load it and from where, and that torn state is
dropped."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from shells import LIMIT_S, ShellDriver, Wrapped, wait_until

from outlast.config import CheckpointConfig
from outlast.ray.keepers import NodeKeepers
from outlast.ray.protocol import CallFailed, FailureKind, Mesh

pytestmark = [pytest.mark.process]
MESH = Mesh(dp=2)


@pytest.fixture
def config(tmp_path: Path) -> CheckpointConfig:
    return CheckpointConfig(directory=str(tmp_path / "run"), save_interval=1)


@pytest.fixture
def drivers(ray_cluster: Cluster) -> Iterator[list[ShellDriver]]:
    """Collect the shell drivers of a test, which are closed at its end."""
    made: list[ShellDriver] = []
    yield made
    for driver in made:
        driver.close()


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: Cluster) -> list[Any]:
    """Return the state of both ranks after each of several undisturbed steps."""
    driver = ShellDriver(MESH)
    try:
        driver.join()
        found = []
        for iteration in range(1, 6):
            found.append([(weights, seen) for weights, seen, _ in driver.call("look")])
            driver.call("train", iteration)
    finally:
        driver.close()
    return found


@pytest.mark.extended
@pytest.mark.slow
def test_only_a_new_actor_loads_the_state(
    drivers: list[ShellDriver], config: CheckpointConfig, undisturbed: list[Any]
) -> None:
    """A replaced rank reads its state, its peer reads nothing; the result is that of an undisturbed run."""
    expected = undisturbed[4]
    driver = ShellDriver(MESH, num_spares=2, checkpoint=config)
    drivers.append(driver)
    assert [one.origin for one in driver.join()] == ["new", "new"]
    for iteration in (1, 2):
        driver.call("train", iteration)
    before = driver.pids()
    calls = driver.begin_call("hang", "all_reduce", 1)
    driver.wait_in_sections()
    driver.replace(1)
    (aborted,) = driver.abort([0])
    assert (aborted.call_ended, aborted.iteration) == (True, 2)
    driver.outcomes(calls[:1])
    joined = driver.join(has=[aborted.iteration, None])
    assert [one.origin for one in joined] == ["kept", "global"]
    assert [one.loaded for one in joined] == [False, True]
    assert [(one.iteration, one.checkpoint) for one in joined] == [(2, 2), (2, 2)]
    assert driver.pids()[0] == before[0]
    driver.call("train", 3)

    # State in the middle of an update is torn: that rank loads, too, and the rank that had not begun its update keeps.
    answers = driver.outcomes(driver.begin_call("train", 4, tear=True))
    assert {(one.kind, one.iteration) for one in answers if isinstance(one, CallFailed)} == {(FailureKind.RAISED, None)}
    aborted_all = driver.abort([0, 1])
    assert [one.iteration for one in aborted_all] == [None, None]
    joined = driver.join(has=[None, 3])  # even if the driver expects the rank to keep it
    assert [(one.origin, one.iteration) for one in joined] == [("global", 3)] * 2
    driver.call("train", 4)
    assert [(weights, seen) for weights, seen, _ in driver.call("look")] == expected


@pytest.mark.campaign
def test_a_wait_for_an_impossible_commit_is_aborted(drivers: list[ShellDriver], config: CheckpointConfig) -> None:
    """A survivor in the middle of a save is interrupted, keeps its process and its state, and saves again."""
    driver = ShellDriver(MESH, num_spares=1, checkpoint=dataclasses.replace(config, save_interval=0))
    drivers.append(driver)
    driver.join()
    driver.call("train", 1)
    before = driver.pids()
    calls = driver.begin_call("save_without", 1, 1)
    wait_until(lambda: [name for name, _ in driver.statuses()[0].sections] == ["step"], "the wait for a commit")
    wait_until(lambda: driver.statuses()[1].sections, "the other rank's sleep")
    driver.replace(1)
    (aborted,) = driver.abort([0])
    assert (aborted.call_ended, aborted.iteration) == (True, 1), aborted
    (answer,) = driver.outcomes(calls[:1])
    assert isinstance(answer, CallFailed)
    assert answer.kind == FailureKind.ABORTED
    joined = driver.join(has=[1, None])
    assert [(one.origin, one.iteration) for one in joined] == [("new", 0)] * 2
    driver.call("train", 1)
    driver.call("save_without", 9, 1)
    assert driver.pids()[0] == before[0]


@pytest.mark.campaign
def test_a_ddp_wrapper_is_rebuilt_around_kept_state(drivers: list[ShellDriver], tmp_path: Path) -> None:
    """A survivor of a backward pass of ``DistributedDataParallel`` keeps its state, and the result is undisturbed."""
    ends = []
    for name in ("undisturbed", "disturbed"):
        config = CheckpointConfig(directory=str(tmp_path / name), save_interval=1)
        driver = ShellDriver(MESH, actor=Wrapped, num_spares=1, checkpoint=config)
        drivers.append(driver)
        driver.join()
        driver.call("train_wrapped", 1, 9)
        if name == "disturbed":
            before = driver.pids()
            driver.begin_call("train_wrapped", 2, 1)
            driver.wait_in_sections()
            driver.replace(1)
            (aborted,) = driver.abort([0])
            assert (aborted.call_ended, aborted.iteration) == (True, 1), aborted
            assert [one.origin for one in driver.join(has=[1, None])] == ["kept", "global"]
            assert driver.pids()[0] == before[0]
        driver.call("train_wrapped", 2, 9)
        ends.append(driver.call("look"))
        driver.close()
    assert ends[0] == ends[1]


@pytest.mark.campaign
def test_keeping_state_leaks_no_resources(drivers: list[ShellDriver], config: CheckpointConfig) -> None:
    """Twelve rounds of saving, aborting and continuing leave no descriptor and no thread behind."""
    driver = ShellDriver(MESH, checkpoint=config)
    drivers.append(driver)
    driver.join()
    seen = []
    for iteration in range(1, 13):
        driver.call("train", iteration)
        seen.append(driver.call("resources"))
        aborted = driver.abort([0, 1])
        assert [(one.call_ended, one.iteration) for one in aborted] == [(True, iteration)] * 2
        assert [one.origin for one in driver.join(has=[iteration] * 2)] == ["kept"] * 2
    for rank in (0, 1):
        fds, threads, _ = zip(*(one[rank] for one in seen), strict=True)
        assert max(fds[-4:]) <= max(fds[2:6]) + 4, fds
        assert max(threads[-4:]) <= max(threads[2:6]) + 4, threads


@pytest.mark.campaign
def test_unsaved_state_is_kept_only_if_all_ranks_have_it(drivers: list[ShellDriver], undisturbed: list[Any]) -> None:
    """Without a checkpoint all ranks keep the same state, or all start over if one of them lacks it."""
    expected = undisturbed[3]
    driver = ShellDriver(MESH, num_spares=1)
    drivers.append(driver)
    driver.join()
    for iteration in (1, 2):
        driver.call("train", iteration)
    driver.outcomes(driver.begin_call("fail", 1))
    assert [one.iteration for one in driver.abort([0, 1])] == [2, 2]
    joined = driver.join(has=[2, 2])
    assert [(one.origin, one.iteration, one.checkpoint) for one in joined] == [("kept", 2, None)] * 2
    driver.call("train", 3)
    assert [(weights, seen) for weights, seen, _ in driver.call("look")] == expected

    driver.replace(0)
    assert [one.iteration for one in driver.abort([1])] == [3]
    joined = driver.join(has=[None, 3])
    assert [(one.origin, one.iteration) for one in joined] == [("new", 0)] * 2
    for iteration in (1, 2, 3):
        driver.call("train", iteration)
    assert [(weights, seen) for weights, seen, _ in driver.call("look")] == expected


@pytest.mark.campaign
def test_state_is_restored_from_an_object_store(
    drivers: list[ShellDriver], tmp_path: Path, undisturbed: list[Any]
) -> None:
    """State is saved to ``s3://`` and loaded from there, by a new actor and by actors that start over."""
    expected = undisturbed[3]
    server = s3_server("actors", tmp_path / "record.json")
    try:
        config = CheckpointConfig(directory="s3://actors/run", save_interval=1)
        driver = ShellDriver(MESH, num_spares=1, checkpoint=config, environment=server.environment)
        drivers.append(driver)
        driver.join()
        for iteration in (1, 2):
            driver.call("train", iteration)
        driver.replace(0)
        (aborted,) = driver.abort([1])
        joined = driver.join(has=[None, aborted.iteration])
        assert [(one.origin, one.iteration) for one in joined] == [("global", 2), ("kept", 2)]
        driver.call("train", 3)
        assert [(weights, seen) for weights, seen, _ in driver.call("look")] == expected
        assert any("step-3/" in name for name in server.objects("run/"))
    finally:
        for driver in drivers:
            driver.close()
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
def test_node_memory_and_replicas_restore_lost_actors(
    drivers: list[ShellDriver], ray_cluster: Cluster, tmp_path: Path, undisturbed: list[Any]
) -> None:
    """A dead actor's successor loads from its node's memory; after the loss of a node, from the copy in another node's
    memory."""
    expected = undisturbed[4]
    config = CheckpointConfig(local_directory=str(tmp_path / "local"), save_interval=1, replication_timeout=5.0)
    added = [ray_cluster.add_node(num_cpus=3, object_store_memory=100 << 20) for _ in range(2)]
    ray_cluster.wait_for_nodes()
    keepers = NodeKeepers()
    try:
        nodes = [node.node_id for node in added]
        driver = ShellDriver(MESH, checkpoint=config, nodes=nodes)
        drivers.append(driver)
        spares = [driver.make(node) for node in (nodes[1], nodes[0])]
        assert [one.node_id for one in driver.identities()] == nodes
        assert len({one.node for one in driver.identities()}) == 2
        addresses = keepers.ensure(nodes, LIMIT_S)
        assert sorted(addresses) == sorted(nodes)
        writers = [addresses[node] for node in nodes]
        driver.join(writers=writers)
        for iteration in (1, 2):
            driver.call("train", iteration)

        driver.spares = spares
        driver.replace(1)
        (aborted,) = driver.abort([0])
        joined = driver.join(has=[aborted.iteration, None], writers=writers)
        assert [(one.origin, one.iteration) for one in joined] == [("kept", 2), ("memory", 2)]
        driver.call("train", 3)

        ray_cluster.remove_node(added.pop())
        keepers.forget(nodes[1])
        driver.slots[1] = driver.spares.pop(0)
        (aborted,) = driver.abort([0])
        joined = driver.join(has=[aborted.iteration, None], writers=[addresses[nodes[0]]] * 2)
        assert joined[0].origin == "kept"
        assert joined[1].origin in ("memory", "replica", "local")
        assert [one.iteration for one in joined] == [3, 3]
        driver.call("train", 4)
        assert [(weights, seen) for weights, seen, _ in driver.call("look")] == expected
    finally:
        keepers.close()
        for driver in drivers:
            driver.close()
        for node in added:
            ray_cluster.remove_node(node)
    assert ray.is_initialized()
