"""Rank-local state of a training: random numbers, and everything that is neither module nor optimizer.

It is small and changes anywhere in a step, so a copy is taken at the end of each step at a low cost: unchanged values
are not encoded again, and simple ones are encoded together.

The copies of the last two iterations are in shared memory that outlives the rank while a neighbour has it open. Two
slots alternate, each with its iteration, length and digest; a rank that dies while it writes one leaves the other. The
memory has no name in a file system: a neighbour opens it through ``/proc``, and it ends with its last user.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from outlast.checkpoint.fit import filled
from outlast.checkpoint.state import decode, flatten, is_stateful
from outlast.decoding import from_msgpack, msgpack_decoder
from outlast.errors import OutlastError
from outlast.runtime.device import device_rng_state
from outlast.runtime.files import memory_file
from outlast.runtime.random_numbers import restore_random

CAPACITY_BYTES = 256 << 10
"""Limit of one iteration; pages that are never written use no memory."""
_HEAD = struct.Struct("<qQQ")
_SLOT_BYTES = CAPACITY_BYTES + 4096


class SharedBuffer:
    """The rank-local state of one rank in shared memory.

    Args:
        fd: Descriptor of the memory; this object owns it.
        writable: Whether this is the rank itself.
    """

    def __init__(self, fd: int, *, writable: bool) -> None:
        self.fd = -1
        try:
            self._map = mmap.mmap(
                fd, 2 * _SLOT_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
            )
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd

    @classmethod
    def create(cls) -> SharedBuffer:
        fd = memory_file("outlast-own")
        try:
            os.ftruncate(fd, 2 * _SLOT_BYTES)
        except OSError:
            os.close(fd)
            raise
        page = cls(fd, writable=True)
        page.clear()
        return page

    @classmethod
    def open(cls, pid: int, fd: int) -> SharedBuffer:
        """Open the buffer of a neighbour.

        Raises:
            OSError: It is gone, or may not be opened.
        """
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), writable=False)

    def write(self, iteration: int, data: bytes) -> None:
        """Store the data of an iteration in place of the older one of two.

        Args:
            iteration: Number of optimizer steps done, 0 or more.
            data: At most :data:`CAPACITY_BYTES`.
        """
        start = (iteration & 1) * _SLOT_BYTES
        _HEAD.pack_into(self._map, start, -1, 0, 0)
        self._map[start + _HEAD.size : start + _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._map, start, iteration, len(data), xxhash.xxh3_64_intdigest(data))

    def clear(self) -> None:
        for slot in range(2):
            _HEAD.pack_into(self._map, slot * _SLOT_BYTES, -1, 0, 0)

    def iterations(self) -> tuple[int, ...]:
        """Return the iterations whose data is whole, in order."""
        found = (_HEAD.unpack_from(self._map, slot * _SLOT_BYTES)[0] for slot in range(2))
        return tuple(sorted(one for one in found if one >= 0 and self.read(one) is not None))

    def read(self, iteration: int) -> bytes | None:
        """Return the data of an iteration; ``None``: it is not stored, or not whole."""
        start = (iteration & 1) * _SLOT_BYTES
        there, length, digest = _HEAD.unpack_from(self._map, start)
        if there != iteration or length > CAPACITY_BYTES:
            return None
        data = self._map[start + _HEAD.size : start + _HEAD.size + length]
        return data if xxhash.xxh3_64_intdigest(data) == digest else None

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            self._map.close()
            os.close(self.fd)
            self.fd = -1


_MT19937_BYTES = 624 * 4 + 4
_SCALARS = frozenset((str, int, float, bool, type(None)))
_INT_MAX = 2**63


class _Description(msgspec.Struct, frozen=True):
    tree: bytes
    tensors: list[tuple[str, str, list[int]]]


class _Payload(msgspec.Struct, frozen=True):
    python: bytes
    numpy: bytes
    torch: bytes
    device: bytes
    simple: dict[str, Any]
    others: dict[str, bytes]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgpack_decoder(_Payload)


class RankLocalState:
    """Copy a rank's local state, and restore a copy.

    Args:
        state: The state that training changes; its modules and optimizers are left out, but an optimizer's settings
            (learning rates) are not.
        optimizers: Its optimizers, by path.

    Thread: that of the training loop.
    """

    def __init__(self, state: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._state, self._optimizers = state, dict(optimizers)
        leaves = list(_leaves(state, ""))
        self._stateful = {path: value for path, _, _, value in leaves if is_stateful(value)}
        self._has_plain = len(leaves) > len(self._stateful)
        self._random = _Random()
        self._encoded: dict[str, tuple[bytes, bytes]] = {}

    def take(self) -> bytes:
        """Return a copy of the current state.

        Raises:
            OutlastError: A part cannot be copied so that it can be restored.
        """
        simple: dict[str, Any] = {}
        others: dict[str, bytes] = {}
        for path, optimizer in self._optimizers.items():
            groups = optimizer.param_groups
            simple[f"groups {path}"] = [
                {name: value for name, value in group.items() if type(value) in _SCALARS} for group in groups
            ]
            rest = [
                {name: value for name, value in group.items() if type(value) not in _SCALARS and name != "params"}
                for group in groups
            ]
            others[f"groups {path}"] = self._encode(f"groups {path}", rest)
        for path, value in self._stateful.items():
            captured = value.state_dict()
            if _is_simple(captured):
                simple[path] = captured
            else:
                others[f"state {path}"] = self._encode(f"state {path}", captured)
        if self._has_plain:
            for path, _, _, value in self._plain():
                others[f"plain {path}"] = self._encode(f"plain {path}", value)
        parts = self._random.take()
        return _encoder.encode(_Payload(*parts, simple, others))

    def put_back(self, data: bytes) -> None:
        """Restore the state from the ``data`` of :meth:`take`, in this process or another one.

        Raises:
            OutlastError: The state has other parts.
        """
        try:
            payload = _decoder.decode(data)
        except msgspec.DecodeError as error:
            raise OutlastError(f"what was kept of a rank cannot be read ({error})") from error
        for path, value in self._stateful.items():
            if path in payload.simple:
                value.load_state_dict(payload.simple[path])
            else:
                value.load_state_dict(_from_bytes(_of(payload.others, f"state {path}")))
        for path, optimizer in self._optimizers.items():
            groups = _from_bytes(_of(payload.others, f"groups {path}"))
            numbers = payload.simple.get(f"groups {path}", [])
            if not len(groups) == len(numbers) == len(optimizer.param_groups):
                raise OutlastError(
                    f"optimizer {path!r} has another number of parameter groups than the one that was kept"
                )
            for group, kept, scalars in zip(optimizer.param_groups, groups, numbers, strict=True):
                group.update(kept)
                group.update(scalars)
        for path, mapping, name, value in self._plain():
            kept = _from_bytes(_of(payload.others, f"plain {path}"))
            if isinstance(value, torch.Tensor):
                with torch.no_grad():
                    value.copy_(kept)
            elif isinstance(mapping, MutableMapping):
                mapping[name] = filled(value, kept)
            else:
                raise OutlastError(f"state {path!r} is a plain value in a mapping that takes none back; give a dict")
        _put_back_random(payload)

    def _plain(self) -> list[tuple[str, Mapping[str, Any], str, Any]]:
        return [leaf for leaf in _leaves(self._state, "") if not is_stateful(leaf[-1])]

    def _encode(self, name: str, value: Any) -> bytes:
        """Return a value as bytes; reuses them while its msgpack is unchanged, which takes a tenth of the time."""
        try:
            key = _encoder.encode(value)
        except (TypeError, OverflowError, msgspec.ValidationError):
            return _as_bytes(value)  # tensors, or what msgpack does not know
        known = self._encoded.get(name)
        if known is None or known[0] != key:
            known = self._encoded[name] = (key, _as_bytes(value))
        return known[1]


class _Random:
    """Random number generators of this process; a generator that was not used is not encoded again."""

    def __init__(self) -> None:
        self._python_address = _python_state_address()
        self._python_seen: tuple[bytes, float | None] | None = None
        self._python = b""
        self._numpy_seen, self._numpy = b"", b""

    def take(self) -> tuple[bytes, bytes, bytes, bytes]:
        of_torch = torch.get_rng_state().numpy().tobytes()
        return self._take_python(), self._take_numpy(), of_torch, device_rng_state() or b""

    def _take_python(self) -> bytes:
        if self._python_address:
            generator: Any = random._inst
            seen = (ctypes.string_at(self._python_address, _MT19937_BYTES), generator.gauss_next)
            if seen == self._python_seen:
                return self._python
            self._python_seen = seen
        self._python = _encoder.encode(random.getstate())
        return self._python

    def _take_numpy(self) -> bytes:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(generator).__name__ != "MT19937":
            raise OutlastError("numpy's global generator is not its default one; it cannot be kept")
        seen = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if seen != self._numpy_seen or not self._numpy:
            self._numpy_seen = seen
            state: Any = np.random.get_state()
            _, words, position, has_gauss, gauss = state
            self._numpy = _encoder.encode((words.tobytes(), int(position), int(has_gauss), float(gauss)))
        return self._numpy


def _python_state_address() -> int:
    """Return the address of the words of CPython's global generator; 0 where it is not certain."""
    address = id(random._inst) + object.__basicsize__
    try:
        seen = ctypes.string_at(address, _MT19937_BYTES)
    except (ValueError, OSError):
        return 0
    *words, position = random.getstate()[1]
    as_kept = position.to_bytes(4, "little") + np.array(words, dtype="<u4").tobytes()
    return address if seen == as_kept else 0


