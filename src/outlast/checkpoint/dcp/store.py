"""Object stores through fsspec, with a time limit on every operation. Must not import torch.

A store library's errors become ``FileNotFoundError`` or a CheckpointError that names the object. Settings and
credentials are fsspec's: its configuration files, ``FSSPEC_<PROTOCOL>_...`` variables, and the library's own sources.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from outlast.decoding import MAX_FILE_BYTES
from outlast.errors import CheckpointError, Unavailable

log = logging.getLogger(__name__)
TIMEOUT_S = 60.0
"""Time limit for one small operation, or one part of a large one."""
SLACK_S = 1.0
RENEW_S = 300.0
"""Age from which a failing file system client is replaced; each new client takes about 10 MB."""
MAX_TRIES = 3
BATCH = 1000
"""Objects deleted by one S3 request."""
_CONDITIONAL = ("s3", "s3a", "gs", "gcs", "memory")
"""Protocols in which fsspec can create an object atomically only if it does not exist."""
_REFUSED = frozenset({errno.EINVAL, errno.EBUSY})
"""s3fs's translations of HTTP 412 and 409: a condition failed, or a concurrent request won."""

_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoRegionError"})
"""botocore's errors that do not come from the object store."""

_stores: dict[str, ObjectStore] = {}
_lock = threading.Lock()


def is_remote(url: str) -> bool:
    return "://" in url and not url.startswith("file://")


def local_path(url: str) -> str:
    """Return the path of a file URL; as in fsspec, ``%20`` is not decoded."""
    return url.removeprefix("file://") or "/"


def without_slash(url: str) -> str:
    """Strip trailing slashes, except those of a bare scheme such as ``memory://``."""
    bare = url.rstrip("/")
    return f"{bare}//" if bare.endswith(":") else bare


def open_store(url: str) -> ObjectStore:
    """Return the shared client for a URL."""
    with _lock:
        if url not in _stores:
            _stores[url] = ObjectStore(url)
        return _stores[url]


