"""Batch scripts: their requests to Slurm, the settings that are rejected, and that the examples match the tool's
output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outlast.cli.slurm import slurm
from outlast.errors import ConfigError
from outlast.integrations.slurm import BatchScript, step_options
from outlast.integrations.slurm.jobs import prepare

EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"


def script(**settings: Any) -> BatchScript:
    return BatchScript(**{"command": ("train.py", "--lr", "3e-4"), "run_id": "gpt", "run_dir": "/runs/gpt", **settings})


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def is_bash(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, check=False, timeout=300).returncode == 0


def test_signal_goes_to_the_steps_not_the_batch_shell() -> None:
    """The signal before the time limit goes to the job's steps, and the exit of one task does not end the others."""
    text = script(preempt_time=90).render()
    assert "--signal=TERM@90" in directives(text)
    assert "--signal=B:" not in text
    assert "--requeue" in directives(text)
    assert "--kill-on-bad-exit=0" in text
    assert is_bash(text)
    assert not [line for line in directives(script(preempt_time=0).render()) if "signal" in line]


def test_job_with_spares_survives_the_loss_of_a_node() -> None:
    """Spares are additional nodes of the job, and neither job nor step ends with the loss of a node."""
    text = script(nodes=4, spares=1).render()
    assert {"--nodes=5", "--no-kill"} <= set(directives(text))
    assert "--nnodes=4:5" in text
    assert " --no-kill" in text.split("srun ")[1].splitlines()[0]
    assert "--no-kill" not in script(nodes=4).render()


def test_all_settings_appear_in_the_script() -> None:
    """Each setting appears in the script, quoted for the shell where needed."""
    text = script(
        nodes=2,
        command=("--ft-safety-factor=4", "train.py", "--name", "it's a 'b'; rm -rf $HOME"),
        job_name="j.1",
        time="2-00",
        partition="big",
        account="me",
        qos="high",
        gpus_per_node="h100:8",
        cpus_per_task=12,
        mem="100G",
        exclude=("n1", "n7"),
        directives=("--constraint=ib&hot",),
        setup=("module load cuda",),
        port=1234,
        num_job_retries_on_failure=5,
    ).render()
    expected = "job-name=j.1 time=2-00 partition=big account=me qos=high gpus-per-node=h100:8 cpus-per-task=12 mem=100G"
    expected += " exclude=n1,n7 constraint=ib&hot output=/runs/gpt/slurm-%j.log"
    assert {f"--{option}" for option in expected.split()} <= set(directives(text))
    assert "\nmodule load cuda\n" in text
    assert "--cpus-per-task=12" in step(text)
    assert 'sed "s/$/:1234/"' in text
    assert "--num-job-retries-on-failure=5" in text
    assert is_bash(text)
    echoed = text[text.index("  --ft-safety-factor") :].splitlines()[0]
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {echoed}"], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.splitlines() == ["--ft-safety-factor=4", "train.py", "--name", "it's a 'b'; rm -rf $HOME"]


def step(text: str) -> str:
    """Return the command line of the script's step as one line."""
    return text[text.index("srun ") : text.index("code=$?")].replace("\\\n", " ")


def test_srun_options_precede_the_step_command() -> None:
    """Options for the step come before its command, quoted for the shell, and not among those of the job."""
    options = ("--container-image=/images/a b.sqsh", "--container-mounts=/runs:/runs", "--label", "--mpi=none")
    text = script(nodes=2, srun=options, cpus_per_task=8).render()
    words = shlex.split(step(text))
    assert words[0] == "srun"
    assert set(options) <= set(words[: words.index("bash")])
    assert not [line for line in directives(text) if "container" in line or "mpi" in line]
    assert is_bash(text)
    assert "container" not in script(nodes=2).render()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *[
            (f"--{name}", f"the srun option --{name.partition('=')[0]} cannot be added: the script")
            for name in ("ntasks-per-node=2", "kill-on-bad-exit=1", "wait=5", "no-kill", "output=x", "open-mode=append")
        ],
        ("--cpus-per-task=3", "the script sets it from cpus_per_task"),
        ("--ntasks=2", "--ntasks cannot be added: the script starts one agent on each node"),
        ("--nodelist=n1", "--nodelist cannot be added: the script starts one agent on each node"),
        ("--account=me", "--account cannot be added: it is an option of the job"),
        ("--test-only", "--test-only cannot be added: with it srun starts nothing"),
        ("--lable", "--lable is not an option of srun; did you mean --label?"),
        ("--kill-on", "--kill-on is not an option of srun"),
        ("-l", "'-l' is not a long option; write its long name, such as --label"),
        ("-K", "write its long name, such as --kill-on-bad-exit"),
        ("--cpu-bind cores", "'--cpu-bind cores' is not in the form --name or --name=value"),
        ("label", "'label' is not in the form"),
        ("--export=A\n", "is not in the form"),
    ],
)
def test_unsupported_srun_options_are_rejected(option: str, text: str) -> None:
    """Options that the script sets, options of the job, and unknown options are rejected with their names."""
    with pytest.raises(ConfigError, match=re.escape(text)):
        script(srun=(option,))
    with pytest.raises(ConfigError, match="--label is given twice"):
        script(srun=("--label", "--label"))


