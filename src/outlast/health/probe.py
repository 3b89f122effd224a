"""The probe process: receives checks from its parent, runs one after another, and sends each one's outcome."""

from __future__ import annotations

import sys

from outlast.health.devices import DeviceCheck
from outlast.health.node import NodeCheck
from outlast.health.result import CheckOutcome, Status
from outlast.runtime.child import channel_to_parent
from outlast.runtime.processes import die_with_parent

__all__ = ["main"]


def main() -> None:
    """Run checks until the parent closes the channel."""
    channel = channel_to_parent(sys.argv[1], DeviceCheck | NodeCheck)
    die_with_parent(int(sys.argv[2]))
    while (check := channel.receive()) is not None:
        try:
            outcome = check.run()
        except Exception as error:  # noqa: BLE001 - whatever a driver or a library raises is the outcome
            text = " ".join(str(error).split())[:500]
            outcome = CheckOutcome(status=Status.ERROR, reason=f"{type(error).__name__}: {text}")
        channel.send(outcome)


if __name__ == "__main__":
    main()
