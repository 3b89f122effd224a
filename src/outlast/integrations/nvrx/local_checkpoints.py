"""NVRx's local checkpoints over the checkpoint engine: verified node-local copies, and replicas on other nodes.

:class:`LocalCheckpointManager` has NVRx's calls and results. A save is a checkpoint of the local tier (and of the
node's memory, under ``outlast run``): every byte is verified against its digest before it is loaded, all ranks load the
same iteration, and a missing or damaged copy is replaced by a replica.

A tensor-aware state dict is an arbitrary Python object. Its tensors are saved as tensors. The rest, the *hollow* state,
is pickled and read by an unpickler that accepts only known classes (:func:`allow_class`), since anybody who can write
to the folder could otherwise run code. Each save verifies that its hollow state can be read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fcntl
import importlib
import io
import itertools
import logging
import os
import pickle
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Protocol, cast

import torch

from outlast.checkpoint.manager import ReadingEngine
from outlast.checkpoint.places import Peers
from outlast.checkpoint.save import SaveHandle
from outlast.config import CheckpointConfig
from outlast.config.base import require
from outlast.decoding import open_file
from outlast.errors import CheckpointError, OutlastError
from outlast.inprocess.call import current_handle
from outlast.integrations.megatron import follow_rerun_machine
from outlast.integrations.nvrx.nested import dict_list_map_inplace
from outlast.runtime.process_groups import current_place
from outlast.runtime.random_numbers import capture_random, restore_random

log = logging.getLogger(__name__)
NOT_FOUND = -1
"""Result of :meth:`LocalCheckpointManager.find_latest` if there is nothing to load."""
_SESSION, _HOLLOW, _TENSORS, _INNER = "session", "hollow", "tensors", "inner"


class CheckpointingException(Exception):
    """A local checkpoint was not saved, or could not be loaded; the text has the reason and the remedy."""


class SameMachineReplicationException(CheckpointingException):
    """Never raised, since copies are stored on other nodes. For code that handles NVRx's."""


class TensorAwareStateDict(ABC):
    """A state dict whose tensors can be taken out and replaced; the unit that a manager saves."""

    @abstractmethod
    def pop_tensors(self) -> Sequence[torch.Tensor]:
        """Take the tensors out and return them; the hollow rest keeps their shapes and devices."""

    @property
    @abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, always in the same order."""

    @property
    @abstractmethod
    def is_hollow(self) -> bool:
        """Whether the tensors were taken out."""

    @abstractmethod
    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Insert tensors where :meth:`pop_tensors` took some out, in the same order."""

    @abstractmethod
    def init_tensors(self) -> None:
        """Insert uninitialised tensors of the same shapes, types and devices."""

    @abstractmethod
    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Replace each tensor by a copy on the CPU; its device is kept for :meth:`restore_tensor_device`."""

    @abstractmethod
    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """Move each tensor to its former device."""

    def values(self) -> ValuesView[Any]:
        return vars(self).values()


@dataclasses.dataclass(slots=True)
class _Hole:
    """Placeholder of a tensor that was taken out."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


