"""The run key: what every process of a run knows and no stranger does, and from which all its connections are proved.

Where it comes from, in this order: the file of ``--run-key-file``, the variable ``OUTLAST_RUN_KEY``, the file
``run.key`` of a run directory that all agents share (the first one makes it, readable by its owner only), else the
run's id. The last is no secret: it keeps accidents out (another run at the same port), not attackers.

Whether the run directory is shared is decided alike on every node, before anybody is asked: it is where all agents are
on one machine, or where the directory lies on a network file system. The key is never on a command line, in a log, in
the journal, or in a child's arguments; workers find it in their environment.

Workers that connect to each other derive the key of these connections from the run key and an *offer*, which one of
them draws and passes on through the ranks' store or a collective (:func:`make_offer`, :func:`accept_offer`). With a run
key the offer may be known: it only makes the keys of two groups, and so of two cycles, differ. Where no worker has a
run key (``torchrun``, ``srun``) the offer itself is the secret.

Rejected: asking the first agent for it (whoever answers at the endpoint would give it); accepting the run's id beside a
secret (a stranger knows the id).
Rejected for the offers: the number of the cycle in their place (agents of ``torchrun`` count restarts each by
themselves); a key from the run key alone where there is one (the id of a run without a secret would be all there is to
know).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import logging
import os
import secrets
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from outlast import env
from outlast.decoding import read_file
from outlast.errors import ConfigError
from outlast.runtime.files import create_atomically
from outlast.version import __version__

log = logging.getLogger(__name__)
FILE_NAME = "run.key"
_MIN_BYTES = 16
_MAX_BYTES = 1 << 16
_OFFER_BYTES = 32
_warned: set[Path] = set()
_NETWORK_FILE_SYSTEMS = frozenset(
    {
        0x6969,  # NFS
        0xFF534D42,  # CIFS
        0xFE534D42,  # SMB2
        0x517B,  # SMB
        0x0BD00BD0,  # Lustre
        0x47504653,  # GPFS
        0x00C36400,  # Ceph
        0x65735546,  # FUSE: nearly always one of a cluster (BeeGFS, JuiceFS, s3fs, ...)
        0x19830326,  # BeeGFS
        0x01021997,  # 9p
        0x5346414F,  # AFS
        0x01161970,  # GFS2
        0x7461636F,  # OCFS2
        0x20030528,  # OrangeFS
        0xAAD7AAEA,  # PanFS
    }
)


class KeySource(StrEnum):
    """Where a run key came from."""

    FILE = "the file of --run-key-file"
    VARIABLE = "OUTLAST_RUN_KEY"
    RUN_DIRECTORY = "run.key of the run directory"
    RUN_ID = "the run's id"


@dataclass(frozen=True, slots=True)
class RunKey:
    """A run's key."""

    secret: bytes = field(repr=False)
    source: KeySource

    @classmethod
    def of_run_id(cls, run_id: str) -> RunKey:
        """Return the key of a run that has no secret."""
        return cls(hashlib.sha256(b"outlast run " + run_id.encode()).digest(), KeySource.RUN_ID)

    @property
    def fingerprint(self) -> bytes:
        """What may be shown of it: eight bytes by which two sides see that their keys differ."""
        return self.derive("fingerprint")[:8]

    def derive(self, purpose: str) -> bytes:
        """Return the key for one purpose; from it neither the run key nor another purpose's can be found."""
        return hmac.digest(self.secret, b"outlast key " + purpose.encode(), "sha256")

    def as_variable(self) -> str:
        """Return what ``OUTLAST_RUN_KEY`` of this run's workers holds."""
        return f"hex:{self.secret.hex()}"


def find_run_key(run_id: str, run_dir: Path | None, *, key_file: str | None, is_one_machine: bool) -> RunKey:
    """Return the key of a run; make the one of its directory, if that is to have one and has none yet.

    Args:
        run_id: Name of the run.
        run_dir: Its directory; ``None``: it has none.
        key_file: What ``--run-key-file`` names.
        is_one_machine: All agents are on this machine.

    Raises:
        ConfigError: A file or the variable that is to hold it cannot be used; one line with the remedy.
    """
    if key_file is not None:
        try:
            secret = read_file(key_file, max_bytes=_MAX_BYTES, follows_links=True)
            return RunKey(_check(secret, f"--run-key-file={key_file}"), KeySource.FILE)
        except OSError as error:
            raise ConfigError(f"--run-key-file={key_file} cannot be read ({error.strerror}); check its path") from None
    if (found := key_of_environment()) is not None:
        return found
    if run_dir is not None and (is_one_machine or is_network_file_system(run_dir)):
        return key_of_directory(run_dir)
    return RunKey.of_run_id(run_id)


def key_of_environment() -> RunKey | None:
    """Return the key that ``OUTLAST_RUN_KEY`` holds; ``None``: it is not set.

    Raises:
        ConfigError: It is too short.
    """
    text = env.environ().get(env.RUN_KEY)
    if not text:
        return None
    if text.startswith("hex:"):
        try:
            return RunKey(bytes.fromhex(text.removeprefix("hex:")), KeySource.VARIABLE)
        except ValueError:
            pass  # then it only looks so
    return RunKey(_check(text.encode(), env.RUN_KEY), KeySource.VARIABLE)