def _put_back_random(payload: _Payload) -> None:
    version, words, gauss = from_msgpack(payload.python, list[Any])
    numpy_words, position, has_gauss, numpy_gauss = from_msgpack(payload.numpy, list[Any])
    restore_random(
        {
            "python": (version, tuple(words), gauss),
            "numpy": ("MT19937", np.frombuffer(numpy_words, dtype=np.uint32), position, has_gauss, numpy_gauss),
            "torch": torch.frombuffer(bytearray(payload.torch), dtype=torch.uint8),
            "device": payload.device or None,
        }
    )


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping) and any(
        is_stateful(inner) or isinstance(inner, torch.Tensor) or _is_nested(inner) for inner in value.values()
    )


def _leaves(state: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any], str, Any]]:
    """Yield each leaf that is neither module nor optimizer: path, mapping that contains it, name there, and value."""
    for name, value in state.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            continue
        if not is_stateful(value) and _is_nested(value):
            yield from _leaves(value, here)
        else:
            yield here, state, name, value


def _is_simple(value: Any) -> bool:
    """Return whether msgpack preserves a value exactly."""
    if type(value) is not dict:
        return False
    for name, inner in value.items():
        kind = type(inner)
        if type(name) is not str or not (
            kind in _SCALARS or (kind is list and all(type(one) in _SCALARS for one in inner))
        ):
            return False
        if kind is int and not -_INT_MAX <= inner < _INT_MAX:
            return False
    return True


