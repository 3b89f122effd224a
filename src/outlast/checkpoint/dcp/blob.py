"""One tensor as ``torch.save`` writes it, made by hand around bytes that lie elsewhere. Nothing here imports torch.

The blob is a stored zip archive of four records: the pickled description, the byte order, the format's version and,
last, the raw bytes, which begin at a multiple of 64. So all but the raw bytes is known beforehand, and these are copied
from where they lie without passing through an interpreter. The records' checksums are zero: torch looks at none, and
the file that the blob becomes part of has digests of its own.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "ELEMENT_BYTES", "Blob", "tensor_blob"]

ALIGNMENT = 64
"""Raw bytes begin at a multiple of it, in the blob as in the file."""

_STORAGES = {
    "F64": (8, "DoubleStorage"),
    "F32": (4, "FloatStorage"),
    "F16": (2, "HalfStorage"),
    "BF16": (2, "BFloat16Storage"),
    "C64": (8, "ComplexFloatStorage"),
    "I64": (8, "LongStorage"),
    "I32": (4, "IntStorage"),
    "I16": (2, "ShortStorage"),
    "I8": (1, "CharStorage"),
    "U8": (1, "ByteStorage"),
    "BOOL": (1, "BoolStorage"),
}
"""Element types with a storage class of their own in torch: bytes of an element, the class."""

_UNTYPED = {
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "U64": (8, "uint64"),
    "U32": (4, "uint32"),
    "U16": (2, "uint16"),
}
"""Element types without one: bytes of an element, torch's name of the type."""

ELEMENT_BYTES = {name: size for table in (_STORAGES, _UNTYPED) for name, (size, _) in table.items()}
"""safetensors' name of an element type to the bytes of an element."""

_ROOT = b"archive"
_ZIP64_LIMIT = 0xFFFFFFFF
_DATE = 33
"""1 January 1980, the earliest that the format knows."""


@dataclass(frozen=True, slots=True)
class Blob:
    """What surrounds a tensor's raw bytes."""

    prefix: bytes
    """Its length is a multiple of 64."""
    suffix: bytes


@dataclass(frozen=True, slots=True)
class _ZipRecord:
    name: bytes
    size: int
    offset: int


def tensor_blob(dtype: str, shape: tuple[int, ...], num_bytes: int) -> Blob:
    """Return what surrounds the raw bytes of a contiguous tensor.

    Args:
        dtype: safetensors' name of the element type.
        shape: Of the tensor.
        num_bytes: Of the raw bytes.

    Raises:
        ValueError: There is no such type, or the tensor has another number of bytes.
    """
    if math.prod(shape) * ELEMENT_BYTES.get(dtype, -1) != num_bytes:
        raise ValueError(f"a tensor of {dtype} {shape} does not take {num_bytes} bytes")
    prefix, records = bytearray(), []
    for name, content in (
        (b"data.pkl", _pickle(dtype, shape, num_bytes)),
        (b"byteorder", b"little"),
        (b"version", b"3\n"),
    ):
        records.append(_ZipRecord(name, len(content), len(prefix)))
        prefix += _local_header(name, len(content), padding=0) + content
    records.append(_ZipRecord(b"data/0", num_bytes, len(prefix)))
    unpadded = len(prefix) + len(_local_header(b"data/0", num_bytes, padding=4))
    prefix += _local_header(b"data/0", num_bytes, padding=4 + -unpadded % ALIGNMENT)
    return Blob(bytes(prefix), _directory(records, len(prefix) + num_bytes))


def _local_header(name: bytes, size: int, *, padding: int) -> bytes:
    """Return what precedes a record.

    Args:
        name: Of the record, within the archive.
        size: Bytes of the record.
        padding: Bytes that an extra field fills, at least 4, or 0.
    """
    path = _ROOT + b"/" + name
    extra = struct.pack("<HHQQ", 1, 16, size, size) if size >= _ZIP64_LIMIT else b""
    if padding:
        extra += b"FB" + struct.pack("<H", padding - 4) + b"Z" * (padding - 4)
    told = min(size, _ZIP64_LIMIT)
    version = 45 if size >= _ZIP64_LIMIT else 10
    return struct.pack("<4sHHHHHIIIHH", b"PK\3\4", version, 0, 0, 0, _DATE, 0, told, told, len(path), len(extra)) + (
        path + extra
    )


def _directory(records: list[_ZipRecord], start: int) -> bytes:
    """Return the archive's directory, which lies at ``start``."""
    entries = bytearray()
    for record in records:
        path = _ROOT + b"/" + record.name
        extra = struct.pack("<HHQQ", 1, 16, record.size, record.size) if record.size >= _ZIP64_LIMIT else b""
        told = min(record.size, _ZIP64_LIMIT)
        version = 45 if record.size >= _ZIP64_LIMIT else 10
        sizes = (0, told, told, len(path), len(extra))
        entries += struct.pack("<4sHHHHHHIIIHH", b"PK\1\2", version, version, 0, 0, 0, _DATE, *sizes)
        entries += struct.pack("<HHHII", 0, 0, 0, 0, record.offset) + path + extra
    end = b""
    if start >= _ZIP64_LIMIT:
        counts = (len(records), len(records), len(entries), start)
        end += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, *counts)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, start + len(entries), 1)
    told = min(start, _ZIP64_LIMIT)
    end += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, len(records), len(records), len(entries), told, 0)
    return bytes(entries) + end


def _pickle(dtype: str, shape: tuple[int, ...], num_bytes: int) -> bytes:
    """Return the description of a tensor: which function of torch makes it of which storage, protocol 2."""
    strides, step = list[int](), 1
    for length in reversed(shape):
        strides.insert(0, step)
        step *= max(1, length)
    if dtype in _STORAGES:
        rebuild, storage = "_rebuild_tensor_v2", _global("torch", _STORAGES[dtype][1])
        length, tail = num_bytes // ELEMENT_BYTES[dtype], b""
    else:
        rebuild, storage = "_rebuild_tensor_v3", _global("torch.storage", "UntypedStorage")
        length, tail = num_bytes, _global("torch", _UNTYPED[dtype][1])
    stored = b"(" + _text("storage") + storage + _text("0") + _text("cpu") + _int(length) + b"tQ"
    hooks = _global("collections", "OrderedDict") + b")R"
    arguments = stored + _int(0) + _ints(shape) + _ints(tuple(strides)) + b"\x89" + hooks + tail
    return b"\x80\x02" + _global("torch._utils", rebuild) + b"(" + arguments + b"tR."


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def _int(number: int) -> bytes:
    if number < 1 << 31:
        return b"J" + struct.pack("<i", number)
    return b"\x8a\x08" + struct.pack("<q", number)


def _ints(numbers: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(_int, numbers)) + b"t"
