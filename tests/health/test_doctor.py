"""`outlast doctor`: a table or JSON, and an exit code for schedulers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from outlast.cli.doctor import doctor
from outlast.errors import ConfigError

pytestmark = pytest.mark.process


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "outlast.toml"
    path.write_text(
        f'[checkpoint]\ndirectory = "{tmp_path / "global"}"\nlocal_directory = "/dev/shm/outlast-doctor"\n'
        "[health]\nmin_open_files = 16\n"
    )
    return path


def run(*arguments: str) -> tuple[int, str]:
    # Not standalone, as the command line calls it: what a command returns is then the exit code.
    result = CliRunner().invoke(doctor, [*arguments, "--no-gpu"], standalone_mode=False, catch_exceptions=False)
    return int(result.return_value), result.output


def test_healthy_node_exits_with_0(settings: Path) -> None:
    """A healthy node is reported with exit code 0, and the tiers of the run's settings are checked."""
    code, output = run("--config", str(settings))
    assert code == 0, output
    assert output.splitlines()[-1].endswith("is healthy")
    assert "/dev/shm/outlast-doctor" in output


@pytest.mark.parametrize(
    ("limits", "arguments", "named"),
    [
        ("min_free_disk_gib = 1e9", [], "min_free_disk_gib"),
        ("", ["--place", "/proc/none"], "cannot be written"),
        ('simulate_wrong_gemm = "NODE"', [], "wrong matrix product"),
        ("", ["--command", "echo no data here; exit 9"], "exit code 9: no data here"),
    ],
    ids=["nearly full", "unwritable", "wrong product", "own check"],
)
def test_unhealthy_node_exits_with_1(
    settings: Path, limits: str, arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault of a node is reported, and the exit code is 1."""
    monkeypatch.setenv("OUTLAST_NODE", "sick")
    settings.write_text(settings.read_text() + limits.replace("NODE", "sick"))
    code, output = run("--config", str(settings), *arguments)
    assert code == 1
    assert named in output
    assert "sick is unhealthy: " in output


def test_json_has_every_check(settings: Path) -> None:
    """--json prints one object with every check, and nothing else."""
    code, output = run("--config", str(settings), "--json", "--command", "exit 1")
    report = json.loads(output)
    assert code == 1
    assert (report["schema"], report["ok"]) == (1, False)
    assert [check["name"] for check in report["checks"] if check["status"] == "failed"] == ["command"]
    assert report["checks"][0].keys() == {"name", "target", "status", "reason", "took_s", "facts"}


def test_contradictory_options_are_rejected() -> None:
    """Contradictory options are bad input, not an unhealthy node."""
    with pytest.raises(ConfigError, match="--no-gpu"):
        run("--gpu", "0")
