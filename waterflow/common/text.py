"""Text that others made, fit to be shown: in a terminal, in a log, in one line.

A job's name, or the message of an error, may hold anything: escapes that colour, clear or retitle a
terminal, line feeds that forge a line of a log, marks that turn the direction of writing. All that
is shown of such text goes through here; what is kept (reports, checkpoints) stays as it was given.
"""

from __future__ import annotations

import unicodedata

#: Categories of characters that are shown as their escapes: control characters, formats that
#: change how others are shown (bidirectional marks), surrogates, separators of lines.
_UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
#: Formats that belong to writing itself: joiners, without which emoji and some scripts fall apart.
_KEPT = frozenset("\u200c\u200d")


def printable(text: object) -> str:
    r"""The text, as `str` makes it, with everything that is no visible character as its escape:
    ``\x1b`` for an escape, ``\n`` for a line feed."""
    given = str(text)
    if given.isascii() and given.isprintable():
        return given
    return "".join(map(_shown, given))


def text_of(value: object) -> str:
    """What `str` makes of an object; of a user's error, whose own `__str__` may fail, that too."""
    try:
        return str(value)
    except BaseException as failure:  # of whatever kind: it is told of, and ends nobody
        return f"its text cannot be made ({type(failure).__name__})"


def one_line(text: object, most: int = 400) -> str:
    """The text in one line, its lines joined by blanks; of a very long one the beginning, and the
    end, where errors say what happened.

    Args:
        text: anything; `str` makes a text of it.
        most: characters, at least 16.
    """
    line = printable(" ".join(text_of(text).split()))
    if len(line) <= most:
        return line
    end = most // 3
    return f"{line[: most - end - 5]} ... {line[-end:]}"


def lines(text: object) -> str:
    """The text with its line feeds, and everything else as `printable` shows it."""
    return "\n".join(map(printable, text_of(text).split("\n")))


def error_line(error: BaseException) -> str:
    """An error in one line: its type and its message."""
    message = one_line(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _shown(character: str) -> str:
    if unicodedata.category(character) not in _UNSHOWN or character in _KEPT:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
