"""A rank that dies before its monitor process was told where the hub is keeps nobody waiting."""

from __future__ import annotations

import datetime
import signal

import pytest
from fake_ranks import TOKEN, FakeRanks
from torch._C._distributed_c10d import TCPStore

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

KEY = "bootstrap"
PATIENCE_S = 60.0
"""Half of what the others would wait otherwise; the store is read by a process that imports torch."""


@pytest.fixture
def store() -> TCPStore:
    """The launcher's."""
    hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    hosted.set_timeout(datetime.timedelta(seconds=PATIENCE_S))
    return hosted


@pytest.fixture
def environment(store: TCPStore) -> dict[str, str]:
    """By which ranks find the store."""
    return {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_others_go_without_a_rank_that_never_came(store: TCPStore, environment: dict[str, str]) -> None:
    """Its monitor process asks where the hub is, and says there that the rank is gone."""
    with FakeRanks(4, active=3, short_lived=2, bootstrap_key=KEY, environment=environment) as ranks:
        store.set(KEY, f"{ranks.hub} {TOKEN}")
        ranks.connect()
        order = ranks.go(0, but=(2,), timeout_s=PATIENCE_S)
        assert order["ranks"] == {"0": 0, "1": 1, "3": 2}


def test_others_find_the_hub_of_a_first_rank_that_never_came(store: TCPStore, environment: dict[str, str]) -> None:
    """The monitor process of initial rank 0 hosts the hub, and has the others told so, though its rank is dead."""
    with FakeRanks(4, active=3, short_lived=0, bootstrap_key=KEY, environment=environment) as ranks:
        host, port, token = store.get(KEY).decode().split(" ")
        ranks.hub = f"{host} {port}"
        ranks.connect(token=token)
        order = ranks.go(0, but=(0,), timeout_s=PATIENCE_S)
        assert order["ranks"] == {"1": 0, "2": 1, "3": 2}


def test_others_find_the_hub_of_a_first_rank_that_died_before_it_told_them(
    store: TCPStore, environment: dict[str, str]
) -> None:
    """What its monitor process was told by then is what the others are told."""
    with FakeRanks(3, active=2, bootstrap_key=KEY, environment=environment) as ranks:
        ranks[0].tell("unready")
        ranks.connect(0)
        ranks[0].wait_for("connected")
        ranks[0].send(signal.SIGKILL)
        assert store.get(KEY).decode() == f"{ranks.hub} {TOKEN}"
        ranks.connect(1, 2)
        order = ranks.go(0, but=(0,), timeout_s=PATIENCE_S)
        assert order["ranks"] == {"1": 0, "2": 1}
