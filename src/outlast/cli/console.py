"""The terminal that tables and screens are printed to: no text from outside can control it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from outlast.wording import printable


class PrintableConsole(Console):
    """A console that escapes control characters in whatever it is given, and reads markup only on request.

    Hostnames, paths, journals and exceptions of other machines and users end in tables; rich passes their escape
    sequences on. Its own, for colours and the cursor, are added later.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of what is shown, as rich does."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
