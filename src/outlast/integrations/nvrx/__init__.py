"""The Python API of NVIDIA's resiliency extension (``nvidia_resiliency_ext``) over outlast's own engine.

After :func:`install`, ``import nvidia_resiliency_ext`` finds this package wherever the real one is not installed, so
that code written for it (Megatron-LM, Megatron-Bridge, scripts) runs unchanged. Modules that are not in :data:`MODULES`
raise ``ModuleNotFoundError``, as without the extension, and callers fall back. Names are imported on first use.

For a script that must not be edited, in place of ``train.py``::

    outlast run --nproc-per-node 8 -m outlast.integrations.nvrx train.py ...

Rejected: a distribution that installs ``nvidia_resiliency_ext`` into site-packages (it and NVIDIA's would overwrite
each other's files), and a ``sitecustomize`` (it would act in every process of the machine).
"""

from __future__ import annotations

import dis
import importlib
import importlib.machinery
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from outlast import env

__all__ = ["install"]

log = logging.getLogger(__name__)

PACKAGE = "nvidia_resiliency_ext"
VERSION = "0.6.0"
"""Version of the API."""

_CLIENT = f"{__name__}.fault_tolerance"
_INPROCESS = f"{__name__}.inprocess"
_RANKS = f"{__name__}.ranks"
_LOCAL = f"{__name__}.local_checkpoints"
_RULES = (
    *("ActivateAllRanks", "ActiveWorldSizeDivisibleBy=ActiveDivisibleBy", "FillGaps=FillGapsFromTheEnd"),
    *("FilterCountGroupedByKey=CountedGroups", "Layer", "LayerFlag", "MaxActiveWorldSize=AtMostActive"),
    *("RankAssignment=AssignmentRule", "RankAssignmentCtx", "RankDiscarded", "RankFilter=FilterRule"),
    *("ShiftRanks=ShiftRanksUp", "Tree=LayeredTree"),
)
_STATE = ("FrozenState=FrozenWrapperState", "Mode", "State=WrapperState")
_NESTED = tuple(f"NestedRestarter{name}" for name in ("Aborted", "Finalized", "HandlingCompleted", "HandlingStarting"))
_LIGHTNING = "outlast.integrations.lightning"
_STRAGGLER = {
    f"{__name__}.straggler": ("CallableId", "Detector", "Report=PerformanceReport", "Statistic", "StragglerId"),
}
_REPORTING = {f"{__name__}.straggler": ("Report=PerformanceReport", "ReportGenerator", "StragglerId")}

