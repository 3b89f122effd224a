"""Mistakes on the command line: one line with the fault as it was typed and the remedy, exit code 2, and no files
left."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from outlast.cli import run as run_command
from outlast.cli.main import main
from outlast.errors import ConfigError
from outlast.launch.options import RunOptions

FILES = {
    "train.py": "",
    "folder/notes.txt": "",
    "run.toml": "[fault_tolerance]\nrank_heartbeat_timeout = 300\n[health]\nmin_open_files = 1\n",
    "few.toml": "[fault_tolerance]\nmin_nodes = 9\n",
    "key.toml": 'rundir = "x"\n',
    "place.toml": 'run_dir = "train.py"\n',
    "bad.toml": "x",
}
WRONG = [
    # what to run
    ("run", "there is no script to run", "outlast run --nproc-per-node=2 train.py"),
    ("run --nproc-per-node=2", "there is no script to run", "name one"),
    ("run -m", "there is no script to run", "name one"),
    ("run --nproc-per-node train.py", "'train.py' is taken for the value of --nproc-per-node", "name the script after"),
    ("run --run-dir train.py", "'train.py' is taken for the value of --run-dir", "name the script after"),
    ("run gone.py", "the script 'gone.py' does not exist", "check its path"),
    ("run folder", "'folder' is a folder without __main__.py", "name the script in it"),
    ("run python train.py", "the script 'python' does not exist", "leave 'python' out"),
    ("run torchrun train.py", "'torchrun' does not exist", "leave 'torchrun' out"),
    ("run —nproc-per-node=2 train.py", "'—nproc-per-node=2' does not exist", "only looks like '-'"),
    ("run -m train.py", "-m takes a module's name", "write train, without .py"),
    ("run -m nosuch.train", "there is no module 'nosuch'", "check its name"),
    ("run --no-python train.py", "'train.py' is not an executable program", "check its path and mode"),
    ("run --no-python --module train.py", "--no-python and --module contradict", "leave one out"),
    # unknown options
    ("run --bogus train.py", "unknown option --bogus", "outlast run --help"),
    ("run -n 2 train.py", "unknown option -n", "outlast run --help"),
    ("run -nproc-per-node=2 train.py", "unknown option -nproc-per-node", "--nproc-per-node?"),
    ("run --nproc-per-nodes=2 train.py", "unknown option --nproc-per-nodes", "did you mean --nproc-per-node?"),
    ("run --st train.py", "--st may be --standalone or --start-method", "write it in full"),
    ("run --ft train.py", "unknown option --ft", "outlast run --help"),
    ("run --ft-rank-heart=3 train.py", "unknown option --ft-rank-heart", "--ft-rank-heartbeat-timeout?"),
    ("run --standalone=maybe train.py", "--standalone: 'maybe' does not fit", "write true or false"),
    ("run --ft-simulate-fault=maybe train.py", "--ft-simulate-fault: 'maybe' does not fit", "write true or false"),
    ("run --preload", "--preload lacks its value", "--preload=MODULE,..."),
    # values
    ("run --nproc=0 train.py", "--nproc=0", "at least 1"),
    ("run --nproc-per-node=two train.py", "'two'", "auto, cpu, gpu or xpu"),
    ("run --nnodes=2:1 train.py", "--nnodes='2:1'", "write for example 4:5"),
    ("run --nn=x train.py", "--nn='x'", "write for example 4:5"),
    ("run --max-restarts=x train.py", "--max-restarts: 'x' does not fit", "write a whole number"),
    (
        "run --max-restarts train.py",
        "there is no script to run: 'train.py' is taken for the value of --max-restarts",
        "after",
    ),
    ("run --max-restarts --standalone train.py", "--max-restarts lacks its value", "--max-restarts=N"),
    ("run --max_restarts=-1 train.py", "--max_restarts=-1 must not be negative", "0 or more"),
    ("run --max-restarts-t=-2 train.py", "--max-restarts-t=-2", "0 or more"),
    ("run --restart-grace=inf train.py", "--restart-grace=inf has no end", "seconds"),
    ("run --start-method=x train.py", "--start-method='x'", "spawn, fork, forkserver"),
    ("run --ft-rank_heartbeat_timeout=soon train.py", "--ft-rank_heartbeat_timeout: 'soon'", "a number, or none"),
    ("run --ft-rank-heartbeat-timeout=-3 train.py", "--ft-rank-heartbeat-timeout=-3 ", "write none"),
    ("run --ft_rank_heartbeat_timeout -3 train.py", "--ft_rank_heartbeat_timeout=-3 ", "write none"),
    ("run --ft-rank-section-timeouts=step:-1 train.py", "=step:-1: step=-1.0 must be above 0", "write none"),
    ("run --ft-rank-section-timeouts=step train.py", "'step' is not in the form", "setup:600,step:180"),
    ("run --ft-rank-termination-signal=FOO train.py", "--ft-rank-termination-signal=FOO is not a signal", "SIGKILL"),
    ("run --redirects=9 train.py", "--redirects='9'", "0:3,1:2"),
    ("run -t 1:4 train.py", "-t='1:4'", "0:3,1:2"),
    ("run --local-ranks-filter=a train.py", "--local-ranks-filter='a'", "0,1"),
    ("run --event-log-handler=bogus train.py", "--event-log-handler=bogus", "write console or null"),
    ("run --logs-specs=none-such train.py", "--logs-specs=none-such", "leave it out"),
    ("run --rdzv-id= train.py", "--rdzv-id is empty", "shell variable"),
    ("run --config= train.py", "--config is empty", "leave it out"),
    # nodes
    ("run --standalone --nnodes=2 train.py", "--standalone is for one node, and --nnodes=2", "leave one out"),
    ("run --ft-min-nodes=2 train.py", "--ft-min-nodes=2 is more than the 1 node", "lower it"),
    ("run --nnodes=2 --rdzv-endpoint=host:http train.py", "'http' is not a port", "host:port"),
    ("run --nnodes=2 --rdzv-endpoint=:29400 train.py", "--rdzv-endpoint=':29400' names no host", "host:port"),
    ("run --nnodes=2 --rdzv-endpoint=host:0 train.py", "port 0 is another on each node", "29400"),
    ("run --nnodes=2 --master-addr= train.py", "--master-addr is empty", "give it a value"),
    ("run --nnodes=2 --node-rank=5 train.py", "--node-rank=5 is not a rank of 2 nodes", "from 0 to 1"),
    ("run --rdzv-backend=etcd train.py", "--rdzv-backend=etcd", "leave the option out"),
    ("run --rdzv-conf=join_timeout train.py", "--rdzv-conf: 'join_timeout'", "join_timeout=600"),
    ("run --rdzv-conf=join_timeout=x train.py", "join_timeout='x' is not a number", "join_timeout=600"),
    # files
    ("run --config=gone.toml train.py", "gone.toml: no such file", "check the path"),
    ("run --ft-cfg-path=gone.toml train.py", "gone.toml: no such file", "check the path"),
    ("run --config=bad.toml train.py", "bad.toml: not valid TOML", "Expected '='"),
    ("run --config=key.toml train.py", "key.toml:1: unknown key 'rundir'", "'run_dir'?"),
    ("run --config=train.py train.py", "train.py: a config file ends in one of", ".toml"),
    ("run --config=few.toml train.py", "min_nodes=9 (few.toml) is more than the 1 node", "lower it"),
    ("run --config=run.toml --no-health train.py", "--no-health and [health] of run.toml", "leave one out"),
    (
        "run --config=run.toml --ft-initial-rank-heartbeat-timeout=100 train.py",
        "--ft-initial-rank-heartbeat-timeout=100 must be at least rank_heartbeat_timeout=300.0 (run.toml)",
        "start-up",
    ),
    ("run --config=place.toml train.py", "run_dir of place.toml", "name another"),
    ("run --run-dir=train.py train.py", "--run-dir=", "name another"),
    ("run --run-dir=/proc/x/y train.py", "--run-dir=/proc/x/y cannot be made", "writable"),
    ("run --run-dir=a\udcffb train.py", "a\\udcffb is not UTF-8", "name another"),
    ("run --log-dir=train.py train.py", "--log-dir=", "name another"),
    ("run --run-dir=a/b --log-dir=/proc/x train.py", "--log-dir=/proc/x cannot be made", "writable"),
    # other commands
    ("rnu train.py", "there is no command 'rnu'", "did you mean 'run'?"),
    ("--verison", "'--verison'", "--version"),
    ("ckpt list folder", "there is no command 'list' of outlast ckpt", "'ls'?"),
    ("ckpt ls", "missing argument 'DIR...'", "outlast ckpt ls --help"),
    ("ckpt ls gone", "gone does not exist", "check the path"),
    ("ckpt verify folder --iteration x", "'x' is not a whole number", "outlast ckpt verify --help"),
    ("ckpt prune folder", "nothing to prune", "--keep N"),
    ("doctor --config gone.toml", "gone.toml: no such file", "check the path"),
    ("doctor --gpu 0 --no-gpu", "--gpu and --no-gpu contradict", "leave one out"),
    ("doctor extra", "(extra)", "outlast doctor --help"),
    ("completion tcsh", "'tcsh'", "'bash', 'zsh', 'fish'"),
    ("slurm script", "there is no training script", "outlast slurm script --nodes 2 -- train.py"),
    ("slurm script gone.py", "the script 'gone.py' does not exist in this folder", "check its path"),
    ("slurm script --directive=--chdir=folder train.py", "'train.py' does not exist in folder", "check its path"),
    ("slurm script --nodes 0 train.py", "--nodes=0", "at least 1"),
    ("slurm script --preempt-time -4 train.py", "--preempt-time=-4", "0 = no signal before the time limit"),
    ("slurm script --nproc-per-node 0 train.py", "--nproc-per-node='0'", "auto"),
    ("slurm script --ft-min-nodes=2 train.py", "--ft-min-nodes is an option of outlast run", "put it after --"),
    ("slurm script -- --nproc=8 train.py", "--nproc is made from --nproc-per-node", "leave it out"),
    ("slurm submit --dry-run -- --ft-safety-factor=0.5 train.py", "--ft-safety-factor=0.5", "at least 1"),
    ("slurm requeue --run-dir x", "'--exit-code'", "outlast slurm requeue --help"),
]
NEVER_TYPED = re.compile(r"training_script|--ft:|Traceback|\bargument --|/--[a-z]+_")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("PET_", "SLURM_"))]:
        monkeypatch.delenv(name)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


def run_outlast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> tuple[int | str | None, str, str]:
    """Return exit code, output and errors of `outlast` with the words of ``line``."""
    monkeypatch.setattr(sys, "argv", ["outlast", *line.split(" ")] if line else ["outlast"])
    with pytest.raises(SystemExit) as ended:
        main()
    return (ended.value.code, *capsys.readouterr())


@pytest.mark.parametrize(("line", "fault", "remedy"), WRONG, ids=[line for line, _, _ in WRONG])
def test_mistake_is_reported_in_one_line(
    line: str, fault: str, remedy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and one line in the words that were typed, with the fault and the remedy; no folder is left."""
    before = sorted(Path().rglob("*"))
    code, out, err = run_outlast(monkeypatch, capsys, line)
    assert (code, out) == (2, "")
    assert err.startswith("outlast: ")
    assert err.count("\n") == 1
    assert fault in err
    assert remedy in err
    assert not NEVER_TYPED.search(err)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("PET_NNODES", "3:1", "PET_NNODES='3:1' is not N or MIN:MAX"),
        ("PET_MAX_RESTARTS", "x", "PET_MAX_RESTARTS: 'x' does not fit; write a whole number"),
        ("PET_MAX_RESTARTS", "-3", "PET_MAX_RESTARTS=-3 must not be negative"),
        ("PET_STANDALONE", "2", "PET_STANDALONE: '2' does not fit; write true or false"),
    ],
)
def test_wrong_environment_variable_is_identified(
    name: str, value: str, fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid value of torchrun's environment variable is reported with that variable, not with an option that
    the user did not type."""
    monkeypatch.setenv(name, value)
    code, out, err = run_outlast(monkeypatch, capsys, "run train.py")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"outlast: {fault}")


def test_rejection_after_the_checks_leaves_no_folders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error after the import of torch removes the folders that were created for the run, and no others."""
    Path("runs").mkdir()
    created: list[Path] = []

    def refuse(options: RunOptions) -> int:
        created.extend(options.new_folders)
        raise ConfigError("torch refuses; ask it why")

    from outlast.launch import run

    monkeypatch.setattr(run, "launch", refuse)
    monkeypatch.setattr(run_command.logging, "basicConfig", lambda **_: None)
    before = sorted(Path().rglob("*"))
    code, _, err = run_outlast(monkeypatch, capsys, "run --run-dir=runs/a/b --log-dir=logs/x train.py")
    assert (code, err) == (2, "outlast: torch refuses; ask it why\n")
    assert {folder.name for folder in created} == {"a", "b", "logs", "x"}
    assert sorted(Path().rglob("*")) == before
