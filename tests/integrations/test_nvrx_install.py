"""``nvidia_resiliency_ext`` is outlast's if the real package is absent, and only then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pages import python_blocks, run_python

from outlast.integrations import nvrx


def run(code: str, *arguments: str, path: Path | None = None) -> str:
    """Run Python code in a separate process; return its output and its log."""
    before = [] if path is None else [str(path)]
    python_path = os.pathsep.join([*before, os.environ.get("PYTHONPATH", "")])
    completed = run_python("-c", code, *arguments, PYTHONPATH=python_path)
    return completed.stdout + completed.stderr


INSTALL = "import sys; from outlast.integrations import nvrx; "


@pytest.mark.process
def test_install_is_idempotent_without_torch() -> None:
    """``install()`` adds one finder however often it is called, and does not import torch."""
    code = INSTALL + (
        "before = len(sys.meta_path); assert nvrx.install() and nvrx.install(); "
        "assert len(sys.meta_path) == before + 1; import nvidia_resiliency_ext as ext; assert nvrx.install(); "
        "assert ext.__version__ == '0.6.0'; assert 'torch' not in sys.modules, 'torch'"
    )
    assert run(code) == ""


def test_unlisted_names_cannot_be_imported() -> None:
    """A module or name that is not offered is an ImportError, so that callers fall back."""
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
def test_every_listed_name_exists(name: str) -> None:
    """Each name of the table exists in the listed module."""
    for home, names in nvrx.MODULES[name].items():
        module = __import__(home, fromlist=["_"])
        for entry in names:
            assert hasattr(module, entry.rpartition("=")[2]), f"{home} has no {entry}"


def write_real_package(folder: Path) -> None:
    """Write a substitute for the real package into a folder."""
    package = folder / "nvidia_resiliency_ext" / "fault_tolerance"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("REAL = True\n")


def test_installed_real_package_is_not_replaced(tmp_path: Path) -> None:
    """If the real package is installed, ``install()`` logs that and returns ``False``."""
    write_real_package(tmp_path)
    code = INSTALL + (
        "assert nvrx.install() is False; import nvidia_resiliency_ext.fault_tolerance as ft; assert ft.REAL"
    )
    (line,) = run(code, path=tmp_path).splitlines()
    assert str(tmp_path) in line
    assert "is installed at" in line
    assert "outlast's is not installed over it" in line


def test_later_real_package_takes_precedence(tmp_path: Path) -> None:
    """A real package that is put on the path before the first import takes precedence, as a whole."""
    write_real_package(tmp_path)
    code = INSTALL + (
        "nvrx.MODULES['a.b'] = {'json': ('loads',)}; assert nvrx.install(); sys.path.insert(0, sys.argv[1])\n"
        "import nvidia_resiliency_ext.fault_tolerance as ft\n"
        "assert ft.REAL\n"
        "try: import nvidia_resiliency_ext.a.b\n"
        "except ModuleNotFoundError: pass\n"
        "else: raise SystemExit('a part of ours in the real one')"
    )
    assert run(code, str(tmp_path)) == ""


def test_remaining_parts_of_the_real_package_are_reported(tmp_path: Path) -> None:
    """If only parts of a removed package remain, ``install()`` returns ``False`` and logs what to remove."""
    (tmp_path / "nvidia_resiliency_ext" / "shared_utils").mkdir(parents=True)
    (tmp_path / "nvidia_resiliency_ext" / "shared_utils" / "log.py").touch()
    (line,) = run(INSTALL + "assert nvrx.install() is False", path=tmp_path).splitlines()
    assert f"only parts of nvidia_resiliency_ext are at {tmp_path / 'nvidia_resiliency_ext'}; remove them" in line


@pytest.mark.parametrize("order", ["install, then folders", "folders, then install"])
def test_empty_folders_of_the_real_package_are_ignored(tmp_path: Path, order: str) -> None:
    """Folders without a module, left by an uninstalled package, are not the extension."""
    remaining = tmp_path / "nvidia_resiliency_ext" / "inprocess" / "__pycache__"
    remaining.mkdir(parents=True)
    (remaining / "wrap.cpython-311.pyc").touch()
    add = "sys.path.insert(0, sys.argv[1]); import importlib.util; importlib.util.find_spec('nvidia_resiliency_ext'); "
    install = "assert nvrx.install(); "
    code = INSTALL + (install + add if order.startswith("install") else add + install)
    code += "import nvidia_resiliency_ext.fault_tolerance as ft; assert nvrx.install(); assert ft.__doc__"
    assert run(code, str(tmp_path)) == ""


def test_import_of_a_rejected_name_reports_the_replacement() -> None:
    """Importing a rejected name is an ImportError with its replacement; ``hasattr()`` is False."""
    code = INSTALL + (
        "nvrx.install(); import nvidia_resiliency_ext.fault_tolerance as ft\n"
        "assert not hasattr(ft, 'RankMonitorServer') and getattr(ft, 'unknown', 7) == 7\n"
        "for name in 'RankMonitorServer', 'unknown':\n"
        "    try: exec(f'from nvidia_resiliency_ext.fault_tolerance import {name}')\n"
        "    except ImportError as error: print(error)"
    )
    rejected, unknown = run(code).splitlines()
    assert rejected.endswith("use RankMonitorClient")
    assert unknown.endswith(
        "fault_tolerance.unknown is not among the names that outlast offers of nvidia_resiliency_ext"
    )


def test_loaded_module_of_this_name_is_not_replaced() -> None:
    """A module of this name in ``sys.modules`` is not replaced."""
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
def test_safe_path_is_unchanged(tmp_path: Path) -> None:
    """With ``python -P`` the module search path is unchanged."""
    (tmp_path / "train.py").write_text("import sys; print(*sys.path, sep='\\n')\n")
    plain = run_python("-P", "-c", "import sys; print(*sys.path, sep='\\n')", cwd=tmp_path)
    here = run_python("-P", "-m", "outlast.integrations.nvrx", tmp_path / "train.py", cwd=tmp_path)
    assert here.stdout == plain.stdout


@pytest.mark.parametrize("target", [["{}/train.py"], ["-m", "train"]])
def test_script_runs_unchanged_with_the_extension(tmp_path: Path, target: list[str]) -> None:
    """``python -m outlast.integrations.nvrx train.py`` runs like ``python train.py``, with the extension."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("HERE = 1\n")
    arguments = [part.format(tmp_path) for part in target]
    completed = run_python("-m", "outlast.integrations.nvrx", *arguments, "--lr", "-m", cwd=tmp_path, code=7)
    assert completed.stdout == "0.6.0 __main__ ['--lr', '-m'] 1\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["none.py"]])
def test_invalid_command_line_exits_with_2(arguments: list[str]) -> None:
    """An invalid command line exits with 2 and the usage, which no launcher restarts."""
    completed = run_python("-m", "outlast.integrations.nvrx", *arguments, code=2)
    assert "usage: python -m outlast.integrations.nvrx" in completed.stderr


@pytest.mark.process
def test_documented_code_runs(tmp_path: Path) -> None:
    """The Python blocks of docs/nvrx.md run one after the other as one script."""
    blocks = python_blocks("nvrx.md")
    assert len(blocks) == 2, "a block was added: run it here"
    check = 'assert state["current_timeouts"]["section"]["section"] == {"step": 10.0}, state\nprint("ok")\n'
    (script := tmp_path / "train.py").write_text("".join([*blocks, check]))
    assert run_python(script).stdout == "ok\n"