MODULES: dict[str, Mapping[str, Sequence[str]]] = {
    "attribution.straggler": _STRAGGLER,
    "attribution.straggler.reporting": _REPORTING,
    "checkpointing.async_ckpt.core": {
        f"{__name__}.async_calls": ("AsyncCallsQueue", "AsyncRequest", "abort_nvrx_checkpoint"),
    },
    "checkpointing.local.base_state_dict": {_LOCAL: ("TensorAwareStateDict",)},
    "checkpointing.local.basic_state_dict": {_LOCAL: ("BasicTensorAwareStateDict",)},
    "checkpointing.local.ckpt_managers.base_manager": {
        _LOCAL: ("BaseCheckpointManager", "CheckpointingException", "SameMachineReplicationException")
    },
    "checkpointing.local.ckpt_managers.local_manager": {_LOCAL: ("LocalCheckpointManager",)},
    "checkpointing.local.replication.group_utils": {_LOCAL: ("GroupWrapper", "parse_group_sequence")},
    "checkpointing.local.replication.strategies": {
        _LOCAL: ("CliqueReplicationStrategy", "LazyCliqueReplicationStrategy", "ReplicationStrategy"),
    },
    "fault_tolerance": {
        _CLIENT: (
            "FaultToleranceConfig=NvrxFaultToleranceConfig",
            "RankMonitorClient",
            "RankMonitorClientError",
            "WorkloadAction",
            "WorkloadControlRequest",
        ),
    },
    "fault_tolerance.config": {_CLIENT: ("FaultToleranceConfig=NvrxFaultToleranceConfig",)},
    "fault_tolerance.data": {
        _CLIENT: ("HeartbeatTimeouts", "SectionTimeouts", "WorkloadAction", "WorkloadControlRequest")
    },
    "fault_tolerance.dict_utils": {f"{__name__}.nested": ("dict_list_map_inplace", "dict_list_map_outplace")},
    "fault_tolerance.rank_monitor_client": {_CLIENT: ("RankMonitorClient", "RankMonitorClientError")},
    "inprocess": {_INPROCESS: ("CallWrapper", "Compose=ComposeFromRight", "Wrapper=WrapperOfNVRx"), _RANKS: _STATE},
    "inprocess.abort": {
        _INPROCESS: (
            *("Abort=StatePlugin", "AbortPersistentCheckpointProcesses=AbortAsyncCalls", "AbortTorchDistributed"),
            "AbortTransformerEngine",
        ),
    },
    "inprocess.completion": {_INPROCESS: ("Completion=StatePlugin",)},
    "inprocess.compose": {_INPROCESS: ("Compose=ComposeFromRight",)},
    "inprocess.exception": {
        _INPROCESS: ("HealthCheckError", "InternalError", "TimeoutError=RestartTimeout"),
        _RANKS: ("RestartError",),
        "outlast.errors": ("RestartAbort",),
    },
    "inprocess.finalize": {_INPROCESS: ("Finalize=StatePlugin", "ThreadedFinalize")},
    "inprocess.health_check": {
        _INPROCESS: (
            *("ChainedGPUHealthCheck=GpuMemoryHealthCheck", "ChainedNVLHealthCheck=NvLinkHealthCheck"),
            *("ChainedNicHealthCheck=NicHealthCheck", "CudaHealthCheck", "FaultCounter=RankFaultCounter"),
            *("FaultCounterExceeded=RankFaultsExceeded", "HealthCheck=StatePlugin"),
        ),
    },
    "inprocess.initialize": {_INPROCESS: ("Initialize=StatePlugin", "RetryController=RetryLimits")},
    "inprocess.monitor_thread": {"outlast.inprocess.call": ("RankShouldRestart=RestartRequested",)},
    "inprocess.nested_restarter": {_INPROCESS: ("NestedRestarterCallback", "NestedRestarterLogger", *_NESTED)},
    "inprocess.param_utils": {
        _INPROCESS: ("check_type=is_annotated", "count_type_in_params", "substitute_param_value"),
    },
    "inprocess.rank_assignment": {_RANKS: _RULES},
    "inprocess.state": {_RANKS: _STATE},
    "inprocess.store": {_INPROCESS: ("StoreMixin=NoStore", "TCPStore")},
    "inprocess.terminate": {_INPROCESS: ("Terminate=StatePlugin",)},
    "inprocess.wrap": {_INPROCESS: ("CallWrapper", "Wrapper=WrapperOfNVRx")},
    "ptl_resiliency": {
        _LIGHTNING: (
            *("FaultToleranceCallback", "FaultToleranceSectionsCallback", "SimulatedFaultParams"),
            "StragglerDetectionCallback",
        ),
    },
    "ptl_resiliency.fault_tolerance_callback": {_LIGHTNING: ("FaultToleranceCallback", "SimulatedFaultParams")},
    "ptl_resiliency.fault_tolerance_sections_callback": {_LIGHTNING: ("FaultToleranceSectionsCallback",)},
    "ptl_resiliency.local_checkpoint_callback": {_LIGHTNING: ("HierarchicalCheckpointIO", "LocalCheckpointCallback")},
    "ptl_resiliency.straggler_det_callback": {_LIGHTNING: ("StragglerDetectionCallback",)},
    "shared_utils.inject_fault": {
        f"{__name__}.fault_injection": (
            *("Fault=WorkloadFault", "InjectedException", "clear_workload_exception", "dispatch_fault_injection"),
            *("inject_fault", "maybe_raise_workload_exception", "register_fault"),
        ),
    },
    "straggler": _STRAGGLER,
    "straggler.reporting": _REPORTING,
}
"""Offered names, by module below ``nvidia_resiliency_ext`` and by outlast's module that defines them.

An entry ``theirs=ours`` has another name in outlast. Parent packages need no entry.
"""

