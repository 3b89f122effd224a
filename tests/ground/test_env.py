"""Rank, run and node are read from the environment of every launcher."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast import env
from outlast.env import BOARD, NAMES, RUN_ID, WorkerEnv, clean_name, hostname, node_name, read_worker
from outlast.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "tr-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_plain_python_is_one_rank() -> None:
    """Without a launcher a worker is the only rank of cycle 0 on this node."""
    worker = read_worker({})
    assert worker == WorkerEnv(node=hostname())
    assert (worker.launcher, worker.global_rank, worker.world_size) == ("python", 0, 1)


def test_torchrun_variables_are_read() -> None:
    """Under torchrun ranks, run and cycle come from its variables; there is no heartbeat memory."""
    worker = read_worker(TORCHRUN)
    assert worker == WorkerEnv(
        global_rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        node_rank=1,
        run_id="tr-7",
        cycle=2,
        node=hostname(),
        launcher="torchrun",
        names=("id tr-7",),
    )


def test_rank_and_world_size_count_as_torchrun() -> None:
    """RANK and WORLD_SIZE are enough, as for the env:// method of init_process_group."""
    worker = read_worker({"RANK": "1", "WORLD_SIZE": "2"})
    assert (worker.launcher, worker.global_rank, worker.world_size) == ("torchrun", 1, 2)


def test_agent_variables_precede_torchruns() -> None:
    """An agent's variables take precedence over torchrun's, which it sets too."""
    worker = read_worker(
        {
            **TORCHRUN,
            "OUTLAST_RUN_ID": "mine",
            "OUTLAST_RUN_DIR": "/runs/mine",
            "OUTLAST_JOB": "job-1",
            "OUTLAST_CYCLE": "3",
            "OUTLAST_NODE": "b",
            "OUTLAST_BOARD": "/dev/shm/board",
            "OUTLAST_FAULT_TOLERANCE": "{}",
        }
    )
    assert (worker.launcher, worker.run_id, worker.job, worker.cycle) == ("outlast", "mine", "job-1", 3)
    assert (worker.node, worker.board, worker.run_dir) == ("b", "/dev/shm/board", "/runs/mine")
    assert worker.fault_tolerance == "{}"


@pytest.mark.parametrize(("nested", "relay"), [("mine", "relay-1"), ("none", None)])
def test_nested_workers_ignore_the_relay(nested: str, relay: str | None) -> None:
    """Workers of a launcher within a worker inherit its variables, but do not take the places of its peers at the
    relay."""
    agent_environment = {"OUTLAST_RUN_ID": "mine", "OUTLAST_BOARD": "/dev/shm/board", "OUTLAST_RELAY": "relay-1"}
    assert read_worker({**TORCHRUN, **agent_environment, "TORCHELASTIC_RUN_ID": nested}).relay == relay


def test_srun_variables_are_read() -> None:
    """Under srun ranks, job and cycle come from Slurm's variables."""
    worker = read_worker(
        {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "6",
            "SLURM_NTASKS": "8",
            "SLURM_LOCALID": "2",
            "SLURM_NNODES": "2",
            "SLURM_NODEID": "1",
            "SLURM_JOB_ID": "991",
            "SLURM_RESTART_COUNT": "1",
        }
    )
    assert (worker.launcher, worker.global_rank, worker.world_size) == ("srun", 6, 8)
    assert (worker.local_rank, worker.local_world_size, worker.node_rank) == (2, 4, 1)
    assert (worker.run_id, worker.job, worker.cycle) == ("991", "991", 1)