class BasicTensorAwareStateDict(TensorAwareStateDict):
    """A state dict of nested dicts and lists, with tensors on any device."""

    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict = state_dict
        self._is_hollow = False
        self._devices: list[str] | None = None

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        self._require(hollow=False)
        return (leaf for leaf in _leaves(self.state_dict) if isinstance(leaf, torch.Tensor))

    @property
    def is_hollow(self) -> bool:
        return self._is_hollow

    def pop_tensors(self) -> list[torch.Tensor]:
        taken = list(self.tensors)
        self._replace(torch.Tensor, lambda tensor: _Hole(tuple(tensor.shape), tensor.dtype, str(tensor.device)))
        self._is_hollow = True
        return taken

    def insert_tensors(self, tensor_data: Iterable[torch.Tensor]) -> None:
        """Insert tensors where some were taken out.

        Raises:
            CheckpointingException: Their number differs.
        """
        self._require(hollow=True)
        given = list(tensor_data)
        holes = [leaf for leaf in _leaves(self.state_dict) if isinstance(leaf, _Hole)]
        if len(given) != len(holes):
            raise CheckpointingException(f"{len(given)} tensors were given for {len(holes)} places; give all of them")
        left = iter(given)
        self._replace(_Hole, lambda hole: next(left))
        self._devices = [hole.device for hole in holes]
        self._is_hollow = False

    def init_tensors(self) -> None:
        self._require(hollow=True)
        self._replace(_Hole, lambda hole: torch.empty(hole.shape, dtype=hole.dtype, device=hole.device))
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self._devices = [str(tensor.device) for tensor in self.tensors]
        self._replace(torch.Tensor, lambda tensor: tensor.detach().to("cpu", non_blocking=non_blocking, copy=True))

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        if (devices := self._devices) is not None:
            left = iter(devices)
            self._replace(torch.Tensor, lambda tensor: tensor.to(next(left), non_blocking=non_blocking))
            self._devices = None

    def _require(self, *, hollow: bool) -> None:
        if self._is_hollow != hollow:
            remedy = "insert_tensors() comes first" if self._is_hollow else "pop_tensors() comes first"
            raise CheckpointingException(f"the state dict is {'' if self._is_hollow else 'not '}hollow; {remedy}")

    def _replace(self, kind: type, make: Any) -> None:
        dict_list_map_inplace(lambda leaf: make(leaf) if isinstance(leaf, kind) else leaf, self.state_dict)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


# -- hollow state -----------------------------------------------------------------------------------------------