_OWN = "a helper of the extension's own code; copy what you use of it"
_ENGINE = "copies are made and found by outlast's checkpoints; use LocalCheckpointManager(..., repl_strategy=...)"
_MONITOR = "outlast run, or the client, starts the monitor of a rank itself; use RankMonitorClient"
_FAULT = "use dispatch_fault_injection(Fault.NAME, delay, callback), or register_fault() with a function of yours"

REFUSED: dict[str, Mapping[str, str]] = {
    "checkpointing.async_ckpt.core": dict.fromkeys(
        ("AsyncCaller", "ObjectTracker", "PersistentAsyncCaller", "TemporalAsyncCaller"),
        "use AsyncCallsQueue(persistent=True), or persistent=False",
    ),
    "checkpointing.local.basic_state_dict": {
        "TensorPlaceholder": "the place of a tensor in hollow state is not public; use pop_tensors(), insert_tensors()",
        **dict.fromkeys(("dict_list_map_inplace", "nested_values"), _OWN),
    },
    "checkpointing.local.replication.group_utils": dict.fromkeys(
        ("ExchangePlan", "ExchangePlanEntry", "batched"), _ENGINE
    ),
    "checkpointing.local.replication.strategies": dict.fromkeys(
        ("LazyReplicationStrategyBuilder", "NoReplicasAvailableError"), _ENGINE
    ),
    "fault_tolerance": dict.fromkeys(
        ("InvalidStateTransitionException", "RankMonitorServer", "RankMonitorState", "RankMonitorStateMachine"),
        _MONITOR,
    ),
    "fault_tolerance.data": dict.fromkeys(
        (
            *("AuthkeyMsg", "ErrorMsg", "HeartbeatMsg", "InitMsg", "OkMsg", "RankInfo", "SectionAction", "SectionMsg"),
            "UpdateConfigMsg",
        ),
        "a message between the extension's own processes; use RankMonitorClient",
    ),
    "fault_tolerance.dict_utils": dict.fromkeys(
        (
            *("compare_namespaces", "compare_state_dicts_and_get_new_values", "dict_map", "dict_map_with_key", "diff"),
            *("extract_matching_values", "inspect_types", "map_reduce", "merge", "merge_namespace_changes"),
            *("merge_namespaces_", "merge_state_dicts_", "nested_items_iter", "nested_values"),
        ),
        _OWN,
    ),
    "ptl_resiliency.local_checkpoint_callback": {
        "LOCAL_CKPT_OPTS_KEY": "pass storage_options to HierarchicalCheckpointIO.save_checkpoint",
    },
    "shared_utils.inject_fault": dict.fromkeys(
        (
            *("abort", "async_raise", "async_raise_exception", "gpu_sleep", "lock_gil", "raise_gpu_error", "segfault"),
            *("send_signal", "termination_signal_handler", "workload_exception"),
        ),
        _FAULT,
    ),
}
"""Public names of the extension that are not offered, by module, and their replacements. Importing one raises an
``ImportError`` with that text. Other modules are left out whole, so that callers fall back."""

_LOOK_FOR_IT = (
    "megatron.bridge.training",
    "megatron.core.dist_checkpointing.tensor_aware_state_dict",
    "megatron.training",
)
"""Modules that look for the extension only once, when they are imported."""


