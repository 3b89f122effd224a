"""What an agent is doing.

States::

    OUTSIDE   not known to be fit yet, or unfit: no place is asked for
    JOINING   asked for a place in the next cycle (a spare stays here)
    RUNNING   the cycle's workers run
    FINISHED  they all ended with 0; the others may still fail
    LEAVING   told to leave by a signal; the workers may save
    STOPPING  the job is over; what still runs is ended in order

From RUNNING a failure here or elsewhere leads to JOINING at once: the request for the next cycle goes out while the
zygote still kills what is left of this one, and the next workers start when both the answer and the zygote's word
that all are gone are there.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = ["AgentState"]


class AgentState(StrEnum):
    """What the agent is doing; see the module's head."""

    OUTSIDE = "outside"
    JOINING = "joining"
    RUNNING = "running"
    FINISHED = "finished"
    LEAVING = "leaving"
    STOPPING = "stopping"
