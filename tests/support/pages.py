"""The pages of the documentation and the programs on them."""

import ast
import contextlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_FENCED = re.compile(r"```.*?```", re.DOTALL)


def indented(page: Path) -> list[str]:
    """The indented blocks of a page, each as a text of its own."""
    return [block for _, block in _indented(page.read_text(encoding="utf-8"))]


def _indented(text: str) -> Iterator[tuple[int, str]]:
    text = _FENCED.sub(lambda found: re.sub(r"[^\n]", "`", found[0]), text)  # places stay
    for found in re.finditer(r"(?:^|\n)\n((?: {4}[^\n]*\n|\n(?= {4}))+)", text):
        yield found.start(), textwrap.dedent(found[1])


def programs(page: Path) -> list[ast.Module]:
    """What of a page is Python, whole programs and pieces of some, in the page's order.

    Raises:
        SyntaxError: a block that is said to be Python is not.
    """
    text = page.read_text(encoding="utf-8")
    found = [
        (block.start(), ast.parse(block[1]))
        for block in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
    ]
    for place, block in _indented(text):
        try:
            found.append((place, ast.parse(block)))
        except SyntaxError:  # commands, output, or both beside Python
            for part in re.split(r"\n{2,}(?=\S)", block):
                with contextlib.suppress(SyntaxError):
                    found.append((place, ast.parse(part)))
    return [tree for _, tree in sorted(found, key=lambda each: each[0])]
