"""The run key: its sources, and that it is not disclosed."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from outlast import env
from outlast.errors import ConfigError
from outlast.runtime import run_key
from outlast.runtime.run_key import (
    KeySource,
    RunKey,
    accept_offer,
    find_known_keys,
    find_run_key,
    key_of_directory,
    make_offer,
)
from outlast.version import __version__

SECRET = b"sixteen bytes or more"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(env.RUN_KEY, raising=False)


def test_sources_of_the_run_key_have_an_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file takes precedence over the variable, the variable over the directory's key, and that over the run id."""
    file = tmp_path / "key"
    file.write_bytes(SECRET + b"\n")
    found = [find_run_key("run", tmp_path, key_file=None, is_one_machine=False)]
    found.append(find_run_key("run", tmp_path, key_file=None, is_one_machine=True))
    monkeypatch.setenv(env.RUN_KEY, "another secret of some length")
    found.append(find_run_key("run", tmp_path, key_file=None, is_one_machine=True))
    found.append(find_run_key("run", tmp_path, key_file=str(file), is_one_machine=True))
    assert [key.source for key in found] == [
        KeySource.RUN_ID,
        KeySource.RUN_DIRECTORY,
        KeySource.VARIABLE,
        KeySource.FILE,
    ]
    assert len({key.secret for key in found}) == 4


