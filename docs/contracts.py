"""What is changed in docstrings before the API reference is built from them.

The source writes references as ``:meth:`name``` and contracts as lines of their own below the sections
(``Collective:`` who must call, ``Blocks:`` up to what, ``Thread:`` which). Here references become inline code, and each
contract a paragraph that begins with its name in bold.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

REFERENCE = re.compile(r":(?:meth|func|class|data|attr|mod|exc|obj):`[~!]?([^`]+)`")
CONTRACT = re.compile(r"^(?P<name>Collective|Blocks|Thread): ", re.MULTILINE)
LITERAL = re.compile(r"``([^`]+)``")


class Contracts(griffe.Extension):
    """Rewrite every docstring of the package."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)


def to_markdown(text: str) -> str:
    """Return a docstring with its references as code and each contract as a paragraph."""
    text = LITERAL.sub(r"`\1`", REFERENCE.sub(r"`\1`", text))
    return CONTRACT.sub(r"\n**\g<name>**: ", text)
