"""The first failed worker is identified, and failures that a restart cannot recover are detected as permanent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.incidents import Cause
from outlast.policy.causes import Ended, find_first, is_consequence, is_permanent, permanent_cause, wait_s

OWN = Cause(type="ValueError", bases=("Exception",), text="token 50257 out of range", frame="train.py:29", mono_ns=50)
LOST = Cause(type="PeerLost", bases=("OutlastError", "Exception"), text="a peer left", mono_ns=40)
GLOO = Cause(
    type="RuntimeError",
    bases=("Exception",),
    text="[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242",
)
MISSING = Cause(type="ModuleNotFoundError", bases=("ImportError", "Exception"), text="no module", frame="train.py:1")

causes = st.one_of(
    st.none(),
    st.builds(
        Cause,
        type=st.sampled_from(["ValueError", "PeerLost", "RuntimeError", "ImportError", "SystemExit"]),
        text=st.sampled_from(["", "Connection closed by peer", "out of range"]),
        frame=st.sampled_from(["a.py:1", "b.py:2"]),
        mono_ns=st.integers(0, 100),
        is_usage_error=st.booleans(),
    ),
)
endings = st.lists(
    st.builds(Ended, rank=st.integers(0, 7), cause=causes, ended_ns=st.integers(1, 100)), min_size=1, max_size=8
)


@pytest.mark.parametrize("cause", [LOST, GLOO], ids=["ours", "gloo's"])
def test_lost_peer_is_a_consequence(cause: Cause) -> None:
    """An exception about a lost peer is not the root cause, although its rank ended first."""
    assert is_consequence(cause)
    first = find_first([Ended(rank=0, cause=cause, ended_ns=60), Ended(rank=1, cause=OWN, ended_ns=90)])
    assert first.rank == 1


def test_application_connection_error_is_not_a_consequence() -> None:
    """A data loader's own exception about a connection can be the root cause."""
    own = Cause(type="app.StorageError", bases=("ValueError", "Exception"), text="connection reset by the bucket")
    assert not is_consequence(own)


def test_first_recorded_exception_is_the_cause() -> None:
    """A rank that raised and still cleans up is the cause, not a peer that ended in the meantime."""
    slow = Ended(rank=3, cause=OWN)
    assert find_first([Ended(rank=0, ended_ns=60), slow]) == slow
    killed = Ended(rank=0, ended_ns=45)
    assert find_first([killed, slow]) == killed


@given(endings)
def test_root_cause_is_a_consequence_only_if_all_are(ended: list[Ended]) -> None:
    """The identified worker is one that ended, and it lost a peer only if all workers did."""
    first = find_first(ended)
    assert first in ended
    assert not is_consequence(first.cause) or all(is_consequence(one.cause) for one in ended)


@pytest.mark.parametrize(
    ("cause", "plain", "session"),
    [
        (MISSING, True, True),
        (Cause(type="SyntaxError", frame="train.py:1"), True, True),
        (Cause(type="SystemExit", is_usage_error=True), True, True),
        (Cause(type="ConfigError", bases=("OutlastError", "ValueError")), True, True),
        (OWN, False, True),
        (Cause(type="KeyError", bases=("LookupError", "Exception")), False, True),
        (Cause(type="json.decoder.JSONDecodeError", bases=("ValueError",)), False, False),
        (Cause(type="RuntimeError", bases=("Exception",)), False, False),
        (Cause(type="SystemExit"), False, False),
        (Cause(type="torch.OutOfMemoryError", bases=("RuntimeError",)), False, False),
        (LOST, False, False),
        (None, False, False),
    ],
)
def test_permanent_causes_are_identified(cause: Cause | None, plain: bool, session: bool) -> None:
    """Errors of the script itself are permanent; errors of its data, memory or environment are not."""
    assert is_permanent(cause, has_session=False) is plain
    assert is_permanent(cause, has_session=True) is session


def test_permanent_cause_requires_identical_failures() -> None:
    """A rank that failed in another line, or recorded nothing, makes the failure worth a restart."""
    assert permanent_cause([MISSING, MISSING], has_session=False) == MISSING
    other = Cause(type="ModuleNotFoundError", bases=("ImportError",), frame="train.py:2")
    assert permanent_cause([MISSING, other], has_session=False) is None
    assert permanent_cause([MISSING, None], has_session=False) is None
    assert permanent_cause([], has_session=True) is None


@given(endings, st.floats(0, 1e5), st.integers(0, 8), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_wait_for_other_workers_is_bounded(
    ended: list[Ended], ran_s: float, num_running: int, early: bool, session: bool, alone: bool, is_agreed: bool
) -> None:
    """The wait before a failure is reported is at most 5 s or the run time of the workers, up to 30 s; it is 0 if no
    worker is left, or if the root cause may be on another node and the ranks did not agree to exit."""
    seconds = wait_s(
        ended,
        ran_s=ran_s,
        num_running=num_running,
        is_before_first_step=early,
        has_session=session,
        is_alone=alone,
        is_agreed=is_agreed,
    )
    assert 0 <= seconds <= min(max(5, ran_s), 30)
    if not num_running or (not early and not alone and not is_agreed):
        assert seconds == 0
    elif is_agreed:
        assert seconds == 5


def test_wait_for_other_workers_follows_their_run_time() -> None:
    """A worker that needed 20 s to reach a missing file waits as long for its peers, which read the same files."""
    waits = [
        wait_s(
            [Ended(rank=0, cause=MISSING, ended_ns=1)],
            ran_s=ran_s,
            num_running=1,
            is_before_first_step=True,
            has_session=False,
            is_alone=False,
        )
        for ran_s in (0.1, 20.0, 59.0)
    ]
    assert waits == [5.0, 20.0, 30.0]
