"""Decode messages and files into values of a type: the only module that decodes bytes and calls msgspec's decoders.

Bytes may come from another user, a damaged disk or an attacker. Decoding returns a value or raises
``msgspec.DecodeError``; :func:`read_file` returns the bytes of a regular file of a limited size or raises ``OSError``.
Nesting is limited by the interpreter's recursion limit or, in a process that raised this limit beyond the stack size of
a thread, by :data:`MAX_DEPTH`. Settings (:func:`parse_settings`) have separate limits: the TOML and YAML parsers are
written in Python and take minutes for some texts of 100 KB.

msgspec inspects a type on its first use and lets other threads run meanwhile. Two threads that begin with the same
type, or with two types that share a part, crash the process with SIGSEGV (msgspec 0.22). Types are therefore prepared
here under a lock, which is also held across forks; decoding needs no lock.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import threading
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Generic, TypeVar, overload

import msgspec

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

MAX_DEPTH = 1000
"""Limit of nesting in a process whose recursion limit does not protect its stack."""
MAX_FILE_BYTES = 1 << 30
"""Limit of a file that is read whole."""
MAX_STATE_BYTES = 1 << 24
"""Limit of a file that holds a few values, whatever the size of the run."""
MAX_SETTINGS_DEPTH = 50
"""Limit of nesting in settings, including dotted keys of TOML and aliases of YAML."""
MAX_SETTINGS_BYTES: Mapping[str, int] = {"toml": 1 << 20, "yaml": 1 << 17, "json": 1 << 20}
"""Limit of a settings file by format, so that parsing takes seconds at most."""
_MIN_PARTS = 10_000
"""Values that settings of any size may have; larger settings may have one for each character."""
_READ_BYTES = 1 << 23
_SAFE_RECURSION_LIMIT = 5000
"""An 8 MiB thread stack has room for four times as many nested values."""

_preparing = threading.RLock()
os.register_at_fork(before=_preparing.acquire, after_in_parent=_preparing.release, after_in_child=_preparing.release)


class Decoder(Generic[T]):
    """Decode values of one type.

    Args:
        decode: Decodes bytes.
        is_too_deep: Whether bytes are nested deeper than :data:`MAX_DEPTH`.

    Thread: any.
    """

    def __init__(self, decode: Callable[[Any], T], is_too_deep: Callable[[Buffer], bool]) -> None:
        self._decode, self._is_too_deep = decode, is_too_deep

    def decode(self, data: Buffer | str) -> T:
        """Return the decoded value.

        Raises:
            msgspec.DecodeError: The data is malformed, nested too deeply or (as ``msgspec.ValidationError``) of another
            type.
        """
        try:
            _check_depth(data, self._is_too_deep)
            return self._decode(data)
        except msgspec.DecodeError:
            raise
        except (RecursionError, ValueError, OverflowError) as error:  # such as text that is not UTF-8
            raise msgspec.DecodeError(str(error)) from error


@cache
def json_decoder(kind: Any) -> Decoder[Any]:
    """Return the JSON decoder of a type, cached."""
    with _preparing:
        return Decoder(msgspec.json.Decoder(kind).decode, _is_deep_json)


@cache
def msgpack_decoder(kind: Any) -> Decoder[Any]:
    """Return the MessagePack decoder of a type, cached."""
    with _preparing:
        return Decoder(msgspec.msgpack.Decoder(kind).decode, _is_deep_msgpack)


@overload
def from_json(data: bytes | str, kind: type[T]) -> T: ...
@overload
def from_json(data: bytes | str, kind: Any) -> Any: ...
def from_json(data: bytes | str, kind: Any) -> Any:
    """Decode a JSON text.

    Raises:
        msgspec.DecodeError: The text is not JSON, nested too deeply, or (as ``msgspec.ValidationError``) of another
        type.
    """
    return json_decoder(kind).decode(data)


@overload
def from_msgpack(data: bytes | bytearray | memoryview, kind: type[T]) -> T: ...
@overload
def from_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any: ...
def from_msgpack(data: bytes | bytearray | memoryview, kind: Any) -> Any:
    """Decode a MessagePack packet.

    Raises:
        msgspec.DecodeError: The data is not MessagePack, nested too deeply, or (as ``msgspec.ValidationError``) of
        another type.
    """
    return msgpack_decoder(kind).decode(data)


@overload
def convert(value: Any, kind: type[T], *, strict: bool = True) -> T: ...
@overload
def convert(value: Any, kind: Any, *, strict: bool = True) -> Any: ...
def convert(value: Any, kind: Any, *, strict: bool = True) -> Any:
    """Convert plain dicts, lists and numbers into a value of a type.

    Args:
        value: The plain value.
        kind: The type.
        strict: Refuse a text where a number is expected, even if the text reads as a number.

    Raises:
        msgspec.ValidationError: The value does not fit the type.
    """
    with _preparing:
        try:
            return msgspec.convert(value, kind, strict=strict)
        except RecursionError as error:
            raise msgspec.ValidationError(str(error)) from error


def parse_json(text: bytes | str, **options: Any) -> Any:
    """Call ``json.loads``, which accepts NaN, infinities and repeated names, with its options.

    Raises:
        ValueError: The text is nested too deeply or (as ``json.JSONDecodeError``) not JSON.
    """
    try:
        _check_depth(text, _is_deep_json)
        return json.loads(text, **options)
    except RecursionError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error


class MalformedText(ValueError):
    """A text does not follow its format.

    Attributes:
        line: Line number, from 1; ``None`` = not known.
    """

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def parse_settings(text: str, form: str) -> Any:
    """Parse settings that a person wrote.

    Args:
        text: The text.
        form: ``toml``, ``yaml`` or ``json``.

    Raises:
        MalformedText: The text does not follow this format, or repeats a key.
        ValueError: The text is larger than :data:`MAX_SETTINGS_BYTES`, values are nested deeper than
            :data:`MAX_SETTINGS_DEPTH`, aliases repeat too much, or a number or a date cannot be represented.
        ImportError: The format is YAML, and PyYAML is not installed.
    """
    if len(text) > MAX_SETTINGS_BYTES[form]:
        raise ValueError(f"it has {len(text)} characters, and the limit is {MAX_SETTINGS_BYTES[form]}")
    try:
        value = {"toml": _parse_toml, "yaml": _parse_yaml, "json": _parse_json}[form](text)
    except RecursionError:
        raise _nested_too_deeply() from None
    _check_parts(value, max(len(text), _MIN_PARTS))
    return value


def open_file(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o666, *, follows_links: bool = False
) -> int:
    """Open a regular file and return its descriptor.

    Args:
        path: The file.
        flags: As for ``os.open``.
        mode: Permissions of a file that is created.
        follows_links: Follow a symbolic link at ``path``, as for a path that the user gave.

    Raises:
        OSError: The file does not exist, or is a link, a pipe, a device or a folder; the text says which.

    Blocks: for a disk, never for a pipe without a writer.
    """
    flags |= 0 if follows_links else os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not follows_links and os.path.islink(path):
            raise _refused(path, "a symbolic link") from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise _refused(path, "a pipe or a socket" if error.errno == errno.ENXIO else "a folder") from None
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    raise _refused(path, next((name for is_kind, name in _KINDS if is_kind(mode)), "a special file"))


def read_file(path: str | os.PathLike[str], *, max_bytes: int = MAX_FILE_BYTES, follows_links: bool = False) -> bytes:
    """Return the bytes of a regular file; see :func:`open_file`.

    Raises:
        OSError: The file cannot be read, is not a regular file, or exceeds the limit.
    """
    fd = open_file(path, follows_links=follows_links)
    try:
        size, parts = os.fstat(fd).st_size, list[bytes]()
        while size <= max_bytes and (part := os.read(fd, _READ_BYTES)):
            parts.append(part)
            size = max(size, sum(map(len, parts)))  # another process may append to it
    finally:
        os.close(fd)
    if size > max_bytes:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and the limit is {max_bytes}", os.fspath(path))
    return b"".join(parts)


_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _refused(path: str | os.PathLike[str], kind: str) -> OSError:
    return OSError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def _check_depth(data: Buffer | str, is_too_deep: Callable[[Buffer], bool]) -> None:
    """Raise RecursionError where the stack would overflow before the interpreter's limit."""
    if sys.getrecursionlimit() <= _SAFE_RECURSION_LIMIT or len(data) <= MAX_DEPTH:
        return
    if is_too_deep(data.encode(errors="replace") if isinstance(data, str) else data):
        raise RecursionError(f"values are nested deeper than {MAX_DEPTH}")


