"""The Slurm job of a process: its fields, and the log line on it."""

from __future__ import annotations

import itertools
import logging

import pytest

import outlast
from outlast.errors import ConfigError
from outlast.integrations.slurm import SLURMInfo, get_slurm_info, is_requeued, log_job_info

JOB = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "llm",
    "SLURM_JOB_NODELIST": "gpu[07-08],gpu12",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_PARTITION": "big",
    "SLURM_NTASKS": "11",
    "SLURM_PROCID": "0",
}
job_ids = itertools.count(5000)
"""A new job id for each test: a process logs each job once."""


def test_outside_of_slurm_there_is_no_job() -> None:
    """Without Slurm's variables the result is None, and the job was not requeued."""
    assert get_slurm_info({}) is None
    assert not is_requeued({})


def test_all_fields_are_read() -> None:
    """The fields are those of NVRx's SLURMInfo."""
    info = get_slurm_info({**JOB, "SLURM_RESTART_COUNT": "2", "SLURM_ARRAY_TASK_ID": "5"})
    assert info == SLURMInfo(
        job_id="4711",
        job_name="llm",
        node_list="gpu[07-08],gpu12",
        num_nodes=3,
        ntasks_per_node=4,
        restart_count=2,
        partition="big",
        array_task_id="5",
        tasks_per_node=(4, 4, 3),
    )
    assert info.is_requeued
    assert info.nodes == ("gpu07", "gpu08", "gpu12")


@pytest.mark.parametrize(("text", "expected"), [("4(x2)", 4), ("8", 8), ("2,4(x3)", 4)])
def test_tasks_per_node_are_read_in_all_forms(text: str, expected: int) -> None:
    """SLURM_NTASKS_PER_NODE is parsed in each form that Slurm uses."""
    info = get_slurm_info({**JOB, "SLURM_NTASKS_PER_NODE": text})
    assert info is not None
    assert info.ntasks_per_node == expected


@pytest.mark.parametrize("name", ["SLURM_RESTART_COUNT", "SLURM_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES"])
def test_invalid_variable_is_reported(name: str) -> None:
    """An invalid value is rejected with the variable's name."""
    with pytest.raises(ConfigError, match=name):
        get_slurm_info({**JOB, name: "many"})


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ({}, 1),
        ({"SLURM_PROCID": "3"}, 0),
        ({"SLURM_RESTART_COUNT": "1"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "0"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": "1"}, 0),
        ({"RANK": "1", "WORLD_SIZE": "8"}, 0),
        ({"OUTLAST_RUN_ID": "r", "OUTLAST_BOARD": "b", "RANK": "0", "WORLD_SIZE": "8", "OUTLAST_CYCLE": "0"}, 1),
        ({"OUTLAST_RUN_ID": "r", "OUTLAST_BOARD": "b", "RANK": "0", "WORLD_SIZE": "8", "OUTLAST_CYCLE": "1"}, 0),
    ],
)
def test_job_is_logged_once(more: dict[str, str], lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 logs the job in the first cycle of each start; no other rank and no restarted cycle does."""
    job = {**JOB, "SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(next(job_ids)), **more}
    with caplog.at_level(logging.INFO, "outlast"):
        for _ in range(2):
            assert log_job_info(job) is not None
    assert len(caplog.records) == lines


def test_session_logs_its_job_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process logs its job once, however many sessions it creates."""
    for name, value in {**JOB, "SLURM_JOB_ID": str(next(job_ids))}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, "outlast"):
        for _ in range(2):
            with outlast.init():
                pass
    (line,) = [record.getMessage() for record in caplog.records if "Slurm job" in record.getMessage()]
    assert "'llm': 3 nodes (gpu[07-08],gpu12), 4 tasks each, partition big" in line


def test_session_trains_in_spite_of_an_invalid_variable(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid value of Slurm's variables is a warning and does not prevent training."""
    for name, value in {**JOB, "SLURM_RESTART_COUNT": "many"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OUTLAST_CYCLE", "0")
    with caplog.at_level(logging.WARNING, "outlast"), outlast.init():
        pass
    assert "SLURM_RESTART_COUNT='many'" in caplog.text
