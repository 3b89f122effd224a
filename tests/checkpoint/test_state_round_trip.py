"""Every supported value of a state is restored as it was, from a file that other programs can read."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outlast.checkpoint import CheckpointManager
from outlast.checkpoint.fit import filled
from outlast.checkpoint.manager import open_manager
from outlast.checkpoint.manifest import decode_manifest
from outlast.checkpoint.state import decode, flatten
from outlast.config import CheckpointConfig
from outlast.env import WorkerEnv
from outlast.errors import CheckpointError, ConfigError


def round_trip(value: Any) -> Any:
    flat = flatten(value)
    tensors = {named.name: named.tensor.clone() for named in flat.tensors}
    return decode(flat.tree, tensors.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, (2.5, None, ("x",)), b"\0\xff", True]},
        {1: {"b": 2}, "1": 3, -1: float("inf")},
        {"big": 2**80, "small": -(2**70)},
        [(), {}, [], "", collections.OrderedDict(b=1, a=(2,))],
        (1 << 63, torch.float16, torch.Size([2, 3]), {1, 2}, 3j),
    ],
)
def test_plain_values_keep_their_types(value: Any) -> None:
    """Tuples stay tuples, numbers keep their size, and keys keep their type and order."""
    restored = round_trip(value)
    assert restored == value
    assert repr(restored) == repr(value)


def test_a_load_fills_containers_in_place(tmp_path: Path) -> None:
    """Nested dicts, lists, arrays and tensors are filled in place, so that references of the script stay valid.

    Later changes through these references are saved.
    """

    def make_state(seed: int) -> dict[str, Any]:
        extra = {"gone": 1} if seed else {"new": {"a": 2}}
        return {
            "meta": {
                "epoch": seed,
                "inner": {"seen": [seed, seed + 1]},
                **extra,
            },
            "history": [{"loss": float(seed)}, [seed], *([seed] if seed else [])],
            "tensors": [torch.full((2,), float(seed))],
            "array": np.full(3, seed),
            "shared": (seed,),
        }

    saved, live = make_state(0), make_state(5)
    manager = _manager(tmp_path)
    manager.save(saved, 1).wait(100)
    manager.close()
    meta, inner, history, first = live["meta"], live["meta"]["inner"], live["history"], live["history"][0]
    tensor, array = live["tensors"][0], live["array"]
    manager = _manager(tmp_path)
    manager.load_latest(live)
    assert live["meta"] is meta
    assert meta == saved["meta"]
    assert meta["inner"] is inner
    assert inner == {"seen": [0, 1]}
    assert live["history"] is history
    assert history == saved["history"]
    assert history[0] is first
    assert live["tensors"][0] is tensor
    assert tensor.tolist() == [0.0, 0.0]
    assert live["array"] is array
    assert array.tolist() == [0, 0, 0]
    assert live["shared"] == (0,)
    meta["epoch"] = 9
    manager.save(live, 2).wait(100)
    manager.close()
    manager, other = _manager(tmp_path), make_state(3)
    manager.load_latest(other)
    manager.close()
    assert other["meta"]["epoch"] == 9


def test_a_shared_container_is_filled_once() -> None:
    """Two keys that share one list get the values that each of them was saved with."""
    shared: list[int] = [1]
    live: dict[str, Any] = {"a": shared, "b": shared}
    assert filled(live, {"a": [2], "b": [3]}) == {"a": [2], "b": [3]}
    assert live["a"] is shared


def test_a_value_that_cannot_be_filled_is_replaced() -> None:
    """A live value of another type or shape, or one that is not writable, is replaced by the saved one."""
    fixed = np.zeros(2)
    fixed.flags.writeable = False
    live = {"list": (1,), "short": np.zeros(1), "fixed": fixed, "spread": [torch.zeros(1).expand(3)]}
    saved = {"list": [1], "short": np.ones(2), "fixed": np.ones(2), "spread": [torch.ones(3)]}
    restored = filled(live, saved)
    assert restored["list"] == [1]
    assert [restored[name].tolist() for name in ("short", "fixed")] == [[1, 1], [1, 1]]
    assert restored["spread"][0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e5m2])
def test_tensors_are_restored_bit_by_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Scalars, empty tensors, slices and transposes of any element type are restored through a real file."""
    source = torch.arange(24).reshape(4, 6).to(dtype)
    state = {"t": source.t(), "s": source[1:3, ::2], "0": source[0, 1], "e": source[:0], "n": np.arange(3, dtype="u4")}
    target = {name: torch.zeros_like(value) if name != "n" else None for name, value in state.items()}
    manager = _manager(tmp_path)
    manager.save(state, 1).wait(100)
    manager.close()
    manager = _manager(tmp_path)
    manager.load_latest(target)
    manager.close()
    for name in ("t", "s", "0", "e"):
        restored, expected = (value.contiguous().reshape(-1).view(torch.uint8) for value in (target[name], state[name]))
        assert restored.equal(expected), name
    assert target["n"].dtype == np.uint32
    assert target["n"].tolist() == [0, 1, 2]


