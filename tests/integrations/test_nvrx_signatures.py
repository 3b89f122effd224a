"""Beside NVRx itself: every name that we offer takes the parameters that NVRx 0.4.1's takes, as far as that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.integrations import nvrx

Described = dict[str, dict[str, list[str]]]
"""Parameters by name and member."""

REAL = Path(sys.prefix) / "nvrx"
"""Where `make test-integrations` puts NVRx."""

MOVED = {"attribution.straggler": "straggler", "shared_utils.inject_fault": "inprocess.tools.inject_fault"}
"""Modules that 0.4.1 has elsewhere."""

DIFFERENT = {
    "checkpointing.async_ckpt.core.AsyncCallsQueue.close": "0.6.0 takes abort",
    "checkpointing.local.replication.strategies.CliqueReplicationStrategy.from_replication_params": "as in Megatron",
    "checkpointing.local.replication.strategies.LazyCliqueReplicationStrategy": "None as in Megatron",
    "checkpointing.local.replication.strategies.ReplicationStrategy": "theirs is abstract, ours takes anything",
    "fault_tolerance.FaultToleranceConfig": "0.6.0 has the settings of GPU memory",
    "fault_tolerance.RankMonitorClient.init_workload_monitoring": "0.6.0 takes num_warmup_iters",
    "inprocess.CallWrapper": "nobody but the wrapper makes one",
    "inprocess.FrozenState": "ours also has the node and its faults",
    "inprocess.State": "ours also has the node and its faults",
    "inprocess.Wrapper": "defaults are objects of the package; 0.6.0 has no rank_filter",
    "inprocess.nested_restarter.NestedRestarterAborted": "states and stages are fixed by the class",
    "inprocess.nested_restarter.NestedRestarterCallback": "states and stages are fixed by the class",
    "inprocess.nested_restarter.NestedRestarterFinalized": "states and stages are fixed by the class",
    "inprocess.nested_restarter.NestedRestarterHandlingStarting": "states and stages are fixed by the class",
    "inprocess.param_utils.check_type": "two functions of 0.4.1 are one",
    "inprocess.state.FrozenState": "ours also has the node and its faults",
    "inprocess.state.State": "ours also has the node and its faults",
    "inprocess.wrap.CallWrapper": "nobody but the wrapper makes one",
    "inprocess.wrap.Wrapper": "defaults are objects of the package; 0.6.0 has no rank_filter",
    "ptl_resiliency.local_checkpoint_callback.HierarchicalCheckpointIO.load_checkpoint": "passes on what it is given",
    "ptl_resiliency.local_checkpoint_callback.HierarchicalCheckpointIO.remove_checkpoint": "passes on what it is given",
    "ptl_resiliency.local_checkpoint_callback.HierarchicalCheckpointIO.save_checkpoint": "passes on what it is given",
}
"""Where ours differs, and why."""

CALLBACKS = "ptl_resiliency"
"""The module, and those below it, of Lightning's callbacks: ours are made with more, and with less, than theirs."""

OTHER_DEFAULTS = {"logger_name": "theirs are loggers of NeMo; ours log under their own names unless one is given"}
"""Parameters of callbacks whose defaults differ, and why."""

STUBS = """
import sys, unittest.mock
for name in ("defusedxml", "defusedxml.ElementTree", "pynvml"):
    sys.modules[name] = unittest.mock.MagicMock()
"""
"""Packages that NVRx imports, and that only a machine with GPUs needs."""

DESCRIBE = """
import enum, importlib, inspect, json, sys

def parameters(what):
    try:
        found = inspect.signature(what).parameters.values()
    except (TypeError, ValueError):
        return None
    show = lambda value: value.name if isinstance(value, enum.Enum) else repr(value)
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        kinds.get(one.kind, "") + one.name + ("" if one.default is one.empty else f"={show(one.default)}")
        for one in found if one.name not in ("self", "cls")
    ]

def describe(value):
    if not callable(value):
        return {}
    found = {"": parameters(value)}
    if inspect.isclass(value) and not issubclass(value, (enum.Enum, BaseException)):
        for name in dir(value):
            if not name.startswith("_") and inspect.isroutine(getattr(value, name)):
                found["." + name] = parameters(getattr(value, name))
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        found = {"": [member.name for member in value]}
    return found

result = {}
for module, names in json.loads(sys.argv[1]).items():
    try:
        loaded = importlib.import_module("nvidia_resiliency_ext." + module)
    except ImportError as error:
        result[module] = str(error)
        continue
    result[module] = {name: describe(getattr(loaded, name)) for name in names if hasattr(loaded, name)}
print(json.dumps(result))
"""


def describe(
    modules: dict[str, list[str]], first: str, *, path: Path | None
) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the parameters of names of ``nvidia_resiliency_ext``, as a process of its own finds it."""
    python_path = os.pathsep.join([*([str(path)] if path else []), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", first + DESCRIBE, json.dumps(modules)],
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    described: dict[str, Described] = json.loads(done.stdout.splitlines()[-1])
    return described


def agrees(module: str, member: str, theirs: list[str], ours: list[str]) -> bool:
    """Return whether what is written for their parameters can be called with ours."""
    if module.partition(".")[0] != CALLBACKS:
        return theirs == ours
    if member.startswith(".on_"):
        return True  # Lightning alone calls them, with its own parameters
    if member:
        return theirs == ours
    if len(ours) < len(theirs):
        return False
    for their, our in zip(theirs, ours, strict=False):
        (parameter, has_default, default), (own, _, own_default) = their.partition("="), our.partition("=")
        if parameter != own or (has_default and default != own_default and parameter not in OTHER_DEFAULTS):
            return False
    return all("=" in more for more in ours[len(theirs) :])


@pytest.mark.overlay
@pytest.mark.process
def test_signatures_are_those_of_the_real_package() -> None:
    """Names, order and defaults of all parameters are NVRx 0.4.1's; what differs is listed above, with the reason.
    Lightning's callbacks are made with all of its parameters, in its order, with its defaults where it has any."""
    assert REAL.is_dir(), f"there is no {REAL}: make test-integrations installs it"
    names = {
        module: [entry.partition("=")[0] for offered in homes.values() for entry in offered]
        for module, homes in nvrx.MODULES.items()
    }
    ours = describe(names, "from outlast.integrations import nvrx; assert nvrx.install()\n", path=None)
    elsewhere = {MOVED.get(module, module): wanted for module, wanted in names.items()}
    real = describe(elsewhere, STUBS, path=REAL)
    differences, num_compared = {}, 0
    for module, offered in ours.items():
        theirs = real[MOVED.get(module, module)]
        if isinstance(theirs, str):  # it needs a GPU's libraries
            differences[module] = theirs
            continue
        for name, members in offered.items():
            for member, parameters in members.items():
                wanted = theirs.get(name, {}).get(member)
                if wanted is None:
                    continue  # newer than 0.4.1, or ours alone
                num_compared += 1
                if not agrees(module, member, wanted, parameters):
                    differences[f"{module}.{name}{member}"] = f"theirs {wanted}, ours {parameters}"
    assert num_compared > 70
    unexpected = {what: how for what, how in differences.items() if what not in DIFFERENT}
    assert not unexpected, "\n".join(f"{what}: {how}" for what, how in unexpected.items())
    assert set(DIFFERENT) <= set(differences), "no longer different: take it from the list"
