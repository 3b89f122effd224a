"""The view: what is seen while the demo runs; a live picture, plain lines, or nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from outlast import clock
from outlast.demo.plan import Shape
from outlast.demo.scene import Scene
from outlast.demo.story import tell
from outlast.incidents import Event

__all__ = ["LiveView", "PlainView", "SilentView", "View"]

_REFRESH_S = 0.2
_LINES = 12


class View:
    """What is told and shown; this one tells nothing.

    Args:
        shape: The world's size and the number of iterations.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._told: set[tuple[str, str, int]] = set()

    @contextmanager
    def act(self, title: str) -> Iterator[None]:
        """Show one of the demo's runs, until the block is left."""
        self._told.clear()
        self._open(title)
        try:
            yield
        finally:
            self._close()

    def show(self, scene: Scene) -> None:
        """Show what the cluster looks like, and tell what is new since the last time."""

    def _open(self, title: str) -> None: ...

    def _close(self) -> None: ...

    def _new_lines(self, scene: Scene) -> Iterator[str]:
        for event in scene.events:
            if (key := (event.node, event.proc, event.mono_ns)) not in self._told:
                self._told.add(key)
                if (line := tell(event)) is not None:
                    yield f"{_since_start(event, scene):6.2f} s  {line}"


SilentView = View
"""For a reader that is a program."""


class PlainView(View):
    """Tell everything in lines, for a log or a pipe.

    Args:
        shape: The world's size and the number of iterations.
        write: Called with each line.
    """

    def __init__(self, shape: Shape, write: Callable[[str], None]) -> None:
        super().__init__(shape)
        self._write = write
        self._next_iteration = 0

    def show(self, scene: Scene) -> None:
        """Tell what is new."""
        for line in self._new_lines(scene):
            self._write(line)
        if scene.iteration >= self._next_iteration and scene.loss is not None:
            self._write(f"          iteration {scene.iteration} of {self.shape.iterations}, loss {scene.loss:.4f}")
            self._next_iteration = scene.iteration // 20 * 20 + 20

    def _open(self, title: str) -> None:
        self._write(title)
        self._next_iteration = 0


class LiveView(View):
    """Show a picture that changes, on a terminal.

    Args:
        shape: The world's size and the number of iterations.
        console: The terminal.
    """

    def __init__(self, shape: Shape, console: Console) -> None:
        super().__init__(shape)
        self._console = console
        self._title = ""
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._live: Live | None = None
        self._next_s = 0.0
        self._scene: Scene | None = None
        self._iteration = 0

    def show(self, scene: Scene) -> None:
        """Draw the picture anew, a few times a second."""
        self._scene = scene
        if clock.now_s() >= self._next_s:
            self._next_s = clock.now_s() + _REFRESH_S
            self._redraw(scene)

    def _open(self, title: str) -> None:
        self._title = title
        self._lines.clear()
        self._scene, self._iteration = None, 0
        self._live = Live(Text(title, style="bold"), console=self._console, auto_refresh=False)
        self._live.start()

    def _close(self) -> None:
        if self._scene is not None:
            self._redraw(self._scene)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _redraw(self, scene: Scene) -> None:
        if self._live is not None:
            self._lines.extend(self._new_lines(scene))
            self._live.update(self._draw(scene), refresh=True)

    def _draw(self, scene: Scene) -> RenderableType:
        self._iteration = scene.iteration or self._iteration  # while a cycle restores, where the last one was
        loss = "-" if scene.loss is None else f"{scene.loss:.4f}"
        durable = "none" if scene.durable is None else str(scene.durable)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=self.shape.iterations, completed=self._iteration, width=30),
            f"iteration [bold]{self._iteration}[/] of {self.shape.iterations}",
            f"loss [bold]{loss}[/]",
            f"saved {durable}",
            f"cycle {max(scene.cycle, 0)}",
        )
        lines = [Text(line, style=_style(line), no_wrap=True, overflow="ellipsis") for line in self._lines]
        ranks = [self._ranks(scene)] if scene.running else []
        return Group(Text(self._title, style="bold"), head, *ranks, *lines)

    def _ranks(self, scene: Scene) -> Table:
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for name in ("rank", "node", "pid", "iteration", "in section"):
            table.add_column(name, justify="left" if name in ("node", "in section") else "right")
        known = {one.rank: one for one in scene.ranks if one.cycle == scene.cycle}
        for rank in range(self.shape.world_size):
            one = known.get(rank)
            if one is None:
                table.add_row(str(rank), "-", "-", "-", "", style="yellow")
            else:
                table.add_row(str(rank), one.node, str(one.pid), str(one.iteration), one.section)
        for node in scene.spares:
            table.add_row("", node, "", "", "waits as a spare", style="dim")
        for node in sorted(scene.quarantined):
            table.add_row("", node, "", "", "is quarantined", style="dim")
        return table


def _style(line: str) -> str:
    if "FAULT:" in line:
        return "bold red"
    if "noticed by" in line:
        return "yellow"
    return "green" if "decided:" in line else "dim"


def _since_start(event: Event, scene: Scene) -> float:
    return (event.mono_ns - scene.events[0].mono_ns) / 1e9
