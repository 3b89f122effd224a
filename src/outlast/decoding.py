"""Messages and files to values of a type: the only place that has msgspec look into a type.

When msgspec first meets a type it looks into it, and other threads run meanwhile. Two threads that begin with the same
type, or with two that share a part, end the process with SIGSEGV (msgspec 0.22). So types are prepared here, by one
thread at a time, and never while the process forks; decoding itself needs no lock.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any, TypeVar, overload

import msgspec

T = TypeVar("T")

_preparing = threading.RLock()
os.register_at_fork(before=_preparing.acquire, after_in_parent=_preparing.release, after_in_child=_preparing.release)


@cache
def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a type; the same for every caller."""
    with _preparing:
        return msgspec.json.Decoder(kind)


@cache
def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a type; the same for every caller."""
    with _preparing:
        return msgspec.msgpack.Decoder(kind)


@overload
def from_json(data: bytes | str, kind: type[T]) -> T: ...
@overload
def from_json(data: bytes | str, kind: Any) -> Any: ...
def from_json(data: bytes | str, kind: Any) -> Any:
    """Return the value that a text stands for.

    Raises:
        msgspec.DecodeError: It is not JSON, or (as ``msgspec.ValidationError``) not of this type.
    """
    return json_decoder(kind).decode(data)


@overload
def from_msgpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T: ...
@overload
def from_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any: ...
def from_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """Return the value that a packet stands for.

    Raises:
        msgspec.DecodeError: It is not MessagePack, or (as ``msgspec.ValidationError``) not of this type.
    """
    return msgpack_decoder(kind).decode(data)


@overload
def convert(value: Any, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def convert(value: Any, kind: Any, *, strict: bool = True) -> Any: ...
def convert(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """Return a value of plain dicts, lists and numbers as one of a type.

    Args:
        value: What is converted.
        kind: The type.
        strict: Whether a text that reads as a number is refused as a number.

    Raises:
        msgspec.ValidationError: It is not of this type.
    """
    with _preparing:
        return msgspec.convert(value, kind, strict=strict)
