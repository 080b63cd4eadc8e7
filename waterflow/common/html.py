"""Parts of pages that are one file: text that stays text, tables, and the frame around them.

All that users name goes through `text`: markup is escaped, control characters, lone surrogates and
those that turn the direction of what follows are shown as escapes, as in a Python string.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from html import escape

#: Light and dark by what the reader's system asks for; tables scroll in themselves, the page never.
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--paper:#fff;--line:#d0d7de;
--panel:#f6f8fa;--link:#0550ae;--bad:#a40e26;--bar:#0072b2}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#a5afba;--paper:#0d1117;--line:#3d444d;
--panel:#161b22;--link:#79c0ff;--bad:#ff9a92;--bar:#56b4e9}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:0 auto;
max-width:1200px;padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.6rem;line-height:1.25;margin:.3rem 0}
h2{font-size:1.2rem;margin:2.2rem 0 .4rem;border-top:1px solid var(--line);padding-top:1.2rem}
h3{font-size:1rem;margin:1.2rem 0 .3rem}
p{margin:.4rem 0}.soft{color:var(--soft);font-size:.9rem}.bad{color:var(--bad);font-weight:600}
a{color:var(--link)}nav a{display:inline-block;margin-right:1rem;padding:.2rem 0}
:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.scroll{overflow-x:auto;max-width:100%;max-height:34rem;overflow-y:auto;margin:.6rem 0}
table{border-collapse:collapse;width:100%;font-size:.9rem}
caption{text-align:left;color:var(--soft);padding-bottom:.3rem}
caption span{display:block;position:sticky;left:0;width:min(100%,100vw - 2rem)}
th,td{padding:.3rem .7rem;text-align:right;vertical-align:top;border-bottom:1px solid var(--line);
overflow-wrap:normal}
tbody th,tbody td{white-space:nowrap}tbody .words{white-space:normal}
td:first-child,th:first-child,.words{text-align:left}th{font-weight:600}
td.words,th.words{min-width:9rem;max-width:32rem;overflow-wrap:anywhere}
thead th{background:var(--panel);position:sticky;top:0;z-index:1}
img{max-width:100%;height:auto}pre{white-space:pre-wrap;margin:.3rem 0;padding:.6rem;
background:var(--panel);border:1px solid var(--line);font-size:.85rem;max-height:20rem;
overflow:auto}
"""

_HIDDEN = {"Cc", "Cs", "Cf"}  # controls, surrogates, and marks that turn or hide text
_KEPT = {"\u200c", "\u200d"}  # joiners, without which some scripts and emoji fall apart


def visible(words: str, lines: bool = False) -> str:
    """`words` with what cannot be seen as escapes; line ends stay where there may be `lines`."""
    return "".join(
        letter
        if letter in _KEPT or (lines and letter in "\n\t") or _is_seen(letter)
        else letter.encode("unicode_escape", "surrogatepass").decode()
        for letter in words
    )


def _is_seen(letter: str) -> bool:
    return unicodedata.category(letter) not in _HIDDEN


def shorten(words: str, length: int = 40) -> str:
    """`words`, visible, of at most `length` letters."""
    words = visible(words)
    return words if len(words) <= length else f"{words[: length - 1]}…"


def text(words: str, lines: bool = False) -> str:
    """`words` as HTML."""
    return escape(visible(words, lines))


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)
) -> str:
    """A table that scrolls in itself and can be reached by keyboard.

    Args:
        caption: what it holds, as text.
        head: of the columns, as text.
        rows: of cells, which are HTML already; the first is the row's heading.
        words: the columns that hold words rather than numbers.
    """
    marks = ['class="words"' if place in words else "" for place in range(len(head))]
    cells = "".join(
        f'<th scope="col" {mark}>{text(name)}</th>' for mark, name in zip(marks, head, strict=True)
    )
    body = []
    for first, *rest in rows:
        line = "".join(f"<td {m}>{c}</td>" for m, c in zip(marks[1:], rest, strict=True))
        body.append(f'<tr><th scope="row" {marks[0]}>{first}</th>{line}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f"<table><caption><span>{text(caption)}</span></caption><thead><tr>{cells}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def page(title: str, body: str, style: str = "", head: str = "", end: str = "") -> str:
    """The whole document: `title` is text, all else HTML or CSS."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{head}'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}{style}</style></head>\n"
        f"<body>{body}{end}</body></html>\n"
    )
