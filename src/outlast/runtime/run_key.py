"""The run key: the secret of a run, with which all its connections are authenticated.

Sources, in this order: the file of ``--run-key-file``, ``OUTLAST_RUN_KEY``, the file ``run.key`` of a run directory
that all agents share (on one machine, or on a network file system; the first agent creates it, readable by its owner
only), else the run's id, which is not a secret: it prevents accidents (another run at the same port), not attacks. The
key is never on a command line, in a log, in the journal, or in a child's arguments; workers get it in their
environment.

Workers that connect to each other derive the key of these connections from the run key and an *offer*, which one of
them draws and passes on through the ranks' TCPStore or a collective. With a run key the offer may be public: it only
makes the keys of two groups, and so of two cycles, differ. Without one (``torchrun``, ``srun``) the offer itself is the
secret.

Rejected: requesting the key from the first agent (any process that responds at the endpoint could give one); accepting
the run's id in addition to a secret (the id is public). Rejected for offers: the number of the cycle instead (agents of
``torchrun`` count restarts separately); the run key alone (for a run without a secret, the id would suffice).
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
    FILE = "the file of --run-key-file"
    VARIABLE = "OUTLAST_RUN_KEY"
    RUN_DIRECTORY = "run.key of the run directory"
    RUN_ID = "the run's id"


@dataclass(frozen=True, slots=True)
class RunKey:
    secret: bytes = field(repr=False)
    source: KeySource

    @classmethod
    def of_run_id(cls, run_id: str) -> RunKey:
        """Return the key of a run without a secret."""
        return cls(hashlib.sha256(b"outlast run " + run_id.encode()).digest(), KeySource.RUN_ID)

    @property
    def fingerprint(self) -> bytes:
        """Eight public bytes that show two sides whether their keys differ."""
        return self.derive("fingerprint")[:8]

    def derive(self, purpose: str) -> bytes:
        """Return the key for one purpose, which reveals neither the run key nor the key of another purpose."""
        return hmac.digest(self.secret, b"outlast key " + purpose.encode(), "sha256")

    def as_variable(self) -> str:
        """Return the value of ``OUTLAST_RUN_KEY`` for this run's workers."""
        return f"hex:{self.secret.hex()}"


def find_run_key(run_id: str, run_dir: Path | None, *, key_file: str | None, is_one_machine: bool) -> RunKey:
    """Return the key of a run; create that of its directory if it needs one.

    Args:
        is_one_machine: All agents are on this machine.

    Raises: ConfigError: The file or variable of the key cannot be used.
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
    """Return the key in ``OUTLAST_RUN_KEY``; ``None``: not set. Raises: ConfigError: It is too short."""
    text = env.environ().get(env.RUN_KEY)
    if not text:
        return None
    if text.startswith("hex:"):
        with contextlib.suppress(ValueError):  # not hexadecimal: a plain secret
            return RunKey(bytes.fromhex(text.removeprefix("hex:")), KeySource.VARIABLE)
    return RunKey(_check(text.encode(), env.RUN_KEY), KeySource.VARIABLE)


def key_of_directory(run_dir: Path, *, make: bool = True) -> RunKey:
    """Return the key in a run directory. Raises: ConfigError: It cannot be read or created."""
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
    """Return the bytes of a key of this user or of the run directory's owner; warn if others can access it.

    Raises:
        ConfigError: Another user owns it.
        OSError: It cannot be read, or is not a regular file.
    """
    data, found = read_file(path, max_bytes=_MAX_BYTES), path.lstat()
    # With root squash, both an administrator's file and the directory belong to the user nobody.
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
    """Return the possible keys of a run of which only the directory is known, the likeliest first.

    The variable may be of another run, and the directory's key older than the variable, so both are returned.

    Raises: ConfigError: The given file, or the variable, cannot be used.
    """
    if key_file is not None:
        return [find_run_key("", None, key_file=key_file, is_one_machine=False)]
    found = [key_of_environment()]
    if run_dir is not None and (run_dir / FILE_NAME).exists():
        with contextlib.suppress(ConfigError):  # owned by another user
            found.append(key_of_directory(run_dir, make=False))
    return [key for key in found if key is not None]


def make_offer() -> str:
    """Return a new offer for a group, which one process sends to all others: version, random bytes, key fingerprint.

    Raises: ConfigError: ``OUTLAST_RUN_KEY`` is too short.
    """
    version = __version__.replace(".", "_")
    return f"{version}:{secrets.token_hex(_OFFER_BYTES)}.{_own_fingerprint()}"


def accept_offer(offer: str, purpose: str) -> bytes:
    """Return the key that all processes derive from the same offer for the same purpose.

    Raises:
        ConfigError: This process and the one that made the offer have different versions of the package or different
            run keys, or only one of them has a run key.
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
    """Return why a process of another version of the package is refused, for people; ``None``: it is accepted.

    Args:
        theirs: Its version; empty: not reported, as by versions before 1.0.
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
    """Return whether other machines may share a folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(256)  # struct statfs begins with the type, a word
    if libc.statfs(os.fsencode(path), buffer) != 0:
        return False
    kind = int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)
    return kind & 0xFFFFFFFF in _NETWORK_FILE_SYSTEMS


def _check(data: bytes, source: str) -> bytes:
    data = data.strip()
    if len(data) < _MIN_BYTES:
        raise ConfigError(f"{source} holds {len(data)} bytes; give at least {_MIN_BYTES} random ones")
    return hashlib.sha256(data).digest()
