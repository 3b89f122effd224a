"""Each adapter imports only its own framework, and its extra installs the needed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import run_python

import outlast

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
SOURCE = Path(outlast.__file__).parent
FRAMEWORKS = (
    *("accelerate", "kubernetes", "leptonai", "lightning", "megatron", "mlflow", "nemo_run", "nvidia_resiliency_ext"),
    *("opentelemetry", "prometheus_client", "pytorch_lightning", "ray", "tensorboard", "tensorboardX", "torchdata"),
    *("torchtitan", "transformers", "wandb"),
)
"""Optional frameworks that only their own adapter may import."""
ADAPTERS: dict[str, tuple[str, ...]] = {
    "outlast": (),
    "outlast.cli.main": (),
    "outlast.integrations.kempnerforge": (),
    "outlast.integrations.kubernetes": (),
    "outlast.integrations.lightning": ("lightning",),
    "outlast.integrations.megatron": (),
    "outlast.integrations.metrics": (),
    "outlast.integrations.nemo_run": ("nemo_run",),
    "outlast.integrations.nvrx": (),
    "outlast.integrations.slurm": (),
    "outlast.integrations.transformers": ("transformers", "accelerate"),
    "outlast.ray": ("ray",),
}
"""Each public adapter, and the frameworks that it imports."""
EXTRAS: dict[str, tuple[str, str]] = {
    "yaml": ("outlast.config.sources", "import yaml"),
    "s3": ("outlast", "import s3fs"),
    "gcs": ("outlast", "import gcsfs"),
    "stacks": (
        "outlast",
        "import shutil, sys, os; assert os.path.exists(os.path.join(os.path.dirname(sys.executable), 'py-spy'))",
    ),
    "nvml": ("outlast", "import pynvml"),
    "ray": ("outlast.ray", "outlast.ray.ActorGroup"),
    "lightning": ("outlast.integrations.lightning", ""),
    "transformers": ("outlast.integrations.transformers", ""),
    "nemo-run": ("outlast.integrations.nemo_run", ""),
    "megatron": ("outlast.integrations.nvrx", "import megatron.core"),
    "tensorboard": ("outlast.integrations.metrics", "outlast.integrations.metrics.TensorBoardSink('a')"),
    "wandb": ("outlast.integrations.metrics", "outlast.integrations.metrics.WandbSink()"),
    "mlflow": ("outlast.integrations.metrics", "outlast.integrations.metrics.MLflowSink()"),
    "prometheus": ("outlast.integrations.metrics", "outlast.integrations.metrics.PrometheusSink(port=0)"),
    "opentelemetry": ("outlast.integrations.metrics", "outlast.integrations.metrics.OpenTelemetrySink()"),
    "k8s": ("outlast.integrations.kubernetes", "outlast.integrations.kubernetes.as_yaml([])"),
}
"""Each extra's module, and an expression that must work with it. ``dev`` and ``docs`` are this repository's."""
UNPINNED = {"nemo-run"}
"""Extras that clash with constraints.txt."""


def module_exists(module: str) -> bool:
    """Return whether a module of the package exists."""
    path = SOURCE.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


EXISTING = [name for name in ADAPTERS if module_exists(name)]
WITH_FRAMEWORK = [name for name in EXISTING if ADAPTERS[name]]
HIDING_CODE = """
import importlib, sys

class Without:
    # A finder that does not find some packages, as if they were not installed.
    def __init__(self, finder, hidden):
        self.finder, self.hidden = finder, hidden
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in self.hidden:
            return None
        return self.finder.find_spec(name, path, target)

def hide(names):
    sys.meta_path[:] = [Without(finder, set(names)) for finder in sys.meta_path]

def loaded():
    return {name.partition('.')[0] for name, module in list(sys.modules.items()) if module is not None}
