"""``nvidia_resiliency_ext`` is found here where the real one is absent, and never where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.integrations import nvrx


def run(code: str, *arguments: str, path: Path | None = None) -> str:
    """Run Python code in a process of its own; return what it wrote to both streams."""
    before = [] if path is None else [str(path)]
    python_path = os.pathsep.join([*before, os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


INSTALL = "import sys; from outlast.integrations import nvrx; "


@pytest.mark.process
def test_install_is_idempotent_and_light() -> None:
    """install() any number of times adds one finder; neither it nor the import of the extension imports torch."""
    code = INSTALL + (
        "before = len(sys.meta_path); assert nvrx.install() and nvrx.install(); "
        "assert len(sys.meta_path) == before + 1; import nvidia_resiliency_ext as ext; assert nvrx.install(); "
        "assert ext.__version__ == '0.6.0'; assert 'torch' not in sys.modules, 'torch'"
    )
    assert run(code) == ""


def test_what_is_not_in_the_table_is_not_there() -> None:
    """A module that is not offered is not found, a name that is not offered is an ImportError: callers fall back."""
    code = INSTALL + (
        "nvrx.MODULES['a.b'] = {'json': ('loads', 'dump_it=dumps')}; nvrx.install(); "
        "import nvidia_resiliency_ext.a.b as b, json; assert b.loads is json.loads and b.dump_it is json.dumps; "
        "import nvidia_resiliency_ext as ext; assert ext.a.b is b; assert b.__all__ == ['dump_it', 'loads']\n"
        "from nvidia_resiliency_ext.a.b import *\n"
        "assert dump_it is json.dumps\n"
        "for text in 'import nvidia_resiliency_ext.a.c', 'import nvidia_resiliency_ext.ab':\n"
        "    try: exec(text)\n"
        "    except ModuleNotFoundError: pass\n"
        "    else: raise SystemExit(text)\n"
        "try: from nvidia_resiliency_ext.a.b import missing\n"
        "except ImportError: pass\n"
        "else: raise SystemExit('missing')\n"
        "assert not hasattr(b, 'missing')"
    )
    assert run(code) == ""


@pytest.mark.parametrize("name", sorted(nvrx.MODULES))
def test_every_name_of_the_table_is_there(name: str) -> None:
    """Each name that the table lists is one of the module that it names."""
    for home, names in nvrx.MODULES[name].items():
        module = __import__(home, fromlist=["_"])
        for entry in names:
            assert hasattr(module, entry.rpartition("=")[2]), f"{home} has no {entry}"


def real_package(folder: Path) -> None:
    """Put what stands for the real package below a folder."""
    whole = folder / "nvidia_resiliency_ext" / "fault_tolerance"
    whole.mkdir(parents=True)
    (whole / "__init__.py").write_text("REAL = True\n")


def test_the_real_package_stays(tmp_path: Path) -> None:
    """Where the real package is installed, install() returns False, says so, and imports find the real one."""
    real_package(tmp_path)
    code = INSTALL + (
        "assert nvrx.install() is False; import nvidia_resiliency_ext.fault_tolerance as ft; assert ft.REAL"
    )
    (line,) = run(code, path=tmp_path).splitlines()
    assert str(tmp_path) in line
    assert "is installed at" in line
    assert "outlast's is not installed over it" in line


def test_a_real_package_that_comes_later_is_found_first(tmp_path: Path) -> None:
    """A path on which the real package is, set after install() and before the first import, wins, as a whole."""
    real_package(tmp_path)
    code = INSTALL + (
        "nvrx.MODULES['a.b'] = {'json': ('loads',)}; assert nvrx.install(); sys.path.insert(0, sys.argv[1])\n"
        "import nvidia_resiliency_ext.fault_tolerance as ft\n"
        "assert ft.REAL\n"
        "try: import nvidia_resiliency_ext.a.b\n"
        "except ModuleNotFoundError: pass\n"
        "else: raise SystemExit('a part of ours in the real one')"
    )
    assert run(code, str(tmp_path)) == ""


def test_parts_of_the_real_package_are_named(tmp_path: Path) -> None:
    """Where a module is left of a package that was removed, install() returns False and the log has what to remove."""
    (tmp_path / "nvidia_resiliency_ext" / "shared_utils").mkdir(parents=True)
    (tmp_path / "nvidia_resiliency_ext" / "shared_utils" / "log.py").touch()
    (line,) = run(INSTALL + "assert nvrx.install() is False", path=tmp_path).splitlines()
    assert f"only parts of nvidia_resiliency_ext are at {tmp_path / 'nvidia_resiliency_ext'}; remove them" in line


@pytest.mark.parametrize("order", ["install, then folders", "folders, then install"])
def test_empty_folders_of_the_real_package_do_not_count(tmp_path: Path, order: str) -> None:
    """Folders without a module, as they are left of an uninstalled package, are not the extension: outlast's is found,
    also where a test of an import has found the folders before."""
    left = tmp_path / "nvidia_resiliency_ext" / "inprocess" / "__pycache__"
    left.mkdir(parents=True)
    (left / "wrap.cpython-311.pyc").touch()
    add = "sys.path.insert(0, sys.argv[1]); import importlib.util; importlib.util.find_spec('nvidia_resiliency_ext'); "
    install = "assert nvrx.install(); "
    code = INSTALL + (install + add if order.startswith("install") else add + install)
    code += "import nvidia_resiliency_ext.fault_tolerance as ft; assert nvrx.install(); assert ft.__doc__"
    assert run(code, str(tmp_path)) == ""


def test_an_import_of_a_refused_name_has_what_to_use_instead() -> None:
    """A public name of the extension that is not offered is an ImportError with its replacement; hasattr() is False."""
    code = INSTALL + (
        "nvrx.install(); import nvidia_resiliency_ext.fault_tolerance as ft\n"
        "assert not hasattr(ft, 'RankMonitorServer') and getattr(ft, 'unknown', 7) == 7\n"
        "for name in 'RankMonitorServer', 'unknown':\n"
        "    try: exec(f'from nvidia_resiliency_ext.fault_tolerance import {name}')\n"
        "    except ImportError as error: print(error)"
    )
    refused, unknown = run(code).splitlines()
    assert refused.endswith("use RankMonitorClient")
    assert unknown.endswith(
        "fault_tolerance.unknown is not among the names that outlast offers of nvidia_resiliency_ext"
    )


def test_a_stub_of_somebody_elses_stays() -> None:
    """A module of this name that a test or framework put into sys.modules is not replaced."""
    code = INSTALL + (
        "import types; stub = sys.modules['nvidia_resiliency_ext'] = types.ModuleType('nvidia_resiliency_ext'); "
        "assert nvrx.install() is False; import nvidia_resiliency_ext; assert nvidia_resiliency_ext is stub"
    )
    assert "is loaded already" in run(code)


SCRIPT = """
import sys
import nvidia_resiliency_ext
import beside
print(nvidia_resiliency_ext.__version__, __name__, sys.argv[1:], beside.HERE)
sys.exit(7)
"""


@pytest.mark.cold
@pytest.mark.process
def test_a_safe_path_stays_as_it_is(tmp_path: Path) -> None:
    """With ``python -P`` the script's folder is not searched, and no other entry is lost."""
    (tmp_path / "train.py").write_text("import sys; print(*sys.path, sep='\\n')\n")
    outputs = []
    for launcher in (
        ["-P", "-c", "import sys; print(*sys.path, sep='\\n')"],
        ["-P", "-m", "outlast.integrations.nvrx", str(tmp_path / "train.py")],
    ):
        command = [sys.executable, *launcher]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.splitlines())
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("target", [["{}/train.py"], ["-m", "train"]])
def test_a_script_runs_unchanged(tmp_path: Path, target: list[str]) -> None:
    """``python -m outlast.integrations.nvrx train.py`` is ``python train.py``, where the extension is found."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("HERE = 1\n")
    arguments = [part.format(tmp_path) for part in target]
    done = subprocess.run(
        [sys.executable, "-m", "outlast.integrations.nvrx", *arguments, "--lr", "-m"],
        cwd=tmp_path,
        env={**os.environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "0.6.0 __main__ ['--lr', '-m'] 1\n"), done.stderr


@pytest.mark.parametrize("arguments", [[], ["--help"], ["none.py"]])
def test_a_wrong_command_line_is_bad_input(arguments: list[str]) -> None:
    """What cannot be run ends with 2 and the usage, which no launcher restarts."""
    command = [sys.executable, "-m", "outlast.integrations.nvrx", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "usage: python -m outlast.integrations.nvrx" in done.stderr