def take_apart(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return a description of a value, and the bytes of its tensors on the host."""
    flat = flatten(value)
    hosted = [(named.name, named.tensor.detach().cpu().contiguous()) for named in flat.tensors]
    kinds = [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in hosted]
    contents = [one.reshape(-1).view(torch.uint8) for _, one in hosted if one.numel()]
    return _encoder.encode(_Description(flat.tree, kinds)), contents


def put_together(description: bytes, fill: Callable[[torch.Tensor], object]) -> Any:
    """Return the value that :func:`take_apart` described.

    Args:
        description: The first result of :func:`take_apart`.
        fill: Fills the bytes of the next tensor, in the same order.
    """
    described = from_msgpack(description, _Description)
    tensors = {}
    for name, dtype, shape in described.tensors:
        one = tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        if one.numel():
            fill(one.reshape(-1).view(torch.uint8))
    return decode(described.tree, tensors.__getitem__)


def _as_bytes(value: Any) -> bytes:
    description, contents = take_apart(value)
    return _encoder.encode((description, [one.numpy().tobytes() for one in contents]))


def _from_bytes(data: bytes) -> Any:
    description, contents = from_msgpack(data, tuple[bytes, list[bytes]])
    left = iter(contents)
    return put_together(
        description, lambda into: into.copy_(torch.frombuffer(bytearray(next(left)), dtype=torch.uint8))
    )


def _of(others: Mapping[str, bytes], name: str) -> bytes:
    if name not in others:
        raise OutlastError(f"nothing was kept of {name}; is the state made of the same parts on all ranks?")
    return others[name]