"""


def run(code: str) -> list[str]:
    """Return the output lines of code that can hide frameworks."""
    return run_python("-c", HIDING_CODE + code).stdout.splitlines()


# -- imports -------------------------------------------------------------------------------------------------------


@pytest.mark.cold
@pytest.mark.slow
@pytest.mark.process
def test_plain_adapters_import_no_framework() -> None:
    """The package, its command and the plain adapters can be imported without any framework."""
    plain = [name for name in EXISTING if not ADAPTERS[name]]
    lines = run(
        f"hide({FRAMEWORKS!r})\n"
        f"for name in {plain!r}:\n"
        "    importlib.import_module(name)\n"
        f"    print(name, sorted(loaded() & set({FRAMEWORKS!r})))\n"
    )
    assert lines == [f"{name} []" for name in plain]


@pytest.mark.campaign
@pytest.mark.cold
@pytest.mark.process
@pytest.mark.parametrize("adapter", WITH_FRAMEWORK)
def test_adapter_imports_only_its_own_framework(adapter: str) -> None:
    """An adapter can be imported without all other frameworks, and imports none of them."""
    own = ADAPTERS[adapter]
    if missing := [name for name in own if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{missing[0]} is installed for `make test-integrations` only")
    lines = run(
        f"import {', '.join(own)}\n"
        f"before = loaded() & set({FRAMEWORKS!r})\n"
        f"hide(set({FRAMEWORKS!r}) - before)\n"
        f"import {adapter}\n"
        f"print(sorted((loaded() & set({FRAMEWORKS!r})) - before))\n"
    )
    assert lines[-1] == "[]", lines


@pytest.mark.cold
@pytest.mark.process
def test_missing_framework_is_reported_with_its_extra() -> None:
    """A missing framework is one line with its name and the extra to install."""
    lines = run(
        f"hide({FRAMEWORKS!r})\n"
        f"for name in {WITH_FRAMEWORK!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    assert len(lines) == len(WITH_FRAMEWORK), lines
    for name, line in zip(WITH_FRAMEWORK, lines, strict=True):
        expected = rf"{re.escape(name)} needs .*: pip install 'outlast\[({'|'.join(EXTRAS)})\]'"
        assert re.fullmatch(expected, line), line


# -- versions ------------------------------------------------------------------------------------------------------

MATRIX: dict[str, Any] = json.loads((ROOT / "docs" / "results" / "integrations.json").read_text(encoding="utf-8"))


def test_matrix_has_the_pinned_and_installed_versions() -> None:
    """The versions on the page of integrations are those of constraints.txt, the environment and the Makefile."""
    pins = dict(runpy.run_path(str(ROOT / "docs" / "generate.py"))["pins"]())
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for one in MATRIX["adapters"]:
        for name in one.get("pinned", ()):
            assert importlib.metadata.version(name) == pins[name.lower().replace("_", "-")], name
        for name, version in one.get("beside", {}).items():
            assert f"{name}=={version}" in makefile, f"{name}: the Makefile installs another version than {version}"
    assert importlib.metadata.version("torch").partition("+")[0] == pins["torch"]


def test_every_adapter_is_in_the_matrix() -> None:
    """Each public adapter is in the matrix, and each extra has a test."""
    pages = {one["module"] for one in MATRIX["adapters"]}
    assert {name for name in EXISTING if name.startswith(("outlast.integrations", "outlast.ray"))} <= pages | {
        "outlast.integrations.kempnerforge"  # documented with Megatron's adapter
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) - {"dev", "docs"} == set(EXTRAS)


@pytest.mark.overlay
def test_matrix_has_the_versions_of_the_overlay() -> None:
    """The environment of `make test-integrations` has the versions of the matrix."""
    for one in MATRIX["adapters"]:
        for name, version in one.get("beside", {}).items():
            if name != "nvidia-resiliency-ext":  # installed in a separate folder
                assert importlib.metadata.version(name) == version, name


# -- each extra alone ----------------------------------------------------------------------------------------------


def pip(python: Path, *arguments: str) -> None:
    command = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-cache-dir",
        *arguments,
    ]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert completed.returncode == 0, completed.stderr[-3000:]


def make_environment(folder: Path, *base_sites: Path) -> Path:
    """Create a virtual environment on top of the packages of other environments; return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=200)
    python = folder / "bin" / "python"
    probe = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(
        subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True, timeout=300).stdout.strip()
    )
    (site / "under.pth").write_text("".join(f"{one}\n" for one in base_sites))
    return python


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return this package's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    copied = folder / "source"
    kept = shutil.ignore_patterns(".*", "tests", "docs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copied, ignore=kept)
    arguments = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(copied)]
    completed = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=250, check=False
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    (built,) = folder.glob("outlast-*.whl")
    return built


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Return the packages of an environment with only the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("base")
    python = make_environment(folder / "venv")
    pip(python, "--constraint", str(ROOT / "constraints.txt"), "torch==2.13.0")
    pip(python, "--constraint", str(ROOT / "constraints.txt"), str(wheel))
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    return site


def check(python: Path, code: str) -> str:
    """Run code in an environment, isolated from this one; return its output."""
    completed = subprocess.run(
        [str(python), "-I", "-c", code], capture_output=True, text=True, timeout=250, check=False, cwd="/"
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return completed.stdout


@pytest.mark.overlay
@pytest.mark.timeout(900)
def test_wheel_works_without_extras(base: Path, tmp_path: Path) -> None:
    """Without any extra the package trains, its command responds, and each adapter's error contains its extra."""
    python = make_environment(tmp_path / "venv", base)
    code = (
        "import outlast, torch\n"
        "with outlast.init(outlast.Config()) as run:\n"
        "    print([*run.steps({'w': torch.zeros(1)}, total=3)])\n"
        "from outlast.cli.main import cli\n"
        "cli(['--version'], standalone_mode=False)\n"
    )
    assert "[0, 1, 2]" in check(python, code)
    for name in EXISTING:
        if ADAPTERS[name]:
            expected = check(python, f"try:\n    import {name}\nexcept ImportError as error:\n    print(error)\n")
            assert re.search(r"pip install 'outlast\[[\w-]+\]'$", expected.strip()), expected
        else:
            check(python, f"import {name}")


@pytest.mark.overlay
@pytest.mark.timeout(900)
@pytest.mark.parametrize("extra", [name for name, (module, _) in EXTRAS.items() if module_exists(module)])
def test_each_extra_works_alone(extra: str, base: Path, wheel: Path, tmp_path: Path) -> None:
    """With only one extra installed, its module can be imported and used."""
    python = make_environment(tmp_path / "venv", base)
    overlay_pins = [
        f"{name}=={version}" for one in MATRIX["adapters"] for name, version in one.get("beside", {}).items()
    ]
    constraints = tmp_path / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch = re.findall(r"^torch==.*$", pinned, re.MULTILINE)
    constraints.write_text("\n".join([*overlay_pins, *(torch if extra in UNPINNED else [pinned])]))
    pip(python, "--constraint", str(constraints), f"outlast[{extra}] @ file://{wheel}")
    module, code = EXTRAS[extra]
    check(python, f"import {module}\n{code}\n")