class ObjectStore:
    """Objects below one URL. Thread: any.

    Args:
        url: ``s3://bucket/run``, ``gs://bucket/run``, ``memory://run``, or any other URL that fsspec supports.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = without_slash(url)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._opened_at = 0.0
        self._is_unfenced = False

    @property
    def _is_s3(self) -> bool:
        return self.url.startswith(("s3://", "s3a://"))

    @property
    def _is_gcs(self) -> bool:
        return self.url.startswith(("gs://", "gcs://"))

    def describe(self, name: str) -> str:
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{name}" if name else self.url

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the bytes of the objects below a folder by relative name; empty if there is no such folder."""
        strip = len(self._path(folder).strip("/")) + 1
        found = self._find(folder).items()
        return {path.strip("/")[strip:]: int(about.get("size") or 0) for path, about in found}

    def modified_ns(self, folder: str = "") -> int | None:
        """Return the newest modification time below a folder, in ns since the epoch; ``None``: not reported."""
        times = [_modified_ns(about) for about in self._find(folder).values()]
        return None if None in times else max(filter(None, times), default=None)

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        try:
            return dict(self._call("find", folder, self._path(folder), detail=True))
        except FileNotFoundError:
            return {}

    def names(self) -> list[str]:
        """Return the names directly below the URL, folders and objects."""
        try:
            found = self._call("ls", "", self._path(""), detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in found})

    def read(self, name: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return a small object.

        Raises: FileNotFoundError (the object does not exist); CheckpointError (the store fails, or the object is larger
        than the limit).
        """
        about = self._call("info", name, self._path(name))
        if about.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, "it is a folder", self.describe(name))
        size = about.get("size")
        if size is not None and int(size) > max_bytes:
            raise CheckpointError(f"{self.describe(name)}: it has {size} bytes, and the limit is {max_bytes}")
        return self.read_range(name, 0, 0 if size == 0 else max_bytes)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return an object's bytes from ``start`` to ``end``.

        Raises: FileNotFoundError (the object does not exist); CheckpointError (the store fails).
        """
        return bytes(self._call("cat_file", name, self._path(name), start=start, end=end)) if start != end else b""

    def write(self, name: str, data: bytes) -> None:
        self._call("pipe_file", name, self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Create a small object unless it exists; return whether this call created it.

        Of several concurrent callers one succeeds. If the store has no conditional create, existence is checked first,
        which is racy, and a warning is logged. Raises: CheckpointError (the store does not respond, or refuses).
        """
        if self.url.partition("://")[0] not in _CONDITIONAL:
            self.warn_unfenced()
        for number in range(1, MAX_TRIES + 1):  # a store may reject both of two concurrent requests
            try:
                self._call("pipe_file", name, self._path(name), data, mode="create")
                return True
            except FileExistsError:
                return False
            except CheckpointError as error:
                if self.version(name) is not None:
                    return False
                if _is_unknown(error):
                    break
                if number == MAX_TRIES:
                    raise
        self.warn_unfenced()
        self.write(name, data)
        return True

    def version(self, name: str) -> str | None:
        """Return an object's version; ``None``: no object; empty: the store has no conditional replace."""
        try:
            about = self._call("info", name, self._path(name))
        except FileNotFoundError:
            return None
        key = "ETag" if self._is_s3 else "generation" if self._is_gcs else ""
        return str(about.get(key) or "")

    def replace(self, name: str, data: bytes, version: str | None) -> bool:
        """Replace one :meth:`version` of a small object; return whether the new content is stored.

        Raises: CheckpointError (the store does not respond, or refuses).
        """
        try:
            if version is not None or self.create(name, data):
                if version and self._is_gcs:
                    self._replace_in_gcs(name, data, version)
                elif version is not None:
                    condition: dict[str, Any] = {"IfMatch": version} if version else {}
                    self._call("pipe_file", name, self._path(name), data, **condition)
                return True
        except CheckpointError:
            if self.version(name) == version:
                raise
        try:  # the store's library may have retried and found its own first write
            return self.read(name) == data
        except FileNotFoundError:
            return False

    def _replace_in_gcs(self, name: str, data: bytes, version: str) -> None:
        """Upload a small object in one request with the precondition that gcsfs does not expose."""
        file_system, _ = self._open()
        bucket, key, _ = file_system.split_path(self._path(name))
        self._call(
            "call",
            name,
            "POST",
            f"{file_system._location}/upload/storage/v1/b/{quote(bucket, safe='')}/o",
            uploadType="media",
            name=key,
            ifGenerationMatch=version,
            headers={"Content-Type": "application/octet-stream"},
            data=data,
        )

    def check_fencing(self, name: str) -> None:
        """Log a warning once if the store cannot fence owners; ``name`` is a probe object."""
        with contextlib.suppress(CheckpointError):  # the first commit will fail with the error
            self.remove([name])
            if self.create(name, b"{}") and self.create(name, b"{}"):
                self.warn_unfenced()
            elif not self.version(name):
                self.warn_unfenced("replace an object only if it is the one that was read")
            self.remove([name])

    def warn_unfenced(self, lacks: str = "make an object only if there is none") -> None:
        if not self._is_unfenced:
            self._is_unfenced = True
            log.warning(
                "%s cannot %s, so it cannot fence: never let two runs use this directory at the same time",
                self.url,
                lacks,
            )

    def put(self, name: str, data: Any, *, part_bytes: int, concurrency: int, timeout_s: float) -> None:
        """Upload a large object: in S3 several parts at once, elsewhere part after part.

        Args:
            data: Has a length and returns bytes for slices, on demand.
        """
        if self._is_s3:
            # Fewer than two parts are uploaded as one object, which must be complete in memory.
            parts = data[:] if len(data) < 2 * part_bytes else data
            arguments = {"chunksize": part_bytes, "max_concurrency": concurrency}
            self._call("pipe_file", name, self._path(name), parts, timeout_s=timeout_s, **arguments)
            return

        def put() -> None:
            from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

            file_system, _ = self._open()
            file = file_system.open(self._path(name), "wb", block_size=part_bytes)
            try:
                for start in range(0, len(data), part_bytes):
                    file.write(data[start : start + part_bytes])
            except BaseException:  # however it ends, no object may be created
                if isinstance(file, AbstractBufferedFile):
                    file.closed = True  # closing would create an object of the partial data
                    file.discard()
                raise
            file.close()

        self._guard(name, lambda: _in_thread(put, timeout_s), timeout_s, writes=True)

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects, in batches in S3; missing objects are ignored."""
        left = list(names)
        while self._is_s3 and len(left) > 1:
            try:
                self._call("bulk_delete", left[0], [self._path(name) for name in left[:BATCH]])
            except CheckpointError as error:
                if _is_unknown(error):
                    break
                raise
            del left[:BATCH]
        for name in left:
            with contextlib.suppress(FileNotFoundError):
                self._call("rm_file", name, self._path(name))

    def _path(self, name: str) -> str:
        _, root = self._open()
        return f"{root}/{name}" if name else root

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                self._opened = self._guard("", self._connect, self._timeout_s)
                self._opened_at = time.monotonic()
            return self._opened

    def _connect(self) -> tuple[Any, str]:
        import fsspec  # type: ignore[import-untyped]

        # A cached listing would hide the other ranks' files.
        file_system, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True)
        return file_system, str(root).rstrip("/")

    def _call(self, method: str, name: str, /, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        file_system, _ = self._open()

        def call() -> Any:
            if file_system.async_impl:
                work = getattr(file_system, f"_{method}")(*args, **kwargs)
                running = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, limit_s), file_system.loop)
                try:
                    return running.result(limit_s + SLACK_S)
                except BaseException:
                    running.cancel()
                    raise
                finally:
                    del running  # its error's traceback references this frame: a cycle
            return _in_thread(lambda: getattr(file_system, method)(*args, **kwargs), limit_s)

        writes = method in ("pipe_file", "call")
        return self._guard(name, call, limit_s, writes=writes, creates=kwargs.get("mode") == "create")

    def _guard(
        self, name: str, work: Callable[[], Any], limit_s: float, *, writes: bool = False, creates: bool = False
    ) -> Any:
        """Run a store operation and translate its errors.

        Args:
            creates: Lets ``FileExistsError`` through.
        """
        where = self.describe(name)
        try:
            return work()
        except FileNotFoundError as error:
            if not writes:
                raise
            raise CheckpointError(f"{where}: {error}; make the place first") from error
        except (TimeoutError, FutureTimeout) as error:
            raise Unavailable(f"{where}: the object store did not respond within {limit_s:.3g} s") from error
        except ImportError as error:
            raise CheckpointError(f"{where}: {error}; install the package that reaches this store") from error
        except Exception as error:  # each store's library has its own errors
            if creates and isinstance(error, FileExistsError):
                raise
            is_refused = isinstance(error, OSError) and error.errno in _REFUSED
            is_old = time.monotonic() - self._opened_at > RENEW_S
            if isinstance(error, RuntimeError) or (is_old and not is_refused):
                self._opened = None  # closed, or its library does not recover: the next call opens a new one
            text = str(error).strip().splitlines()
            line = f"{where}: {type(error).__name__}: {text[0][:300] if text else ''}"
            if _is_usage_error(error):
                raise CheckpointError(line) from error
            raise Unavailable(line) from error


def _is_usage_error(error: Exception) -> bool:
    """Return whether a library error concerns the call rather than the object store."""
    if isinstance(error, TypeError | ValueError | NotImplementedError | AttributeError | KeyError):
        return True
    # s3fs reports 409 and 503 as EBUSY: a concurrent request, or a temporary failure of the store.
    return type(error).__name__ in _NO_CREDENTIALS or (isinstance(error, OSError) and error.errno == errno.EINVAL)


def _is_unknown(error: CheckpointError) -> bool:
    """Return whether the store or its library lacks an operation."""
    return isinstance(error.__cause__, TypeError | NotImplementedError) or "NotImplemented" in str(error)


def _in_thread(work: Callable[[], Any], timeout_s: float) -> Any:
    """Run a call without a timeout of its own in a thread, abandoned at the time limit."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, name="outlast-store", daemon=True).start()
    return outcome.result(timeout_s)


def _modified_ns(about: Mapping[str, Any]) -> int | None:
    """Return an object's time, whatever key the library uses."""
    for key in ("LastModified", "mtime", "updated", "last_modified", "created"):
        when = about.get(key)
        if isinstance(when, str):
            when = datetime.fromisoformat(when)
        if isinstance(when, int | float):
            return int(when * 1e9)
        if isinstance(when, datetime):
            return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1e9)
    return None
