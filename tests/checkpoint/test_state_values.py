"""Values of a state in addition to plain tensors and numbers: saved as they are, or rejected with path and remedy."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.dcp.directory import GlobalDirectory
from outlast.checkpoint.dcp.reshard import load_resharded
from outlast.checkpoint.manager import open_manager
from outlast.checkpoint.state import capture, decode, flatten
from outlast.checkpoint.verification import VerifiedFiles
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError

aten = torch.ops.aten


def round_trip(value: Any) -> Any:
    flat = flatten(value)
    tensors = {named.name: named.tensor.clone() for named in flat.tensors}
    return decode(flat.tree, tensors.__getitem__)


def manage(folder: Path) -> CheckpointManager:
    config = CheckpointConfig(local_directory=str(folder / "local"), directory=str(folder / "global"), save_timeout=40)
    return open_manager(config, env=WorkerEnv(node="node"))


# -- arrays ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0)[::-1],
        np.arange(12).reshape(3, 4)[:, ::-1],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.broadcast_to(np.float32(3), (2, 2)),
        np.array(7.5),
        np.arange(3, dtype=">f8"),
        np.arange(3, dtype=np.complex128),
        np.arange(3, dtype=np.longdouble),
        np.array(["2026-11-22", "NaT"], dtype="M8[s]"),
        np.array(["ä", "bc"]),
        np.array([(1, 2.5)], dtype=[("n", "i4"), ("x", "f8")]),
        np.zeros((0, 3)),
    ],
)
def test_arrays_of_any_dtype_are_restored(array: Any) -> None:
    """Reversed views, read-only arrays, other byte orders, dates, texts and records keep type, shape and values."""
    decoded = round_trip({"a": array})["a"]
    assert (type(decoded), decoded.dtype, decoded.shape) == (np.ndarray, array.dtype, array.shape)
    assert decoded.tobytes() == array.tobytes()
    assert decoded.flags.writeable


@pytest.mark.parametrize("number", [np.float16(2), np.complex64(3j), np.datetime64("2026-11-22"), np.str_("ä")])
def test_numpy_scalars_keep_their_type(number: Any) -> None:
    """Scalars of numpy keep their type."""
    decoded = round_trip([number, 1])[0]
    assert (type(decoded), decoded.dtype, decoded) == (type(number), number.dtype, number)


def test_changes_after_the_save_are_not_saved() -> None:
    """A reversed view is copied at the save."""
    base = np.arange(4)
    flat = flatten({"a": base[::-1]})
    base[:] = 0
    assert decode(flat.tree, {n.name: n.tensor for n in flat.tensors}.__getitem__)["a"].tolist() == [3, 2, 1, 0]


# -- rejected values ---------------------------------------------------------------------------------------------------


class _Colour(enum.Enum):
    RED = 1


class _Point(collections.namedtuple("_Point", "x y")):
    pass


@pytest.fixture(autouse=True)
def default_safe_globals() -> Iterator[None]:
    """Remove the safe globals that Megatron adds to torch if another test has imported it."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(added)


@dataclasses.dataclass
class _Settings:
    rate: float = 0.1


class _Strange:
    def __reduce__(self) -> Any:
        raise KeyError("\x1b[31mnot today\x1b[0m\nsecond line")


@pytest.mark.parametrize(
    ("value", "kind", "remedy"),
    [
        (_Colour.RED, "_Colour", ".value or .name"),
        (_Point(1, 2), "_Point", "_asdict()"),
        (_Settings(), "_Settings", "dataclasses.asdict()"),
        (np.array([1, None], dtype=object), "ndarray", "plain array"),
        (np.ma.masked_array([1, 2]), "MaskedArray", "numpy.asarray()"),
        (torch.nn.Linear(2, 2), "Linear", "state_dict()"),
        (Path("a"), "PosixPath", "str()"),
        (torch.Generator(), "Generator", "get_state()"),
        ({object()}, "set", "sorted list"),
        ({(1, 2): object()}, "dict", "keys are texts or numbers"),
        (collections.defaultdict(int), "defaultdict", "dict() of it"),
        (collections.deque([1]), "deque", "list() of it"),
        (lambda: 1, "function", "save numbers"),
        (_Strange(), "_Strange", "save numbers"),
        (torch.empty(3, dtype=torch.uint4), "Tensor", "uint4"),
    ],
)
def test_unsupported_values_are_rejected_with_path_and_remedy(value: Any, kind: str, remedy: str) -> None:
    """One line has the path, the type and a remedy, and nothing of torch's own message."""
    with pytest.raises(CheckpointError) as error_info:
        flatten({"state": {"parts": [1, {"it": value}]}})
    text = str(error_info.value)
    assert "state 'state.parts.1.it'" in text
    assert kind in text
    assert remedy in text
    assert "\n" not in text
    assert "\x1b" not in text
    assert "weights_only" not in text


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _recursive_list() -> dict[str, Any]:
    value: dict[str, Any] = {"fine": 1, "history": []}
    value["history"].append({"all": value["history"]})
    return value


