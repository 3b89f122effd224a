"""What all tests share: hypothesis without surprises, and no process of ours left behind."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

settings.register_profile("outlast", deadline=None, derandomize=True, database=None)
settings.load_profile("outlast")


@pytest.fixture(autouse=True)
def no_process_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child process running, and end that process."""
    if request.node.get_closest_marker("process") is None:
        yield
        return
    me = psutil.Process()
    before = set(me.children(recursive=True))
    yield
    left = [child for child in me.children(recursive=True) if child not in before and child.is_running()]
    _, alive = psutil.wait_procs(left, timeout=2)
    alive = [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    described = [f"{child.pid} {' '.join(child.cmdline())[:200]}" for child in alive]
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=5)
    assert not described, f"processes left behind: {described}"
