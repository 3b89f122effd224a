"""Directories and object stores that can fail for one node or for all nodes, and recover.

A directory is a tmpfs with a separate bindfs mount for each node, so that one node's mount can hang, be read-only or be
unmounted while another node uses the same files. A bucket is a moto server with one proxy for each node, which can
stall, refuse connections, delay or fail requests.

The test never accesses a node's mount after it was broken: all checks use the tmpfs, which always responds. Mounts
carry the id of the process that made them; mounts of a killed process are removed by the next one.

Rejected: a FUSE file system in Python (one more thing to trust; bindfs is stopped with a signal), ``--write-rate`` of
bindfs for a slow disk (the saves of these tests are small, so that their cost is the number of calls, not bytes), and a
mount namespace for each node (a mount in a namespace can be repaired only from inside).
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from outlast.testing.ranks import free_port

__all__ = ["ALL", "Bucket", "Disk", "Fault", "processes_named", "start_store", "why_unavailable"]

ALL: tuple[str, ...] = ()
"""Nodes of a fault that applies to all nodes."""
_OWNER = "outlast-places-"
_SIZE, _INODES = "size=4g", "nr_inodes=10000"
"""More than the health check of a joining node requires; only written data uses memory."""
_PART_S = 0.3
"""Seconds for which a slow place works between two stops."""
_LIMIT_S = 60.0


class Fault(StrEnum):
    """The fault of a place."""

    FULL = "full"
    READ_ONLY = "read-only"
    NO_INODES = "no-inodes"
    HUNG = "hung"
    """Calls do not return, and connections stay open."""
    SLOW = "slow"
    """Each save takes ``slow_s`` or more."""
    GONE = "gone"
    """Each call fails at once: a mount whose server is gone, an object store that refuses connections."""
    UNMOUNTED = "unmounted"
    """The mount point is an empty folder of another disk."""
    ERROR_500 = "error-500"
    ERROR_403 = "error-403"


def why_unavailable() -> str:
    """Return why broken places cannot be made on this machine, or an empty string."""
    if os.geteuid() != 0:
        return "broken places are mounted, which needs root"
    if missing := [tool for tool in ("bindfs", "mount", "umount", "setpriv") if shutil.which(tool) is None]:
        return f"broken places need {' and '.join(missing)}"
    if not os.path.exists("/dev/fuse"):
        return "broken places need /dev/fuse"
    return ""


class Disk:
    """Files that each node reaches through a separate mount; use as a context manager.

    Args:
        root: Folder for the mount points.
        nodes: Names of the nodes.
        slow_s: How long a slow disk makes a save last.
    """

    def __init__(self, root: Path, nodes: Sequence[str], *, slow_s: float = 15.0) -> None:
        self.files = root / "files"
        """Where the test reads and writes, independent of the nodes' mounts."""
        self._root, self._nodes, self._slow_s = root, tuple(nodes), slow_s
        self._calls = root / "connections"
        """The kernel's count of pending calls of each mount."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._broken: list[tuple[Fault, tuple[str, ...]]] = []
        self._slowing: tuple[threading.Thread, threading.Event] | None = None

    def path(self, node: str) -> Path:
        """Return the path of the files on a node."""
        return self._root / f"mount-{self._nodes.index(node)}"

    def __enter__(self) -> Disk:
        remove_mounts_of_dead_processes()
        self.files.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"{_SIZE},{_INODES}", _owner(), os.fspath(self.files))
        try:
            self._calls.mkdir()
            _run("mount", "-t", "fusectl", _owner(), os.fspath(self._calls))
            for node in self._nodes:
                self.path(node).mkdir()
                self._mount(node)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the daemons and remove the mounts; calls that hang in them fail. Idempotent."""
        self._stop_slowing()
        for node in self._daemons:
            self._unmount(node)
        self._daemons.clear()
        for path in (self._calls, self.files):
            if os.path.ismount(path):
                _run("umount", "-l", os.fspath(path))

    def break_(self, fault: Fault, nodes: Sequence[str] = ALL) -> None:
        """Apply a fault to some nodes' mounts; ``full`` and ``no-inodes`` apply to the files, so to all nodes.

        Blocks: until the fault is in force.
        """
        nodes = tuple(nodes) or self._nodes
        self._broken.append((fault, nodes))
        match fault:
            case Fault.FULL:
                self._limit(lambda at: f"size={(at.f_blocks - at.f_bfree) * at.f_frsize}")
            case Fault.NO_INODES:
                self._limit(lambda at: f"nr_inodes={at.f_files - at.f_ffree}")
            case Fault.READ_ONLY:
                for node in nodes:
                    self._remount(node, "ro")
            case Fault.HUNG:
                for node in nodes:
                    self._stop_between_calls(node)
            case Fault.SLOW:
                stop = threading.Event()
                thread = threading.Thread(target=self._slow_down, args=(nodes, stop), daemon=True)
                self._slowing = (thread, stop)
                thread.start()
            case Fault.GONE:
                for node in nodes:
                    self._end_daemon(node)
            case Fault.UNMOUNTED:
                for node in nodes:
                    self._unmount(node)
            case _:
                raise ValueError(f"a directory cannot have the fault {fault}")

    def lift(self) -> None:
        """End all faults. Blocks: until every node's mount works."""
        while self._broken:
            fault, nodes = self._broken.pop()
            match fault:
                case Fault.FULL:
                    _run("mount", "-o", f"remount,{_SIZE}", os.fspath(self.files))
                case Fault.NO_INODES:
                    _run("mount", "-o", f"remount,{_INODES}", os.fspath(self.files))
                case Fault.READ_ONLY:
                    for node in nodes:
                        self._remount(node, "rw")
                case Fault.HUNG:
                    self._signal(nodes, signal.SIGCONT)
                case Fault.SLOW:
                    self._stop_slowing()
                    self._signal(nodes, signal.SIGCONT)
                case _:
                    for node in nodes:
                        self._unmount(node)
                        self._mount(node)

    def _mount(self, node: str) -> None:
        path = self.path(node)
        self._daemons[node] = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "KILL",
                "bindfs",
                "-f",
                "-o",
                f"fsname={_owner()},nonempty",
                os.fspath(self.files),
                os.fspath(path),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end_s = time.monotonic() + _LIMIT_S
        while not os.path.ismount(path):
            assert self._daemons[node].poll() is None, f"bindfs ended with {self._daemons[node].returncode}"
            assert time.monotonic() < end_s, f"{path} is not mounted"
            time.sleep(0.01)

    def _unmount(self, node: str) -> None:
        self._end_daemon(node)
        subprocess.run(["umount", "-l", self.path(node)], check=False, capture_output=True, timeout=_LIMIT_S)

    def _end_daemon(self, node: str) -> None:
        self._daemons[node].kill()  # also ends a stopped process
        self._daemons[node].wait(_LIMIT_S)

    def _remount(self, node: str, mode: str) -> None:
        """Remount one mount; retry while a file that is open for writing makes it busy."""
        _try(lambda: ["mount", "-i", "-o", f"remount,{mode},bind", os.fspath(self.path(node))])

    def _limit(self, to_used: Callable[[os.statvfs_result], str]) -> None:
        """Limit the space to the space in use. A concurrent write makes the limit too small."""
        _try(lambda: ["mount", "-o", f"remount,{to_used(os.statvfs(self.files))}", os.fspath(self.files)])

    def _signal(self, nodes: Sequence[str], number: int) -> None:
        for node in nodes:
            self._daemons[node].send_signal(number)

    def _stop_between_calls(self, node: str) -> None:
        """Stop a mount's daemon when it has read no call.

        SIGKILL ends a process that waits in a call that the daemon has not read, as on NFS. It does not end one whose
        call the daemon has read: test_stuck_kernel.py has such processes.
        """
        mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
        device = next(fields[2] for fields in mounts if fields[4] == os.fspath(self.path(node)))
        waiting = self._calls / device.partition(":")[2] / "waiting"
        threads = Path("/proc", str(self._daemons[node].pid), "task")
        end_s = time.monotonic() + _LIMIT_S
        while True:
            self._signal([node], signal.SIGSTOP)
            while any(b") T " not in (one / "stat").read_bytes() for one in threads.iterdir()):
                assert time.monotonic() < end_s, f"bindfs of {node} does not stop"
            if waiting.read_text().strip() == "0":
                return
            assert time.monotonic() < end_s, f"{node} calls its mount all the time"
            self._signal([node], signal.SIGCONT)
            time.sleep(0.001)

    def _slow_down(self, nodes: Sequence[str], stop: threading.Event) -> None:
        while not stop.is_set():
            self._signal(nodes, signal.SIGSTOP)
            if stop.wait(self._slow_s):
                break
            self._signal(nodes, signal.SIGCONT)
            stop.wait(_PART_S)

    def _stop_slowing(self) -> None:
        if self._slowing is not None:
            thread, stop = self._slowing
            stop.set()
            thread.join(_LIMIT_S)
            self._slowing = None