def _recursive_dict() -> dict[str, Any]:
    value: dict[str, Any] = {"fine": {"x": 1}, "sub": {}}
    value["sub"]["parent"] = value
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": ["fine", "bad \ud800"]}}, r"state 'state.a.b.1' has text with lone surrogates"),
        ({"a": {"k\udcff": 1}}, r"state 'state\.a\.k.+udcff' has text with lone surrogates"),
        ({"a": {"k\udcff": torch.ones(2)}}, r"state 'state\.a\.k.+udcff' has text with lone surrogates"),
        ({"deep": _nested(5000)}, r"state 'state\.deep\.0\.0\.0[.0]*\.\.\.' is nested more than 100 levels deep"),
        (_recursive_list(), r"state 'state\.history\.0\.all' contains itself"),
        (_recursive_dict(), r"state 'state\.sub\.parent' contains itself"),
    ],
    ids=["text", "key", "key of a tensor", "deep", "own list", "own dict"],
)
def test_invalid_text_and_recursive_states_are_rejected(value: Any, message: str) -> None:
    """Each is rejected with one printable line that has its path, without a traceback."""
    with pytest.raises(CheckpointError, match=message) as error_info:
        flatten({"state": capture(value)})
    text = str(error_info.value)
    assert text.encode().decode() == text
    assert "\n" not in text
    assert len(text) < 300
    assert error_info.value.__cause__ is None


def test_deep_containers_within_the_limit_are_restored() -> None:
    """A state nested less deeply than the limit is saved and restored."""
    assert round_trip({"deep": _nested(95)}) == {"deep": _nested(95)}


# -- tensors of other types --------------------------------------------------------------------------------------------

