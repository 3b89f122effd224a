"""Leaving in time: hearing that the process must go, and being gone by the deadline."""

from outlast.preemption.listener import Notice, ShutdownListener
from outlast.preemption.loader_workers import outlive_sigterm
from outlast.preemption.sources import EndTime, NoticeFile, NoticeSource, NoticeURL, Told, load_source

__all__ = [
    "EndTime",
    "Notice",
    "NoticeFile",
    "NoticeSource",
    "NoticeURL",
    "ShutdownListener",
    "Told",
    "load_source",
    "outlive_sigterm",
]
