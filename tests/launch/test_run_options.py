"""`outlast run`'s options: torchrun's, ours, and one clear line for each mistake before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.errors import ConfigError
from outlast.launch import run_parser
from outlast.launch.options import parse_options
from outlast.launch.run_parser import (
    RunParser,
    find_event_handlers,
    find_options,
    list_torchrun_options,
    names_of,
    parse_command,
)
from outlast.runtime import device


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return "train.py"


def test_every_option_of_torchrun_is_there() -> None:
    """The installed torchrun's options are all accepted, in each of its spellings and with its defaults, but for those
    that depend on other options here."""
    from torch.distributed.run import get_args_parser

    actions = [action for action in get_args_parser()._actions if action.option_strings]
    ours = names_of(RunParser().options)
    for action in actions:
        for name in action.option_strings:
            (option,) = find_options(ours, name)
            assert option.name == action.dest
    assert {option.name for option in list_torchrun_options()} | {"help"} == {action.dest for action in actions}
    args = parse_command(["train.py"]).args
    for action in actions:
        if action.dest not in ("help", "max_restarts", "node_rank"):
            assert getattr(args, action.dest) == action.default


def test_option_that_prints_completion_is_made_without_torch(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser of torch 2.15, which prints torchrun's completion, is made from its text; that option is refused."""
    (tmp_path / "distributed").mkdir()
    torch = run_parser._torch()
    text = (torch / "distributed" / "run.py").read_text()
    added = """
    parser.add_argument(
        "--print-completion",
        "--print_completion",
        action=_PrintCompletionAction,
        choices=["bash", "zsh", "tcsh"],
        help="Print a completion script.",
    )
    parser.add_argument(
        "training_script","""
    newer = text.replace('\n    parser.add_argument(\n        "training_script",', added)
    (tmp_path / "distributed" / "run.py").write_text(newer)
    monkeypatch.setattr(run_parser, "_torch", lambda: tmp_path)
    monkeypatch.setitem(sys.modules, "torch.distributed.run", None)  # an import would fail
    assert "print_completion" in [option.name for option in list_torchrun_options()]
    assert parse_options([script])
    for argv in (["--print-completion", "bash"], ["--print_completion=zsh", script]):
        with pytest.raises(ConfigError, match=r"outlast completion bash$"):
            parse_options(argv)


