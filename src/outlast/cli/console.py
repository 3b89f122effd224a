"""The terminal for tables and screens; external text cannot control it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from outlast.wording import printable


class PrintableConsole(Console):
    """A console that escapes control characters in all given text, and reads markup only on request.

    Host names, paths, journals and exceptions of other machines and users are printed in tables, and rich passes their
    escape sequences on. rich's own sequences, for colours and the cursor, are added later.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
