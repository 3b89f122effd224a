"""``make wheel`` builds a wheel that contains exactly the package and works without a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from outlast.version import __version__

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src", "examples")
BUILD = "from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
"""The command of ``make wheel``: the build backend in the current environment, without a network."""
EXAMPLE = "share/outlast/examples/train_gpt.py"
SCRIPT = """
import os
import torch.distributed as dist
import outlast
dist.init_process_group("gloo")
dist.barrier()
print("trained by", outlast.__version__, "from", outlast.__file__, "rank", os.environ["RANK"], flush=True)
dist.destroy_process_group()
"""

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.cold, pytest.mark.extended]


def run(command: Sequence[str | Path], cwd: Path, *, code: int = 0) -> str:
    """Run a program that cannot find this checkout by chance; return its output."""
    unexpected = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in unexpected and "OUTLAST" not in name}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == code, done.stdout[-4000:]
    return done.stdout


def build(folder: Path, kind: str) -> Path:
    """Build a distribution from the sources in a folder; return its file."""
    run([sys.executable, "-c", BUILD.format(kind=kind)], folder)
    (made,) = (folder / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources, so that the build writes nothing into the checkout."""
    folder = tmp_path_factory.mktemp("sources")
    excluded = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=excluded)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """Return the wheel."""
    return build(sources, "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment with the installed wheel and the packages of the current environment."""
    folder = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", folder], folder)
    (site,) = (folder / "lib").glob("python*/site-packages")
    # A plain folder on the path: its own .pth files, such as the one of an editable install, are not read.
    (site / "under.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], folder)
    return folder / "bin"


def contents(wheel: Path) -> set[str]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_wheel_contains_exactly_the_package(sources: Path, wheel: Path) -> None:
    """The wheel contains every file of the package, including data, the soak's example and the metadata, and nothing
    else."""
    package = {path.relative_to(sources / "src").as_posix() for path in (sources / "src/outlast").rglob("*")}
    package = {name for name in package if (sources / "src" / name).is_file() and "__pycache__" not in name}
    found = contents(wheel)
    assert package - found == set(), "name these in [tool.setuptools.package-data] of pyproject.toml"
    stem = f"outlast-{__version__}"
    metadata = {f"{stem}.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    metadata |= {f"{stem}.dist-info/top_level.txt", f"{stem}.dist-info/licenses/LICENSE"}
    assert found - package == metadata | {f"{stem}.data/data/{EXAMPLE}"}
    assert wheel.name == f"outlast-{__version__}-py3-none-any.whl"


def test_sdist_is_enough_to_build_the_wheel(sources: Path, wheel: Path, tmp_path: Path) -> None:
    """A wheel built from the sdist has the same files, and the sdist contains no tests."""
    sdist = build(sources, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert not (unpacked / "tests").exists()
    assert contents(build(unpacked, "wheel")) == contents(wheel)


def test_package_and_metadata_versions_are_equal() -> None:
    """The package and its metadata have the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == __version__


def test_installed_package_comes_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Python imports outlast from the environment, not from a checkout, and pip knows its version."""
    code = "import importlib.metadata as m, outlast; print(outlast.__file__, m.version('outlast'), outlast.__version__)"
    where, *versions = run([installed / "python", "-c", code], tmp_path).split()
    assert Path(where).is_relative_to(installed.parent)
    assert versions == [__version__, __version__]


def test_installed_commands_run(installed: Path, tmp_path: Path) -> None:
    """``outlast`` is a program of the environment; version and help need nothing else."""
    assert run([installed / "outlast", "--version"], tmp_path) == f"outlast, version {__version__}\n"
    assert "outlast run --help" in run([installed / "outlast", "--help"], tmp_path)
    assert "Examples:" in run([installed / "outlast", "doctor", "--help"], tmp_path)


def test_installed_wheel_runs_a_script(installed: Path, tmp_path: Path) -> None:
    """``outlast run`` of the wheel starts a worker that imports the wheel's package, and ends with 0."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [installed / "outlast", "run", "--nproc-per-node=1", f"--run-dir={tmp_path / 'run'}", "train.py"]
    found = re.search(r"trained by (\S+) from (\S+) rank 0", run(command, tmp_path))
    assert found is not None
    assert found[1] == __version__
    assert Path(found[2]).is_relative_to(installed.parent)
    assert list((tmp_path / "run" / "journal").iterdir())


def test_soak_finds_its_example(installed: Path, tmp_path: Path) -> None:
    """The soak finds its training script without a checkout, and it trains."""
    code = "from outlast.chaos.soak import find_example; print(find_example())"
    example = Path(run([installed / "python", "-c", code], tmp_path).strip())
    assert example == installed.parent.resolve() / EXAMPLE
    assert example.read_bytes() == (ROOT / "examples" / "train_gpt.py").read_bytes()
    assert "usage" in run([installed / "python", example, "--help"], tmp_path).lower()
