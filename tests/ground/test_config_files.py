"""Config files are read in three formats, and every error is reported in one clear line."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from outlast.config import HealthConfig, PreemptionConfig
from outlast.config.sources import load_config
from outlast.errors import ConfigError

GOOD = {
    "good.toml": """
run_dir = "/tmp/run"
[checkpoint]
directory = "/tmp/ckpt"
save-interval = 5
[fault_tolerance]
enable_ft_package = true
rank_heartbeat_timeout = "none"
rank_section_timeouts = { setup = 600, step = "none" }
""",
    "good.yaml": """
run_dir: /tmp/run
checkpoint: {directory: /tmp/ckpt, save-interval: 5}
fault_tolerance:
  enable_ft_package: true
  rank_heartbeat_timeout: none
  rank_section_timeouts: {setup: 600, step: none}
""",
    "good.json": """
{"run_dir": "/tmp/run", "checkpoint": {"directory": "/tmp/ckpt", "save-interval": 5},
 "fault_tolerance": {"enable_ft_package": true, "rank_heartbeat_timeout": null,
                     "rank_section_timeouts": {"setup": 600, "step": null}}}
""",
}


@pytest.mark.parametrize("name", GOOD)
def test_three_formats_give_the_same_config(name: str, tmp_path: Path) -> None:
    """TOML, YAML and JSON files with the same keys give the same config."""
    path = tmp_path / name
    path.write_text(GOOD[name])
    config = load_config(path)
    assert config.run_dir == "/tmp/run"
    assert config.checkpoint is not None
    assert config.checkpoint.save_interval == 5
    assert config.fault_tolerance is not None
    assert config.fault_tolerance.rank_heartbeat_timeout is None
    assert dict(config.fault_tolerance.rank_section_timeouts) == {"setup": 600.0, "step": None}


BAD = [
    ("c.txt", "x = 1", "", "ends in one of .json, .toml, .yaml, .yml"),
    ("c.toml", "run_dir = \n", ":1", "not valid TOML"),
    ("c.json", '{"run_dir": 1,\n}', ":2", "not valid JSON"),
    ("c.yaml", "run_dir: [1\n", ":2", "not valid YAML"),
    ("c.yaml", "- 1\n- 2\n", "", "holds a list, not settings"),
    ("c.json", "7", "", "holds a int, not settings"),
    ("c.toml", "seed = 1\nrun_dri = 'x'\n", ":2", "unknown key 'run_dri'; did you mean 'run_dir'?"),
    (
        "c.toml",
        "# safety = 3\n[fault_tolerance]\nsafety = 3\n",
        ":3",
        "fault_tolerance: unknown key 'safety'; did you mean 'safety_factor'?",
    ),
    (
        "c.toml",
        "[fault_tolerance]\nmax-restarts = 3\n",
        ":2",
        "fault_tolerance: unknown key 'max-restarts'; it is an option of outlast run: --max-restarts",
    ),
    (
        "c.yaml",
        "fault_tolerance:\n  rank_heartbeat_timeout: soon\n",
        ":2",
        "fault_tolerance.rank_heartbeat_timeout: 'soon' does not fit; write a number, or none",
    ),
    (
        "c.json",
        '{"checkpoint":\n {"directory": "x", "save_interval": -1}}',
        ":1",
        "save_interval=-1 must be a number of iterations",
    ),
    ("c.toml", "[checkpoint]\nsave_interval = 3\n", ":1", "neither directory nor local_directory is set"),
    ("c.toml", "checkpoint = 3\n", ":1", "3 is not a section; write keys and values below its name"),
    ("c.json", '{"seed": 1, "seed": 2}', "", "key 'seed' is given twice"),
    ("c.yaml", "seed: 1\nseed: 2\n", ":1", "key 'seed' is given twice"),
    ("c.toml", "seed = 1\nseed = 2\n", ":2", "not valid TOML"),
    ("c.toml", "[checkpoint]\ndirectory='x'\nsave_interval=1\nsave-interval=2\n", ":4", "given twice"),
    ("c.toml", "train = 5\n", ":1", "train: 5 is not a section"),
    (
        "c.toml",
        "[health]\nprocess-group-interval = 5\n[train]\nnccl_health_check_interval = 5\n",
        ":4",
        "train.nccl_health_check_interval is health.process_group_interval, which is given too; keep one of them",
    ),
    ("c.toml", "health='none'\n[train]\nnccl_health_check_interval = 5\n", ":3", "which is given too"),
    ("c.toml", "[train]\nnccl_health_check_interval = 'often'\n", ":2", "health.process_group_interval: 'often'"),
    ("c.toml", "# x\n[train]\nnccl_health_check_interval = -1\n", ":2", "health: process_group_interval=-1"),
    ("c.toml", "seed = true\n", ":1", "seed: True does not fit; write a whole number, or none"),
    ("c.toml", "[fault_tolerance]\nrank_heartbeat_timeout = inf\n", ":1", "must be finite"),
    ("c.yaml", 'seed: !!int ""\n', "", "a value does not fit its tag"),
    ("c.yaml", "seed: 1\n? [a]\n: 2\n", ":2", "found unhashable key"),
    ("c.yaml", "a: &a {b: 1}\nc:\n  <<: *a\n", ":3", "merge keys (<<) are not supported; write the keys out"),
    ("c.yaml", "a: &a [*a]\n", "", "nested deeper than 50"),
    ("c.yaml", "a: &a [1, 1, 1]\nb: &b [*a, *a]\nc: [" + "*b, " * 2000 + "]", "", "aliases make it"),
    ("c.yaml", "a: [" + "1, " * 50_000 + "]", "", "the limit is 131072"),
    ("c.toml", "[" + "a." * 60 + "b]\n", "", "nested deeper than 50"),
    ("c.toml", "seed = " + "[" * 60 + "]" * 60, "", "nested deeper than 50"),
    ("c.json", '{"a":' * 60 + "1" + "}" * 60, "", "nested deeper than 50"),
    ("c.json", '{"%s": 1}' % ("a" * 5000), ":1", "... (5002 characters); known: checkpoint"),
]


@pytest.mark.parametrize(("name", "text", "line", "message"), BAD)
def test_invalid_file_is_reported_in_one_line(name: str, text: str, line: str, message: str, tmp_path: Path) -> None:
    """Every error in a file is one line with the file, the line if known, and the change to make."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    reported = str(caught.value)
    assert reported.startswith(f"{path}{line}: ")
    assert message in reported
    assert "\n" not in reported


