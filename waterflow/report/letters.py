"""Names in pictures: letters that a font has, and words for those that none has."""

from __future__ import annotations

import contextlib
import functools
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from matplotlib import font_manager
from matplotlib.font_manager import FontProperties
from matplotlib.text import Text

from waterflow.common.html import shorten

#: Asked in turn for letters that DejaVu Sans, which comes with matplotlib, does not have.
_FALLBACKS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "WenQuanYi Micro Hei",
    "PingFang SC",
    "Hiragino Sans",
    "Microsoft YaHei",
    "Arial Unicode MS",
    "Noto Emoji",
    "Noto Sans Symbols2",
    "Symbola",
)
_FALLBACK_FILES = ("NotoSansCJK-Regular", "wqy-microhei", "NotoEmoji-Regular", "Symbola_hint")
#: What belongs to the emoji before it and says nothing by itself: joiner, variation, tones of skin.
_SILENT = frozenset("\u200d\ufe0e\ufe0f\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff")
_REGIONAL = "REGIONAL INDICATOR SYMBOL LETTER "


def drawable(name: str, length: int = 40) -> str:
    """A user's name in letters that fonts on this machine have, of at most `length`."""
    words = " ".join(name.split())
    known = {code for _, letters in _fonts(words) for code in letters}
    shown, is_spelt = [], False
    for letter in words:
        if is_spelt and letter in _SILENT:
            continue
        is_spelt = ord(letter) not in known
        shown.append(_words_for(letter) if is_spelt else letter)
    short = shorten("".join(shown), length)
    # matplotlib hides labels that begin with an underscore.
    return f"\u200b{short}" if short.startswith("_") else short


def draw_as_text(texts: Iterable[Text]) -> None:
    """Has texts with users' names drawn as they are, in fonts that have their letters."""
    for text in texts:
        text.set_parse_math(False)  # "$" in a name is a dollar, not a formula
        text.set_fontfamily([name for name, _ in _fonts(text.get_text())])


def _words_for(letter: str) -> str:
    """An emoji by its name, any other letter as its escape."""
    name = unicodedata.name(letter, "")
    if name.startswith(_REGIONAL):
        return name.removeprefix(_REGIONAL)  # two of them are a flag
    if name and unicodedata.category(letter) == "So":
        return f":{name.lower().replace(' ', '_')}:"
    return letter.encode("unicode_escape").decode()


def _fonts(words: str) -> list[tuple[str, frozenset[int]]]:
    """The fonts to draw `words` with, the first first, and the letters that each has."""
    fonts = [("DejaVu Sans", _letters("DejaVu Sans"))]
    if all(ord(letter) in fonts[0][1] for letter in words):
        return fonts  # the common case asks for no list of the system's fonts
    _find_fallbacks()
    return fonts + [(name, letters) for name in _FALLBACKS if (letters := _letters(name))]


@functools.cache
def _find_fallbacks() -> None:
    """matplotlib's list of fonts is of its first use: those installed since are added."""
    known = {font.name for font in font_manager.fontManager.ttflist}
    if known.intersection(_FALLBACKS):
        return
    for path in font_manager.findSystemFonts():
        if Path(path).stem in _FALLBACK_FILES:
            with contextlib.suppress(OSError, RuntimeError):  # of a kind that it cannot read
                font_manager.fontManager.addfont(path)


@functools.cache
def _letters(font: str) -> frozenset[int]:
    try:
        path = font_manager.findfont(FontProperties(family=font), fallback_to_default=False)
        return frozenset(font_manager.get_font(path).get_charmap())
    except (ValueError, OSError, RuntimeError):  # not installed, or of a kind it cannot read
        return frozenset()