_PLAIN = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "argparse": {"Namespace"},
    "types": {"SimpleNamespace"},
    "datetime": {"date", "datetime", "timedelta", "timezone"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath"},
    "io": {"BytesIO"},
    "_io": {"BytesIO"},
    "torch": {"Size", "device"},
    "numpy": {"dtype", "ndarray"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
}
"""Accepted in hollow state, in addition to enums, Megatron's data classes and classes from :func:`allow_class`."""
_MEGATRON = "megatron"
_allowed: dict[tuple[str, str], type] = {}


def allow_class(kind: type) -> type:
    """Accept objects of a class in hollow state of local checkpoints; also a decorator.

    Loading creates such objects and sets their attributes: do not allow a class that acts when that is done.
    """
    _allowed[kind.__module__, kind.__qualname__] = kind
    return kind


allow_class(_Hole)
allow_class(BasicTensorAwareStateDict)


class _HollowPickler(pickle.Pickler):
    """Pickle hollow state; tensors within its objects are collected in ``inner``."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.inner: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        self.inner.append(obj.detach())
        return len(self.inner) - 1


class HollowUnpickler(pickle.Unpickler):
    """Read hollow state; refuse all other classes."""

    def __init__(self, data: bytes, inner: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._inner = inner

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._inner[int(pid)]

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (found := _allowed.get((module_name, global_name))) is not None:
            return found
        if global_name in _PLAIN.get(module_name, ()):
            return super().find_class(module_name, global_name)
        found = _find(module_name, global_name)
        if isinstance(found, torch.dtype) or (isinstance(found, type) and _may_be_state(found)):
            return found
        raise pickle.UnpicklingError(
            f"a local checkpoint holds {module_name}.{global_name}, which is not one of the classes that are read "
            "back; if it only holds values, call outlast.integrations.nvrx.local_checkpoints.allow_class() with it"
        )


def _find(module_name: str, global_name: str) -> Any:
    """Return the object that a name refers to. Only Megatron's modules are imported for that."""
    if module_name.partition(".")[0] == _MEGATRON:
        with contextlib.suppress(ImportError):
            importlib.import_module(module_name)
    found: Any = sys.modules.get(module_name)
    for part in global_name.split("."):
        found = getattr(found, part, None)
    return found


def _may_be_state(kind: type) -> bool:
    is_megatrons = kind.__module__.partition(".")[0] == _MEGATRON
    return issubclass(kind, enum.Enum | TensorAwareStateDict) or (is_megatrons and dataclasses.is_dataclass(kind))


def _split_state(state_dict: TensorAwareStateDict, session_id: str) -> dict[str, Any]:
    """Return the parts to save of a state dict, which is left unchanged.

    Raises:
        CheckpointingException: The state dict could not be loaded again.
    """
    tensors = list(state_dict.pop_tensors())
    try:
        buffer = io.BytesIO()
        pickler = _HollowPickler(buffer)
        pickler.dump(state_dict)
        hollow = buffer.getvalue()
        HollowUnpickler(hollow, pickler.inner).load()
    except Exception as error:  # objects of a state dict may raise anything
        text = f"this state dict cannot be saved, as it could not be loaded again: {error}"
        raise CheckpointingException(text) from error
    finally:
        state_dict.insert_tensors(tensors)
    # A dict, not a list: a shard names each tensor by its path.
    return {
        _SESSION: session_id,
        _HOLLOW: hollow,
        _TENSORS: {str(number): tensor.detach() for number, tensor in enumerate(tensors)},
        _INNER: {str(number): tensor for number, tensor in enumerate(pickler.inner)},
    }


def _join_state(saved: dict[str, Any]) -> TensorAwareStateDict:
    hollow = HollowUnpickler(saved[_HOLLOW], _in_order(saved[_INNER])).load()
    hollow.insert_tensors(_in_order(saved[_TENSORS]))
    hollow.restore_tensor_device(non_blocking=False)
    return cast(TensorAwareStateDict, hollow)


def _in_order(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensors[str(number)] for number in range(len(tensors))]


class _SavedPart:
    """One rank's part of a checkpoint.

    Args:
        make: Returns the content to save. Called by the engine's save, which reports an exception of it to all ranks,
            so that no rank waits for this one.
    """

    def __init__(self, make: Callable[[], dict[str, Any]] | None = None) -> None:
        self.content: dict[str, Any] = {}
        self._make = make

    def state_dict(self) -> dict[str, Any]:
        if self._make is not None:
            self.content, self._make = self._make(), None
        return self.content

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.content = content


# -- replication ------------------------------------------------------------------------------------------------


def parse_group_sequence(replication_jump: int, replication_factor: int, world_size: int) -> list[tuple[int, ...]]:
    """Return the groups of ranks that hold each other's copies, as NVRx divides the world.

    Raises:
        ConfigError: The world cannot be divided in that way.
    """
    require(replication_jump >= 1, f"replication_jump={replication_jump} must be at least 1 rank")
    require(replication_factor >= 1, f"replication_factor={replication_factor} must be at least 1")
    size = replication_jump * replication_factor
    require(
        world_size % size == 0,
        f"{world_size} ranks cannot be divided into groups of replication_factor={replication_factor} ranks that are "
        f"replication_jump={replication_jump} apart; their product must divide the number of ranks",
    )
    starts = [start + first for start in range(0, world_size, size) for first in range(replication_jump)]
    return [tuple(range(start, start + size, replication_jump)) for start in starts]


class GroupWrapper:
    """A process group and its members."""

    def __init__(self, group: torch.distributed.ProcessGroup | None = None) -> None:
        self._group = group

    @staticmethod
    def wrap(group: GroupWrapper | torch.distributed.ProcessGroup | None) -> GroupWrapper:
        return group if isinstance(group, GroupWrapper) else GroupWrapper(group)

    @property
    def group(self) -> Any:
        return self._group if self._group is not None else torch.distributed.group.WORLD

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the members."""
        return torch.distributed.get_process_group_ranks(self.group)

    @property
    def world_size(self) -> int:
        return torch.distributed.get_world_size(self.group)

    @property
    def my_group_rank(self) -> int:
        return torch.distributed.get_rank(self.group)

    @property
    def my_global_rank(self) -> int:
        return torch.distributed.get_rank()


class ReplicationStrategy(Protocol):
    """Which nodes hold copies; the checkpoint engine makes them."""

    replication_jump: int | None
    """Ranks between a rank and the one whose node gets its copy; ``None`` = the ranks of a node."""
    replication_factor: int


class LazyCliqueReplicationStrategy:
    """Copy each rank's part to the nodes of the ranks ``replication_jump`` apart; needs no process group.

    Args:
        replication_jump: Ranks between a rank and the one whose node gets its copy; ``None`` = the ranks of a node.
        replication_factor: Nodes that hold each part, including the rank's own, at least 2.

    Raises:
        ConfigError: A value is out of range.
    """

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2) -> None:
        jump = replication_jump
        require(jump is None or jump >= 1, f"replication_jump={jump} must be at least 1 rank")
        text = f"replication_factor={replication_factor} must be at least 2; for no copies pass repl_strategy=None"
        require(replication_factor >= 2, text)
        self.replication_jump, self.replication_factor = replication_jump, replication_factor


class CliqueReplicationStrategy(LazyCliqueReplicationStrategy):
    """:class:`LazyCliqueReplicationStrategy` from a process group whose members' nodes hold each other's copies.

    Args:
        local_group: Ranks that are all equally far apart.
        target_device: Only ``"cpu"``: copies are sent from host memory to the other nodes' memory and disks.

    Raises:
        ConfigError: The ranks are not equally far apart, or another device is given.
    """

    def __init__(self, local_group: GroupWrapper | torch.distributed.ProcessGroup, target_device: str = "cpu") -> None:
        text = f"target_device={target_device!r} is not supported: copies travel through host memory; leave it out"
        require(str(target_device) == "cpu", text)
        ranks = sorted(GroupWrapper.wrap(local_group).ranks)
        jumps = {after - before for before, after in itertools.pairwise(ranks)}
        text = f"the ranks {ranks} of local_group are not equally far apart; use from_replication_params(jump, factor)"
        require(len(jumps) == 1, text)
        super().__init__(jumps.pop(), len(ranks))

    @classmethod
    def from_replication_params(
        cls, replication_jump: int | None = None, replication_factor: int = 2
    ) -> LazyCliqueReplicationStrategy:
        """Return the strategy with the parameters of :class:`LazyCliqueReplicationStrategy`."""
        return LazyCliqueReplicationStrategy(replication_jump, replication_factor)


# -- the manager ------------------------------------------------------------------------------------------------


class LocalCheckpointID(NamedTuple):
    """Identifies one rank's part of a local checkpoint."""

    iteration: int
    rank: int
    session_id: str


class BaseCheckpointManager(ABC):
    """Save and load local checkpoints.

    Args:
        session_id: Names the training; checkpoints of another training are never loaded.
        repl_strategy: Which nodes hold copies; ``None`` = no replicas.
    """

    def __init__(self, session_id: str, repl_strategy: ReplicationStrategy | None = None) -> None:
        self.session_id, self.repl_strategy = session_id, repl_strategy
        self.latest_iteration = NOT_FOUND
        """Last result of :meth:`find_latest`, until the next save."""

    @property
    def rank(self) -> int:
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @abstractmethod
    def find_latest(self) -> int:
        """Return the newest iteration that all ranks can load; -1 = there is none. Collective: all ranks."""

    @abstractmethod
    def load(self) -> tuple[TensorAwareStateDict, LocalCheckpointID]:
        """Return the state that :meth:`find_latest` found. Collective: all ranks."""

    @abstractmethod
    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> Any:
        """Save a state dict as that of an iteration. Collective: all ranks."""


class _ManagerStage(enum.Enum):
    """Stage of the engine's manager, which searches and loads only before it saves."""

    FRESH = enum.auto()
    FOUND = enum.auto()
    """The search is done; as far as known, training does not continue from its result."""
    READY = enum.auto()
    """The next save follows the loaded checkpoint, or there was none."""
    SAVING = enum.auto()


class LocalCheckpointManager(BaseCheckpointManager):
    """Save tensor-aware state dicts to node-local tiers, and load the newest checkpoint that all ranks can verify.

    Args:
        root_local_ckpt_dir: A folder on a disk of each node, or in memory.
        session_id: Names the training; each has a separate folder.
        repl_strategy: Which other nodes hold copies; ``None`` = no replicas.

    Raises:
        ConfigError: ``session_id`` is not a valid folder name.

    Collective: its calls, all ranks in the same order.
    """

    def __init__(
        self,
        root_local_ckpt_dir: str | os.PathLike[str],
        session_id: str = "",
        repl_strategy: ReplicationStrategy | None = None,
    ) -> None:
        parts = PurePath(session_id).parts
        text = f"session_id={session_id!r} must be the name of a folder within root_local_ckpt_dir"
        require(not session_id.startswith("/") and ".." not in parts, text)
        super().__init__(session_id, repl_strategy)
        self.root_local_ckpt_dir = root_local_ckpt_dir
        config = CheckpointConfig(
            local_directory=str(self.local_ckpt_dir),
            replication=repl_strategy is not None,
            replication_jump=getattr(repl_strategy, "replication_jump", None),
            replication_factor=getattr(repl_strategy, "replication_factor", 2),
            resume_from_other_run=True,  # the session id names the training, over all jobs
        )
        self._suspect_window = config.suspect_window
        self._config = dataclasses.replace(config, suspect_window=0)  # retention: NVRx's, plus one
        self._manager: ReadingEngine | None = None
        self._stage = _ManagerStage.FRESH
        self._locks: _Locks | None = None
        self._found: tuple[TensorAwareStateDict, LocalCheckpointID] | None = None
        self._loaded_iteration = NOT_FOUND
        """Iteration that was loaded, until the next save."""
        self._suspect = NOT_FOUND
        """Iteration of the last :meth:`load`."""

    @property
    def local_ckpt_dir(self) -> Path:
        """The session's folder, which has a folder for each node."""
        return Path(self.root_local_ckpt_dir) / self.session_id

    def find_latest(self) -> int:
        """Return the newest iteration of which every rank has verified a copy; -1 = there is none.

        Every byte is verified now, so that :meth:`load` cannot fail. The copy is held in memory until then, or until
        the next save. After :meth:`load`, the search and the verification are repeated.

        Raises:
            CheckpointingException: The folder contains another session's checkpoints, or cannot be used; a rank exited.

        Collective: all ranks.
        """
        try:
            if self.latest_iteration == NOT_FOUND or self._find_first("" if self._found is not None else "loaded"):
                self._find()
        except OutlastError as error:
            raise CheckpointingException(str(error)) from error
        return self.latest_iteration

    def load(self) -> tuple[TensorAwareStateDict, LocalCheckpointID]:
        """Return the state dict that :meth:`find_latest` found, and (iteration, rank, session).

        Raises:
            CheckpointingException: Nothing was found, or the state dict was returned already.

        Collective: all ranks.
        """
        if self._found is None:
            raise CheckpointingException("there is nothing to load; call find_latest() first, and load() once after it")
        found, self._found, self._stage = self._found, None, _ManagerStage.READY
        self._loaded_iteration = self._suspect = found[1].iteration
        if self._manager is not None:
            self._manager.report_used(self._suspect_window)
        follow_rerun_machine(self._note_rejection)
        return found

    def save(self, state_dict: TensorAwareStateDict, iteration: int, is_async: bool = False) -> Any:
        """Copy a state dict and commit it as the checkpoint of ``iteration``.

        Args:
            state_dict: Unchanged when this returns; may be changed afterwards.
            iteration: Number of optimizer steps done; higher than that of all found or saved checkpoints.
            is_async: Return once the state dict is copied, with a request that commits it.

        Returns:
            ``None`` once it is committed. With ``is_async`` an ``AsyncRequest``, whose finalization waits for the
                commit.

        Raises:
            CheckpointingException: It was not committed, or cannot be saved; earlier checkpoints are unchanged. Also
                raised by the request's finalization.

        Collective: all ranks; the finalization, too.
        """
        if iteration <= self.latest_iteration:
            raise CheckpointingException(
                f"iteration {iteration} is not newer than the local checkpoint of iteration {self.latest_iteration}, "
                f"which would be loaded in its place; remove {self.local_ckpt_dir}, or use another session_id"
            )
        kind = _request_kind() if is_async else None
        part = _SavedPart(lambda: _split_state(state_dict, self.session_id))
        try:
            handle = self._open_for_saving(iteration).save({"part": part}, iteration)
            self._found, self.latest_iteration, self._loaded_iteration = None, NOT_FOUND, NOT_FOUND
            if not is_async:
                handle.wait()
        except OutlastError as error:
            raise CheckpointingException(f"the local checkpoint of iteration {iteration} failed: {error}") from error
        if not is_async:
            return None
        if self._locks is None:
            self._locks = _Locks(self.local_ckpt_dir / f".saving-{self.rank}")
        return self._locks.request(handle, kind)

    def close(self) -> None:
        """Stop background work; saves that are not committed are dropped. Idempotent.

        Called at the end of the process, and when a call of a function with in-process restart ends.
        """
        manager, self._manager = self._manager, None
        locks, self._locks = self._locks, None
        if manager is not None:
            manager.close()
        if locks is not None:
            locks.close()

    # -- the engine --------------------------------------------------------------------------------------------

    def _open_new(self) -> ReadingEngine:
        """Return a manager that has neither searched nor saved, after pending saves of the last one are decided."""
        if self._manager is not None and self._stage is not _ManagerStage.FRESH:
            with contextlib.suppress(CheckpointError):  # the save's handle reports the failure
                self._manager.wait()
            self.close()
        if self._manager is None:
            self._manager, self._stage = ReadingEngine(self._config, current_place()), _ManagerStage.FRESH
            if (call := current_handle()) is not None:
                call.on_leave(self.close)
        self._manager.claim()
        return self._manager

    def _open_for_saving(self, iteration: int) -> ReadingEngine:
        if self._manager is None or self._stage in (_ManagerStage.FRESH, _ManagerStage.FOUND):
            # Training resumed from elsewhere, for example a global checkpoint, not from the checkpoints here.
            self._open_new().go_on({"part": _SavedPart()}, max(0, iteration - 1), None)
        self._stage = _ManagerStage.SAVING
        assert self._manager is not None
        return self._manager

    def _find(self) -> None:
        manager = self._open_new()
        self._found, self.latest_iteration, self._stage = None, NOT_FOUND, _ManagerStage.FOUND
        part, random = _SavedPart(), capture_random()
        try:
            restored = manager.load_latest({"part": part})
        except CheckpointError as error:
            self._log_refusal(f"no local checkpoint can be loaded, as if there were none: {error}")
            return
        finally:
            restore_random(random)  # a search must not change random numbers; training's own are in the state dict
        if restored is None:
            self._stage = _ManagerStage.READY
            return
        foreign = ""
        if (session := part.content.get(_SESSION)) != self.session_id:
            foreign = (
                f"{self.local_ckpt_dir} holds local checkpoints of session {session!r}, not of {self.session_id!r}; "
                "name another folder or session_id, or remove them"
            )
        if text := self._find_first(foreign):  # on all ranks, so that none waits for a rank that refused
            raise CheckpointError(text)
        problem, found = "", None
        try:
            found = _join_state(part.content)
        except Exception as error:  # noqa: BLE001 - what the objects of a state dict raise is theirs
            problem = f"rank {self.rank}: {error}"
        if text := self._find_first(problem):
            self._log_refusal(f"the local checkpoint of iteration {restored.iteration} is not loaded: {text}")
            return
        assert found is not None
        if restored.iteration == self._loaded_iteration:
            self._stage = _ManagerStage.READY  # it was found again after it was loaded
        self.latest_iteration = restored.iteration
        self._found = found, LocalCheckpointID(restored.iteration, self.rank, self.session_id)

    def _note_rejection(self, iteration: int, exit_code: int) -> bool:
        """Report an invalid result of Megatron's step; return whether the result of :meth:`load` is suspect."""
        if self._manager is not None:
            self._manager.report_leaving(iteration, exit_code)
        return 0 <= iteration - self._suspect <= self._suspect_window

    def _log_refusal(self, text: str) -> None:
        if self.rank == 0:
            log.error("%s", text)

    def _find_first(self, text: str) -> str:
        """Return the first non-empty text of any rank. Collective: all ranks."""
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        peers = Peers(self.rank, world_size, timeout_s=self._config.save_timeout)
        try:
            return peers.find_first(text)
        finally:
            peers.close()


# -- asynchronous saves ------------------------------------------------------------------------------------------

_under_way: dict[tuple[str, int], tuple[SaveHandle, int]] = {}
"""Saves that were returned as requests, and the process id of their owner, by their locks."""


def _request_kind() -> Any:
    """Return the class of requests: the extension's, real or outlast's, else Megatron's of the same form.

    Raises:
        CheckpointingException: There is neither.
    """
    for name in (
        "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
        "megatron.core.dist_checkpointing.strategies.async_utils",
    ):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).AsyncRequest
    raise CheckpointingException(
        "is_async=True needs nvidia_resiliency_ext, or Megatron-Core; call outlast.integrations.nvrx.install() first"
    )