def test_missing_file_and_folder_are_rejected(tmp_path: Path) -> None:
    """A missing file or a folder is rejected, and the error contains the path."""
    with pytest.raises(ConfigError, match=r"none\.toml: no such file; check the path"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ConfigError, match=r"folder\.toml: cannot be read \(it is a folder, not a regular file\)"):
        load_config(tmp_path / "folder.toml")


def test_brackets_in_strings_are_not_nesting(tmp_path: Path) -> None:
    """Brackets and dots in strings and comments do not count as nesting."""
    path = tmp_path / "c.toml"
    marks = "[{." * 100
    path.write_text(f'# {marks}\nrun_dir = """{marks}"""\n# "\n')
    assert load_config(path).run_dir == marks
    path.write_text(f"run_dir = '{marks}'")
    assert load_config(path).run_dir == marks
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"run_dir": marks}))
    assert load_config(path).run_dir == marks
    path = tmp_path / "c.yaml"
    path.write_text(f"run_dir: &name '{marks}'\nfault_plan: *name\n# {marks}\n")
    assert load_config(path).fault_plan == marks


def test_link_is_read_and_pipe_is_rejected(tmp_path: Path) -> None:
    """A file of a Kubernetes ConfigMap is a link; a pipe without a writer does not block the command."""
    (tmp_path / "data.toml").write_text("seed = 3\n")
    (tmp_path / "link.toml").symlink_to("data.toml")
    assert load_config(tmp_path / "link.toml").seed == 3
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="it is a pipe"):
        load_config(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="it is a device"):
        load_config(tmp_path / "zero.toml")


def test_binary_file_is_rejected(tmp_path: Path) -> None:
    """A file that is not text is rejected with the position of its first invalid byte."""
    path = tmp_path / "model.json"
    path.write_bytes(b"{\xff\xfe")
    with pytest.raises(ConfigError, match="byte 1 is not UTF-8"):
        load_config(path)


def test_empty_file_gives_defaults(tmp_path: Path) -> None:
    """An empty TOML or YAML file gives a config with all defaults."""
    for name in ("empty.toml", "empty.yaml"):
        (tmp_path / name).write_text("")
        assert load_config(tmp_path / name).checkpoint is None


def test_yaml_without_pyyaml_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PyYAML a YAML file is rejected, and the error contains the package to install."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "c.yaml"
    path.write_text("seed: 1")
    with pytest.raises(ConfigError, match=r"pip install 'outlast\[yaml\]'"):
        load_config(path)


