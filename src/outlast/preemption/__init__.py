"""Preemption: notices that the process must leave, and the deadline by which it has left."""

from outlast.preemption.listener import (
    EndTime,
    Notice,
    NoticeFile,
    NoticeReceived,
    NoticeSource,
    NoticeURL,
    ShutdownListener,
    load_source,
)
from outlast.preemption.signals import outlive_sigterm

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