def _counted(seed: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape) + seed


def _shared_list(seed: int) -> list[list[int]]:
    shared_list = [seed]
    return [shared_list, shared_list]


UNUSUAL_VALUES: dict[str, Callable[[int], Any]] = {
    "containers in containers": lambda seed: {"l": [{"d": {"t": _counted(seed, 2), "n": seed}}]},
    "an ordered dict": lambda seed: collections.OrderedDict(b=_counted(seed, 2), a=[seed]),
    "a counter": lambda seed: collections.Counter(a=seed),
    "a tuple of dicts": lambda seed: ({"a": seed}, {"t": _counted(seed, 2)}, (_counted(seed, 1),)),
    "a list that is held twice": _shared_list,
    "keys of several types": lambda seed: {7: _counted(seed, 2), "7": _counted(-seed, 2), None: seed, 2.5: 1, True: 1},
    "keys that are tuples": lambda seed: {(1, 2): _counted(seed, 2)},
    "empty containers": lambda seed: {
        "d": {},
        "l": [],
        "t": (),
        "o": collections.OrderedDict(),
        "e": torch.empty(0, 3),
    },
    "scalars": lambda seed: [torch.tensor(float(seed)), np.array(seed), np.float32(seed), complex(seed)],
    "views": lambda seed: {"s": _counted(seed, 4, 4)[::2, 1::2], "t": _counted(seed, 2, 3).t()},
    "a conjugated view": lambda seed: (1j * _counted(seed, 2)).conj(),
    "a tensor that is held twice": lambda seed: dict.fromkeys("ab", _counted(seed, 3)),
    "an expanded tensor": lambda seed: _counted(seed, 2, 1).expand(2, 3),
    "an expanded tensor in a list": lambda seed: [_counted(seed, 1).expand(3)],
    "a sparse tensor": lambda seed: _counted(seed, 3, 3).to_sparse(),
    "a sparse tensor in a list": lambda seed: [_counted(seed, 3, 3).to_sparse()],
    "a compressed sparse tensor": lambda seed: _counted(seed, 3, 3).to_sparse_csr(),
    "a quantized tensor": lambda seed: torch.quantize_per_tensor(_counted(seed, 3), 0.5, 0, torch.qint8),
    "half-precision complex numbers": lambda seed: _counted(seed, 3).to(torch.complex32),
    "sets and bytes": lambda seed: [{seed}, bytearray([seed]), bytes([seed])],
    "arrays": lambda seed: {"v": np.arange(seed, seed + 6)[::2], "n": np.arange(seed, seed + 3)[::-1]},
}


def _objects(value: Any, path: str = "state") -> dict[str, Any]:
    """Return by their paths all objects that a script may refer to and change."""
    restored = {}
    if isinstance(value, torch.Tensor | dict | list | np.ndarray | set | bytearray):
        restored[path] = value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, inner in items:
        restored |= _objects(inner, f"{path}.{name!r}")
    return restored


