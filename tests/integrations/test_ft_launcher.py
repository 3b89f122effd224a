"""Command lines of NVIDIA's ``ft_launcher`` run under outlast's program of the same name."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import gated_training
import pytest
from click.testing import CliRunner
from gated_training import Launch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from outlast.cli.main import cli
from outlast.errors import ConfigError
from outlast.incidents import EventKind, IncidentKind
from outlast.integrations.ft_launcher import NAME, settle_exit, translate, write_shims
from outlast.journal import read
from outlast.launch.options import check_values
from outlast.testing.ranks import free_port

DOCUMENTED = [
    *("--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:29400", "--nnodes=1", "--nproc-per-node=2"),
    *("--ft-rank_section_timeouts=setup:600,step:180,checkpointing:420", "--ft-rank_out_of_section_timeout=300"),
]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("PET_", "FAULT_TOL_", "OUTLAST_FT_", "SLURM_"))]:
        monkeypatch.delenv(name)


def settings(*argv: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the fault tolerance settings that an ``ft_launcher`` command line passes to ``outlast run``."""
    translation = translate([*argv, "train.py"], environment or {})
    return dict(check_values(translation.arguments).layers.options)


def test_documented_command_line_is_translated() -> None:
    """The command line of Megatron-Bridge's guide is accepted unchanged."""
    translation = translate([*DOCUMENTED, "train.py", "--lr", "3e-4"], {"GROUP_RANK": "0"})
    assert translation.notes == ()
    checked = check_values(translation.arguments)
    assert checked.layers.config.rank_section_timeouts == {"setup": 600.0, "step": 180.0, "checkpointing": 420.0}
    assert checked.layers.config.rank_out_of_section_timeout == 300.0
    assert checked.command.args.nproc_per_node == "2"
    assert checked.command.args.training_script_args == ["--lr", "3e-4"]


@pytest.mark.parametrize("spelling", ["--ft-{dashes}", "--ft-{plain}", "--ft-param-{plain}", "--ft-param-{dashes}"])
@pytest.mark.parametrize("form", ["{name}={value}", "{name} {value}"])
def test_every_spelling_of_a_setting_is_accepted(spelling: str, form: str) -> None:
    """Each ``--ft-`` option is accepted in all spellings, with the value in either place."""
    values = {
        "initial_rank_heartbeat_timeout": ("70", 70.0),
        "rank_heartbeat_timeout": ("60.5", 60.5),
        "rank_section_timeouts": (
            "setup:,step:180,checkpointing:none",
            {"setup": None, "step": 180.0, "checkpointing": None},
        ),
        "rank_out_of_section_timeout": ("30", 30.0),
        "safety_factor": ("4", 4.0),
        "gpu_memory_reclaim_timeout": ("20", 20.0),
        "gpu_memory_tolerance_mb": ("256", 256.0),
        "gpu_memory_poll_interval": ("2", 2.0),
    }
    for plain, (text, value) in values.items():
        name = spelling.format(plain=plain, dashes=plain.replace("_", "-"))
        assert settings(*form.format(name=name, value=text).split()) == {plain: value}


