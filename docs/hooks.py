"""What is changed in pages while the site is built.

* A page whose first line is ``<!-- include: ../NAME.md -->`` becomes that file, with its links turned to pages of the
  site.
* An SVG file that a page shows as an image becomes part of the page, so that it follows the switch between light and
  dark.
* Words within inline code are marked, so that no key or option breaks at a hyphen or in the middle.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
INCLUDED = re.compile(r"\A<!-- include: \.\./(?P<name>[\w.-]+) -->\n")
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>(?![a-z]+:|#)[^)\s]+)\)")
DRAWING = re.compile(r'<p><img alt="[^"]*" src="[./]*(?P<path>assets/[\w.-]+\.svg)" ?/?></p>')
INLINE_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>(?P<text>[^<]+)</code>")
WORD = re.compile(r"[^\s&]+")
LONGEST_WORD = 40
"""Characters of a word that is never broken; a longer one must break on a small screen."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page's text, or that of the file in the repository's root that it stands for."""
    if (found := INCLUDED.match(markdown)) is None:
        return markdown
    text = (DOCS.parent / found["name"]).read_text(encoding="utf-8")
    return LINK.sub(_turn_link, text)


def on_page_content(html: str, **_: Any) -> str:
    """Return a page's HTML with its drawings in it, and with the words of its inline code marked."""
    html = INLINE_CODE.sub(lambda found: f"<code>{WORD.sub(_mark_word, found['text'])}</code>", html)
    return DRAWING.sub(lambda found: _frame((DOCS / found["path"]).read_text(encoding="utf-8")), html)


def _mark_word(found: re.Match[str]) -> str:
    word = found[0]
    return f'<span class="word">{word}</span>' if len(word) <= LONGEST_WORD else word


def _turn_link(found: re.Match[str]) -> str:
    """Return a link from the repository's root as one between pages; only its text where the site has no such page."""
    path, hash_, anchor = found["target"].partition("#")
    name = path.removeprefix("docs/") if path.startswith("docs/") else path.lower()
    if not (DOCS / name).is_file():
        return found["text"]
    return f"[{found['text']}]({name}{hash_}{anchor})"


def _frame(svg: str) -> str:
    return f'<div class="drawing-frame">{svg}</div>'
