"""The run key: where it comes from, and that it stays where it belongs."""

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


def test_the_first_source_that_is_there_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file comes before the variable, that before the directory's key, that before the run's id."""
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
def test_a_directorys_key_is_made_once_and_its_owners_alone(tmp_path: Path) -> None:
    """Processes that come at the same time find one key, which nobody else can read."""
    code = (
        "import sys; from pathlib import Path; from outlast.runtime.run_key import key_of_directory\n"
        "print(key_of_directory(Path(sys.argv[1])).secret.hex())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    assert len({one.communicate(timeout=300)[0] for one in several}) == 1
    assert stat.S_IMODE(os.stat(tmp_path / run_key.FILE_NAME).st_mode) == 0o600
    assert os.listdir(tmp_path) == [run_key.FILE_NAME]


def test_workers_have_the_same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent gives its workers in the environment stands for its own key."""
    key = RunKey.of_run_id("run")
    monkeypatch.setenv(env.RUN_KEY, key.as_variable())
    (found,) = find_known_keys(None)
    assert found.secret == key.secret
    assert found.derive("replica") == key.derive("replica") != key.derive("hub")


def test_an_offer_gives_all_processes_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a run key or without; another purpose, another offer and another run key give another one."""
    keys = set()
    for variable in (None, RunKey.of_run_id("a").as_variable(), RunKey.of_run_id("b").as_variable()):
        if variable is not None:
            monkeypatch.setenv(env.RUN_KEY, variable)
        offers = [make_offer(), make_offer()]
        for offer, purpose in itertools.product(offers, ("replica", "hub")):
            keys.add(accept_offer(offer, purpose))
            assert accept_offer(offer, purpose) in keys
    assert len(keys) == 12


def test_an_offer_does_not_give_the_key_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who knows the offer and not the run key derives something else."""
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
def test_processes_with_other_run_keys_are_named(
    theirs: str | None, own: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says that the environment is to blame, and no key."""

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
def test_processes_of_other_versions_are_named(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names both versions of the package and how to allow them; where that is allowed, all derive one key."""
    own, _, rest = make_offer().partition(":")
    assert own == __version__.replace(".", "_")
    with pytest.raises(ConfigError, match=f"this process has outlast {__version__}.*OUTLAST_ANY_VERSION=1"):
        accept_offer(f"{theirs}{rest}", "hub")
    monkeypatch.setenv(env.ANY_VERSION, "1")
    assert accept_offer(f"{theirs}{rest}", "hub") == accept_offer(f"{theirs}{rest}", "hub")


def test_a_key_is_not_shown() -> None:
    """Neither its text nor a line of the log that has it shows the secret."""
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
def test_a_key_that_cannot_be_used_is_named(tmp_path: Path, make: object, named: str) -> None:
    """A file that is not there or too short is refused in one line."""
    assert callable(make)
    with pytest.raises(ConfigError, match=named) as caught:
        find_run_key("run", tmp_path, key_file=make(tmp_path), is_one_machine=True)
    assert "\n" not in str(caught.value)


def test_a_short_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is a variable that is too short; its value is not shown."""
    monkeypatch.setenv(env.RUN_KEY, "hunter2")
    with pytest.raises(ConfigError, match=env.RUN_KEY) as caught:
        find_run_key("run", None, key_file=None, is_one_machine=False)
    assert "hunter2" not in str(caught.value)


def test_another_runs_variable_does_not_hide_a_directorys_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks about a directory tries both; a file that is named counts alone."""
    own = key_of_directory(tmp_path)
    monkeypatch.setenv(env.RUN_KEY, "another secret of some length")
    assert [key.source for key in find_known_keys(tmp_path)] == [KeySource.VARIABLE, KeySource.RUN_DIRECTORY]
    assert find_known_keys(tmp_path)[1].secret == own.secret
    file = _write(tmp_path / "key", SECRET)
    assert [key.source for key in find_known_keys(tmp_path, key_file=file)] == [KeySource.FILE]


def test_asking_makes_no_key(tmp_path: Path) -> None:
    """Looking for the key of a run that has none leaves nothing."""
    assert find_known_keys(tmp_path) == []
    with pytest.raises(ConfigError):
        key_of_directory(tmp_path, make=False)
    assert os.listdir(tmp_path) == []


def _write(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_key_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    """Another user's key is an error with both users; it is accepted where the run directory is that user's, too."""
    key_of_directory(tmp_path)
    os.chown(tmp_path / "run.key", 12345, -1)
    with pytest.raises(ConfigError, match=r"run\.key belongs to user 12345, not to you \(user 0\)"):
        key_of_directory(tmp_path)
    os.chown(tmp_path, 12345, -1)
    key_of_directory(tmp_path)


def test_a_key_that_others_can_use_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key that others can read or replace is used with one warning that names the file, its mode and the remedy."""
    key = key_of_directory(tmp_path)
    assert not caplog.records
    (tmp_path / "run.key").chmod(0o666)
    assert key_of_directory(tmp_path) == key_of_directory(tmp_path) == key
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"run key {tmp_path}/run.key (mode 666)" in warning
    assert f"chmod 600 {tmp_path}/run.key" in warning