class _Locks:
    """A file with one lock for each save that was returned as a request, held until that save is decided.

    A queue's worker, a thread or a process, only waits for the lock, since the engine does the writing. So the
    finalization runs once the save is decided, and never blocks training. The kernel releases the locks of a process
    that dies; child processes do not inherit them.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")  # noqa: SIM115 - open for as long as there are locks: closing it releases all
        self._path, self._next = str(path), 0

    def request(self, handle: SaveHandle, kind: Any) -> Any:
        """Return the request for a save."""
        key = self._path, self._next
        self._next += 1
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, key[1])
        _under_way[key] = handle, os.getpid()

        def release() -> None:
            with contextlib.suppress(OutlastError):  # raised by the finalization
                handle.wait()
            with contextlib.suppress(ValueError):  # closed: all locks are released
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, key[1])

        def finalize() -> None:
            _under_way.pop(key, None)
            try:
                handle.wait()
            except OutlastError as error:
                text = f"the local checkpoint of iteration {handle.iteration} failed: {error}"
                raise CheckpointingException(text) from error

        threading.Thread(target=release, name="outlast-local-checkpoint", daemon=True).start()
        return kind(wait_until_decided, key, [finalize])

    def close(self) -> None:
        """Release all locks."""
        self._file.close()


def wait_until_decided(path: str, number: int) -> None:
    """Wait until an asynchronous save is committed or has failed; called by the queue, in any process of the node.

    Blocks: up to the save's own deadline.
    """
    handle, owner = _under_way.get((path, number), (None, 0))
    if handle is not None and owner == os.getpid():
        with contextlib.suppress(OutlastError):
            handle.wait()
        return
    with contextlib.suppress(FileNotFoundError), open(open_file(path), "rb") as file:
        fcntl.lockf(file, fcntl.LOCK_SH, 1, number)
