"""Command lines written for torchrun mean the same to `outlast run`, or a note reports the difference."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outlast.errors import ConfigError
from outlast.launch.options import RunOptions, parse_options
from outlast.launch.recovery_state_file import save_recovery_state
from outlast.launch.run_parser import parse_command
from outlast.policy.recovery_policy import RecoveryState
from outlast.testing.ranks import free_port


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    Path("train.py").write_text("")


def parse(*argv: str) -> RunOptions:
    return parse_options([*argv, "train.py"])


@pytest.mark.parametrize(
    ("argument", "name", "value"),
    [
        ("--redirect=3", "redirects", "3"),
        ("--nn=2", "nnodes", "2"),
        ("--nproc=4", "nproc_per_node", "4"),
        ("--master-p=29501", "master_port", 29501),
        ("--max-r=1", "max_restarts", 1),
        ("--run-", "run_path", True),
        ("--max-restarts-t=9", "max_restarts_total", 9),
        ("--preload=json", "preload", "json"),
        ("--prel=json", "preload", "json"),
    ],
)
def test_options_may_be_abbreviated(argument: str, name: str, value: Any) -> None:
    """A unique prefix of an option is accepted, also for options of outlast; torchrun's options take precedence."""
    assert getattr(parse(argument).torchrun, name) == value


def test_abbreviations_mean_the_same_as_in_torchrun() -> None:
    """Every option prefix that the installed torchrun accepts selects the same option in `outlast run`."""
    from torch.distributed.run import get_args_parser

    parser_of_torchrun = get_args_parser()
    names = [name for action in parser_of_torchrun._actions for name in action.option_strings if name.startswith("--")]
    num_compared = 0
    for action in parser_of_torchrun._actions:
        if action.dest in ("help", "print_completion"):
            continue  # they end the parsing
        value = [] if action.nargs == 0 else [next(iter(action.choices))] if action.choices else ["7"]
        for name in (name for name in action.option_strings if name.startswith("--")):
            for end in range(3, len(name)):
                if sum(one.startswith(name[:end]) for one in names) == 1:
                    line = [name[:end], *value, "train.py"]
                    theirs = getattr(parser_of_torchrun.parse_args(line), action.dest)
                    assert getattr(parse_command(line).args, action.dest) == theirs, line
                    num_compared += 1
    assert num_compared > 100


@pytest.mark.parametrize(
    ("argument", "fault"),
    [
        ("--st", "--st may be --standalone or --start-method"),
        ("--no", "--no-health-check or --no-python"),
        ("--ft-rank-heart=3", "did you mean --ft-rank-heartbeat-timeout"),
        ("--ft-min=1", "unknown option --ft-min"),
    ],
)
def test_ambiguous_abbreviation_is_rejected(argument: str, fault: str) -> None:
    """A prefix of several options is rejected with their names; a timeout can only be set by its full name."""
    with pytest.raises(ConfigError, match=fault):
        parse(argument)


def test_arguments_of_the_script_are_not_parsed() -> None:
    """All arguments after the script reach it, even if they are options or prefixes of options."""
    rest = ["--no", "--max", "3", "--nproc=x", "--ft-rank", "--node-rank=1", "-x"]
    options = parse_options(["--nnodes=2", "--master-port=29501", "train.py", *rest])
    assert options.torchrun.training_script_args == rest
    assert options.wish is None
    assert options.notes[0].startswith("--node-rank stands after the script, so the script gets it; put it before")


@pytest.mark.parametrize("conf", ["join_timeout=5,timeout=7", "'join_timeout=5, timeout=7'", ' "join_timeout = 5" '])
def test_rdzv_conf_may_be_quoted(conf: str) -> None:
    """Quotes and blanks in the value do not change its meaning."""
    assert parse(f"--rdzv-conf={conf}").join_timeout_s == 5


def test_unused_rdzv_conf_settings_are_reported() -> None:
    """Settings of other rendezvous backends are accepted and reported as without effect."""
    options = parse("--rdzv-conf=last_call_timeout=1,timeout=7,read_timeout=60")
    assert options.join_timeout_s == 7
    (note,) = options.notes
    assert "last_call_timeout, read_timeout: without effect" in note