@pytest.mark.cold
def test_parsing_imports_no_torch(script: str) -> None:
    """A mistyped option is answered without the second that torch's import takes, and without what else is slow."""
    code = (
        "import sys; import outlast.cli.run; from outlast.launch.options import parse_options; "
        f"parse_options(['{script}']); print(*{{'torch', 'numpy', 'rich', 'fsspec', 'asyncio'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == []


def test_reference_launch_line_is_understood(script: str) -> None:
    """The launch line that users of the reference know works as it is."""
    options = parse_options(
        [
            "--rdzv_backend=c10d",
            "--rdzv_endpoint=127.0.0.1:29500",
            "--nnodes=2",
            "--nproc-per-node=8",
            "--ft-rank_section_timeouts=setup:600,step:180,checkpointing:420",
            "--ft-rank_out_of_section_timeout=300",
            script,
            "--lr",
            "0.1",
        ]
    )
    assert options.fault_tolerance.rank_section_timeouts == {"setup": 600, "step": 180, "checkpointing": 420}
    assert options.fault_tolerance.rank_out_of_section_timeout == 300
    assert options.torchrun.training_script_args == ["--lr", "0.1"]
    assert (options.num_slots, options.max_nodes) == (2, 2)


def test_defaults(script: str) -> None:
    """One node, fault tolerance on, three restarts, a run directory of its own."""
    options = parse_options([script])
    assert options.endpoints == "localhost:0"
    assert options.fault_tolerance.enable_ft_package
    assert options.torchrun.max_restarts == 3
    assert options.run_dir.is_dir()
    assert options.run_dir.parent.name == "outlast-runs"


@pytest.mark.parametrize(
    ("argv", "fault", "remedy"),
    [
        (["--bogus", "train.py"], "unknown option --bogus", "--help"),
        (["--nproc-per-nodes=2", "train.py"], "--nproc-per-nodes", "--nproc-per-node?"),
        (["--ft-rank-heartbeat-timeou=3", "train.py"], "--ft-rank-heartbeat-timeou", "--ft-rank-heartbeat-timeout"),
        (["--ft-rank-heartbeat-timeout=-3", "train.py"], "--ft-rank-heartbeat-timeout=-3", "above 0"),
        (["--ft-rank-section-timeouts=step", "train.py"], "'step'", "setup:600"),
        (["--nnodes=3:2", "train.py"], "--nnodes", "4:5"),
        (["--nproc-per-node=0", "train.py"], "--nproc-per-node=0", "at least 1"),
        (["--nproc-per-node=many", "train.py"], "'many'", "auto"),
        (["--max-restarts=-1", "train.py"], "--max-restarts=-1", "negative"),
        (["--max-restarts=x", "train.py"], "--max-restarts: 'x' does not fit", "write a whole number"),
        (["--rdzv-endpoint=host:http", "--nnodes=2", "train.py"], "'http'", "host:port"),
        (["--rdzv-backend=etcd", "train.py"], "etcd", "leave the option out"),
        (["--rdzv-conf=join_timeout=soon", "train.py"], "'soon'", "seconds"),
        (["--no-python", "--module", "train.py"], "--no-python and --module", "leave one out"),
        (["--run-dir=train.py", "train.py"], "not a folder", "name another"),
        (["--run-dir=/proc/x", "train.py"], "/proc/x", "writable"),
        (["--ft-min-nodes=3", "--nnodes=2", "train.py"], "--ft-min-nodes=3", "lower it"),
        (
            ["--ft-initial-rank-heartbeat-timeout=1", "--ft-rank-heartbeat-timeout=2", "train.py"],
            "--ft-initial-rank-heartbeat-timeout=1 ",
            "--ft-rank-heartbeat-timeout=2:",
        ),
        (["gone.py"], "'gone.py' does not exist", "check its path"),
        ([], "there is no script to run", "train.py"),
    ],
)
def test_mistakes_name_the_fault_and_the_remedy(argv: list[str], fault: str, remedy: str, script: str) -> None:
    """Bad input is one line that names what is wrong and what to do."""
    with pytest.raises(ConfigError) as caught:
        parse_options(argv)
    assert fault in str(caught.value)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.process
def test_bad_input_ends_with_2_and_starts_nothing(script: str) -> None:
    """The command prints the one line, exits with 2 and leaves no run directory behind."""
    code = "import sys; from outlast.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--nnodes=0", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("outlast: --nnodes=")
    assert os.listdir() == ["train.py"]


@pytest.mark.parametrize(
    ("argv", "built_for", "files", "environment", "why"),
    [
        ("--nproc-per-node=gpu", set(), [], {}, "built without CUDA and ROCm"),
        ("--nproc-per-node=gpu", {"cuda"}, [], {}, "there is no NVIDIA driver"),
        ("--nproc-per-node=gpu", {"cuda"}, ["/dev/nvidiactl"], {"CUDA_VISIBLE_DEVICES": ""}, "hides all GPUs"),
        ("--nproc-per-node=gpu", {"hip"}, ["/dev/nvidiactl"], {}, "there is no AMD GPU"),
        ("--nproc-per-node=xpu", {"cuda"}, ["/dev/nvidiactl"], {}, "not built for Intel GPUs"),
        ("--nproc-per-node=xpu", {"xpu"}, [], {}, "there is no Intel GPU"),
        ("--numa-binding=node", set(), [], {}, "--numa-binding=node needs GPUs"),
        # it may be there: torch is asked
        ("--nproc-per-node=gpu", {"cuda"}, ["/dev/nvidiactl"], {}, None),
        ("--nproc-per-node=gpu", {"cuda"}, ["/dev/dxg"], {}, None),
        ("--nproc-per-node=gpu", {"cuda"}, ["libcuda.so.1"], {}, None),
        ("--nproc-per-node=gpu", {"hip"}, ["/dev/kfd"], {}, None),
        ("--nproc-per-node=xpu", {"xpu"}, ["/dev/dri"], {}, None),
        ("--nproc-per-node=gpu", None, [], {}, None),
        ("--nproc-per-node=auto", set(), [], {}, None),
    ],
)
def test_devices_that_are_certainly_not_there_are_refused_at_once(
    argv: str,
    built_for: set[str] | None,
    files: list[str],
    environment: dict[str, str],
    why: str | None,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs need a torch that is built for them, a driver, and a device in sight; what is not certain passes."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device, "_torch_built_for", lambda: built_for)
    monkeypatch.setattr(device, "_exists", lambda *paths: bool({*paths} & {*files}))
    monkeypatch.setattr(device, "_has_driver", lambda: "libcuda.so.1" in files)
    if "--numa-binding" in argv and "--numa-binding" not in names_of(list_torchrun_options()):
        pytest.skip("this torch has no --numa-binding")
    if why is None:
        assert parse_options([argv, script])
        return
    with pytest.raises(ConfigError, match=why):
        parse_options([argv, script])
    assert os.listdir() == [script]


def test_what_torch_is_built_for_is_read_from_its_files() -> None:
    """The installed torch's version file says whether it computes on GPUs, as torch itself does."""
    import torch

    assert device._torch_built_for() == {
        name for name in ("cuda", "hip", "xpu") if getattr(torch.version, name, None) is not None
    }


def test_handlers_of_torchs_events_are_known() -> None:
    """The names that torch's table of handlers has are read from it without importing it."""
    from torch.distributed.elastic.events.handlers import _log_handlers

    assert find_event_handlers() == _log_handlers.keys()


@pytest.mark.process
def test_recovery_policy_file_that_cannot_be_read_is_refused(script: str) -> None:
    """A ladder.json that is none is named before anything starts, not taken for an empty one."""
    os.mkdir("run")
    Path("run", "ladder.json").write_text("{}x")
    code = "import sys; from outlast.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--run-dir=run", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2
    assert "ladder.json cannot be used" in done.stderr
    assert len(done.stderr.splitlines()) == 1