def remove_mounts_of_dead_processes() -> None:
    """Unmount places of processes that were killed before they could."""
    for line in reversed(Path("/proc/mounts").read_text().splitlines()):
        name, path, *_ = line.split(" ")
        if name.startswith(_OWNER) and not psutil.pid_exists(int(name.removeprefix(_OWNER))):
            subprocess.run(["umount", "-l", path], check=False, capture_output=True, timeout=_LIMIT_S)


def _owner() -> str:
    return f"{_OWNER}{os.getpid()}"


def _try(make_command: Callable[[], list[str]]) -> None:
    end_s = time.monotonic() + _LIMIT_S
    while (done := subprocess.run(make_command(), check=False, capture_output=True, timeout=_LIMIT_S)).returncode:
        assert time.monotonic() < end_s, done.stderr
        time.sleep(0.01)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT_S)


def start_store(record: Path) -> Any:
    """Start the S3 server of the tests in ``dcp``.

    Args:
        record: File for its objects; if it exists, the server has these.

    Blocks: until the server responds.
    """
    path = Path(__file__).parents[1] / "dcp" / "s3_server.py"
    spec = importlib.util.spec_from_file_location("s3_server_of_places", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.S3Server("bucket", record)


class _Proxy(ThreadingHTTPServer):
    """The proxy between one node and the object store."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    fault: Fault | None = None
    slow_s = 15.0
    store: tuple[str, int]

    def __init__(self, port: int) -> None:
        self.lifted = threading.Event()
        self._open: set[Any] = set()
        super().__init__(("127.0.0.1", port), _Relay)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have closed their connection."""

    def get_request(self) -> Any:
        request, address = super().get_request()
        self._open.add(request)
        return request, address

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def reset_connections(self) -> None:
        """Close every connection."""
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(2)


class _Relay(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    server: _Proxy

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _relay(self) -> None:
        body = self._read_body()
        proxy = self.server
        match proxy.fault:
            case Fault.HUNG | Fault.GONE:
                proxy.lifted.wait()
                self.close_connection = True
                return
            case Fault.SLOW:
                proxy.lifted.wait(proxy.slow_s)
            case Fault.ERROR_500:
                self._fail(500, "InternalError", "We encountered an internal error. Please try again.")
                return
            case Fault.ERROR_403:
                self._fail(403, "AccessDenied", "Access Denied")
                return
        store = http.client.HTTPConnection(*proxy.store, timeout=600)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "transfer-encoding"}
            if body or "content-length" in {name.lower() for name in headers}:
                headers = {name: value for name, value in headers.items() if name.lower() != "content-length"}
                headers["Content-Length"] = str(len(body))
            store.request(self.command, self.path, body or None, headers)
            response = store.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # as the object store did
            return
        finally:
            store.close()
        if proxy.fault in (Fault.HUNG, Fault.GONE):
            proxy.lifted.wait()
            self.close_connection = True
            return
        self.send_response_only(response.status, response.reason)
        hop = {"connection", "transfer-encoding", "content-length", "keep-alive"}
        for name, value in response.getheaders():
            if name.lower() not in hop:
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _relay

    def _read_body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _fail(self, status: int, code: str, message: str) -> None:
        data = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class Bucket:
    """Objects that each node reaches through a separate proxy; use as a context manager.

    Args:
        server: The S3 server: its ``port``, ``environment``, ``bucket``, ``client()``, ``stop()``, ``resume()``.
        nodes: Names of the nodes.
        slow_s: How long a slow store takes for a request.
    """

    def __init__(self, server: Any, nodes: Sequence[str], *, slow_s: float = 15.0) -> None:
        self.server = server
        self._nodes, self._slow_s = tuple(nodes), slow_s
        self._ports = {node: free_port() for node in nodes}
        self._proxies: dict[str, _Proxy] = {}
        self._is_stopped = False

    def environment(self, node: str) -> dict[str, str]:
        """Return the environment variables with a node's endpoint of the object store."""
        variables: dict[str, str] = {**self.server.environment}
        variables["FSSPEC_S3_ENDPOINT_URL"] = f"http://127.0.0.1:{self._ports[node]}"
        return variables

    def __enter__(self) -> Bucket:
        for node in self._nodes:
            self._open(node)
        return self

    def __exit__(self, *_error: object) -> None:
        self.lift()
        for node in self._nodes:
            self._close(node)

    def break_(self, fault: Fault, nodes: Sequence[str] = ALL) -> None:
        """Apply a fault to some nodes' proxies; a hang for all nodes stops the object store itself."""
        if fault == Fault.HUNG and not nodes:
            self.server.stop()
            self._is_stopped = True
            return
        if fault not in (Fault.HUNG, Fault.SLOW, Fault.GONE, Fault.ERROR_500, Fault.ERROR_403):
            raise ValueError(f"an object store cannot have the fault {fault}")
        for node in tuple(nodes) or self._nodes:
            self._proxies[node].fault = fault
            self._proxies[node].lifted.clear()
            if fault == Fault.GONE:
                self._close(node)

    def lift(self) -> None:
        """End all faults."""
        if self._is_stopped:
            self.server.resume()
            self._is_stopped = False
        for node in self._nodes:
            if node not in self._proxies:
                self._open(node)
            self._proxies[node].fault = None
            self._proxies[node].lifted.set()

    def newest_checkpoint(self, url: str) -> int:
        """Return the newest committed checkpoint below a URL, by the object store; 0 while it is stopped."""
        if self._is_stopped:
            return 0
        prefix = url.removeprefix(f"s3://{self.server.bucket}/")
        found = (re.fullmatch(rf"{prefix}/step-(\d+)/manifest\.json", name) for name in self.server.objects(prefix))
        return max((int(match[1]) for match in found if match), default=0)

    def _open(self, node: str) -> None:
        proxy = _Proxy(self._ports[node])
        proxy.slow_s, proxy.store = self._slow_s, ("127.0.0.1", self.server.port)
        self._proxies[node] = proxy
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def _close(self, node: str) -> None:
        """Refuse new connections and close the open ones."""
        proxy = self._proxies.pop(node, None)
        if proxy is not None:
            proxy.shutdown()
            proxy.server_close()
            proxy.lifted.set()
            proxy.reset_connections()


def processes_named(processes: Sequence[psutil.Process], text: str) -> Iterator[psutil.Process]:
    """Yield the processes whose command line contains a text."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if text in " ".join(process.cmdline()):
                yield process
