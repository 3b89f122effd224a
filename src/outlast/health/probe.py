"""The probe process: takes tasks from its standard input, one JSON line each, and answers each with one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from outlast.decoding import json_decoder
from outlast.health import node_checks
from outlast.health.result import Outcome, Status
from outlast.health.tasks import Compute, Devices, Driver, MemoryTest, Task
from outlast.runtime.processes import die_with_parent

__all__ = ["main"]


def _answer(task: Task) -> Outcome:
    if isinstance(task, Compute | Devices | Driver | MemoryTest):
        from outlast.health import device_checks

        check: Callable[[Any], Outcome] = device_checks.CHECKS[type(task)]
    else:
        check = node_checks.CHECKS[type(task)]
    try:
        return check(task)
    except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises is the answer
        text = " ".join(str(error).split())[:500]
        return Outcome(status=Status.ERROR, reason=f"{type(error).__name__}: {text}")


def main() -> None:
    """Answer until standard input ends."""
    answers, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    os.set_inheritable(answers, False)
    decoder = json_decoder(Task)
    for line in sys.stdin.buffer:
        data = msgspec.json.encode(_answer(decoder.decode(line))) + b"\n"
        while data:
            data = data[os.write(answers, data) :]


if __name__ == "__main__":
    main()