def _nested_too_deeply() -> ValueError:
    return ValueError(f"values are nested deeper than {MAX_SETTINGS_DEPTH}")


def _parse_toml(text: str) -> Any:
    bare = _TOML_TEXT.sub("", text)
    num_dots = max(part.count(".") for part in _TOML_MARK.split(bare))  # a dotted key of n parts takes n * n steps
    if num_dots >= MAX_SETTINGS_DEPTH or _is_deep_json(bare.encode(), MAX_SETTINGS_DEPTH):
        raise _nested_too_deeply()
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.fullmatch(r"(.*) \(at line (\d+), column \d+\)", str(error))
        raise MalformedText(found[1] if found else str(error), int(found[2]) if found else None) from None


def _parse_json(text: str) -> Any:
    if _is_deep_json(text.encode(), MAX_SETTINGS_DEPTH):
        raise _nested_too_deeply()
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise MalformedText(error.msg, error.lineno) from None


def _parse_yaml(text: str) -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.depth > MAX_SETTINGS_DEPTH:
                raise _nested_too_deeply()
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            line = node.start_mark.line + 1
            if any(
                key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value
            ):  # their number can grow exponentially
                raise MalformedText("merge keys (<<) are not supported; write the keys out", line)
            values = super().construct_mapping(node, deep)
            if len(values) < len(node.value):
                _without_repeats([(self.construct_object(key), None) for key, _ in node.value], line)
            return values

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise MalformedText(problem, None if mark is None else mark.line + 1) from None
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
    ) as error:  # raised by PyYAML itself, such as for !!int ""
        raise ValueError(f"a value does not fit its tag: {type(error).__name__}: {error}") from None


