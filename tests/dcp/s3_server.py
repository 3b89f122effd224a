"""An S3 server in a separate process on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from outlast.testing.ranks import free_port

READY_S = 120.0
# moto checks whether an object exists and then creates it, and closes an object that it replaces or deletes while
# another request may be reading it; S3 does each of these atomically.
# may be reading it; S3 does each at once.
ATOMIC_SERVER = """
import functools, os, sys, threading
import requests
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.s3.responses import S3Response
from moto.server import main
one_at_a_time = threading.Lock()
def alone(method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        with one_at_a_time:
            return method(*args, **kwargs)
    return call
for name in ("put_object", "get_object", "delete_object", "_bucket_response_delete_keys"):
    setattr(S3Response, name, alone(getattr(S3Response, name)))
hold, request = os.environ["HOLD"], requests.request
def mark(*args, headers, **more):
    return request(*args, headers={**headers, "X-Replay": "1"}, **more)
requests.request = mark
dispatch = DomainDispatcherApplication.__call__
def answer(self, environ, start_response):
    is_own = "HTTP_X_REPLAY" in environ or environ["PATH_INFO"].startswith("/moto-api")
    if os.path.exists(hold) and not is_own:
        start_response("503 Service Unavailable", [])
        return [b""]
    return dispatch(self, environ, start_response)
DomainDispatcherApplication.__call__ = answer
main(sys.argv[1:])
"""
"""While moto replays its recording, it refuses the requests of clients: the bucket must not look empty."""


class S3Server:
    """moto's server. It keeps its objects in memory and records its requests, so that a new process can replay them.

    Args:
        bucket: Bucket to create.
        record: File for the recorded requests.
    """

    def __init__(self, bucket: str, record: Path) -> None:
        self.bucket, self._record = bucket, record
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @classmethod
    @contextlib.contextmanager
    def reachable(cls, bucket: str, record: Path) -> Iterator[S3Server]:
        """Run a server that fsspec in this process connects to."""
        server = cls(bucket, record)
        try:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in server.environment.items():
                    patch.setenv(name, value)
                # fsspec is already imported and has already read its variables in this process.
                patch.setitem(fsspec.config.conf, "s3", {"endpoint_url": server.endpoint})
                yield server
        finally:
            server.kill()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables from which fsspec and the S3 library take the server's address."""
        return {
            "FSSPEC_S3_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def client(self) -> Any:
        """Return a client that does not use outlast."""
        import botocore.session

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )

    def start(self) -> None:
        """Start the server with the objects that it had when it ended. Blocks: until it responds."""
        is_new, hold = not self._record.exists(), self._record.with_suffix(".hold")
        if not is_new:
            hold.touch()
        self._process = subprocess.Popen(
            [sys.executable, "-c", ATOMIC_SERVER, "-H", "127.0.0.1", "-p", str(self.port)],
            env={
                **os.environ,
                **self.environment,
                "HOLD": os.fspath(hold),
                "MOTO_ENABLE_RECORDING": "1",
                "MOTO_RECORDER_FILEPATH": os.fspath(self._record),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + READY_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                break
            except OSError:
                assert time.monotonic() < end, "the server does not answer"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(0.05)  # the delay before the next attempt
                    raise AssertionError(f"the server ended with code {code}") from None
        if is_new:
            self.client().create_bucket(Bucket=self.bucket)
        else:
            request = urllib.request.Request(f"{self.endpoint}/moto-api/recorder/replay-recording", method="POST")
            urllib.request.urlopen(request, timeout=READY_S).close()
            hold.unlink()

    def stop(self) -> None:
        """Stop the process by a signal: connections stay open, requests get no response."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo :meth:`stop`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Return the names and sizes of the objects in the bucket."""
        found = self.client().list_objects_v2(Bucket=self.bucket, Prefix=prefix)
        return {one["Key"]: one["Size"] for one in found.get("Contents", ())}
