"""Test doubles, faults on purpose and a real cluster on one machine, for outlast's tests and for those of its users."""

from __future__ import annotations

from outlast.chaos import FaultPlan
from outlast.testing.cluster import Agent, Cluster
from outlast.testing.fake_clock import FakeClock
from outlast.testing.ranks import RankProcesses

__all__ = ["Agent", "Cluster", "FakeClock", "FaultPlan", "RankProcesses"]
