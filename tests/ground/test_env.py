"""The environment: one answer, whoever started the worker."""

from __future__ import annotations

import pytest

from outlast.env import WorkerEnv, clean_name, hostname, read_worker
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
    """Without any launcher a worker is the only rank of cycle 0 on this node."""
    worker = read_worker({})
    assert worker == WorkerEnv(node=hostname())
    assert (worker.launcher, worker.global_rank, worker.world_size) == ("python", 0, 1)


def test_torchrun_is_read() -> None:
    """Under torchrun ranks, run and cycle come from its variables; there is no board."""
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
    )


def test_hand_made_ranks_count_as_torchrun() -> None:
    """RANK and WORLD_SIZE alone are enough, as for init_process_group's env:// method."""
    worker = read_worker({"RANK": "1", "WORLD_SIZE": "2"})
    assert (worker.launcher, worker.global_rank, worker.world_size) == ("torchrun", 1, 2)


def test_our_launcher_comes_first() -> None:
    """An agent's variables win over torchrun's, which it sets too."""
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


def test_srun_is_read() -> None:
    """Under srun ranks come from Slurm's variables, job and cycle too."""
    worker = read_worker(
        {
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


def test_slurm_batch_shell_is_plain_python() -> None:
    """One process in a Slurm job is not a distributed run; torchrun inside Slurm is torchrun."""
    assert read_worker({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).launcher == "python"
    assert read_worker({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", **TORCHRUN}).launcher == "torchrun"


def test_bad_number_names_its_variable() -> None:
    """A rank that is no number is refused by the variable's name."""
    with pytest.raises(ConfigError, match="environment variable RANK='one' is not a number; unset it"):
        read_worker({"RANK": "one", "WORLD_SIZE": "2"})


def test_empty_variables_are_unset() -> None:
    """An empty variable means the same as none."""
    worker = read_worker({"RANK": "", "WORLD_SIZE": "", "OUTLAST_RUN_DIR": ""})
    assert (worker.global_rank, worker.world_size, worker.run_dir) == (0, 1, None)


@pytest.mark.parametrize(
    ("name", "clean"), [("a-b.c_1", "a-b.c_1"), ("../etc", ".._etc"), ("a b/c", "a_b_c"), ("", "_")]
)
def test_names_are_safe_in_paths(name: str, clean: str) -> None:
    """A name never leads out of its folder."""
    assert clean_name(name) == clean
