"""Write the table of all cells into the documentation: ``python tests/places/table.py``; ``--check`` only compares."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, os.fspath(Path(__file__).parent))

from broken_places import Fault
from cells import Cell, Tier, disk_cells, store_cells, writer_cells

__all__ = ["render"]

PAGE = Path(__file__).parents[2] / "docs" / "broken-tiers.md"
_PLACE = re.compile(r"(<!-- cells -->\n).*?(<!-- end of cells -->)", re.DOTALL)
_MODULES = {
    Tier.GLOBAL: "test_broken_disks.py",
    Tier.LOCAL: "test_broken_disks.py",
    Tier.STORE: "test_broken_stores.py",
    Tier.MEMORY: "test_broken_writers.py",
}
_TIERS = {
    Tier.GLOBAL: "global, a directory",
    Tier.STORE: "global, S3",
    Tier.LOCAL: "local",
    Tier.MEMORY: "memory, and the replicas kept there",
}
_RETRIED = "the newest save is tried again until it succeeds; the other tiers take all saves"
_FOLLOWS = {
    Fault.FULL: _RETRIED,
    Fault.READ_ONLY: _RETRIED,
    Fault.NO_INODES: _RETRIED,
    Fault.HUNG: "one save waits in the call that hangs, the newest one after it; the other tiers take all saves",
    Fault.SLOW: "saves that are not finished in time give their place to newer ones; the other tiers take all saves",
    Fault.GONE: _RETRIED,
    Fault.UNMOUNTED: "the empty folder below the mount point takes saves until the mount is back",
    Fault.ERROR_500: _RETRIED,
    Fault.ERROR_403: _RETRIED,
}
_OF_WRITERS = {
    Fault.HUNG: "the agent replaces the checkpoint writer, and its checkpoints are taken from other tiers",
    Fault.GONE: "the same",
    Fault.FULL: "checkpoints that find no memory are stored in the other tiers",
}


def render(text: str) -> str:
    """Return the page with the table of the cells of the tests."""
    rows: dict[tuple[Tier, Fault], list[Cell]] = {}
    for cell in (*disk_cells(), *store_cells(), *writer_cells()):
        rows.setdefault((cell.tier, cell.fault), []).append(cell)
    lines = ["| tier | fault | what happens | tests |", "| --- | --- | --- | --- |"]
    for (tier, fault), cells in rows.items():
        follows = (_OF_WRITERS if tier == Tier.MEMORY else _FOLLOWS)[fault]
        names = "<br>".join(f"`{cell}`" for cell in cells)
        lines.append(f"| {_TIERS[tier]} | {fault} | {follows} | `{_MODULES[tier]}`<br>{names} |")
    return _PLACE.sub(lambda found: found[1] + "\n".join(["", *lines, "", ""]) + found[2], text)


def main() -> int:
    """Run the command line; return the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    if "--check" not in sys.argv:
        PAGE.write_text(render(text), encoding="utf-8")
    return int(render(text) != text and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
