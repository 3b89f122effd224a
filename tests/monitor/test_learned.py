"""ft_state.json: what a run has learned survives its cycles, jobs and accidents."""

import json
from pathlib import Path

import pytest

from outlast.config import FaultToleranceConfig
from outlast.monitor.learned_timeouts import FILE_NAME, LearnedTimeouts, Observation, observe
from outlast.policy.deadlines import Learned, Timeouts
from outlast.runtime.board import RankState
from outlast.testing import RankProcesses

CONFIG = FaultToleranceConfig(rank_section_timeouts={"step": 8.0}, safety_factor=2.0, num_warmup_iterations=3)


def seen(step_s: float) -> Observation:
    return Observation(longest_s={"step": step_s}, counts={"step": 20})


def merge(learned: LearnedTimeouts, *steps: float, cycle: str) -> float:
    learned.merge([seen(step_s) for step_s in steps], cycle=cycle, config=CONFIG, finished=False)
    return learned.learned.sections["step"]


def test_next_job_enforces_what_was_learned(tmp_path):
    """What one job saved, the next one loads and enforces, where it is longer than the configured values."""
    learned = LearnedTimeouts.load(tmp_path)
    assert learned.apply(CONFIG) == CONFIG
    assert merge(learned, 4.0, 5.0, cycle="a-0") == 10.0
    learned.save()
    config = LearnedTimeouts.load(tmp_path).apply(CONFIG)
    assert config.rank_section_timeouts == {"step": 10.0}
    assert (config.safety_factor, config.num_warmup_iterations) == (2.0, 3)
    given = CONFIG.changed(rank_section_timeouts={"step": 180.0})
    assert LearnedTimeouts.load(tmp_path).apply(given) == given
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_what_was_not_learned_counts_as_not_given(tmp_path):
    """A config that learns sections alone was not told to have no timeout of heartbeats: an agent's defaults hold, and
    what was given stays given."""
    learned = LearnedTimeouts.load(tmp_path)
    learns = FaultToleranceConfig(calc_ft_timeouts=True)
    assert learned.apply(learns).given == learns.given
    merge(learned, 5.0, cycle="a-0")
    config = learned.apply(learns)
    assert config.given == {"calc_ft_timeouts": True, "rank_section_timeouts": {"step": 10.0}}
    assert Timeouts.from_config(config, with_defaults=True).heartbeat_s == 1800.0
    off = learned.apply(FaultToleranceConfig(rank_heartbeat_timeout=None))
    assert Timeouts.from_config(off, with_defaults=True).heartbeat_s is None


def test_cycles_merge_as_mean_and_nodes_as_maximum(tmp_path):
    """Nodes that report one cycle after each other give the same as all at once; the next cycle is averaged."""
    one, other = LearnedTimeouts.load(tmp_path), LearnedTimeouts.load(tmp_path)
    assert merge(one, 5.0, cycle="a-0") == 10.0
    assert merge(one, 3.0, cycle="a-0") == 10.0
    assert merge(one, 7.0, cycle="a-0") == 14.0
    assert merge(other, 5.0, 3.0, 7.0, cycle="a-0") == 14.0
    assert merge(one, 6.0, cycle="a-1") == (14.0 + 12.0) / 2
    assert merge(one, 8.0, cycle="a-1") == (14.0 + 16.0) / 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"version": 1, "learned": {"sect',
        "[]",
        '{"step": 5}',
        '{"version": 1, "learned": {"sections": {"step": "x"}}}',
    ],
)
def test_torn_or_foreign_file_is_reported_and_ignored(tmp_path, caplog, content):
    """A file that cannot be understood costs what it held, never the job, and the log says so."""
    (tmp_path / FILE_NAME).write_text(content)
    learned = LearnedTimeouts.load(tmp_path)
    assert learned.learned == Learned()
    assert f"{FILE_NAME} is ignored" in caplog.text
    merge(learned, 5.0, cycle="a-0")
    learned.save()
    assert LearnedTimeouts.load(tmp_path).learned.sections == {"step": 10.0}


def test_file_of_a_later_format_is_ignored(tmp_path, caplog):
    """A file of another format is named as such."""
    learned = LearnedTimeouts.load(tmp_path)
    learned.save()
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 9}))
    assert LearnedTimeouts.load(tmp_path).learned == Learned()
    assert "its format is 9" in caplog.text


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    """A write that fails half-way leaves the earlier file whole and no litter."""
    learned = LearnedTimeouts.load(tmp_path)
    merge(learned, 5.0, cycle="a-0")
    learned.save()
    merge(learned, 9.0, cycle="a-0")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        learned.save()
    assert LearnedTimeouts.load(tmp_path).learned.sections == {"step": 10.0}
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_observation_takes_the_maximum_of_attached_ranks():
    """The board's ranks give one observation; a page that nobody attached to gives nothing."""
    states = [
        RankState(local_rank=0, attached=True, longest_s={"step": 1.0, "": 4.0}, counts={"step": 3}, num_heartbeats=2),
        RankState(local_rank=1, attached=True, longest_s={"step": 2.0}, counts={"step": 5}, restored=True),
        RankState(local_rank=2, longest_s={"step": 99.0}),
    ]
    assert observe(states) == Observation(
        longest_s={"step": 2.0, "": 4.0}, counts={"step": 5}, restored=True, num_heartbeats=2
    )


UPDATE = """
import os, sys
from outlast.config import FaultToleranceConfig
from outlast.monitor.learned_timeouts import LearnedTimeouts, Observation
config = FaultToleranceConfig(safety_factor=2.0)
for step_s in map(float, os.environ["SEEN"].split()):
    seen = Observation(longest_s={"step": step_s}, counts={"step": 20})
    LearnedTimeouts.update(sys.argv[1], seen, cycle="a-0", config=config, finished=True)
"""


@pytest.mark.process
def test_ranks_that_save_at_once_lose_nothing(tmp_path: Path):
    """Several processes that add what they saw of one cycle end with the maximum of all."""
    values = [["3", "5", "9"], ["4", "8", "2"], ["7", "11", "1"]]
    seen = [{"SEEN": " ".join(some)} for some in values]
    with RankProcesses(UPDATE, str(tmp_path), world_size=3, code=True, environments=seen) as ranks:
        assert ranks.wait(120) == [0, 0, 0], ranks.tails()
    assert LearnedTimeouts.load(tmp_path).learned.sections == {"step": 22.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME, "ft_state.lock"]


def test_a_file_of_nvidias_extension_is_read(tmp_path):
    """Timeouts that NVIDIA's extension, or Megatron with it, calculated are in force; configured ones in its file are
    not, and what is learned next is merged with them."""
    sections = {"section": {"step": 30.0, "setup": 600.0}, "out_of_section": 9.0, "calculated_sections": ["step"]}
    state = {"current_timeouts": {"section": {**sections, "is_out_of_section_calculated": False}}}
    (tmp_path / FILE_NAME).write_text(json.dumps(state))
    learned = LearnedTimeouts.load(tmp_path)
    assert learned.learned == Learned(sections={"step": 30.0})
    assert merge(learned, 5.0, cycle="a-0") == 20.0
    learned.save()
    assert LearnedTimeouts.load(tmp_path).learned.sections == {"step": 20.0}
