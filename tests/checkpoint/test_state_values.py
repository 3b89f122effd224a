"""What a state may hold beside tensors and numbers: saved as it is, or refused with its place and what to do."""

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
def test_an_array_of_any_numbers_comes_back(array: Any) -> None:
    """Views backwards, read-only ones, other byte orders, dates, texts and records: same type, shape and values."""
    found = round_trip({"a": array})["a"]
    assert (type(found), found.dtype, found.shape) == (np.ndarray, array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


@pytest.mark.parametrize("number", [np.float16(2), np.complex64(3j), np.datetime64("2026-11-22"), np.str_("ä")])
def test_a_number_of_numpy_comes_back_with_its_type(number: Any) -> None:
    """Scalars keep their type."""
    found = round_trip([number, 1])[0]
    assert (type(found), found.dtype, found) == (type(number), number.dtype, number)


def test_what_changes_after_the_save_is_not_in_it() -> None:
    """A view backwards is copied at the save, as everything that is not a tensor."""
    base = np.arange(4)
    flat = flatten({"a": base[::-1]})
    base[:] = 0
    assert decode(flat.tree, {n.name: n.tensor for n in flat.tensors}.__getitem__)["a"].tolist() == [3, 2, 1, 0]


# -- what is refused ---------------------------------------------------------------------------------------------------


class _Colour(enum.Enum):
    RED = 1


class _Point(collections.namedtuple("_Point", "x y")):
    pass


@pytest.fixture(autouse=True)
def torchs_own_list() -> Iterator[None]:
    """Megatron, where another test has imported it, lets torch load paths and more."""
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
def test_what_cannot_be_saved_is_named_with_its_place_and_the_remedy(value: Any, kind: str, remedy: str) -> None:
    """One line in words of our own: where it is, what it is, what to save instead; nothing of torch's text."""
    with pytest.raises(CheckpointError) as caught:
        flatten({"state": {"parts": [1, {"it": value}]}})
    text = str(caught.value)
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


def _own_list() -> dict[str, Any]:
    value: dict[str, Any] = {"fine": 1, "history": []}
    value["history"].append({"all": value["history"]})
    return value


def _own_dict() -> dict[str, Any]:
    value: dict[str, Any] = {"fine": {"x": 1}, "sub": {}}
    value["sub"]["parent"] = value
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": {"b": ["fine", "bad \ud800"]}}, r"state 'state.a.b.1' has text with lone surrogates"),
        ({"a": {"k\udcff": 1}}, r"state 'state\.a\.k.+udcff' has text with lone surrogates"),
        ({"a": {"k\udcff": torch.ones(2)}}, r"state 'state\.a\.k.+udcff' has text with lone surrogates"),
        ({"deep": _nested(5000)}, r"state 'state\.deep\.0\.0\.0[.0]*\.\.\.' is nested more than 100 levels deep"),
        (_own_list(), r"state 'state\.history\.0\.all' contains itself"),
        (_own_dict(), r"state 'state\.sub\.parent' contains itself"),
    ],
    ids=["text", "key", "key of a tensor", "deep", "own list", "own dict"],
)
def test_text_that_is_not_unicode_and_endless_states_are_refused_in_one_line(value: Any, said: str) -> None:
    """Each is one line with its place; there is no traceback of recursion, and the line itself can be printed."""
    with pytest.raises(CheckpointError, match=said) as caught:
        flatten({"state": capture(value)})
    text = str(caught.value)
    assert text.encode().decode() == text
    assert "\n" not in text
    assert len(text) < 300
    assert caught.value.__cause__ is None


def test_containers_at_the_limit_come_back() -> None:
    """What is nested less deep than the limit is saved and read."""
    assert round_trip({"deep": _nested(95)}) == {"deep": _nested(95)}


# -- tensors of other kinds --------------------------------------------------------------------------------------------