@pytest.mark.parametrize(
    ("line", "translated", "expected_note"),
    [
        ("--term-timeout=90", "--ft-shutdown-grace=90.0", ""),
        ("--term_timeout 90", "--ft-shutdown-grace=90.0", ""),
        ("--ft-log_level=WARN", "--log-level=warning", ""),
        ("--ft-param-log_level 10", "--log-level=debug", ""),
        ("--ignore-missing-fault-tol-cfg", "", ""),
        ("--ft-rank_termination_signal=SIGKILL", "", ""),
        ("--ft-rank_termination_signal=9", "", ""),
        ("--ft-rank_termination_signal kill", "", ""),
        ("--ft-rank_termination_signal SIGTERM", "", "is ended with SIGKILL"),
        ("--ft-rank_termination_signal 15", "", "is ended with SIGKILL"),
        ("--restart-policy=any-failed", "", ""),
        ("--ft-restart-policy min-healthy", "", "--ft-restart-policy (every failure ends the cycle on all nodes)"),
        ("--ft-workload_check_interval 5", "", "--ft-workload_check_interval (a hang is detected"),
        ("--ft-param-workload_check_interval=5", "", "--ft-param-workload_check_interval (a hang"),
        ("--ft-node-health-check-interval 5", "", "node_interval of [health]"),
        ("--ft-restart_check_interval=60", "", "--ft-restart_check_interval"),
        ("--ft-enable-nic-monitor=False", "", ""),
        ("--ft-enable_nic_monitor True", "", "network_interfaces"),
        ("--ft-pci-topo-file=x --ft-link-down-path-template y", "", "--ft-link-down-path-template (set"),
        ("--nproc-per-node 2 --max-restarts=0", "--nproc-per-node 2 --max-restarts=0", ""),
        ("-m -t 3", "-m -t 3", ""),
        ("--rdzv-id=gpt", "--rdzv-id=gpt", ""),
        ("--rdzv-id 4711 --nnodes 1", "--nnodes 1", ""),
        ("--rdzv-id 4711 --nnodes 2", "--rdzv-id 4711 --nnodes 2", ""),
        ("--rdzv-id=4711 --run-dir=x", "--rdzv-id=4711 --run-dir=x", ""),
        ("--nonsense --ft-nonsense=3", "--nonsense --ft-nonsense=3", ""),
    ],
)
def test_different_options_are_translated(line: str, translated: str, expected_note: str) -> None:
    """Options with another name, or without a counterpart, are translated; others are unchanged."""
    translation = translate([*line.split(), "train.py", "--term-timeout=1"], {})
    assert translation.arguments == (*translated.split(), "train.py", "--term-timeout=1")
    assert (expected_note in "".join(translation.notes)) if expected_note else translation.notes == ()
    assert len(translation.notes) <= 1


def test_random_run_id_is_kept_only_in_slurm_jobs() -> None:
    """NeMo-Run's random number is the run id only in a Slurm job, which keeps it when it is requeued."""
    line = ["--rdzv-id", "4711", "train.py"]
    assert translate(line, {}).arguments == ("train.py",)
    assert translate(line, {"SLURM_JOB_ID": "1"}).arguments == tuple(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nonsense", "unknown option --nonsense"),
        ("--ft-rank-heartbeat-timeot=3", "did you mean --ft-rank-heartbeat-timeout"),
        ("--ft-rank_heartbeat_timeout=soon", "--ft-rank_heartbeat_timeout: 'soon' does not fit"),
        ("--ft-log-level=loud", "--ft-log-level=loud is not a log level"),
        ("--term-timeout=long", "--term-timeout: 'long' does not fit"),
        ("--ft-log-level", "--ft-log-level=train.py is not a log level"),
        ("--ft-cfg-path=", "--ft-cfg-path is empty"),
        ("--ft-cfg-path=nothing.yaml", "nothing.yaml: no such file"),
        ("--fault-tol-cfg-path nothing.yaml", "nothing.yaml: no such file"),
    ],
)
def test_invalid_options_are_rejected_by_name(line: str, message: str) -> None:
    """Unknown options, invalid values and missing files are one line each."""
    with pytest.raises(ConfigError, match=message):
        settings(*line.split())


@settings_of_hypothesis(max_examples=30)
@given(
    st.lists(st.sampled_from([*DOCUMENTED, "--ft-log_level=INFO", "--ft-pci-topo-file=x", "-m", "--term-timeout=9"])),
    st.lists(st.text(min_size=1).filter(lambda word: "\0" not in word)),
)
def test_script_arguments_are_unchanged(options: list[str], rest: list[str]) -> None:
    """The script's arguments are not parsed, and a translated line is not translated again."""
    first = translate([*options, "train.py", *rest], {})
    assert first.arguments[len(first.arguments) - len(rest) - 1 :] == ("train.py", *rest)
    assert translate(first.arguments, {}).arguments == first.arguments


@settings_of_hypothesis(max_examples=6)
@given(st.permutations([("--nproc-per-node", "3"), ("--ft-rank_heartbeat_timeout", "9"), ("--ft-log_level", "INFO")]))
def test_separate_values_stay_with_their_options(pairs: list[tuple[str, str]]) -> None:
    """In any order, each option has its own value."""
    translation = translate([*(word for pair in pairs for word in pair), "train.py"], {})
    checked = check_values(translation.arguments)
    args = checked.command.args
    assert (args.nproc_per_node, args.log_level, args.training_script) == ("3", "info", "train.py")
    assert checked.layers.options == {"rank_heartbeat_timeout": 9.0}