ODD_TYPES = [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


class Scaled(torch.Tensor):
    """8-bit numbers with one scale for each four, as in quantised training."""

    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype)  # type: ignore[attr-defined]

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, block: int, dtype: torch.dtype) -> None:
        self.numbers, self.scale, self.block = data, scale, block

    def __tensor_flatten__(self) -> Any:
        return ["numbers", "scale"], {"block": self.block, "dtype": self.dtype}

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Scaled:
        assert parts["numbers"].shape == size
        return Scaled(parts["numbers"], parts["scale"], context["block"], context["dtype"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.view.default):
            return Scaled(args[0].numbers, args[0].scale, args[0].block, args[0].dtype)
        if func is aten.copy_.default:
            args[0].numbers.copy_(args[1].numbers)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        raise NotImplementedError(func)


class Cast(torch.Tensor):
    """Weights with other operations on the same numbers."""

    def __new__(cls, inner: torch.Tensor) -> Cast:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Cast:
        return Cast(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.view.default):
            return Cast(args[0].inner)
        if func is aten.copy_.default:
            args[0].inner.copy_(args[1].inner if isinstance(args[1], Cast) else args[1])
            return args[0]
        raise NotImplementedError(func)


def scaled(first: int) -> Scaled:
    data = torch.arange(first, first + 32, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(4, 8)
    scale = torch.arange(first, first + 8, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(4, 2)
    return Scaled(data, scale, 4, torch.bfloat16)


def bits_of(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        return bits_of(tensor.to_local())
    if isinstance(tensor, Scaled):
        return type(tensor).__name__, tensor.dtype, tensor.block, bits_of(tensor.numbers), bits_of(tensor.scale)
    if isinstance(tensor, Cast):
        return type(tensor).__name__, bits_of(tensor.inner)
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of these tensors, saved to a local and to the global tier."""
    folder = tmp_path_factory.mktemp("values")
    manager = manage(folder)
    manager.save({"w": state_of(1)}, 1).wait(40)
    manager.close()
    return folder


def state_of(first: int) -> dict[str, Any]:
    odd = {f"odd{n}": torch.arange(first, first + 6, dtype=torch.uint8).view(t) for n, t in enumerate(ODD_TYPES)}
    return {"scaled": scaled(first), "cast": Cast(torch.full((3,), float(first))), **odd}


def test_quantised_tensors_are_restored_bit_by_bit(saved_folder: Path) -> None:
    """8-bit types and subclasses with scales keep their bits from the local tier, the global tier and resharded.

    Each of their parts is a tensor in the files.
    """
    expected = {name: bits_of(tensor) for name, tensor in state_of(1).items()}
    header = (saved_folder / "local" / "node" / "step-1" / "rank-00000.safetensors").read_bytes()
    entries = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert entries["state.w.scaled.scale"]["dtype"] == "F8_E8M0"
    assert entries["state.w.cast"]["dtype"] == "F32"
    for tier in ("local", "global"):
        live = {"w": state_of(50)}
        manager = manage(saved_folder if tier == "local" else saved_folder / "nowhere")
        if tier == "global":
            manager.close()
            config = CheckpointConfig(directory=str(saved_folder / "global"), save_timeout=40)
            manager = open_manager(config, env=WorkerEnv(node="another"))
        restored = manager.load_latest(live)
        manager.close()
        assert restored is not None
        assert restored.tier == tier
        assert {name: bits_of(tensor) for name, tensor in live["w"].items()} == expected
    live = {"w": state_of(50)}
    directory = GlobalDirectory.open(str(saved_folder / "global"))
    load_resharded(VerifiedFiles(directory, directory.manifest(1)), live).apply()
    assert {name: bits_of(tensor) for name, tensor in live["w"].items()} == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_dcp_reads_the_parts(saved_folder: Path) -> None:
    """`dcp.load` reads 8-bit exponents, the parts of a subclass by their names, and a cast weight as a plain one."""
    target = {
        "w": {
            "odd0": torch.zeros(6, dtype=torch.uint8).view(ODD_TYPES[0]),
            "cast": torch.zeros(3),
            "scaled": {"scale": torch.zeros(8, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(4, 2)},
        }
    }
    dcp.load(target, checkpoint_id=saved_folder / "global" / "step-1")
    expected = state_of(1)
    assert bits_of(target["w"]["odd0"]) == bits_of(expected["odd0"])
    assert target["w"]["cast"].tolist() == [1.0] * 3
    assert bits_of(target["w"]["scaled"]["scale"]) == bits_of(expected["scaled"].scale)


def test_a_missing_subclass_is_reported(saved_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class in a file is never imported: training must have imported it."""
    flat = flatten({"w": scaled(1)})
    monkeypatch.delattr(sys.modules[__name__], "Scaled")
    with pytest.raises(CheckpointError, match=r"values\.Scaled, which this process has not imported; import"):
        decode(flat.tree, {named.name: named.tensor for named in flat.tensors}.__getitem__)


def test_a_missing_subclass_leaves_the_live_state_unchanged(
    saved_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load fails before a tensor is overwritten, whether the copy is read in place or separately."""
    live = {"w": {**state_of(50), "scaled": torch.zeros(4, 8, dtype=torch.bfloat16)}}
    before = {name: bits_of(tensor) for name, tensor in live["w"].items()}
    monkeypatch.delattr(sys.modules[__name__], "Scaled")
    manager = manage(saved_folder)
    with pytest.raises(CheckpointError, match=r"does not fit rank 0.*values\.Scaled, which this process has not"):
        manager.load_latest(live)
    manager.close()
    monkeypatch.undo()
    assert {name: bits_of(tensor) for name, tensor in live["w"].items()} == before


def test_an_unsupported_subclass_is_rejected() -> None:
    """A class that cannot be found by name or split into parts is rejected with its path."""

    class Local(Cast):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return Local(args[0].inner)

    class Opaque(torch.Tensor):
        pass

    with pytest.raises(CheckpointError, match=r"state 'w'.*Local.*at the top of a module"):
        flatten({"w": Local(torch.ones(2))})
    with pytest.raises(CheckpointError, match=r"state 'w'.*Opaque.*save a plain tensor"):
        flatten({"w": torch.ones(2).as_subclass(Opaque)})


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_quantised_shards_require_the_same_layout(tmp_path: Path, mesh: Any) -> None:
    """Distributed 8-bit and cast tensors are resharded; blocks with scales require the same layout."""

    def shards(first: int, *, with_scaled: bool) -> dict[str, Any]:
        decoded = {"odd": state_of(first)["odd0"], "cast": state_of(first)["cast"]}
        if with_scaled:
            decoded["scaled"] = scaled(first)
        return {name: DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for name, local in decoded.items()}

    for with_scaled in (True, False):
        folder = tmp_path / str(with_scaled)
        manager = manage(folder)
        manager.save({"w": shards(1, with_scaled=with_scaled)}, 1).wait(40)
        manager.close()
        expected = {name: bits_of(tensor) for name, tensor in shards(1, with_scaled=with_scaled).items()}
        live = {"w": shards(50, with_scaled=with_scaled)}
        for config_of_reader in (CheckpointConfig(directory=str(folder / "global")), None):
            manager = (
                manage(folder)
                if config_of_reader is None
                else open_manager(config_of_reader, env=WorkerEnv(node="another"))
            )
            manager.load_latest(live)
            manager.close()
            assert {name: bits_of(tensor) for name, tensor in live["w"].items()} == expected
            live = {"w": shards(50, with_scaled=with_scaled)}
        directory = GlobalDirectory.open(str(folder / "global"))
        if with_scaled:
            with pytest.raises(CheckpointError, match=r"tensor w\.scaled was saved in shards of .*Scaled"):
                load_resharded(VerifiedFiles(directory, directory.manifest(1)), live)
        else:
            load_resharded(VerifiedFiles(directory, directory.manifest(1)), live).apply()
            assert {name: bits_of(tensor) for name, tensor in live["w"].items()} == expected


def test_an_unsupported_distributed_dtype_is_rejected(mesh: Any) -> None:
    """A distributed tensor whose dtype the format lacks is rejected with its path."""
    value = DTensor.from_local(torch.ones(2, dtype=torch.complex128), mesh, [Shard(0)], run_check=False)
    with pytest.raises(CheckpointError, match=r"state 'w'.*complex128 elements cannot be saved"):
        flatten({"w": value})