def test_options_of_srun_plug_ins_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option in the help of the installed srun is accepted."""
    (tmp_path / "srun").write_text("#!/bin/sh\necho '      --site-burst=[MODE]   [site] a plug-in'\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    step_options.installed_options.cache_clear()
    try:
        assert "--site-burst=on" in step(script(srun=("--site-burst=on",)).render())
        with pytest.raises(ConfigError, match="did you mean --site-burst"):
            script(srun=("--site-brst",))
    finally:
        step_options.installed_options.cache_clear()


@pytest.mark.parametrize(
    ("directive", "text"),
    [
        ("--nodes=3", "the directive '--nodes=3' cannot be added: the script sets it"),
        ("-N 3", "the directive '-N 3' cannot be added: the script sets it"),
        ("--ntasks=9", "the script starts one agent on each node"),
        ("--cpus-per-task=9", "srun does not take it from the job; use cpus_per_task"),
        ("-c9", "use cpus_per_task"),
        ("--output=x.log", "the script sets it"),
        ("--signal=B:TERM@60", "the script sets it"),
        ("--no-requeue", "the script sets --requeue"),
        ("--exclude=n1", "use exclude"),
        ("--array=1-3", "share a run directory"),
    ],
)
def test_directives_that_the_script_sets_are_rejected(directive: str, text: str) -> None:
    """An additional #SBATCH line must not replace one of the script."""
    with pytest.raises(ConfigError, match=re.escape(text)):
        script(directives=(directive,))
    assert "--signal=USR1@9" in directives(script(preempt_time=0, directives=("--signal=USR1@9",)).render())


def test_each_of_several_nodes_has_an_output_file() -> None:
    """With several nodes each agent writes to its own file, next to the job's; a single agent writes to the job's
    file."""
    assert "--output=/runs/gpt/slurm-%j-%n-%N.log" in step(script(nodes=2).render())
    assert "--output=/runs/gpt/slurm-%j-%n-%N.log" in step(script(spares=1).render())
    assert "--output" not in step(script().render())


def test_run_directory_may_have_spaces() -> None:
    """A run directory with a space is quoted for the shell and for Slurm."""
    text = script(nodes=2, run_dir="/runs/a b", command=("my train.py",)).render()
    assert '--output="/runs/a b/slurm-%j.log"' in directives(text)
    assert {"--run-dir=/runs/a b", "--output=/runs/a b/slurm-%j-%n-%N.log", "my train.py"} <= set(
        shlex.split(step(text))
    )
    assert is_bash(text)


def test_job_without_cpus_gets_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CPUs for a node's task one line warns of the single core that Slurm assigns; other options prevent
    that."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("run").mkdir()

    def warnings_of(*options: str) -> str:
        words = ["script", "--run-dir=run", *options, "train.py"]
        return CliRunner().invoke(slurm, words, catch_exceptions=False).stderr

    assert warnings_of().startswith("outlast: without --cpus-per-task Slurm gives each node's agent one CPU")
    assert warnings_of().count("\n") == 1
    for option in ("--cpus-per-task=8", "--directive=--exclusive", "--directive=--cpus-per-gpu=12"):
        assert warnings_of(option) == ""
    image = ("--cpus-per-task=8", "--srun=--container-image=/i.sqsh")
    assert f"the run directory {tmp_path}/run is in none of --container-mounts" in warnings_of(*image)
    assert warnings_of(*image, f"--srun=--container-mounts=/data,{tmp_path}:{tmp_path}:rw") == ""