def key_of_directory(run_dir: Path, *, make: bool = True) -> RunKey:
    """Return the key that a run directory holds.

    Args:
        run_dir: The run directory.
        make: Make one where there is none.

    Raises:
        ConfigError: It cannot be read or made.
    """
    path = run_dir / FILE_NAME
    try:
        if make and not path.exists():
            create_atomically(path, secrets.token_hex(32).encode() + b"\n", mode=0o600)
        return RunKey(_check(_read_own(path), str(path)), KeySource.RUN_DIRECTORY)
    except OSError as error:
        raise ConfigError(
            f"the run key {path} cannot be read or made ({error.strerror}); it belongs to the user who began the run: "
            "run as that user, or give all agents the same --run-key-file"
        ) from None


def _read_own(path: Path) -> bytes:
    """Return the bytes of a key that this user, or whoever owns the run directory, made; warn if others can use it.

    Raises:
        ConfigError: Another user owns it.
        OSError: It cannot be read, or is not a regular file.
    """
    data, found = read_file(path, max_bytes=_MAX_BYTES), path.lstat()
    # Where an administrator's files belong to nobody (root squash), so does the directory.
    if found.st_uid not in {os.geteuid(), 0, path.parent.stat().st_uid}:
        raise ConfigError(
            f"the run key {path} belongs to user {found.st_uid}, not to you (user {os.geteuid()}) or to the owner of "
            "the directory: another user knows it; remove it, or use another --run-dir"
        )
    if found.st_mode & 0o077 and path not in _warned:
        _warned.add(path)
        log.warning(
            "other users can read or replace the run key %s (mode %o), and can then control the run; run chmod 600 %s, "
            "and remove it before the next run if others use this machine",
            *(path, found.st_mode & 0o777, path),
        )
    return data


def find_known_keys(run_dir: Path | None, *, key_file: str | None = None) -> list[RunKey]:
    """Return the keys that a run may have of which only the directory is known, the likeliest first.

    The variable may be left from another run, and the directory's key from before the variable was set, so both count.

    Raises:
        ConfigError: The file or the variable that is named cannot be used.
    """
    if key_file is not None:
        return [find_run_key("", None, key_file=key_file, is_one_machine=False)]
    found = [key_of_environment()]
    if run_dir is not None and (run_dir / FILE_NAME).exists():
        with contextlib.suppress(ConfigError):  # it is another user's
            found.append(key_of_directory(run_dir, make=False))
    return [key for key in found if key is not None]


def make_offer() -> str:
    """Return a new offer for a group, which one process gives to all others.

    It holds the package's version, something random, and the run key's fingerprint.

    Raises:
        ConfigError: ``OUTLAST_RUN_KEY`` is too short.
    """
    version = __version__.replace(".", "_")
    return f"{version}:{secrets.token_hex(_OFFER_BYTES)}.{_own_fingerprint()}"


def accept_offer(offer: str, purpose: str) -> bytes:
    """Return the key that all processes derive that take the same offer for the same purpose.

    Args:
        offer: What :func:`make_offer` returned, in one of them.
        purpose: What the key is for.

    Raises:
        ConfigError: This process and the one that made the offer have different versions of the package, or different
            run keys, or only one of them has any.
    """
    drawn, _, theirs = offer.partition(".")
    version, has_version, _ = drawn.partition(":")
    theirs_version = version.replace("_", ".") if has_version else ""
    difference = describe_difference(theirs_version, whose="another process of this run", own="this process")
    if difference is not None:
        raise ConfigError(difference)
    if (own := _own_fingerprint()) != theirs:
        if own and theirs:
            what = f"the processes of this run have different {env.RUN_KEY}"
        else:
            what = f"only {'this process' if own else 'another process'} of this run has {env.RUN_KEY}"
        raise ConfigError(
            f"{what}, from which they derive the key of their connections ({purpose}); keep what outlast run sets in "
            "the environment of each rank, or set the same one on all nodes"
        )
    key = key_of_environment()
    secret = key.derive("offers") if key is not None else b""
    return hmac.digest(secret, f"outlast {purpose} {drawn}".encode(), "sha256")


def describe_difference(theirs: str, *, whose: str, own: str) -> str | None:
    """Return why a process of the run is refused that has another version of the package, for people.

    Args:
        theirs: Its version; empty: it reports none, as versions before 1.0.
        whose: Which process that is.
        own: Which one this is.

    Returns:
        ``None``: it has this version, or :data:`outlast.env.ANY_VERSION` allows any.
    """
    if theirs == __version__ or env.any_version():
        return None
    return (
        f"{whose} has {f'outlast {theirs}' if theirs else 'an earlier version of outlast'}, {own} has outlast "
        f"{__version__}; install the same version on all nodes, or set {env.ANY_VERSION}=1 on all of them"
    )


def _own_fingerprint() -> str:
    key = key_of_environment()
    return key.fingerprint.hex() if key is not None else ""


def is_network_file_system(path: Path) -> bool:
    """Return whether other machines can see a folder under the same files."""
    return _file_system_type(path) in _NETWORK_FILE_SYSTEMS


def _file_system_type(path: Path) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)  # struct statfs begins with the type, a word
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return 0
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


def _check(data: bytes, source: str) -> bytes:
    data = data.strip()
    if len(data) < _MIN_BYTES:
        raise ConfigError(f"{source} holds {len(data)} bytes; give at least {_MIN_BYTES} random ones")
    return hashlib.sha256(data).digest()
