"""Where a notice comes from besides signals: a time limit, a file, an address, or a plug-in of one's own.

A source is anything with ``poll()``. It is polled in a thread of its own, so it may take a second, never a minute.
"""

from __future__ import annotations

import http.client
import importlib
import logging
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outlast import clock
from outlast.errors import ConfigError

__all__ = ["EndTime", "NoticeFile", "NoticeReceived", "NoticeSource", "NoticeURL", "load_source"]

log = logging.getLogger(__name__)
_NOT_YET = frozenset({"", "none", "false", "0", "null"})
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NoticeReceived:
    """A notice that a source received: it is time to leave."""

    reason: str
    """One line for people."""
    left_s: float | None = None
    """Seconds until the process is ended by others; ``None`` = not known."""


class NoticeSource(Protocol):
    """Something that knows when this process must leave."""

    name: str
    """One word for the journal."""

    def poll(self) -> NoticeReceived | None:
        """Return the notice to leave; ``None`` = not yet.

        An exception counts as "not yet", and is logged the first time.

        Blocks: a second or two at most.
        Thread: the listener's own.
        """
        ...


class EndTime:
    """Give notice a while before a time at which the process will be ended.

    Args:
        left_s: Seconds until then, from now.
        lead_s: Seconds before it that the notice comes. With less than twice as many left, it comes at half time: a job
            whose limit is that short would else never do a step.
        what: What ends then.
        is_hard: Whether the process really is ended then; else the time only asks it to leave.
    """

    def __init__(self, left_s: float, *, lead_s: float, what: str, name: str, is_hard: bool = True) -> None:
        self.name = name
        self._what, self._is_hard = what, is_hard
        self._end_s = clock.now_s() + left_s
        self._due_s = self._end_s - min(lead_s, left_s / 2)

    def poll(self) -> NoticeReceived | None:
        """Return the notice once the time has come."""
        now_s = clock.now_s()
        if now_s < self._due_s:
            return None
        if not self._is_hard:
            return NoticeReceived(self._what)
        left_s = max(0.0, self._end_s - now_s)
        return NoticeReceived(f"{self._what} in {left_s:.0f} s", left_s)


class NoticeFile:
    """Give notice when a file comes into being.

    Args:
        path: The file. Its first line is the reason, if it has one.
    """

    name = "file"

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def poll(self) -> NoticeReceived | None:
        """Return the notice if the file is there."""
        try:
            with self._path.open("rb") as file:
                text = file.read(_MOST_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        why = f": {text.splitlines()[0]}" if text else ""
        return NoticeReceived(f"{self._path} is there{why}")


class NoticeURL:
    """Give notice when an address answers so.

    The answer means to leave with status 200 and a text other than nothing, ``none``, ``false``, ``0`` and ``null``;
    204 and 404 mean not yet, as do the texts. That is the way of the clouds' metadata servers. No proxy is asked.

    Args:
        url: The address, http or https.
        header: Header to ask with, ``Name: value``.
        timeout_s: Seconds that an answer may take.
    """

    name = "url"

    def __init__(self, url: str, *, header: str | None = None, timeout_s: float = 2.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address to ask for a notice; it must begin with http:// or https://")
        name, _, value = (header or "").partition(":")
        self._request = urllib.request.Request(url, headers={name.strip(): value.strip()} if header else {})
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._timeout_s = timeout_s

    def poll(self) -> NoticeReceived | None:
        """Ask, and return the notice if the answer is one.

        Raises:
            OSError: There is no answer, or one with another status.
        """
        try:
            with self._opener.open(self._request, timeout=self._timeout_s) as answer:
                text = answer.read(_MOST_BYTES).decode(errors="replace").strip()
                status = answer.status
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise
        except http.client.HTTPException as error:
            raise OSError(f"no answer that can be read: {error!r}") from error
        if status != 200 or text.lower() in _NOT_YET:
            return None
        return NoticeReceived(f"{self._request.full_url.partition('?')[0]} says {text.splitlines()[0][:200]!r}")


def load_source(where: str) -> NoticeSource:
    """Make the source that ``package.module:name`` makes when it is called without arguments.

    Raises:
        ConfigError: There is no such thing, or what it returns has no ``poll``.
    """
    module, _, name = where.partition(":")
    try:
        source = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"notice_plugin={where!r} is unavailable: {error}") from error
    if not callable(getattr(source, "poll", None)):
        raise ConfigError(f"notice_plugin={where!r} returned {source!r}, which has no poll()")
    if not isinstance(getattr(source, "name", None), str):
        source.name = "plugin"
    plugin: NoticeSource = source
    return plugin