def _plain(value: Any) -> Any:
    """Return a value with its tensors and arrays as lists, for comparison."""
    if isinstance(value, torch.Tensor):
        dense = value.int_repr() if value.is_quantized else value.to_dense() if value.is_sparse_csr else value
        dense = dense.to_dense() if dense.is_sparse else dense
        return str(value.dtype), str(value.layout), dense.to(torch.complex128).tolist()
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype.str, value.tolist()
    if isinstance(value, dict):
        return type(value), [(type(key), key, _plain(inner)) for key, inner in value.items()]
    return (type(value), [_plain(inner) for inner in value]) if isinstance(value, list | tuple) else value


@pytest.mark.filterwarnings("ignore:.*(beta|experimental|prototype|deprecat)")
@pytest.mark.parametrize("shape", UNUSUAL_VALUES)
def test_unusual_values_are_restored_in_place(shape: str, tmp_path: Path) -> None:
    """After a load the state equals the saved one, and each object that the script refers to is still part of it."""
    saved, live = {"x": UNUSUAL_VALUES[shape](1), "n": 1}, {"x": UNUSUAL_VALUES[shape](5), "n": 5}
    manager = _manager(tmp_path)
    manager.save(saved, 1).wait(100)
    manager.close()
    before = _objects(live)
    manager = _manager(tmp_path)
    manager.load_latest(live)
    manager.close()
    assert _plain(live) == _plain(saved)
    after = _objects(live)
    assert before.keys() == after.keys()
    assert [place for place in before if after[place] is not before[place]] == []


@pytest.mark.filterwarnings("ignore:.*prototype")
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: torch.empty(3, device="meta"), "initialise it"),
        (lambda: torch.nn.LazyLinear(2), "call the module once"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "unbind()"),
        pytest.param(
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "unbind()",
            marks=pytest.mark.extended,  # torch imports its compiler
        ),
        (lambda: torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {})), "plain tensor"),
    ],
)
def test_unsupported_tensors_are_rejected_at_the_save(make: Any, remedy: str, tmp_path: Path) -> None:
    """A tensor that could not be restored fails the save with one line that has its path and a remedy."""
    manager = _manager(tmp_path)
    with pytest.raises(CheckpointError, match=r"state 'state\.it") as error_info:
        manager.save({"it": make()}, 1)
    manager.close()
    assert remedy in str(error_info.value)
    assert "\n" not in str(error_info.value)


def test_a_lazy_module_is_loaded_before_its_first_call(tmp_path: Path) -> None:
    """The checkpoint determines the shape of a lazy module, as in ``load_state_dict``."""
    module = torch.nn.LazyLinear(2)
    module(torch.ones(1, 3))
    manager = _manager(tmp_path)
    manager.save({"model": module}, 1).wait(100)
    manager.close()
    fresh = torch.nn.LazyLinear(2)
    manager = _manager(tmp_path)
    manager.load_latest({"model": fresh})
    manager.close()
    assert fresh.weight.equal(module.weight)


def test_a_sparse_tensor_is_not_loaded_into_a_dense_one(tmp_path: Path) -> None:
    """All ranks reject the load before any value changes."""
    manager = _manager(tmp_path)
    manager.save({"a": torch.ones(2, 2), "t": torch.eye(2).to_sparse()}, 1).wait(100)
    manager.close()
    live = {"a": torch.zeros(2, 2), "t": torch.zeros(2, 2)}
    manager = _manager(tmp_path)
    with pytest.raises(CheckpointError, match="sparse_coo"):
        manager.load_latest(live)
    manager.close()
    assert live["a"].tolist() == [[0, 0], [0, 0]]


class _Versioned(torch.nn.Module):
    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 10  # like a module that converts an older format
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


def test_a_modules_version_is_restored(tmp_path: Path) -> None:
    """A module that converts states of older versions does not convert a state of its current version."""
    module = _Versioned()
    manager = _manager(tmp_path)
    manager.save({"model": module}, 1).wait(100)
    manager.close()
    manager = _manager(tmp_path)
    manager.load_latest({"model": module})
    manager.close()
    assert module.weight.tolist() == [1, 1, 1]


