"""Another node's writer, as a process of its own: holds parts in memory, and can stop itself midway.

Usage: ``python replica_partner.py KEY_HEX [STOP_AT_OFFSET]``; prints its port; ends when its standard input does.
"""

from __future__ import annotations

import signal
import sys
import threading

from replica_nodes import Memory

from outlast.checkpoint.replica import server as service
from outlast.checkpoint.replica.server import ReplicaServer


def main() -> None:
    key = bytes.fromhex(sys.argv[1])
    if len(sys.argv) > 2:
        stop_at = int(sys.argv[2])
        write_all = service.write_all

        def stop_midway(fd: int, data: memoryview, offset: int) -> None:
            if offset == stop_at:
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            write_all(fd, data, offset)

        service.write_all = stop_midway
    server = ReplicaServer(Memory(), host="127.0.0.1", key=key, on_refused=lambda *_: None)
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