@pytest.mark.slow
@pytest.mark.process
def test_key_of_a_directory_is_created_once(tmp_path: Path) -> None:
    """Concurrent processes get one key, which other users cannot read."""
    code = (
        "import sys; from pathlib import Path; from outlast.runtime.run_key import key_of_directory\n"
        "print(key_of_directory(Path(sys.argv[1])).secret.hex())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert len({one.communicate(timeout=300)[0] for one in processes}) == 1
    assert stat.S_IMODE(os.stat(tmp_path / run_key.FILE_NAME).st_mode) == 0o600
    assert os.listdir(tmp_path) == [run_key.FILE_NAME]


def test_workers_get_the_key_of_their_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that an agent gives its workers yields the same key."""
    key = RunKey.of_run_id("run")
    monkeypatch.setenv(env.RUN_KEY, key.as_variable())
    (found,) = find_known_keys(None)
    assert found.secret == key.secret
    assert found.derive("replica") == key.derive("replica") != key.derive("hub")


def test_offer_yields_one_key_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without a run key; another purpose, offer or run key yields another key."""
    keys = set()
    for variable in (None, RunKey.of_run_id("a").as_variable(), RunKey.of_run_id("b").as_variable()):
        if variable is not None:
            monkeypatch.setenv(env.RUN_KEY, variable)
        offers = [make_offer(), make_offer()]
        for offer, purpose in itertools.product(offers, ("replica", "hub")):
            keys.add(accept_offer(offer, purpose))
            assert accept_offer(offer, purpose) in keys
    assert len(keys) == 12


def test_offer_does_not_disclose_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with the offer but without the run key derives a different key."""
    monkeypatch.setenv(env.RUN_KEY, RunKey.of_run_id("run").as_variable())
    offer = make_offer()
    key = accept_offer(offer, "hub")
    assert RunKey.of_run_id("run").secret.hex() not in offer
    monkeypatch.delenv(env.RUN_KEY)
    assert accept_offer(offer.partition(".")[0] + ".", "hub") != key


@pytest.mark.parametrize(
    ("theirs", "own", "named"),
    [
        ("a", None, "only another process of this run has OUTLAST_RUN_KEY"),
        (None, "a", "only this process of this run has OUTLAST_RUN_KEY"),
        ("a", "b", "the processes of this run have different OUTLAST_RUN_KEY"),
    ],
)
def test_different_run_keys_are_reported(
    theirs: str | None, own: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line identifies the environment as the cause, without a key."""

    def use(run_id: str | None) -> None:
        monkeypatch.setenv(env.RUN_KEY, "" if run_id is None else RunKey.of_run_id(run_id).as_variable())

    use(theirs)
    offer = make_offer()
    use(own)
    with pytest.raises(ConfigError, match=named) as caught:
        accept_offer(offer, "hub")
    assert "\n" not in str(caught.value)
    assert offer not in str(caught.value)


@pytest.mark.parametrize("theirs", ["0_1_7:", ""])
def test_different_versions_are_reported(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line has both versions of the package and the way to allow them; once allowed, all derive one key."""
    own, _, rest = make_offer().partition(":")
    assert own == __version__.replace(".", "_")
    with pytest.raises(ConfigError, match=f"this process has outlast {__version__}.*OUTLAST_ANY_VERSION=1"):
        accept_offer(f"{theirs}{rest}", "hub")
    monkeypatch.setenv(env.ANY_VERSION, "1")
    assert accept_offer(f"{theirs}{rest}", "hub") == accept_offer(f"{theirs}{rest}", "hub")


def test_repr_of_a_key_hides_the_secret() -> None:
    """The repr, and so a log line with it, does not have the secret."""
    key = RunKey.of_run_id("run")
    assert key.secret.hex() not in repr(key)
    assert repr(key.secret) not in repr(key)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda folder: str(folder / "missing"), "cannot be read"),
        (lambda folder: _write(folder / "short", b"abc"), "holds 3 bytes"),
    ],
)
def test_unusable_key_file_is_reported(tmp_path: Path, make: object, named: str) -> None:
    """A missing or too short file is rejected in one line."""
    assert callable(make)
    with pytest.raises(ConfigError, match=named) as caught:
        find_run_key("run", tmp_path, key_file=make(tmp_path), is_one_machine=True)
    assert "\n" not in str(caught.value)


def test_short_key_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is too short is rejected without its value."""
    monkeypatch.setenv(env.RUN_KEY, "hunter2")
    with pytest.raises(ConfigError, match=env.RUN_KEY) as caught:
        find_run_key("run", None, key_file=None, is_one_machine=False)
    assert "hunter2" not in str(caught.value)


def test_variable_does_not_hide_the_key_of_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query for a directory tries both keys; an explicit file is used exclusively."""
    own = key_of_directory(tmp_path)
    monkeypatch.setenv(env.RUN_KEY, "another secret of some length")
    assert [key.source for key in find_known_keys(tmp_path)] == [KeySource.VARIABLE, KeySource.RUN_DIRECTORY]
    assert find_known_keys(tmp_path)[1].secret == own.secret
    file = _write(tmp_path / "key", SECRET)
    assert [key.source for key in find_known_keys(tmp_path, key_file=file)] == [KeySource.FILE]


def test_query_does_not_create_a_key(tmp_path: Path) -> None:
    """Searching for the key of a run without one leaves no file."""
    assert find_known_keys(tmp_path) == []
    with pytest.raises(ConfigError):
        key_of_directory(tmp_path, make=False)
    assert os.listdir(tmp_path) == []


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_key_of_another_user_is_rejected(tmp_path: Path) -> None:
    """Another user's key is an error with both users; it is accepted if the run directory belongs to that user as
    well."""
    key_of_directory(tmp_path)
    os.chown(tmp_path / "run.key", 12345, -1)
    with pytest.raises(ConfigError, match=r"run\.key belongs to user 12345, not to you \(user 0\)"):
        key_of_directory(tmp_path)
    os.chown(tmp_path, 12345, -1)
    key_of_directory(tmp_path)


def test_key_accessible_to_others_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key that others can read or replace is used with one warning with the file, its mode and the remedy."""
    key = key_of_directory(tmp_path)
    assert not caplog.records
    (tmp_path / "run.key").chmod(0o666)
    assert key_of_directory(tmp_path) == key_of_directory(tmp_path) == key
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"run key {tmp_path}/run.key (mode 666)" in warning
    assert f"chmod 600 {tmp_path}/run.key" in warning