def _without_repeats(pairs: list[tuple[Any, Any]], line: int | None = None) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for key, value in pairs:
        if key in values:
            raise MalformedText(f"key {str(key)!r} is given twice; keep one", line)
        values[key] = value
    return values


def _check_parts(value: Any, max_num: int) -> None:
    """Raise ValueError if a value, with aliases expanded, is nested too deeply or has too many parts."""
    level, num = [value], 0
    for _ in range(MAX_SETTINGS_DEPTH + 1):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                inner += part.values()
            elif isinstance(part, list | tuple):
                inner += part
            if num + len(inner) > max_num:
                raise ValueError(f"aliases make it more than {max_num} values")
        if not inner:
            return
        level, num = inner, num + len(inner)
    raise _nested_too_deeply()


_TOML_TEXT = re.compile(
    r'''#[^\n]*|"""(?:\\.|[^\\])*?(?:"""|\Z)|'{3}.*?(?:'{3}|\Z)|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?''', re.DOTALL
)
"""Comments and strings of TOML."""
_TOML_MARK = re.compile(r"[\n=,\[\]{}]")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_MSGPACK_SIZES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4}
"""First byte of a binary, string or extension value to the size of its length field."""
_MSGPACK_FIXED = {0xCA: 4, 0xCB: 8, **{0xCC + n: 1 << n for n in range(4)}, **{0xD0 + n: 1 << n for n in range(4)}}
_MSGPACK_FIXED |= {0xD4 + n: 1 + (1 << n) for n in range(5)}
_MSGPACK_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""First byte of an array or a map to the size of its length field and the values per element."""
_NOT_MSGPACK_CONTAINERS = bytes(set(range(256)) - {*range(0x80, 0xA0), *_MSGPACK_CONTAINERS})


def _is_deep_json(data: Buffer, max_depth: int = MAX_DEPTH) -> bool:
    brackets = bytes(data).translate(None, _BRACKETS)
    if len(brackets) <= max_depth:
        return False
    depth = 0
    for byte in _STRING.sub(b"", bytes(data)).translate(None, _BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > max_depth:
            return True
    return False


def _is_deep_msgpack(data: Buffer) -> bool:
    if len(bytes(data).translate(None, _NOT_MSGPACK_CONTAINERS)) <= MAX_DEPTH:
        return False
    at, left = 0, [1]  # values still missing in each open container
    while left and at < len(data):
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        head, num_values = data[at], 0
        at += 1
        if 0x80 <= head < 0xA0:
            num_values = (head & 0x0F) * (1 if head >= 0x90 else 2)
        elif head in _MSGPACK_CONTAINERS:
            width, each = _MSGPACK_CONTAINERS[head]
            num_values = int.from_bytes(data[at : at + width], "big") * each
            at += width
        elif 0xA0 <= head < 0xC0:
            at += head & 0x1F
        elif head in _MSGPACK_SIZES:
            width = _MSGPACK_SIZES[head]
            at += width + int.from_bytes(data[at : at + width], "big") + (0xC7 <= head <= 0xC9)
        else:
            at += _MSGPACK_FIXED.get(head, 0)
        if num_values:
            left.append(num_values)
            if len(left) > MAX_DEPTH:
                return True
    return False