def test_a_shard_is_a_safetensors_file(tmp_path: Path) -> None:
    """The shard matches the public format: a padded JSON header, offsets without gaps, data aligned to a page."""
    state = {"w": torch.arange(10.0), "h": torch.ones(3, dtype=torch.bfloat16), "n": {"step": 7}}
    manager = _manager(tmp_path)
    manager.save(state, 3).wait(100)
    manager.close()
    data = (tmp_path / "step-3" / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 4096 == 0
    assert data[8:9] == b"{"
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert all(isinstance(text, str) for text in metadata.values())
    end = 0
    for entry in sorted(header.values(), key=lambda entry: entry["data_offsets"]):
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
    assert 8 + length + end == len(data)
    begin, end = header["state.w"]["data_offsets"]
    assert header["state.w"]["dtype"] == "F32"
    assert header["state.w"]["shape"] == [10]
    assert np.frombuffer(data[8 + length + begin : 8 + length + end], np.float32).tolist() == list(range(10))


@pytest.mark.parametrize(("number", "expected"), [(1e30, True), (float("nan"), False), (float("-inf"), False)])
def test_the_manifest_records_nonfinite_shards(tmp_path: Path, number: float, expected: bool) -> None:
    """One NaN or infinity makes a shard's entry not finite; a sum that overflows does not."""
    manager = _manager(tmp_path)
    manager.save({"w": torch.full((300,), 3e38), "h": torch.tensor([1.0, number], dtype=torch.bfloat16)}, 1).wait(100)
    manager.close()
    manifest, _ = decode_manifest((tmp_path / "step-1" / "manifest.json").read_bytes())
    assert [shard.finite for shard in manifest.shards] == [expected]


def test_an_arbitrary_object_is_rejected_at_the_save(tmp_path: Path) -> None:
    """An arbitrary object is rejected with its path; nothing is committed, and the next save works."""
    manager = _manager(tmp_path)
    with pytest.raises(CheckpointError, match=r"state\.x\.1"):
        manager.save({"x": [1, object()]}, 1)
    with pytest.raises(ConfigError, match="number of optimizer steps"):
        manager.save({"x": 1}, -1)
    assert manager.save({"x": 1}, 2).wait(100).checkpoint == 2
    manager.close()
    assert not (tmp_path / "step-1").exists()


def _manager(folder: Path) -> CheckpointManager:
    config = CheckpointConfig(local_directory=str(folder.parent), save_timeout=100)
    return open_manager(config, env=WorkerEnv(node=folder.name))


def test_loaded_tensors_do_not_share_storage(tmp_path: Path) -> None:
    """Each tensor of a loaded optimizer has storage of its own size."""
    model = torch.nn.Linear(1500, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1500)).sum().backward()
    optimizer.step()
    manager = _manager(tmp_path)
    assert manager.save({"optim": optimizer}, 1).wait(100).num_bytes > 8 << 20
    manager.close()
    fresh = torch.optim.AdamW(model.parameters())
    manager = _manager(tmp_path)
    manager.load_latest({"optim": fresh})
    manager.close()
    for parameter in model.parameters():
        for name, value in fresh.state[parameter].items():
            assert value.equal(optimizer.state[parameter][name])
            assert value.untyped_storage().nbytes() == value.nbytes


class _Counter:
    may_be_absent = True

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def test_optional_state_may_be_absent_in_the_checkpoint(tmp_path: Path) -> None:
    """State with ``may_be_absent`` keeps its value if the checkpoint lacks it; all other state must be present."""
    manager = _manager(tmp_path)
    manager.save({"t": torch.ones(2)}, 1).wait(100)
    manager.close()
    for live, is_loadable in (({"t": torch.zeros(2), "c": _Counter(5)}, True), ({"t": torch.zeros(2), "d": 3}, False)):
        manager = _manager(tmp_path)
        if is_loadable:
            manager.load_latest(live)
            assert live["t"].tolist() == [1.0, 1.0]
            assert live["c"].value == 5
            manager.save(live, 2).wait(100)
        else:
            with pytest.raises(CheckpointError, match="without d"):
                manager.load_latest(live)
        manager.close()
    manager = _manager(tmp_path)
    counter = _Counter(0)
    manager.load_latest({"t": torch.zeros(2), "c": counter})
    manager.close()
    assert counter.value == 5