def test_missing_run_directory_is_reported_before_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm opens the output file before the script runs: if its folder is missing, one line has the command to
    create it."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    words = ["script", "--cpus-per-task=1", "--run-dir=a b", "train.py"]
    result = CliRunner().invoke(slurm, words, catch_exceptions=False)
    command = f"mkdir -p '{tmp_path}/a b'"
    assert result.stderr == f"outlast: the run directory does not exist here; before sbatch: {command}\n"
    assert f"# Before sbatch: {command} (Slurm opens" in result.stdout
    assert not Path("a b").exists()


def test_explicit_rendezvous_endpoint_is_used() -> None:
    """An endpoint in the command is not replaced."""
    text = script(nodes=2, command=("--rdzv-endpoint=head:1", "train.py")).render()
    assert text.count("--rdzv-endpoint") == 1
    assert "scontrol" not in text
    assert "--rdzv-endpoint" not in script().render(), "a node alone needs none"


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"command": ()}, "training script"),
        ({"nodes": 0}, "nodes=0"),
        ({"spares": -1}, "spares=-1"),
        ({"preempt_time": -5}, "preempt_time"),
        ({"preempt_time": 100_000}, "65535"),
        ({"num_job_retries_on_failure": -1}, "num_job_retries_on_failure"),
        ({"port": 70000}, "port"),
        ({"cpus_per_task": 0}, "cpus_per_task"),
        ({"run_dir": "runs/gpt"}, "absolute"),
        ({"run_dir": "/runs/a%b"}, "run_dir"),
        ({"run_id": "none"}, "run_id"),
        ({"run_id": "a b"}, "run_id"),
        ({"time": "four hours"}, "time"),
        ({"partition": "a b"}, "partition"),
        ({"exclude": ("n1 n2",)}, "exclude"),
        ({"directives": ("constraint",)}, "dashes"),
        ({"directives": ("--a\n#SBATCH --b",)}, "dashes"),
        ({"setup": ("a\nb",)}, "one line"),
        ({"outlast": "outlast; rm"}, "outlast"),
        ({"outlast": "uv 'run"}, "close its quotes"),
        ({"outlast": "$HOME/bin/outlast"}, "write it out"),
        ({"outlast": "~/bin/outlast"}, "write it out"),
        ({"outlast": " "}, "uv run outlast"),
        ({"nproc_per_node": "many"}, "nproc_per_node='many'"),
        ({"nproc_per_node": "0"}, "nproc_per_node='0'"),
        ({"command": ("--nnodes=3", "train.py")}, "--nnodes"),
        ({"command": ("--run_dir=/x", "train.py")}, "--run_dir is made from run_id|--run_dir is made from run_dir"),
        ({"command": ("--tee", "3", "--nproc=8", "train.py")}, "--nproc is made from nproc_per_node"),
    ],
)
def test_invalid_settings_are_rejected_at_submission(wrong: dict[str, Any], named: str) -> None:
    """Contradictory or unsafe settings are rejected with their names."""
    with pytest.raises(ConfigError, match=named):
        script(**wrong)


