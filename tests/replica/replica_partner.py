"""Run another node's replica server as a separate process, which can stop itself during a transfer.

Usage: ``python replica_partner.py KEY_HEX [STOP_AT_OFFSET] [--host ADDRESS]``. It prints its port and exits when its
standard input is closed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading

from replica_nodes import Memory

from outlast.checkpoint.replica import service
from outlast.checkpoint.replica.server import ReplicaServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("key", type=bytes.fromhex)
    parser.add_argument("stop_at", type=int, nargs="?")
    parser.add_argument("--host", default="127.0.0.1")
    args = parser.parse_args()
    if args.stop_at is not None:
        write_all = service.write_all

        def stop_midway(fd: int, data: memoryview, offset: int) -> None:
            if offset == args.stop_at:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            write_all(fd, data, offset)

        service.write_all = stop_midway
    server = ReplicaServer(Memory(), host=args.host, key=args.key, on_refused=lambda *_: None)
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
