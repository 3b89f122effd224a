"""Workers of a run derive the keys of their connections from the run key; a reader of their TCPStore gets none of
them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outlast import env
from outlast.runtime.run_key import accept_offer, key_of_directory
from outlast.testing import Cluster

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).parent / "job_that_uses_all.py"
PATIENCE_S = 250
PURPOSES = ("step rounds", "replica port", "in-process restarts")
OFFER = re.compile(r"[0-9a-z_]+:[0-9a-f]{64}\.(?:[0-9a-f]{16})?")


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(PATIENCE_S + 50)
def test_the_tcpstore_contains_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two nodes and in two cycles the store contains neither the run key nor a key derived from it, and each cycle
    has its own keys."""
    for cycle in range(2):
        (tmp_path / f"go-{cycle}").touch()
    with Cluster(SCRIPT, str(tmp_path), "1", run_dir=tmp_path / "run", num_nodes=2, nproc_per_node=1) as cluster:
        assert cluster.wait(timeout_s=PATIENCE_S) == [0, 0], cluster.tails()
    key = key_of_directory(tmp_path / "run", make=False)
    monkeypatch.setenv(env.RUN_KEY, key.as_variable())
    offers: list[set[str]] = []
    for cycle in range(2):
        entries = json.loads((tmp_path / f"store-{cycle}").read_text())
        offers.append({offer for value in entries.values() for offer in OFFER.findall(value)})
        assert offers[-1], sorted(entries)  # of the step rounds
        assert all(offer.endswith(f".{key.fingerprint.hex()}") for offer in offers[-1])
        secrets = [key.secret, *(accept_offer(offer, purpose) for offer in offers[-1] for purpose in PURPOSES)]
        for name, value in entries.items():
            for secret in secrets:
                assert secret.hex() not in name + value, name
                assert secret.decode("latin-1") not in name + value, name
    assert offers[0].isdisjoint(offers[1])
