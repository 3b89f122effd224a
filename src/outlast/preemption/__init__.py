"""Preemption: notices that request the process to exit, and the deadline for the exit."""

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
