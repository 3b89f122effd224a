"""A terminal, as far as the demo needs one: what a person sees of the bytes that were written to it, with what scrolled
away."""

from __future__ import annotations

import re

__all__ = ["seen"]

_CONTROL = re.compile(r"\x1b\[(?P<number>[?\d;]*)(?P<what>[A-Za-z])")


def seen(text: str, width: int) -> list[str]:
    """Return the lines that stand on a terminal of a width in the end, without empty ones below them."""
    lines, row, column, position = [""], 0, 0, 0

    def put(char: str) -> None:
        nonlocal row, column
        if column >= width:
            go_down()
        lines[row] = lines[row][:column].ljust(column) + char + lines[row][column + 1 :]
        column += 1

    def go_down() -> None:
        nonlocal row, column
        row, column = row + 1, 0
        if row == len(lines):
            lines.append("")

    while position < len(text):
        if (match := _CONTROL.match(text, position)) is not None:
            position = match.end()
            number = int(match["number"]) if match["number"].isdigit() else 1
            match match["what"]:
                case "A":
                    row = max(0, row - number)
                case "K":
                    lines[row] = "" if number == 2 else lines[row][:column]
                case "m" | "h" | "l":
                    pass  # colours, and whether the cursor is seen
                case other:
                    raise AssertionError(f"a control sequence that no test knows: {other!r}")
            continue
        char = text[position]
        position += 1
        if char == "\r":
            column = 0
        elif char == "\n":
            go_down()
        else:
            put(char)
    lines = [line.rstrip() for line in lines]
    while lines and not lines[-1]:
        del lines[-1]
    return lines