ODD_TYPES = [torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


class Scaled(torch.Tensor):
    """Numbers of 8 bits with a scale for every 4, as quantised training has them."""

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
    """Weights that do something else with the same numbers."""

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


def bits(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        return bits(tensor.to_local())
    if isinstance(tensor, Scaled):
        return type(tensor).__name__, tensor.dtype, tensor.block, bits(tensor.numbers), bits(tensor.scale)
    if isinstance(tensor, Cast):
        return type(tensor).__name__, bits(tensor.inner)
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them saved to a local and to the global tier."""
    folder = tmp_path_factory.mktemp("values")
    manager = manage(folder)
    manager.save({"w": state_of(1)}, 1).wait(40)
    manager.close()
    return folder


def state_of(first: int) -> dict[str, Any]:
    odd = {f"odd{n}": torch.arange(first, first + 6, dtype=torch.uint8).view(t) for n, t in enumerate(ODD_TYPES)}
    return {"scaled": scaled(first), "cast": Cast(torch.full((3,), float(first))), **odd}


def test_quantised_tensors_come_back_bit_by_bit(saved: Path) -> None:
    """8-bit exponents, other 8-bit types and subclasses with scales: the same bits from the local tier, from the global
    one, and resharded; each of their parts is a tensor of the files."""
    expected = {name: bits(tensor) for name, tensor in state_of(1).items()}
    header = (saved / "local" / "node" / "step-1" / "rank-00000.safetensors").read_bytes()
    told = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert told["state.w.scaled.scale"]["dtype"] == "F8_E8M0"
    assert told["state.w.cast"]["dtype"] == "F32"
    for tier in ("local", "global"):
        live = {"w": state_of(50)}
        manager = manage(saved if tier == "local" else saved / "nowhere")
        if tier == "global":
            manager.close()
            config = CheckpointConfig(directory=str(saved / "global"), save_timeout=40)
            manager = open_manager(config, env=WorkerEnv(node="another"))
        restored = manager.load_latest(live)
        manager.close()
        assert restored is not None
        assert restored.tier == tier
        assert {name: bits(tensor) for name, tensor in live["w"].items()} == expected
    live = {"w": state_of(50)}
    directory = GlobalDirectory.open(str(saved / "global"))
    load_resharded(VerifiedFiles(directory, directory.manifest(1)), live).apply()
    assert {name: bits(tensor) for name, tensor in live["w"].items()} == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_stock_dcp_reads_the_parts(saved: Path) -> None:
    """`dcp.load` reads 8-bit exponents, the parts of a subclass by their names, and a cast weight as a plain one."""
    whole = {
        "w": {
            "odd0": torch.zeros(6, dtype=torch.uint8).view(ODD_TYPES[0]),
            "cast": torch.zeros(3),
            "scaled": {"scale": torch.zeros(8, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(4, 2)},
        }
    }
    dcp.load(whole, checkpoint_id=saved / "global" / "step-1")
    expected = state_of(1)
    assert bits(whole["w"]["odd0"]) == bits(expected["odd0"])
    assert whole["w"]["cast"].tolist() == [1.0] * 3
    assert bits(whole["w"]["scaled"]["scale"]) == bits(expected["scaled"].scale)


def test_a_subclass_that_is_not_there_any_more_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is imported for what a file names: the class must have been imported by training."""
    flat = flatten({"w": scaled(1)})
    monkeypatch.delattr(sys.modules[__name__], "Scaled")
    with pytest.raises(CheckpointError, match=r"values\.Scaled, which this process has not imported; import"):
        decode(flat.tree, {named.name: named.tensor for named in flat.tensors}.__getitem__)


def test_nothing_live_is_touched_for_a_subclass_that_is_not_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load fails before any tensor is overwritten, be the copy read into the live tensors or beside them."""
    live = {"w": {**state_of(50), "scaled": torch.zeros(4, 8, dtype=torch.bfloat16)}}
    before = {name: bits(tensor) for name, tensor in live["w"].items()}
    monkeypatch.delattr(sys.modules[__name__], "Scaled")
    manager = manage(saved)
    with pytest.raises(CheckpointError, match=r"does not fit rank 0.*values\.Scaled, which this process has not"):
        manager.load_latest(live)
    manager.close()
    monkeypatch.undo()
    assert {name: bits(tensor) for name, tensor in live["w"].items()} == before


def test_a_subclass_without_parts_or_name_is_refused() -> None:
    """A class that cannot be found again, or that cannot be taken apart, is refused by name with its place."""

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


def test_shards_of_quantised_tensors_come_back_to_the_same_layout_only(tmp_path: Path, mesh: Any) -> None:
    """Distributed tensors of 8-bit exponents and of cast weights are saved and resharded; blocks with scales come back
    as they were, and another layout is refused by name."""

    def shards(first: int, *, all_of_them: bool) -> dict[str, Any]:
        found = {"odd": state_of(first)["odd0"], "cast": state_of(first)["cast"]}
        if all_of_them:
            found["scaled"] = scaled(first)
        return {name: DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for name, local in found.items()}

    for all_of_them in (True, False):
        folder = tmp_path / str(all_of_them)
        manager = manage(folder)
        manager.save({"w": shards(1, all_of_them=all_of_them)}, 1).wait(40)
        manager.close()
        expected = {name: bits(tensor) for name, tensor in shards(1, all_of_them=all_of_them).items()}
        live = {"w": shards(50, all_of_them=all_of_them)}
        for again in (CheckpointConfig(directory=str(folder / "global")), None):
            manager = manage(folder) if again is None else open_manager(again, env=WorkerEnv(node="another"))
            manager.load_latest(live)
            manager.close()
            assert {name: bits(tensor) for name, tensor in live["w"].items()} == expected
            live = {"w": shards(50, all_of_them=all_of_them)}
        directory = GlobalDirectory.open(str(folder / "global"))
        if all_of_them:
            with pytest.raises(CheckpointError, match=r"tensor w\.scaled was saved in shards of .*Scaled"):
                load_resharded(VerifiedFiles(directory, directory.manifest(1)), live)
        else:
            load_resharded(VerifiedFiles(directory, directory.manifest(1)), live).apply()
            assert {name: bits(tensor) for name, tensor in live["w"].items()} == expected


def test_a_distributed_tensor_of_other_elements_is_refused_by_name(mesh: Any) -> None:
    """What no file of the format can name is refused with the tensor's place."""
    value = DTensor.from_local(torch.ones(2, dtype=torch.complex128), mesh, [Shard(0)], run_check=False)
    with pytest.raises(CheckpointError, match=r"state 'w'.*complex128 elements cannot be saved"):
        flatten({"w": value})