def install() -> bool:
    """Make ``import nvidia_resiliency_ext`` find this package, unless the real one is installed.

    Call it before importing anything that looks for the extension. It imports neither torch nor the offered modules.
    Idempotent.

    Returns:
        Whether the extension is this package's now; ``False``: another one is installed, and nothing was changed.

    Thread: the thread that imports, before other threads import the extension.
    """
    real = _real()
    if real is not None:
        level = logging.WARNING if env.read_worker().global_rank == 0 else logging.DEBUG
        log.log(level, "%s: outlast's is not installed over it", real)
        return False
    if not any(isinstance(finder, _NvrxFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NvrxFinder())
        importlib.invalidate_caches()
        log.debug("%s %s is outlast's", PACKAGE, VERSION)
        late = [name for name in _LOOK_FOR_IT if name in sys.modules]
        if late:
            log.warning(
                "%s was imported before install(), and may have found no %s: call install() first", late[0], PACKAGE
            )
    return True


def _real() -> str | None:
    """Return where another extension is, and what is wrong with it; ``None`` = there is none."""
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None:
        if isinstance(getattr(loaded, "__loader__", None), _NvrxLoader):
            return None
        return f"{PACKAGE} is loaded already, from {getattr(loaded, '__file__', None) or 'elsewhere'}"
    spec = _find_real()
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    where = spec.origin or ", ".join(map(str, folders))
    if not any((folder / "fault_tolerance" / "__init__.py").exists() for folder in folders):
        return (
            f"only parts of {PACKAGE} are at {where}; remove them, or install the package again "
            f"(pip install --force-reinstall nvidia-resiliency-ext)"
        )
    return f"{PACKAGE} is installed at {where}"


def _find_real() -> ModuleSpec | None:
    """Return the spec of the real extension; folders without a module, as left by ``pip``, do not count."""
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        if isinstance(finder, _NvrxFinder) or find is None:
            continue
        spec: ModuleSpec | None = find(PACKAGE, None)
        if spec is not None and (spec.origin is not None or _has_module(spec.submodule_search_locations or ())):
            return spec
    return None


def _has_module(folders: Iterable[str]) -> bool:
    suffixes = tuple(importlib.machinery.all_suffixes())
    return any(
        os.path.basename(folder) != "__pycache__" and any(name.endswith(suffixes) for name in names)
        for top in folders
        for folder, _, names in os.walk(top)
    )


def _is_package(name: str) -> bool:
    return not name or any(other.startswith(f"{name}.") for other in MODULES)


def _is_import(frame: FrameType) -> bool:
    """Return whether a frame executes ``from ... import``."""
    return frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]


class _NvrxFinder(MetaPathFinder):
    """Finds the modules of the table, unless the real package was put on the path before its first import.

    The first finder, since the path finder finds a namespace package in folders without a module.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root, _, name = fullname.partition(".")
        if root != PACKAGE or not (name in MODULES or _is_package(name)):
            return None
        if name and not isinstance(getattr(sys.modules.get(root), "__loader__", None), _NvrxLoader):
            return None  # a missing part of the real package
        if not name and _find_real() is not None:
            return None
        return ModuleSpec(fullname, _NvrxLoader(name), origin="outlast.integrations.nvrx", is_package=_is_package(name))


class _NvrxLoader(Loader):
    """Creates a module whose names are imported on first use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = self._name
        homes = {}
        for home, names in MODULES.get(name, {}).items():
            for entry in names:
                theirs, _, ours = entry.partition("=")
                homes[theirs] = (home, ours or theirs)
        below = f"{name}." if name else ""
        children = {other.removeprefix(below).split(".")[0] for other in MODULES if other.startswith(below)} - {""}

        def get(attribute: str) -> Any:
            if attribute in homes:
                home, ours = homes[attribute]
                value = getattr(importlib.import_module(home), ours)
            elif attribute in children:
                value = importlib.import_module(f"{module.__name__}.{attribute}")
            else:
                instead = REFUSED.get(name, {}).get(attribute)
                text = f"{module.__name__}.{attribute} is not among the names that outlast offers of {PACKAGE}"
                # `from ... import` replaces an AttributeError by an ImportError with another text.
                kind = ImportError if _is_import(sys._getframe(1)) else AttributeError
                raise kind(f"{text}: {instead}" if instead else text)
            setattr(module, attribute, value)
            return value

        def list_names() -> Iterable[str]:
            return sorted({*vars(module), *homes, *children})

        vars(module).update(
            __doc__=f"outlast's {module.__name__}.", __all__=sorted(homes), __getattr__=get, __dir__=list_names
        )
        if not name:
            vars(module)["__version__"] = VERSION
