"""Comparison with NVRx 0.6.0: no public name of an offered module is missing, and each has the same parameters."""

from __future__ import annotations

import json
import os
import sys
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

import pytest
from pages import run_python

from outlast.integrations import nvrx

Described = dict[str, dict[str, list[str] | None]]
"""Parameters by name and member."""

REAL = Path(sys.prefix) / "nvrx"
"""The folder of NVRx in the environment of `make test-integrations`."""

MOVED = {"straggler": "attribution.straggler", "straggler.reporting": "attribution.straggler.reporting"}
"""Modules that moved in 0.6.0, under their names of 0.4.1."""

DIFFERENT = {
    "*straggler*.Report": "ours also has the ranks within the noise, none by default",
    "checkpointing.async_ckpt.core.AsyncRequest": "Megatron-Core's queue takes the request, and no None",
    "checkpointing.local.replication.strategies.*CliqueReplicationStrategy*": "None as in Megatron; theirs refuses 0",
    "checkpointing.local.replication.strategies.ReplicationStrategy": "theirs is abstract, ours takes anything",
    "fault_tolerance*.FaultToleranceConfig": "the fields and the default of 0.7",
    "inprocess*.CallWrapper": "only the wrapper makes one",
    "inprocess*.State": "ours also has the node and its faults",
    "inprocess*.Wrapper": "defaults are objects of the package; 0.4.1 has rank_filter",
    "inprocess.nested_restarter.*": "states and stages are fixed by the class",
    "inprocess.param_utils.check_type": "two functions of theirs are one",
    "ptl_resiliency*.HierarchicalCheckpointIO.from_tensor_aware_state_dict": "theirs takes any keyword argument",
    "ptl_resiliency.local_checkpoint_callback.HierarchicalCheckpointIO.load_checkpoint": "passes on what it is given",
    "ptl_resiliency.local_checkpoint_callback.HierarchicalCheckpointIO.remove_checkpoint": "passes on what it is given",
}
"""Patterns of names with different parameters, and the reasons."""

MISSING = {
    "checkpointing.local.replication.group_utils.GroupWrapper.*": "torch.distributed does it, with GroupWrapper.group",
    "checkpointing.local.replication.strategies.*Strategy.re*": "outlast's checkpoints make and find copies",
    "fault_tolerance.data.FT_*_IPC_SOCKET_ENV_VAR": "there is no such socket",
    "fault_tolerance.rank_monitor_client.FT_*_IPC_SOCKET_ENV_VAR": "there is no such socket",
    "inprocess*.CallWrapper.shutdown": "the wrapper's own",
    "inprocess*.State.*": "only the wrapper changes the state",
    "inprocess*.freeze_dataclass": "only the wrapper changes the state",
    "inprocess.abort.AbortTorchDistributed.*": "outlast aborts process groups itself",
    "inprocess.compose.find_common_ancestor": "a helper of its own",
    "inprocess.monitor_thread.*": "its own threads; RankShouldRestart is there",
    "inprocess.nested_restarter.NestedRestarter*.*": "a logger's members, and attributes of its own",
    "inprocess.param_utils.enforce_*": "a helper of its own",
    "inprocess.rank_assignment.FilterCountGroupedByKey.instance_count": "a counter of its own",
    "inprocess.rank_assignment.Node": "inside of Tree",
    "inprocess.rank_assignment.Tree.*": "inside of Tree",
    "inprocess.rank_assignment.bounded_activate": "inside of Tree",
    "inprocess.rank_assignment.propagate_terminations": "inside of Tree",
    "inprocess.wrap.HealthCheckPassed": "raised and caught within the wrapper",
    "inprocess.wrap.reserve_fn": "the wrapper's own",
    "inprocess.store.*": "the ranks of a wrapped function need no store",
    "ptl_resiliency*.FaultTolerance*Callback.[A-Z]*": "where it keeps its own timeouts",
    "ptl_resiliency*.FaultTolerance*Callback.is_initialized": "the session shows that",
    "ptl_resiliency*.HierarchicalCheckpointIO.*": "state dicts are saved as they are",
    "ptl_resiliency*.LocalCheckpointCallback.*": "not a ModelCheckpoint",
}
"""Patterns of missing public names and members, and the reasons; ``nvrx.REFUSED`` has further names."""

CALLBACKS = "ptl_resiliency"
"""The package of Lightning's callbacks, which accept other parameters than NVRx's."""

OTHER_DEFAULTS = {"logger_name": "theirs are loggers of NeMo; ours log under their own names unless one is given"}
"""Parameters of callbacks with different defaults, and the reasons."""

STUBS = """
import importlib.util, sys, unittest.mock
for name in ("defusedxml.ElementTree", "defusedxml", "httpx", "pynvml"):
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        sys.modules[name] = unittest.mock.MagicMock()
"""
"""Packages that NVRx imports, and that only its launcher, or a machine with GPUs, needs."""