NVRX_CONFIG = """\
exp_manager:
  callbacks:
    - other: 1
    - fault_tolerance:
        initial_rank_heartbeat_timeout: 3600.0
        rank_heartbeat_timeout: null
        rank_section_timeouts: {setup: 600, step: null}
        rank_out_of_section_timeout: 300
        rank_termination_signal: SIGKILL
        log_level: 30
        workload_check_interval: 5.0
        pci_topo_file: null
        of_a_later_version: 1
        safety_faktor: 3
"""


def test_nvrx_config_file_is_read(tmp_path: Path) -> None:
    """The section is read from any level of a YAML file; unknown settings are logged, not rejected."""
    path = tmp_path / "ft.yaml"
    path.write_text(NVRX_CONFIG)
    expected = {
        "initial_rank_heartbeat_timeout": 3600.0,
        "rank_heartbeat_timeout": None,
        "rank_section_timeouts": {"setup": 600.0, "step": None},
        "rank_out_of_section_timeout": 300.0,
    }
    for line, environment in (
        ([f"--ft-cfg-path={path}"], {}),
        (["--fault-tol-cfg-path", str(path)], {}),
        (["--ft-cfg_path", str(path)], {}),
        ([], {"FAULT_TOL_CFG_PATH": str(path)}),
        ([], {"PET_FT_CFG_PATH": str(path)}),
    ):
        assert settings(*line, environment=environment) == expected
    translation = translate([f"--ft-cfg-path={path}", "train.py"], {})
    assert "--log-level=warning" in translation.arguments
    known, dropped = translation.notes
    assert "does not know: of_a_later_version, safety_faktor (or safety_factor?)" in known
    assert dropped.startswith(f"ft_launcher: without effect here: workload_check_interval of {path}")


def test_setting_sources_have_a_precedence(tmp_path: Path) -> None:
    """The command line takes precedence over the environment, and that over the file, per setting."""
    path = tmp_path / "ft.yaml"
    path.write_text("fault_tolerance: {safety_factor: 2, rank_heartbeat_timeout: 20, rank_out_of_section_timeout: 2}")
    variables = {
        "OUTLAST_FT_RANK_HEARTBEAT_TIMEOUT": "30",
        "OUTLAST_FT_RANK_OUT_OF_SECTION_TIMEOUT": "3",
        "OUTLAST_FT_CALC_FT_TIMEOUTS": "true",
        "OUTLAST_FT_RANK_SECTION_TIMEOUTS": "setup:600,step:",
        "OUTLAST_FT_MIN_NODES": "",
    }
    assert settings(f"--ft-cfg-path={path}", "--ft-rank_heartbeat_timeout=40", environment=variables) == {
        "safety_factor": 2.0,
        "rank_out_of_section_timeout": 3.0,
        "rank_heartbeat_timeout": 40.0,
        "calc_ft_timeouts": True,
        "rank_section_timeouts": {"setup": 600.0, "step": None},
    }
    with pytest.raises(ConfigError, match=r"OUTLAST_FT_SAFETY_FAKTOR.*OUTLAST_FT_SAFETY_FACTOR"):
        settings(environment={"OUTLAST_FT_SAFETY_FAKTOR": "3"})
    with pytest.raises(ConfigError, match="OUTLAST_FT_SAFETY_FACTOR: 'much'"):
        settings(environment={"OUTLAST_FT_SAFETY_FACTOR": "much"})


def test_outlast_config_file_is_passed_on(tmp_path: Path) -> None:
    """A config file of outlast is passed on and checked as with ``outlast run --config``."""
    path = tmp_path / "ours.toml"
    path.write_text('[fault_tolerance]\nrank_heartbeat_timeout = 60\n[checkpoint]\ndirectory = "x"\n')
    translation = translate([f"--ft-cfg-path={path}", "train.py"], {})
    assert translation.arguments == (f"--config={path}", "train.py")
    assert check_values(translation.arguments).layers.config.rank_heartbeat_timeout == 60.0