def test_srun_tasks_use_the_first_node_as_master() -> None:
    """Without MASTER_ADDR the master is the first node of the step, since a loopback address would not work on other
    nodes."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "gpu[01-09]"}
    assert read_worker(step).master_addr == "gpu01"
    assert read_worker({**step, "SLURM_STEP_NODELIST": "gpu[07-08]"}).master_addr == "gpu07"
    assert read_worker({**step, "MASTER_ADDR": "head"}).master_addr == "head"


def test_slurm_batch_shell_is_plain_python() -> None:
    """One process in a Slurm job is not a distributed run; torchrun inside Slurm is torchrun."""
    assert read_worker({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}).launcher == "python"
    assert read_worker({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}).launcher == "python", (
        "a batch shell waits for no other task"
    )
    in_step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    assert read_worker({**in_step, **TORCHRUN}).launcher == "torchrun"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9).filter(lambda counts: sum(counts) > 1), st.data())
def test_nodes_may_have_different_numbers_of_tasks(counts: list[int], data: st.DataObject) -> None:
    """Each task knows the number of tasks on its node in every notation of Slurm, and a step's counts take
    precedence."""
    node = data.draw(st.integers(0, len(counts) - 1))
    local_rank = data.draw(st.integers(0, counts[node] - 1))
    runs = [(count, len(list(run))) for count, run in itertools.groupby(counts)]
    text = ",".join(
        f"{count}(x{times})" if times > 1 or data.draw(st.booleans()) else str(count) for count, times in runs
    )
    worker = read_worker(
        {
            "SLURM_STEP_ID": "2",
            "SLURM_PROCID": str(sum(counts[:node]) + local_rank),
            "SLURM_NTASKS": data.draw(st.sampled_from([str(sum(counts)), "99"])),
            "SLURM_STEP_NUM_TASKS": str(sum(counts)),
            "SLURM_STEP_TASKS_PER_NODE": text,
            "SLURM_TASKS_PER_NODE": "9(x11)",
            "SLURM_NNODES": data.draw(st.sampled_from([str(len(counts)), "11"])),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local_rank),
            "SLURMD_NODENAME": f"gpu{node}",
        }
    )
    assert (worker.launcher, worker.world_size, worker.local_world_size) == ("srun", sum(counts), counts[node])
    assert (worker.local_rank, worker.node_rank, worker.node) == (local_rank, node, f"gpu{node}")


def test_counts_of_another_step_are_ignored() -> None:
    """If the counts do not add up to this step's tasks, the tasks are evenly spread over the nodes."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    assert read_worker({**step, "SLURM_TASKS_PER_NODE": "8(x2)"}).local_world_size == 2
    assert read_worker({**step, "SLURM_TASKS_PER_NODE": "1,3"}).local_world_size == 3
    with pytest.raises(ConfigError, match="SLURM_TASKS_PER_NODE"):
        read_worker({**step, "SLURM_TASKS_PER_NODE": "many"})


def test_node_name_prefers_agent_then_slurm() -> None:
    """The agent's name for a node comes first, then Slurm's, then the host name."""
    slurm = {"SLURMD_NODENAME": "gpu7"}
    assert (read_worker(slurm).node, node_name(slurm)) == ("gpu7", "gpu7")
    assert read_worker({**slurm, "OUTLAST_NODE": "a"}).node == "a"
    assert node_name({}) == hostname()


def test_invalid_rank_reports_its_variable() -> None:
    """A rank that is not a number is rejected with the variable's name."""
    with pytest.raises(ConfigError, match="environment variable RANK='one' is not a number; unset it"):
        read_worker({"RANK": "one", "WORLD_SIZE": "2"})


def test_empty_variables_are_unset() -> None:
    """An empty variable counts as unset."""
    worker = read_worker({"RANK": "", "WORLD_SIZE": "", "OUTLAST_RUN_DIR": ""})
    assert (worker.global_rank, worker.world_size, worker.run_dir) == (0, 1, None)


@pytest.mark.parametrize(
    ("name", "clean"), [("a-b.c_1", "a-b.c_1"), ("../etc", ".._etc"), ("a b/c", "a_b_c"), ("", "_")]
)
def test_names_are_safe_in_paths(name: str, clean: str) -> None:
    """A name never leads out of its folder."""
    assert clean_name(name) == clean


@pytest.mark.parametrize(
    ("run_id", "names"),
    [
        ("big-run", ("id big-run",)),
        ("none", ()),
        ("", ()),
        ("4711", ()),
        ("0f8fad5b-d9cb-469f-a165-70867728950e", ()),
    ],
)
def test_generated_ids_are_not_run_names(run_id: str, names: tuple[str, ...]) -> None:
    """A run is identified by a name that a user chose, not by a job number or an id that a launcher generates."""
    assert read_worker({**TORCHRUN, "TORCHELASTIC_RUN_ID": run_id}).names == names
    agents = {RUN_ID: run_id, BOARD: "/board", NAMES: '["id a", "directory /a"]'}
    assert read_worker(agents).names == ("id a", "directory /a")
    assert read_worker({**agents, NAMES: ""}).names == ()
    with pytest.raises(ConfigError, match="OUTLAST_RUN_NAMES='a' is not a JSON list"):
        read_worker({**agents, NAMES: "a"})


def test_slurm_restart_count_is_read() -> None:
    """A requeued job is recognised as the successor of itself."""
    worker = read_worker({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"})
    assert (worker.allocation, worker.requeues) == ("7", 2)


def test_iterating_the_environment_records_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a lookup counts as a read; a library that iterates over all variables is not recorded."""
    monkeypatch.setenv("SOME_NAME", "1")
    with env.noting_reads() as read:
        found = {name: value for name, value in os.environ.items() if name == "SOME_NAME"}
        copied, values = os.environ.copy(), list(os.environ.values())
        assert os.environ.get("OTHER_NAME") is None
    assert found == {"SOME_NAME": "1"}
    assert copied == dict(os.environ)
    assert values == list(copied.values())
    assert read == {"OTHER_NAME"}