DESCRIBE = """
import enum, importlib, inspect, json, sys

PACKAGE = "nvidia_resiliency_ext"

def parameters(what):
    if type(type(what).__call__) is not type(type.__call__) and inspect.isclass(what):
        what = what.__init__  # a metaclass hides them
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
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return {"": [member.name for member in value]}
    found = {"": parameters(value)}
    if inspect.isclass(value) and not issubclass(value, BaseException):
        of_others = {n for base in value.__mro__ if base.__module__.partition(".")[0] not in (PACKAGE, "outlast")
                     for n in vars(base)}
        for name in dir(value):
            if not name.startswith("_"):
                is_routine = inspect.isroutine(getattr(value, name))
                if is_routine or name not in of_others:
                    found["." + name] = parameters(getattr(value, name)) if is_routine else None
    return found

def is_own(name, value, module):
    if name.startswith("_") or inspect.ismodule(value):
        return False
    home = getattr(value, "__module__", None)
    if home is None:
        return name.isupper() and isinstance(value, (str, int, float, tuple))
    is_package = hasattr(module, "__path__")
    return (home == module.__name__ or is_package and home.startswith(module.__name__ + ".")) and callable(value) and (
        inspect.isclass(value) or inspect.isroutine(value))

result = {}
for module in json.loads(sys.argv[1]):
    loaded = importlib.import_module(f"{PACKAGE}.{module}")
    names = getattr(loaded, "__all__", None) if "outlast.integrations.nvrx" in sys.modules else None
    if names is None:  # the extension itself, as far as a name is not one of another module of it
        names = [name for name, value in vars(loaded).items() if is_own(name, value, loaded)]
    result[module] = {name: describe(getattr(loaded, name)) for name in names}
print(json.dumps(result))
"""


def describe(modules: list[str], first: str, *, path: Path | None) -> dict[str, Described]:
    """Return the public names of modules of ``nvidia_resiliency_ext``, found in a separate process."""
    python_path = os.pathsep.join([*([str(path)] if path else []), os.environ.get("PYTHONPATH", "")])
    completed = run_python("-c", first + DESCRIBE, json.dumps(modules), PYTHONPATH=python_path)
    described: dict[str, Described] = json.loads(completed.stdout.splitlines()[-1])
    return described


def agrees(module: str, member: str, reference: list[str], ours: list[str]) -> bool:
    """Return whether calls that match the reference's parameters match outlast's."""
    if module.partition(".")[0] != CALLBACKS:
        return reference == ours
    if member.startswith(".on_"):
        return True  # only Lightning calls these, with its own parameters
    if member:
        return reference == ours
    if len(ours) < len(reference):
        return False
    for their, our in zip(reference, ours, strict=False):
        (parameter, has_default, default), (own, _, own_default) = their.partition("="), our.partition("=")
        if parameter != own or (has_default and default != own_default and parameter not in OTHER_DEFAULTS):
            return False
    return all("=" in more for more in ours[len(reference) :])


@pytest.mark.overlay
@pytest.mark.process
def test_names_and_parameters_match_nvrx() -> None:
    """Each public name and member is offered or listed with a reason, and parameters are NVRx 0.6.0's except for
    listed differences."""
    assert REAL.is_dir(), f"there is no {REAL}: make test-integrations installs it"
    modules = sorted(nvrx.MODULES)
    ours = describe(modules, "from outlast.integrations import nvrx; assert nvrx.install()\n", path=None)
    real = describe(sorted({MOVED.get(module, module) for module in modules}), STUBS, path=REAL)
    missing, differences, num_compared = set(), {}, 0
    for module, offered in ours.items():
        for name, reference in real[MOVED.get(module, module)].items():
            members = offered.get(name)
            if members is None:
                missing.add(f"{module}.{name}")
                continue
            for member, expected in reference.items():
                if member not in members:
                    missing.add(f"{module}.{name}{member}")
                elif expected is not None and (parameters := members[member]) is not None:
                    num_compared += 1
                    if not agrees(module, member, expected, parameters):
                        differences[f"{module}.{name}{member}"] = f"theirs {expected}, ours {parameters}"
    assert num_compared > 150
    rejected = {f"{module}.{name}" for module, names in nvrx.REFUSED.items() for name in names}
    unlisted = sorted(one for one in missing - rejected if not any(fnmatch(one, pattern) for pattern in MISSING))
    assert not unlisted, "\n".join(unlisted)
    assert rejected <= missing, f"not missing, or not public: {sorted(rejected - missing)}"
    unexpected = {
        name_of: how for name_of, how in differences.items() if not any(fnmatch(name_of, one) for one in DIFFERENT)
    }
    assert not unexpected, "\n".join(f"{name_of}: {how}" for name_of, how in unexpected.items())
    for pattern in (one for one in (*DIFFERENT, *MISSING) if "*" not in one):
        assert any(fnmatch(one, pattern) for one in missing | differences.keys()), f"{pattern}: take it from the list"
