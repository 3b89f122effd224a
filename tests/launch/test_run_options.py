"""The options of `outlast run`: torchrun's, those of outlast, and one clear line for each mistake before anything
starts."""

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


def test_every_option_of_torchrun_is_accepted() -> None:
    """All options of the installed torchrun are accepted, in each spelling and with the same defaults, except for
    defaults that depend on other options here."""
    from torch.distributed.run import get_args_parser

    actions = [action for action in get_args_parser()._actions if action.option_strings]
    options_of_outlast = names_of(RunParser().options)
    for action in actions:
        for name in action.option_strings:
            (option,) = find_options(options_of_outlast, name)
            assert option.name == action.dest
    assert {option.name for option in list_torchrun_options()} | {"help"} == {action.dest for action in actions}
    args = parse_command(["train.py"]).args
    for action in actions:
        if action.dest not in ("help", "max_restarts", "node_rank"):
            assert getattr(args, action.dest) == action.default


def test_completion_option_of_newer_torch_is_rejected(
    tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser of torch 2.15, which has an option that prints torchrun's completion, is built from its source
    text; that option is rejected with the equivalent command."""
    (tmp_path / "distributed").mkdir()
    torch = run_parser.torch_folder()
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
    monkeypatch.setattr(run_parser, "torch_folder", lambda: tmp_path)
    monkeypatch.setitem(sys.modules, "torch.distributed.run", None)  # an import would fail
    assert "print_completion" in [option.name for option in list_torchrun_options()]
    assert parse_options([script])
    for argv in (["--print-completion", "bash"], ["--print_completion=zsh", script]):
        with pytest.raises(ConfigError, match=r"outlast completion bash$"):
            parse_options(argv)


@pytest.mark.cold
def test_parsing_does_not_import_torch(script: str) -> None:
    """Options are parsed without the import of torch, which takes a second, or of other slow modules."""
    code = (
        "import sys; import outlast.cli.run; from outlast.launch.options import parse_options; "
        f"parse_options(['{script}']); print(*{{'torch', 'numpy', 'rich', 'fsspec', 'asyncio'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == []


def test_ft_launcher_command_line_is_accepted(script: str) -> None:
    """A command line of NVRx's ft_launcher works unchanged."""
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
    """The defaults are one node, fault tolerance on, three restarts, and a new run directory."""
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
def test_mistakes_are_reported_with_fault_and_remedy(argv: list[str], fault: str, remedy: str, script: str) -> None:
    """Bad input is reported in one line with the fault and what to do."""
    with pytest.raises(ConfigError) as caught:
        parse_options(argv)
    assert fault in str(caught.value)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.process
def test_bad_input_exits_with_2_and_starts_nothing(script: str) -> None:
    """The command prints one line, exits with 2 and leaves no run directory behind."""
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
    ("argv", "built_for", "files", "environment", "reason"),
    [
        ("--nproc-per-node=gpu", set(), [], {}, "built without CUDA and ROCm"),
        ("--nproc-per-node=gpu", {"cuda"}, [], {}, "there is no NVIDIA driver"),
        ("--nproc-per-node=gpu", {"cuda"}, ["/dev/nvidiactl"], {"CUDA_VISIBLE_DEVICES": ""}, "hides all GPUs"),
        ("--nproc-per-node=gpu", {"hip"}, ["/dev/nvidiactl"], {}, "there is no AMD GPU"),
        ("--nproc-per-node=xpu", {"cuda"}, ["/dev/nvidiactl"], {}, "not built for Intel GPUs"),
        ("--nproc-per-node=xpu", {"xpu"}, [], {}, "there is no Intel GPU"),
        ("--numa-binding=node", set(), [], {}, "--numa-binding=node needs GPUs"),
        # a device may exist: torch decides later
        ("--nproc-per-node=gpu", {"cuda"}, ["/dev/nvidiactl"], {}, None),
        ("--nproc-per-node=gpu", {"cuda"}, ["/dev/dxg"], {}, None),
        ("--nproc-per-node=gpu", {"cuda"}, ["libcuda.so.1"], {}, None),
        ("--nproc-per-node=gpu", {"hip"}, ["/dev/kfd"], {}, None),
        ("--nproc-per-node=xpu", {"xpu"}, ["/dev/dri"], {}, None),
        ("--nproc-per-node=gpu", None, [], {}, None),
        ("--nproc-per-node=auto", set(), [], {}, None),
    ],
)
def test_missing_devices_are_rejected_at_once(
    argv: str,
    built_for: set[str] | None,
    files: list[str],
    environment: dict[str, str],
    reason: str | None,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPUs need a torch that is built for them, a driver, and a visible device; uncertain cases are accepted."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(device, "torch_built_for", lambda: built_for)
    monkeypatch.setattr(device, "_exists", lambda *paths: bool({*paths} & {*files}))
    monkeypatch.setattr(device, "_has_driver", lambda: "libcuda.so.1" in files)
    if "--numa-binding" in argv and "--numa-binding" not in names_of(list_torchrun_options()):
        pytest.skip("this torch has no --numa-binding")
    if reason is None:
        assert parse_options([argv, script])
        return
    with pytest.raises(ConfigError, match=reason):
        parse_options([argv, script])
    assert os.listdir() == [script]


def test_device_support_is_read_from_torchs_version_file() -> None:
    """The version file of the installed torch lists the device types that torch supports."""
    import torch

    assert device.torch_built_for() == {
        name for name in ("cuda", "hip", "xpu") if getattr(torch.version, name, None) is not None
    }


def test_event_handlers_of_torch_are_found() -> None:
    """The names in torch's table of event handlers are read without an import of torch."""
    from torch.distributed.elastic.events.handlers import _log_handlers

    assert find_event_handlers() == _log_handlers.keys()


@pytest.mark.process
def test_unreadable_recovery_policy_file_is_rejected(script: str) -> None:
    """An invalid ladder.json is reported before anything starts, and not treated as empty."""
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