def test_script_config_file_is_not_an_outlast_config(tmp_path: Path) -> None:
    """Only the fault tolerance section of a script's YAML file is used, which is logged."""
    path = tmp_path / "train.yaml"
    path.write_text("fault_tolerance: {safety_factor: 2}\ncheckpoint: {every: 100}\nmodel: gpt\n")
    assert settings(f"--ft-cfg-path={path}") == {"safety_factor": 2.0}
    (note,) = translate([f"--ft-cfg-path={path}", "train.py"], {}).notes
    assert "only its section fault_tolerance is used; not a setting here: checkpoint" in note
    path.write_text("model: {size: 3}\ncheckpoint: {directory: x}\n")
    line = [f"--ft-cfg-path={path}", "--ft-rank_heartbeat_timeout=40"]
    assert settings(*line) == {"rank_heartbeat_timeout": 40.0}
    (note,) = translate([*line, "train.py"], {}).notes
    assert f"{path} has no section fault_tolerance; nothing of it is used" in note
    path.write_text("checkpoint: {directory: x}\nfault_tolerance: {safety-factor: 2}\ntrain: {lr: 1}\n")
    assert translate([f"--ft-cfg-path={path}", "train.py"], {}).arguments == (f"--config={path}", "train.py")


def test_invalid_value_in_a_file_is_rejected_with_its_key(tmp_path: Path) -> None:
    """An invalid value in a file is rejected with the file and the key."""
    path = tmp_path / "ft.yaml"
    path.write_text("a: {fault_tolerance: {rank_heartbeat_timeout: soon}}")
    with pytest.raises(ConfigError, match=r"ft\.yaml.*rank_heartbeat_timeout"):
        settings(f"--ft-cfg-path={path}")
    path.write_text("a: {fault_tolerance: {log_level: loud}}")
    with pytest.raises(ConfigError, match=r"ft\.yaml: log_level=loud is not a log level"):
        settings(f"--ft-cfg-path={path}")


def test_missing_optional_config_file_is_accepted() -> None:
    """A missing file is accepted from NeMo-Run's variable, and with the old option."""
    for line, environment in (
        (["train.py"], {"FAULT_TOL_CFG_PATH": "nothing.yml"}),
        (["--ignore-missing-fault-tol-cfg", "--ft-cfg-path=nothing.yml", "train.py"], {}),
    ):
        translation = translate(line, environment)
        assert translation.arguments == ("train.py",)
        assert "there is no nothing.yml" in translation.notes[0]


@pytest.mark.parametrize("in_slurm", [False, True])
def test_flag_file_prevents_useless_retries(tmp_path: Path, in_slurm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag file is created for 0, 17, 19 and 93 only; 75 becomes 0 in a Slurm job."""
    for code in (0, 1, 2, 16, 17, 18, 19, 75, 93, 143):
        flag = tmp_path / f"folder-{code}" / "flag"
        monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
        if in_slurm:
            monkeypatch.setenv("SLURM_JOB_ID", "7")
        assert settle_exit(code) == (0 if code == 75 and in_slurm else code)
        assert flag.exists() == (code in (0, 17, 19, 93))
        monkeypatch.delenv("FAULT_TOL_FINISHED_FLAG_FILE")
        assert settle_exit(code) == code


def test_unhealthy_node_does_not_end_a_job_with_other_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If other nodes can continue, 19 creates no flag; a flag that cannot be created does not change the exit code."""
    flag = tmp_path / "flag"
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    assert settle_exit(19, others_may_continue=True) == 19
    assert not flag.exists()
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(tmp_path / "file" / "flag"))
    assert settle_exit(17) == 17


