"""A GCS server in a separate process on this machine.

It is ``gcp-storage-emulator``, which has no preconditions. Run as a script, this module adds the precondition on an
object's generation (0: the object does not exist) with the response of GCS, and gives each write a new generation.
"""

from __future__ import annotations

import contextlib
import http
import http.server
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from outlast.testing.ranks import free_port

READY_S = 120.0


class GCSServer:
    """The server; it keeps its objects in memory.

    Args:
        bucket: Bucket to create.
    """

    def __init__(self, bucket: str) -> None:
        self.bucket, self.port = bucket, free_port()
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), bucket, str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + READY_S
        while True:
            try:
                self.objects()
                break
            except (OSError, urllib.error.URLError):
                assert time.monotonic() < end, "the server does not answer"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(0.05)
                    raise AssertionError(f"the server ended with code {code}") from None

    @property
    def environment(self) -> dict[str, str]:
        """Variables that give gcsfs the server's address and disable credentials and gRPC."""
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self.port}",
            "FSSPEC_GS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def objects(self, prefix: str = "") -> dict[str, int]:
        """Return the names and sizes of the objects in the bucket."""
        query = urllib.parse.urlencode({"prefix": prefix})
        url = f"http://127.0.0.1:{self.port}/storage/v1/b/{self.bucket}/o?{query}"
        with urllib.request.urlopen(url, timeout=READY_S) as reply:
            return {one["name"]: int(one["size"]) for one in json.load(reply).get("items", ())}

    def kill(self) -> None:
        """Kill the server."""
        self._process.kill()
        self._process.wait(10)


def main(bucket: str, port: str) -> None:
    """Serve until the process is killed."""
    from gcp_storage_emulator.handlers import objects  # type: ignore[import-not-found]
    from gcp_storage_emulator.storage import Storage  # type: ignore[import-not-found]

    requested, create, insert = threading.local(), Storage.create_file, objects.insert
    one_at_a_time = threading.Lock()

    generations = itertools.count(1)

    class NotMet(Exception):
        pass

    def create_file(storage: Any, bucket_name: str, file_name: str, content: bytes, about: Any, *args: Any) -> None:
        present = storage.objects.get(bucket_name, {}).get(file_name, {"generation": "0"})
        if getattr(requested, "generation", None) not in (None, present["generation"]):
            raise NotMet
        about["generation"] = str(next(generations))
        create(storage, bucket_name, file_name, content, about, *args)

    def insert_if(request: Any, response: Any, storage: Any, *args: Any, **kwargs: Any) -> None:
        (requested.generation,) = request.query.get("ifGenerationMatch") or [None]
        try:
            with one_at_a_time:
                insert(request, response, storage, *args, **kwargs)
        except NotMet:
            response.status = http.HTTPStatus.PRECONDITION_FAILED
            message = "At least one of the pre-conditions you specified did not hold."
            response.json({"error": {"code": 412, "message": message, "errors": [{"reason": "conditionNotMet"}]}})
        finally:
            requested.generation = None

    Storage.create_file, objects.insert = create_file, insert_if
    from gcp_storage_emulator.server import create_server  # type: ignore[import-not-found]

    # A connection that is kept open must not block the other ones.
    http.server.HTTPServer = http.server.ThreadingHTTPServer  # type: ignore[misc]
    create_server("127.0.0.1", int(port), True, bucket).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
