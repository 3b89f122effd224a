"""Any place that fsspec reaches, with a time limit on everything. Nothing here imports torch.

Whatever a store's own library raises comes out as one of two: ``FileNotFoundError``, or a CheckpointError that names
the object. That an object exists already is no error of :meth:`ObjectStore.create`. Settings and credentials are
fsspec's own: its configuration files, ``FSSPEC_<PROTOCOL>_...`` variables, and what the store's library reads.
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
"""For one small operation, or one piece of a large one."""
SLACK_S = 1.0
RENEW_S = 300.0
"""A file system that fails is replaced when it is this old. Each new one loads its client again, about 10 MB."""
MAX_TRIES = 3
BATCH = 1000
"""Objects that S3 deletes in one request."""
_CONDITIONAL = ("s3", "s3a", "gs", "gcs", "memory")
"""Protocols in which fsspec makes an object only if there is none, in one step."""
_REFUSED = frozenset({errno.EINVAL, errno.EBUSY})
"""What s3fs makes of the codes 412 and 409: a condition was not met, or another request was quicker."""

_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "NoRegionError"})
"""Errors of botocore that the object store has no part in."""

_stores: dict[str, ObjectStore] = {}
_lock = threading.Lock()


def is_remote(url: str) -> bool:
    return "://" in url and not url.startswith("file://")


def local_path(url: str) -> str:
    """Return the path of a place on a file system; as with fsspec, ``%20`` in a URL means itself."""
    return url.removeprefix("file://") or "/"


def without_slash(url: str) -> str:
    """Return a URL without slashes at its end, except those of a scheme that alone is a place: ``memory://``."""
    bare = url.rstrip("/")
    return f"{bare}//" if bare.endswith(":") else bare


def open_store(url: str) -> ObjectStore:
    """Return the store at a URL; the same one, with its connections, each time."""
    with _lock:
        if url not in _stores:
            _stores[url] = ObjectStore(url)
        return _stores[url]


