"""What ``make wheel`` builds: a wheel that holds the whole package and nothing else, and works without a checkout."""

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
"""What ``make wheel`` runs: the build backend itself, in the environment at hand, without a network."""
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
    """Run a program in which nothing of this checkout can be found by chance; return all that it prints."""
    unwanted = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted and "OUTLAST" not in name}
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
    """Build a distribution of the sources in a folder; return its file."""
    run([sys.executable, "-c", BUILD.format(kind=kind)], folder)
    (made,) = (folder / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what is built, so that nothing is written into the checkout."""
    folder = tmp_path_factory.mktemp("sources")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", ".*")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=left_out)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """Return the wheel."""
    return build(sources, "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the programs of an environment in which the wheel is installed, and all else is seen from here."""
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


def test_the_wheel_holds_the_package_and_nothing_else(sources: Path, wheel: Path) -> None:
    """Every file of the package is in the wheel, data too, and beside it the soak's example and the metadata alone."""
    package = {path.relative_to(sources / "src").as_posix() for path in (sources / "src/outlast").rglob("*")}
    package = {name for name in package if (sources / "src" / name).is_file() and "__pycache__" not in name}
    found = contents(wheel)
    assert package - found == set(), "name these in [tool.setuptools.package-data] of pyproject.toml"
    stem = f"outlast-{__version__}"
    metadata = {f"{stem}.dist-info/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt")}
    metadata |= {f"{stem}.dist-info/top_level.txt", f"{stem}.dist-info/licenses/LICENSE"}
    assert found - package == metadata | {f"{stem}.data/data/{EXAMPLE}"}
    assert wheel.name == f"outlast-{__version__}-py3-none-any.whl"


def test_the_sdist_is_enough_to_build_the_wheel(sources: Path, wheel: Path, tmp_path: Path) -> None:
    """A wheel that is built from the sdist has the same files, and the sdist holds no tests."""
    sdist = build(sources, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    assert not (unpacked / "tests").exists()
    assert contents(build(unpacked, "wheel")) == contents(wheel)


def test_the_version_is_stated_once() -> None:
    """The package and its metadata have the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == __version__


def test_the_installed_package_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    """Python imports outlast from the environment, not from a checkout, and pip knows its version."""
    code = "import importlib.metadata as m, outlast; print(outlast.__file__, m.version('outlast'), outlast.__version__)"
    where, *versions = run([installed / "python", "-c", code], tmp_path).split()
    assert Path(where).is_relative_to(installed.parent)
    assert versions == [__version__, __version__]


def test_the_commands_answer(installed: Path, tmp_path: Path) -> None:
    """``outlast`` is a program of the environment; version and help need nothing else."""
    assert run([installed / "outlast", "--version"], tmp_path) == f"outlast, version {__version__}\n"
    assert "outlast run --help" in run([installed / "outlast", "--help"], tmp_path)
    assert "Examples:" in run([installed / "outlast", "doctor", "--help"], tmp_path)


def test_a_script_is_run(installed: Path, tmp_path: Path) -> None:
    """``outlast run`` of the wheel starts a worker that imports the wheel's package, and ends with 0."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [installed / "outlast", "run", "--nproc-per-node=1", f"--run-dir={tmp_path / 'run'}", "train.py"]
    found = re.search(r"trained by (\S+) from (\S+) rank 0", run(command, tmp_path))
    assert found is not None
    assert found[1] == __version__
    assert Path(found[2]).is_relative_to(installed.parent)
    assert list((tmp_path / "run" / "journal").iterdir())


def test_the_soak_has_its_example(installed: Path, tmp_path: Path) -> None:
    """The soak finds its training script without a checkout, and it trains."""
    code = "from outlast.chaos.soak import find_example; print(find_example())"
    example = Path(run([installed / "python", "-c", code], tmp_path).strip())
    assert example == installed.parent.resolve() / EXAMPLE
    assert example.read_bytes() == (ROOT / "examples" / "train_gpt.py").read_bytes()
    assert "usage" in run([installed / "python", example, "--help"], tmp_path).lower()
