"""Preemption: notices that the process must leave, and the deadline by which it has left."""

from outlast.preemption.listener import Notice, ShutdownListener
from outlast.preemption.signals import outlive_sigterm
from outlast.preemption.sources import EndTime, NoticeFile, NoticeReceived, NoticeSource, NoticeURL, load_source

__all__ = [
    "EndTime",
    "Notice",
    "NoticeFile",
    "NoticeReceived",
    "NoticeSource",
    "NoticeURL",
    "ShutdownListener",
    "load_source",
    "outlive_sigterm",
]
