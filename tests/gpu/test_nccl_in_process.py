"""In-process restarts with collectives on a GPU: NCCL is aborted and recreated, and the process stays."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from device_runs import DETERMINISTIC, LAUNCHED, ON_GPU, PATIENCE_S, PROGRAMS, needs_gpu, read_facts, run_alone

from outlast.incidents import EventKind
from outlast.journal import read
from outlast.testing import Cluster, RankProcesses

pytestmark = [pytest.mark.gpu, pytest.mark.process]

RESTARTING = PROGRAMS / "restarting_rank.py"
PAIR = PROGRAMS / "pair_on_one_device.py"
DOCUMENTED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "NCCL_NVLS_ENABLE": "0",
}
BALLAST_BYTES = 512 << 20


def check_recovered(output: str) -> list[dict[str, Any]]:
    """Check that the second call succeeded in the process of the first; return the output of each."""
    facts = read_facts(output)
    calls, (end,) = [one for one in facts if "call" in one], [one for one in facts if "returned" in one]
    assert [one["call"] for one in calls] == [0, 1], output
    assert {one["pid"] for one in (*calls, end)} == {calls[0]["pid"]}, "another process took its place"
    assert end["returned"] == 4 * 111.0, "the new groups compute something else"
    assert end["restored"], "the environment is not as it was before the wrapper"
    return [*calls, end]


@pytest.mark.parametrize("fault", ["exception", "stuck", "running"])
def test_a_fault_with_nccl_is_recovered_in_process(tmp_path: Path, fault: str) -> None:
    """After an exception, a stuck host, and an exception while collectives are queued on the GPU, the same process
    calls the function again; the default group and two others were aborted and work again."""
    output = run_alone(RESTARTING, fault, "on", folder=tmp_path)
    first, second, end = check_recovered(output)
    assert end["aborted"] == [3 if ON_GPU else 0], "not all three groups were aborted, once"
    if ON_GPU:
        assert first["variables"] == second["variables"] == DOCUMENTED


def test_recovery_works_under_the_launcher(tmp_path: Path) -> None:
    """The variable that outlast run sets for every worker is replaced for the wrapper; the cycle continues."""
    with Cluster(
        RESTARTING, "exception", "on", run_dir=tmp_path, num_nodes=1, nproc_per_node=1, options=LAUNCHED
    ) as cluster:
        assert cluster.wait(PATIENCE_S) == [0], cluster.tails()
        output, events = cluster.agent(0).output(), cluster.events()
    first, *_ = check_recovered("\n".join(line[line.find("{") :] for line in output.splitlines() if "{" in line))
    if ON_GPU:
        assert first["variables"] == DOCUMENTED
    assert sum(event.kind == EventKind.CYCLE_STARTED for event in events) == 1
    assert sum(event.kind == EventKind.RESTARTED_IN_PROCESS for event in events) == 1


@needs_gpu("the CPU's allocator keeps no cache")
@pytest.mark.parametrize("empties", [True, False], ids=["on", "off"])
def test_empty_cuda_cache_returns_cached_memory(tmp_path: Path, empties: bool) -> None:
    """With empty_cuda_cache the memory that the failed call left in the allocator's cache is returned before the next
    call; without it the cache stays."""
    output = run_alone(RESTARTING, "exception", "on" if empties else "off", folder=tmp_path)
    first, second, _ = check_recovered(output)
    assert first["reserved_bytes"] < BALLAST_BYTES
    assert (second["reserved_bytes"] < BALLAST_BYTES) == empties


@needs_gpu("NCCL is for GPUs alone")
@pytest.mark.parametrize("init", ["lazy", "eager"])
def test_all_communicators_are_aborted(tmp_path: Path, init: str) -> None:
    """abort_collectives() returns the number of all NCCL groups, whether the first collective or device_id created
    their communicators; afterwards they can be destroyed, a second abort finds none, and new groups work."""
    (facts,) = read_facts(run_alone(PROGRAMS / "aborting_rank.py", init, folder=tmp_path))
    assert facts == {"aborted": [3, 0, 3, 0], "sums": [7.0] * 6}


def train_pair(folder: Path, fault: str, *, world_size: int) -> tuple[list[int], list[list[dict[str, Any]]]]:
    """Run the pair and its spares; return the exit codes and the output of each rank."""
    with RankProcesses(
        PAIR, str(folder), fault, "2", world_size=world_size, directory=folder, environment=DETERMINISTIC
    ) as ranks:
        codes = ranks.wait_until_gone(PATIENCE_S)
        outputs = [ranks.output(rank) for rank in range(world_size)]
    for code, output in zip(codes, outputs, strict=True):
        assert code in (0, -signal.SIGKILL), output
    return codes, [read_facts(output) for output in outputs]


def results(facts: list[list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    """Return the function's results by rank."""
    returned = [one["returned"] for of_process in facts for one in of_process if one.get("returned")]
    return {one["rank"]: one for one in returned}


def restored_from(folder: Path) -> dict[int | None, str]:
    """Return the tier from which each rank resumed."""
    return {event.rank: event.data["tier"] for event in read(folder / "run") if event.kind == EventKind.RESTORED}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return the results of two ranks without a fault."""
    codes, facts = train_pair(tmp_path_factory.mktemp("undisturbed"), "none", world_size=2)
    assert codes == [0, 0]
    found = results(facts)
    assert found[0]["weights"] == found[1]["weights"]
    return found


def test_two_ranks_on_one_device_survive_an_exception(tmp_path: Path, undisturbed: dict[int, dict[str, Any]]) -> None:
    """When one of two ranks that share a GPU (over gloo) raises, both continue in their processes with their state in
    memory; weights and losses are bit-identical to those of an undisturbed run."""
    codes, facts = train_pair(tmp_path, "raise", world_size=2)
    assert codes == [0, 0]
    for of_process in facts:
        assert [one["call"] for one in of_process if "call" in one] == [0, 1]
        assert len({one["pid"] for one in of_process}) == 1
        assert [one["begins"] for one in of_process if "call" in one] == [0, 6]
    assert restored_from(tmp_path) == {0: "in_place", 1: "in_place"}
    assert results(facts) == undisturbed


def test_a_spare_on_the_device_replaces_a_killed_rank(tmp_path: Path, undisturbed: dict[int, dict[str, Any]]) -> None:
    """When one of the ranks is killed, a spare process takes the rank and receives weights and optimizer state from the
    surviving process; weights and losses, drawn from the device's random numbers, are bit-identical."""
    codes, facts = train_pair(tmp_path, "kill", world_size=3)
    assert codes == [0, -signal.SIGKILL, 0]
    assert [one["call"] for one in facts[0] if "call" in one] == [0, 1]
    assert [(one["call"], one["rank"], one["begins"]) for one in facts[2] if "call" in one] == [(1, 1, 6)]
    assert restored_from(tmp_path) == {0: "in_place", 1: "peer"}
    assert results(facts) == undisturbed
