"""What a tier that is behind costs: additional memory, within limits, and one line each minute."""

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
    """A rank has two images; each one that only a late tier needs allows one more, up to a limit; two are left."""
    held = Vault()
    busy: list[int] = []

    def take(num_behind: int) -> bool:
        image = held.take(0, SIZE, busy, may_steal=False, num_behind=num_behind)
        busy.extend([] if image is None else [image.inode])
        return image is not None

    assert [take(0) for _ in range(NUM_IMAGES + 1)] == [True] * NUM_IMAGES + [False]
    assert [take(num) for num in (1, 1, 2, 3)] == [True, False, True, True]
    assert len(busy) == MAX_IMAGES
    assert not take(MAX_IMAGES), "more than the limit"
    kept = busy.pop()
    busy.clear()
    image = held.take(0, SIZE, [kept], may_steal=False)
    assert image is not None
    busy += [kept, image.inode]
    assert not take(0), "two are left"


def test_no_memory_is_added_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reserve is not touched: a save is skipped instead."""
    monkeypatch.setattr(vault, "MEMORY_RESERVE", 1.0)
    held = Vault()
    images = [held.take(0, SIZE, [], may_steal=False) for _ in range(NUM_IMAGES)]
    busy = [image.inode for image in images if image is not None]
    busy += [image.inode for image in [held.take(0, SIZE, busy, may_steal=False)] if image is not None]
    assert held.take(0, SIZE, busy, may_steal=False, num_behind=2) is None


class _Lines(logging.Handler):
    """Collects lines, and signals each."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.came = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.came.release()


@pytest.fixture
def lines() -> Iterator[_Lines]:
    """The lines about late tiers."""
    found = _Lines()
    late_tiers.log.addHandler(found)
    yield found
    late_tiers.log.removeHandler(found)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateTiers]:
    """Reports on the global tier, without the minute between two lines."""
    for name, value in (("LATE_S", 0.0), ("INTERVAL_S", 0.0), ("LOOK_S", 0.01)):
        monkeypatch.setattr(late_tiers, name, value)
    tiers = LateTiers()
    yield tiers
    tiers.stop()


def test_a_tier_that_hangs_is_reported_with_what_it_waits_for(late: LateTiers, lines: _Lines) -> None:
    """Tier, path, rank and node, the saves that are not there, and the age of the newest checkpoint."""
    late.start({"global": "the global tier (/shared/run)"})
    late.commit("global", 10)
    late.begin("global", 20, "rank 0 on node a")
    late.wait_for("global", "rank 1 on node b")
    late.replace("global")
    assert lines.came.acquire(timeout=LONG_S)
    assert lines.came.acquire(timeout=LONG_S)
    text = lines.texts[-1]
    assert text.startswith("the global tier (/shared/run) is behind: the save of iteration 20 has been under way for")
    assert "waits for rank 1 on node b" in text
    assert "its newest checkpoint is iteration 10, 0 s old" in text
    assert any("1 save not written there" in one for one in lines.texts)


def test_a_tier_that_fails_is_reported_with_its_last_error(late: LateTiers, lines: _Lines) -> None:
    """Also between two attempts, when none is under way; and once it works again there is no other line."""
    late.start({"local": "the local tier (/nvme/run)"})
    late.begin("local", 20, "rank 0 on node a")
    late.fail("local", "rank 0 on node a: No space left on device")
    while "last error: rank 0 on node a: No space left on device" not in (lines.texts or [""])[-1]:
        assert lines.came.acquire(timeout=LONG_S)
    assert "no checkpoint was written there since this cycle began" in lines.texts[-1]
    late.commit("local", 20)
    num_lines = len(lines.texts)
    late.begin("local", 30, "rank 0 on node a")
    late.commit("local", 30)
    assert all("is behind" not in text for text in lines.texts[num_lines + 1 :])


def test_one_failure_in_a_minute_is_logged_by_itself() -> None:
    """The others are counted in the line of the minute."""
    tiers = LateTiers()
    assert [tiers.may_warn("global"), tiers.may_warn("global"), tiers.may_warn("local")] == [True, False, True]