def test_arguments_of_the_training_script_are_not_parsed() -> None:
    """Arguments after the training script belong to the script, even if they are named like options of outlast."""
    printed = script(nodes=2, command=("train.py", "--nnodes=3", "--rdzv-endpoint=x")).render()
    assert "train.py --nnodes=3 --rdzv-endpoint=x" in printed
    assert printed.count("--rdzv-endpoint") == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--nodes", "2", "--", "--ft-rank-section-timeout=step:1", "train.py"], "--ft-rank-section-timeouts"),
        (["--", "--max-restartz=1", "train.py"], "--max-restarts"),
        (["--nodes", "2", "--", "--ft-safety-factor=many", "train.py"], "--ft-safety-factor: 'many'"),
        (["--nodes", "2", "--", "--ft-min-nodes=3", "train.py"], "--ft-min-nodes=3 is more than the 2 nodes"),
        (["--exclude", "n[1", "--", "train.py"], "n\\[1"),
        (["--", "gone.py"], "'gone.py' does not exist"),
    ],
)
def test_mistyped_run_options_are_rejected_at_submission(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that `outlast run` would reject after hours in a queue are rejected at submission."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    with pytest.raises(ConfigError, match=named):
        CliRunner().invoke(slurm, ["script", *arguments], catch_exceptions=False)


def test_default_names_come_from_the_training_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a run has the name of its script, and its run directory is in the folder of the submission."""
    monkeypatch.chdir(tmp_path)
    Path("code").mkdir()
    Path("code/train_big.py").touch()
    result = CliRunner().invoke(slurm, ["script", "--", "code/train_big.py", "--lr", "1"], catch_exceptions=False)
    assert "--job-name=train_big" in result.output
    assert f"--run-dir={tmp_path}/outlast-runs/train_big " in result.output


@pytest.mark.parametrize(
    ("command", "is_accepted"),
    [
        (["-m", "train"], True),
        (["--no-python", "train"], True),
        (["--no-python", "bin/train"], False),
        (["/code/train.py"], False),
        (["train.py"], False),
    ],
)
def test_training_script_must_exist(
    command: list[str], is_accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing file is rejected; modules and programs without a path are resolved on the nodes."""
    monkeypatch.chdir(tmp_path)
    if is_accepted:
        assert CliRunner().invoke(slurm, ["script", "--", *command], catch_exceptions=False).exit_code == 0
        return
    with pytest.raises(ConfigError, match="does not exist"):
        CliRunner().invoke(slurm, ["script", "--", *command], catch_exceptions=False)


def test_outlast_command_may_have_arguments() -> None:
    """A command line is used wherever the script calls `outlast`, quoted for the shell where needed."""
    text = script(outlast="apptainer exec 'my image.sif' outlast").render()
    calls = [line for line in text.splitlines() if "apptainer" in line]
    assert [line.count("apptainer exec ") for line in calls] == [1, 1]
    assert "outlast slurm requeue" in calls[1]
    assert is_bash(text)
    agent = calls[0].replace("bash -c", "").removesuffix(" outlast \\").strip()
    done = subprocess.run(
        ["bash", "-c", f"printf '%s' {agent}"], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == """exec apptainer exec 'my image.sif' outlast run --node-name="$SLURMD_NODENAME" "$@\""""


def test_dry_run_submits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--dry-run prints the script, with the excluded nodes of earlier jobs, and the call of sbatch, and writes no
    file."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("run").mkdir()
    Path("run/requeue.json").write_text('{"excluded": ["n2"]}')
    before = sorted(Path().rglob("*"))
    result = CliRunner().invoke(slurm, ["submit", "--dry-run", "--run-dir=run", "train.py"], catch_exceptions=False)
    assert "--exclude=n2" in directives(result.stdout)
    assert result.stdout.endswith(f"Without --dry-run: sbatch --parsable {tmp_path}/run/job.sbatch\n")
    assert is_bash(result.stdout)
    assert sorted(Path().rglob("*")) == before


def test_options_after_the_script_get_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option after the script belongs to the script; one line reports where to put it if it was meant for
    outlast."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    for option, meant_for in (("--max-restarts=9", "outlast run"), ("--nodes=4", "slurm script")):
        result = CliRunner().invoke(slurm, ["script", "train.py", option, "--time=3"], catch_exceptions=False)
        assert f"train.py {option} --time=3" in result.stdout
        (hint,) = [line for line in result.stderr.splitlines() if "stands after" in line]
        assert hint.startswith(f"outlast: {option.partition('=')[0]} stands after the script")
        assert hint.endswith(f"meant for {meant_for}")


def test_nodes_excluded_by_earlier_jobs_stay_excluded(tmp_path: Path) -> None:
    """A new job of a run excludes the nodes that the recovery policy or earlier jobs excluded."""
    (tmp_path / "ladder.json").write_text('{"quarantined": ["n3"]}')
    (tmp_path / "requeue.json").write_text('{"excluded": ["n2", "n3"]}')
    rendered, _ = prepare(script(run_dir=str(tmp_path), exclude=("n1",)))
    assert "--exclude=n1,n2,n3" in directives(rendered)


def test_finished_run_may_be_submitted_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next job trains further if its script gets more iterations; a warning reports that, since it may be a
    mistake."""
    (tmp_path / "ladder.json").write_text('{"finished": true, "had_session": true}')
    prepare(script(run_dir=str(tmp_path)))
    assert "has finished: the job trains only if its script is given more iterations" in caplog.text


@pytest.mark.process
def test_examples_match_the_generated_scripts(tmp_path: Path) -> None:
    """The batch scripts under examples/ are the output of generate.sh."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run([EXAMPLES / "generate.sh", tmp_path], env={**os.environ, "PATH": path}, check=True, timeout=300)
    created = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert created == {file.name: file.read_text() for file in EXAMPLES.glob("*.sbatch")}, (
        "run examples/slurm/generate.sh"
    )
    assert len(created) == 3
    assert all(is_bash(text) for text in created.values())