def test_min_max_nodes_are_explained() -> None:
    """MIN:MAX, elastic in torchrun, is explained at the start: the number of training nodes and spares, and the
    options to train on all of them."""
    (note,) = parse("--nnodes=2:4").notes
    assert note.startswith("--nnodes=2:4: 2 nodes train, up to 2 more wait as spares")
    assert note.endswith("--nnodes=4 --ft-min-nodes=2")
    assert parse("--nnodes=3").notes == parse("--nnodes=3:3").notes == ()
    recommended = parse("--nnodes=4", "--ft-min-nodes=2")
    assert (recommended.num_slots, recommended.fault_tolerance.min_nodes) == (4, 2)


def test_node_rank_requests_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """--node-rank applies when it is abbreviated or comes from torchrun's environment variable, and 0 is a valid
    rank."""
    static = ("--nnodes=2", "--master-addr=head", "--master-port=29501")
    assert parse(*static).wish is None
    assert parse(*static, "--node-rank=0").wish == 0
    assert parse(*static, "--node-r=1").wish == 1
    monkeypatch.setenv("PET_NODE_RANK", "1")
    assert parse(*static).wish == 1


def test_run_without_a_name_is_a_new_run() -> None:
    """One node needs no run id; several nodes share a default id, and their next run is not treated as the same run."""
    alone = parse("--master-addr=localhost", "--master-port=29501")
    assert (alone.run_id != "none", alone.is_named) == (True, True)
    several = parse("--nnodes=2", "--master-port=29501")
    assert (several.run_id, several.is_named) == ("none", False)
    assert parse("--nnodes=2", "--rdzv-id=x").is_named
    assert parse("--nnodes=2", "--run-dir=x").is_named


@pytest.mark.process
def test_torchrun_command_line_can_run_again() -> None:
    """Abbreviations, quotes, MIN:MAX, a prefix and torch's event log work in a real run, and so does the same line a
    second time: without a name it is another run, not the finished one."""
    Path("train.sh").write_text('#!/bin/sh\necho "level $TORCH_CPP_LOG_LEVEL, $TORCH_NCCL_ASYNC_ERROR_HANDLING"\n')
    Path("train.sh").chmod(0o755)
    port = free_port()
    line = [
        *(sys.executable, "-m", "outlast", "run", "--nn=1:2", "--nproc=2", "--redirect=3", "--tee=3", "--no-python"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--event-log-handler=console"),
        *("--rdzv-conf='join_timeout=50,last_call_timeout=1,timeout=50'", "--no-health-check", "./train.sh"),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
    environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = "[rank${rank}]: "
    run_dir = Path("outlast-runs/none")
    run_dir.mkdir(parents=True)
    save_recovery_state(run_dir, RecoveryState(finished=True))  # as the first launch of this line left it
    done = subprocess.run(line, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank0]: level ERROR, 1", "[rank1]: level ERROR, 1"]
    assert done.stderr.count("1 node trains, 1 more waits as a spare") == 1
    assert '"source": "AGENT"' in done.stderr


SEES = """
import os, resource
print(*sorted(name for name in os.environ if name.startswith("TORCH")), sep="\\n")
print(os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"], *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.process
def test_workers_get_the_variables_of_torchrun() -> None:
    """Workers get the variables that torchrun sets, with the signals of ``--signals-to-handle``, and may open as
    many files as the hard limit permits."""
    Path("sees.py").write_text(SEES)
    options = ["--nproc-per-node=1", "--signals-to-handle=SIGTERM,SIGUSR1", "sees.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    variables = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        for launcher in (["torch.distributed.run", "--standalone"], ["outlast", "run", "--no-health-check"]):
            line = [sys.executable, "-m", *launcher, *options]
            done = subprocess.run(line, capture_output=True, text=True, timeout=250, env=environment, check=False)
            assert done.returncode == 0, done.stderr
            *names, last = done.stdout.splitlines()
            variables.append(set(names))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert variables[0] <= variables[1], variables[0] - variables[1]
    assert last.split() == ["SIGTERM,SIGUSR1", str(hard), str(hard)]