class ObjectStore:
    """Objects below one URL. Thread: any.

    Args:
        url: ``s3://bucket/run``, ``gs://bucket/run``, ``memory://run``, or any other that fsspec knows.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = without_slash(url)
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._opened_at = 0.0
        self._is_unfenced = False
        """Whether it was logged that this store cannot fence."""

    @property
    def _is_s3(self) -> bool:
        return self.url.startswith(("s3://", "s3a://"))

    @property
    def _is_gcs(self) -> bool:
        return self.url.startswith(("gs://", "gcs://"))

    def describe(self, name: str) -> str:
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{name}" if name else self.url

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the objects below a folder: names relative to it, and their bytes; empty when there is none."""
        strip = len(self._path(folder).strip("/")) + 1
        found = self._find(folder).items()
        return {path.strip("/")[strip:]: int(about.get("size") or 0) for path, about in found}

    def modified_ns(self, folder: str = "") -> int | None:
        """Return when an object below a folder last changed, in nanoseconds since the epoch by the store's clock.

        Returns:
            The newest of their times; ``None``: the store does not tell.
        """
        times = [_modified_ns(about) for about in self._find(folder).values()]
        return None if None in times else max(filter(None, times), default=None)

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        try:
            return dict(self._call("find", folder, self._path(folder), detail=True))
        except FileNotFoundError:
            return {}

    def names(self) -> list[str]:
        """Return the names of what lies directly here, folders and objects alike."""
        try:
            found = self._call("ls", "", self._path(""), detail=False)
        except FileNotFoundError:
            return []
        return sorted({path.rstrip("/").rsplit("/", 1)[-1] for path in found})

    def read(self, name: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """Return a small object.

        Raises:
            FileNotFoundError: There is none.
            CheckpointError: The store does not give it, or it is larger than the limit.
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

        Raises:
            FileNotFoundError: There is none.
            CheckpointError: The store does not give it.
        """
        return bytes(self._call("cat_file", name, self._path(name), start=start, end=end)) if start != end else b""

    def write(self, name: str, data: bytes) -> None:
        self._call("pipe_file", name, self._path(name), data)

    def create(self, name: str, data: bytes) -> bool:
        """Put a small object unless it exists; of several that try at once, one succeeds.

        A store that knows no such condition is asked before, which two may be at the same time; a warning says so.

        Returns:
            Whether this call made it.

        Raises:
            CheckpointError: The store does not answer, or refuses.
        """
        if self.url.partition("://")[0] not in _CONDITIONAL:
            self.warn_unfenced()
        for number in range(1, MAX_TRIES + 1):  # of two that try at the same moment, a store may ask both to try again
            try:
                self._call("pipe_file", name, self._path(name), data, mode="create")
                return True
            except FileExistsError:
                return False
            except CheckpointError as error:
                if self._exists(name):
                    return False
                if not _is_unknown(error):
                    if number == MAX_TRIES:
                        raise
                    continue
            break
        self.warn_unfenced()
        self.write(name, data)
        return True

    def version(self, name: str) -> str | None:
        """Return what identifies an object's present content.

        Returns:
            ``None``: there is no such object; empty: the store cannot replace one version only.
        """
        try:
            about = self._call("info", name, self._path(name))
        except FileNotFoundError:
            return None
        key = "ETag" if self._is_s3 else "generation" if self._is_gcs else ""
        return str(about.get(key) or "")

    def replace(self, name: str, data: bytes, version: str | None) -> bool:
        """Put a small object in place of one version of it, as :meth:`version` returned it.

        Returns:
            Whether it is there now; ``False``: another version is.

        Raises:
            CheckpointError: The store does not answer, or refuses.
        """
        try:
            if version is None:
                if self.create(name, data):
                    return True
            elif version and self._is_gcs:
                self._replace_in_gcs(name, data, version)
                return True
            elif version:
                self._call("pipe_file", name, self._path(name), data, IfMatch=version)
                return True
            else:
                self.write(name, data)
                return True
        except CheckpointError:
            if self.version(name) == version:
                raise
        try:  # a store's library may have asked twice, and found what it had put itself
            return self.read(name) == data
        except FileNotFoundError:
            return False

    def _replace_in_gcs(self, name: str, data: bytes, version: str) -> None:
        """Upload a small object in one request, as gcsfs does, with the condition that gcsfs has no argument for."""
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
        """Log once, as a warning, what two owners could do to each other here; ``name`` is used to find out."""
        with contextlib.suppress(CheckpointError):  # the first commit will fail, and say so
            self.remove([name])
            if self.create(name, b"{}") and self.create(name, b"{}"):
                self.warn_unfenced()
            elif not self.version(name):
                self.warn_unfenced("replace an object only if it is the one that was read")
            self.remove([name])

    def warn_unfenced(self, lacks: str = "make an object only if there is none") -> None:
        """Log once that nothing keeps two owners of this store apart."""
        if not self._is_unfenced:
            self._is_unfenced = True
            log.warning(
                "%s cannot %s, so it cannot fence: never let two runs use this directory at the same time",
                self.url,
                lacks,
            )

    def _exists(self, name: str) -> bool:
        try:
            self._call("info", name, self._path(name))
        except FileNotFoundError:
            return False
        return True

    def put(self, name: str, data: Any, *, part_bytes: int, concurrency: int, timeout_s: float) -> None:
        """Put a large object: in S3 several parts at once, elsewhere piece after piece.

        Args:
            data: Has a length, and gives bytes for slices, which are asked for when they are needed.
        """
        if self._is_s3:
            # Less than two parts go up as one object, which has to be there as a whole.
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
            except BaseException:  # whatever ends it, no object must come of it
                if isinstance(file, AbstractBufferedFile):
                    file.closed = True  # its end would make an object of the half that is there
                    file.discard()
                raise
            file.close()

        self._guard(name, lambda: _in_thread(put, timeout_s), timeout_s, writes=True)

    def remove(self, names: Iterable[str]) -> None:
        """Delete objects, in S3 a thousand with each request; those that do not exist are no error."""
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

        # A listing that is remembered would hide what other ranks wrote.
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
                    del running  # it has the error, whose traceback has this frame: a cycle
            return _in_thread(lambda: getattr(file_system, method)(*args, **kwargs), limit_s)

        writes = method in ("pipe_file", "call")
        return self._guard(name, call, limit_s, writes=writes, creates=kwargs.get("mode") == "create")

    def _guard(
        self, name: str, work: Callable[[], Any], limit_s: float, *, writes: bool = False, creates: bool = False
    ) -> Any:
        """Do something with the store; its errors become ours.

        Args:
            creates: ``FileExistsError`` comes through: the object is there already.
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
        except Exception as error:  # each store's library has errors of its own
            if creates and isinstance(error, FileExistsError):
                raise
            is_refused = isinstance(error, OSError) and error.errno in _REFUSED
            is_old = time.monotonic() - self._opened_at > RENEW_S
            if isinstance(error, RuntimeError) or (is_old and not is_refused):
                self._opened = None  # closed, or its library does not recover: the next call opens another
            text = str(error).strip().splitlines()
            line = f"{where}: {type(error).__name__}: {text[0][:300] if text else ''}"
            if _is_usage_error(error):
                raise CheckpointError(line) from error
            raise Unavailable(line) from error


def _is_usage_error(error: Exception) -> bool:
    """Return whether an error of a store's library says something about the call and not about the object store."""
    if isinstance(error, TypeError | ValueError | NotImplementedError | AttributeError | KeyError):
        return True
    # s3fs reports 409 and 503 as EBUSY: another request was quicker, or the object store cannot serve this one now.
    return type(error).__name__ in _NO_CREDENTIALS or (isinstance(error, OSError) and error.errno == errno.EINVAL)


def _is_unknown(error: CheckpointError) -> bool:
    """Return whether a store, or its library, does not know an operation."""
    return isinstance(error.__cause__, TypeError | NotImplementedError) or "NotImplemented" in str(error)


def _in_thread(work: Callable[[], Any], timeout_s: float) -> Any:
    """Do something that knows no time limit; past its limit it is left alone."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="outlast-store", daemon=True).start()
    return outcome.result(timeout_s)


def _modified_ns(about: Mapping[str, Any]) -> int | None:
    """Return the time of an object, under whichever name a store's library has it."""
    for key in ("LastModified", "mtime", "updated", "last_modified", "created"):
        when = about.get(key)
        if isinstance(when, str):
            when = datetime.fromisoformat(when)
        if isinstance(when, int | float):
            return int(when * 1e9)
        if isinstance(when, datetime):
            return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1e9)
    return None