def test_kempnerforge_names_are_accepted(tmp_path: Path) -> None:
    """Users of KempnerForge find the shutdown deadline and the liveness check under the same names."""
    path = tmp_path / "c.toml"
    path.write_text(
        "[train]\nshutdown_timeout_sec = 120.0\nnccl-health-check-interval = 50\n[health]\ncheck_timeout = 5\n"
    )
    config = load_config(path)
    assert config.preemption is not None
    assert config.preemption.shutdown_timeout == 120.0
    assert config.health is not None
    assert (config.health.process_group_interval, config.health.check_timeout) == (50, 5.0)


def test_complete_kempnerforge_section_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A complete KempnerForge [train] table loads unchanged; one WARNING of rank 0 lists the keys that outlast does not
    use, so that a misspelt setting is not ignored silently."""
    path = tmp_path / "c.toml"
    path.write_text(
        "seed = 1\n[train]\nbatch_size = 8\nmax_steps = 100\nshutdown_timeout_sec = 120.0\n"
        "nccl_health_chek_interval = 50\n"
    )
    config = load_config(path)
    assert (config.seed, config.preemption and config.preemption.shutdown_timeout, config.health) == (1, 120.0, None)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    reported = record.getMessage()
    assert reported.startswith(f"{path}:2: [train] has keys")
    assert "batch_size, max_steps, nccl_health_chek_interval (or nccl_health_check_interval?);" in reported
    assert "\n" not in reported
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load_config(path) == config
    assert not caplog.records


KEMPNERFORGE = """
[model]
dim = 4096
norm_type = "rmsnorm"

[train]
max_steps = 100000
shutdown_timeout_sec = 120.0

[optimizer]
betas = [0.9, 0.95]

[scheduler]
name = "cosine"

[data]
dataset_path = "/path"

[distributed]
dp_shard = -1

[checkpoint]
dir = "checkpoints/7b"
interval = 1000
async_mode = "async_with_pinned_mem"
keep_last_n = 3

[metrics]
enable_wandb = true

[profiling]
enable = false
"""


def test_complete_kempnerforge_file_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checkpoint settings are used; one WARNING of rank 0 lists the sections that belong to the script."""
    path = tmp_path / "7b.toml"
    path.write_text(KEMPNERFORGE)
    config = load_config(path)
    saved = config.checkpoint
    assert saved is not None
    assert (saved.directory, saved.save_interval, saved.most_recent_k) == ("checkpoints/7b", 1000, 3)
    assert config.preemption is not None
    assert config.preemption.shutdown_timeout == 120.0
    sections, *keys = (record.getMessage() for record in caplog.records)
    assert sections == (
        f"{path} has sections that outlast does not use: model, optimizer, scheduler, data, distributed, metrics, "
        "profiling"
    )
    assert [text.partition(";")[0].partition(": [")[2] for text in keys] == [
        "checkpoint] has keys that outlast does not use: async_mode",
        "train] has keys that outlast does not use: max_steps",
    ]
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert load_config(path) == config
    assert not caplog.records


@pytest.mark.parametrize(
    ("section", "near"),
    [
        ("checkpiont", "checkpoint"),
        ("fault-tolerence", "fault_tolerance"),
        ("straggler", "straggler_detection"),
        ("inprocess_restart", "in_process_restart"),
        ("rerun_machine", "rerun_state_machine"),
    ],
)
def test_misspelt_section_is_rejected(section: str, near: str, tmp_path: Path) -> None:
    """A misspelt section is not taken for a section of the training script."""
    path = tmp_path / "c.toml"
    path.write_text(f"[model]\ndim = 1\n[{section}]\nenabled = true\n")
    with pytest.raises(ConfigError, match=f"c.toml:3: unknown key '{section}'; did you mean '{near}'"):
        load_config(path)


def test_megatron_checkpoint_settings_load(tmp_path: Path) -> None:
    """Megatron's names and values of a local and a global tier are accepted unchanged."""
    path = tmp_path / "c.toml"
    path.write_text(
        '[checkpoint]\nsave = "/shared/run"\nload = "/shared/run"\nasync_save = true\nckpt_format = "torch_dist"\n'
        'non_persistent_ckpt_type = "local"\nnon_persistent_save_interval = 50\n'
        'non_persistent_local_ckpt_dir = "/local/ckpt"\nnon_persistent_local_ckpt_algo = "fully_parallel"\n'
    )
    checkpoint = load_config(path).checkpoint
    assert checkpoint is not None
    assert (checkpoint.directory, checkpoint.local_directory) == ("/shared/run", "/local/ckpt")


def test_names_of_other_systems_have_equal_defaults() -> None:
    """A setting under another system's name has the same meaning, and that system's default."""
    assert PreemptionConfig().shutdown_timeout == 600.0
    assert HealthConfig().process_group_interval == 0