def test_shims_are_written_once(tmp_path: Path) -> None:
    """The program is written once and replaced if it differs, and the shell line accepts any folder."""
    folder = tmp_path / "new" / "shims"
    invoked = CliRunner().invoke(cli, ["shims", str(folder)], standalone_mode=False)
    assert f"{folder / NAME}: written" in invoked.output
    before = (folder / NAME).stat()
    assert os.access(folder / NAME, os.X_OK)
    invoked = CliRunner().invoke(cli, ["shims", str(folder), "--json"], standalone_mode=False)
    document = json.loads(invoked.output)
    assert document == {"folder": str(folder), "shims": [{"path": str(folder / NAME), "changed": False}]}
    assert (folder / NAME).stat().st_mtime_ns == before.st_mtime_ns
    text = (folder / NAME).read_text()
    folder_with_space = tmp_path / "with space"
    invoked = CliRunner().invoke(cli, ["shims", str(folder_with_space)], standalone_mode=False)
    assert f"export PATH='{folder_with_space}':\"$PATH\"" in invoked.output
    (folder / NAME).write_text(text.replace("exec ", "exec /another"))
    (folder / NAME).chmod(0o644)
    assert write_shims(folder)[0].changed
    assert ((folder / NAME).read_text(), os.access(folder / NAME, os.X_OK)) == (text, True)
    assert sorted(path.name for path in folder.iterdir()) == [NAME]


def test_foreign_programs_are_not_overwritten(tmp_path: Path) -> None:
    """Another program, a dangling link and an unusable folder are rejected."""
    (tmp_path / NAME).write_text("#!/usr/bin/python\nfrom nvidia_resiliency_ext ...")
    with pytest.raises(ConfigError, match="is another program"):
        write_shims(tmp_path)
    assert (tmp_path / NAME).read_text().startswith("#!/usr/bin/python\n")
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to("nowhere")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_shims(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_shims(tmp_path / "file" / "shims")


def launched(folder: Path, *argv: str, **variables: str) -> AbstractContextManager[Launch]:
    """Launch in ``folder`` as an old script does, by the program's name."""
    write_shims(folder / "shims")
    variables["PATH"] = f"{folder / 'shims'}:{os.environ['PATH']}"
    return gated_training.launched(folder, NAME, *argv, **variables)


@pytest.mark.extended
@pytest.mark.process
@pytest.mark.slow
def test_killed_and_hung_ranks_are_restarted(tmp_path: Path) -> None:
    """With the documented line, after a SIGKILL and a SIGSTOP, the run ends with an undisturbed run's weights."""
    line = [
        *("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--nnodes=1", "--nproc-per-node=2"),
        *("--ft-rank_section_timeouts=setup:600,step:6,checkpointing:420", "--ft-rank_out_of_section_timeout=300"),
        *("--ft-workload_check_interval", "5", "--run-dir=run", "--rdzv-id=17"),
    ]
    script = [str(gated_training.PROGRAM), str(tmp_path), "12", "@0:1:5", "@1:0:8"]
    flag = tmp_path / "finished"
    variables = {"GROUP_RANK": "0", "FAULT_TOL_FINISHED_FLAG_FILE": str(flag), "FAULT_TOL_CFG_PATH": "none.yml"}
    with launched(tmp_path, *line, *script, **variables) as launch:
        launch.signal_at_gate(0, signal.SIGKILL)
        launch.signal_at_gate(1, signal.SIGSTOP)
        assert launch.process.wait(200) == 0, launch.process.tail(60)
    assert (tmp_path / "digest").read_text() == gated_training.undisturbed(12)
    kinds = [event.data["incident"]["kind"] for event in read(tmp_path / "run") if event.kind == EventKind.INCIDENT]
    assert {IncidentKind.WORKER_DIED, IncidentKind.WORKER_HUNG} <= set(kinds), kinds
    assert gated_training.first_iteration(tmp_path, cycle=1) in (2, 4)  # the last checkpoint may not have been durable
    assert gated_training.first_iteration(tmp_path, cycle=2) in (6, 8)
    assert flag.exists()
    assert "ft_launcher: without effect here: --ft-workload_check_interval" in launch.process.output()


@pytest.mark.process
def test_unknown_option_exits_with_2(tmp_path: Path) -> None:
    """An unknown option is one line and starts nothing; ``--help`` lists the differences."""
    flag = tmp_path / "finished"
    with launched(tmp_path, "--nonsense", "train.py", FAULT_TOL_FINISHED_FLAG_FILE=str(flag)) as launch:
        assert launch.process.wait(60) == 2
    assert launch.process.output() == "ft_launcher: unknown option --nonsense; see outlast run --help\n"
    with launched(tmp_path, "--help") as launch:
        assert launch.process.wait(60) == 0
    assert "usage: ft_launcher" in launch.process.output()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "shims"]
