"""A tier that is behind costs additional memory within limits, and one log line per minute."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from outlast.checkpoint import late_tiers, vault
from outlast.checkpoint.late_tiers import LateTiers
from outlast.checkpoint.vault import MAX_IMAGES, NUM_IMAGES, Vault

LONG_S = 60.0
SIZE = 1 << 16


def test_memory_is_added_while_tiers_are_behind_and_released_afterwards() -> None:
    """A rank has two images; each image that only a late tier needs allows one more, up to a limit.

    Two images remain afterwards.
    """
    arenas = Vault()
    busy: list[int] = []

    def take(num_behind: int) -> bool:
        image = arenas.take(0, SIZE, busy, may_steal=False, num_behind=num_behind)
        busy.extend([] if image is None else [image.inode])
        return image is not None

    assert [take(0) for _ in range(NUM_IMAGES + 1)] == [True] * NUM_IMAGES + [False]
    assert [take(num) for num in (1, 1, 2, 3)] == [True, False, True, True]
    assert len(busy) == MAX_IMAGES
    assert not take(MAX_IMAGES), "more than the limit"
    kept_inode = busy.pop()
    busy.clear()
    image = arenas.take(0, SIZE, [kept_inode], may_steal=False)
    assert image is not None
    busy += [kept_inode, image.inode]
    assert not take(0), "two are left"


def test_no_memory_is_added_without_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory reserve is not used; the save is skipped instead."""
    monkeypatch.setattr(vault, "MEMORY_RESERVE", 1.0)
    arenas = Vault()
    images = [arenas.take(0, SIZE, [], may_steal=False) for _ in range(NUM_IMAGES)]
    busy = [image.inode for image in images if image is not None]
    busy += [image.inode for image in [arenas.take(0, SIZE, busy, may_steal=False)] if image is not None]
    assert arenas.take(0, SIZE, busy, may_steal=False, num_behind=2) is None


class _Lines(logging.Handler):
    """A log handler that collects messages and signals each one."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.arrived = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.arrived.release()


@pytest.fixture
def lines() -> Iterator[_Lines]:
    """The log lines about late tiers."""
    handler = _Lines()
    late_tiers.log.addHandler(handler)
    yield handler
    late_tiers.log.removeHandler(handler)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateTiers]:
    """Reports about late tiers, without the interval between two lines."""
    for name, value in (("LATE_S", 0.0), ("INTERVAL_S", 0.0), ("LOOK_S", 0.01)):
        monkeypatch.setattr(late_tiers, name, value)
    tiers = LateTiers()
    yield tiers
    tiers.stop()


def test_a_hung_tier_is_reported_with_its_cause(late: LateTiers, lines: _Lines) -> None:
    """The line has the tier, its path, the rank and node, the missing saves, and the age of the newest checkpoint."""
    late.start({"global": "the global tier (/shared/run)"})
    late.commit("global", 10)
    late.begin("global", 20, "rank 0 on node a")
    late.wait_for("global", "rank 1 on node b")
    late.replace("global")
    assert lines.arrived.acquire(timeout=LONG_S)
    assert lines.arrived.acquire(timeout=LONG_S)
    text = lines.texts[-1]
    assert text.startswith("the global tier (/shared/run) is behind: the save of iteration 20 has been under way for")
    assert "waits for rank 1 on node b" in text
    assert "its newest checkpoint is iteration 10, 0 s old" in text
    assert any("1 save not written there" in one for one in lines.texts)


def test_a_tier_that_fails_is_reported_with_its_last_error(late: LateTiers, lines: _Lines) -> None:
    """The last error is also reported between two attempts; after the tier recovers, there is no further line."""
    late.start({"local": "the local tier (/nvme/run)"})
    late.begin("local", 20, "rank 0 on node a")
    late.fail("local", "rank 0 on node a: No space left on device")
    while "last error: rank 0 on node a: No space left on device" not in (lines.texts or [""])[-1]:
        assert lines.arrived.acquire(timeout=LONG_S)
    assert "no checkpoint was written there since this cycle began" in lines.texts[-1]
    late.commit("local", 20)
    num_lines = len(lines.texts)
    late.begin("local", 30, "rank 0 on node a")
    late.commit("local", 30)
    assert all("is behind" not in text for text in lines.texts[num_lines + 1 :])


def test_one_failure_per_minute_is_logged() -> None:
    """Further failures of a tier are counted in the next line."""
    tiers = LateTiers()
    assert [tiers.may_warn("global"), tiers.may_warn("global"), tiers.may_warn("local")] == [True, False, True]
