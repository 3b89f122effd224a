"""ft_state.json: learned timeouts survive cycles, jobs and damaged files."""

import json
from pathlib import Path

import pytest

from outlast.config import FaultToleranceConfig
from outlast.monitor.learned_timeouts import FILE_NAME, LearnedTimeouts, Observation, observe
from outlast.policy.deadlines import Learned, Timeouts
from outlast.runtime.board import RankState
from outlast.testing import RankProcesses

CONFIG = FaultToleranceConfig(rank_section_timeouts={"step": 8.0}, safety_factor=2.0, num_warmup_iterations=3)


def observed(step_s: float) -> Observation:
    return Observation(longest_s={"step": step_s}, counts={"step": 20})


def merge(learned: LearnedTimeouts, *steps: float, cycle: str) -> float:
    learned.merge([observed(step_s) for step_s in steps], cycle=cycle, config=CONFIG, finished=False)
    return learned.learned.sections["step"]


def test_the_next_job_enforces_learned_timeouts(tmp_path):
    """The timeouts that one job saved are enforced by the next job where they are longer than the configured ones."""
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


def test_timeouts_that_were_not_learned_keep_their_defaults(tmp_path):
    """Learned section timeouts do not disable the default heartbeat timeout, and explicitly set values remain in
    force."""
    learned = LearnedTimeouts.load(tmp_path)
    learning = FaultToleranceConfig(calc_ft_timeouts=True)
    assert learned.apply(learning).given == learning.given
    merge(learned, 5.0, cycle="a-0")
    config = learned.apply(learning)
    assert config.given == {"calc_ft_timeouts": True, "rank_section_timeouts": {"step": 10.0}}
    assert Timeouts.from_config(config, with_defaults=True).heartbeat_s == 1800.0
    without_heartbeats = learned.apply(FaultToleranceConfig(rank_heartbeat_timeout=None))
    assert Timeouts.from_config(without_heartbeats, with_defaults=True).heartbeat_s is None


def test_nodes_merge_by_maximum_and_cycles_by_mean(tmp_path):
    """Nodes that report one cycle one after another give the same result as all at once; the next cycle is averaged."""
    separate, together = LearnedTimeouts.load(tmp_path), LearnedTimeouts.load(tmp_path)
    assert merge(separate, 5.0, cycle="a-0") == 10.0
    assert merge(separate, 3.0, cycle="a-0") == 10.0
    assert merge(separate, 7.0, cycle="a-0") == 14.0
    assert merge(together, 5.0, 3.0, 7.0, cycle="a-0") == 14.0
    assert merge(separate, 6.0, cycle="a-1") == (14.0 + 12.0) / 2
    assert merge(separate, 8.0, cycle="a-1") == (14.0 + 16.0) / 2


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
def test_an_invalid_file_is_logged_and_ignored(tmp_path, caplog, content):
    """An invalid file costs its content, not the job, and is logged."""
    (tmp_path / FILE_NAME).write_text(content)
    learned = LearnedTimeouts.load(tmp_path)
    assert learned.learned == Learned()
    assert f"{FILE_NAME} is ignored" in caplog.text
    merge(learned, 5.0, cycle="a-0")
    learned.save()
    assert LearnedTimeouts.load(tmp_path).learned.sections == {"step": 10.0}


def test_a_file_of_a_later_format_is_logged_and_ignored(tmp_path, caplog):
    """The log reports the format of a file that is not supported."""
    learned = LearnedTimeouts.load(tmp_path)
    learned.save()
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 9}))
    assert LearnedTimeouts.load(tmp_path).learned == Learned()
    assert "its format is 9" in caplog.text


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    """A write that fails half-way keeps the earlier file intact and leaves no temporary file."""
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


def test_an_observation_is_the_maximum_of_attached_ranks():
    """The ranks of the heartbeat memory give one observation; a page without an attached rank is ignored."""
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
def test_concurrent_updates_lose_nothing(tmp_path: Path):
    """Processes that add their observations of one cycle concurrently end with the maximum of all."""
    values = [["3", "5", "9"], ["4", "8", "2"], ["7", "11", "1"]]
    observed = [{"SEEN": " ".join(steps_s)} for steps_s in values]
    with RankProcesses(UPDATE, str(tmp_path), world_size=3, code=True, environments=observed) as ranks:
        assert ranks.wait(120) == [0, 0, 0], ranks.tails()
    assert LearnedTimeouts.load(tmp_path).learned.sections == {"step": 22.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME, "ft_state.lock"]


def test_a_file_of_nvrx_is_read(tmp_path):
    """Timeouts that NVRx, or Megatron with it, calculated are in force and merged with later ones; configured timeouts
    in its file are not."""
    sections = {"section": {"step": 30.0, "setup": 600.0}, "out_of_section": 9.0, "calculated_sections": ["step"]}
    state = {"current_timeouts": {"section": {**sections, "is_out_of_section_calculated": False}}}
    (tmp_path / FILE_NAME).write_text(json.dumps(state))
    learned = LearnedTimeouts.load(tmp_path)
    assert learned.learned == Learned(sections={"step": 30.0})
    assert merge(learned, 5.0, cycle="a-0") == 20.0
    learned.save()
    assert LearnedTimeouts.load(tmp_path).learned.sections == {"step": 20.0}
