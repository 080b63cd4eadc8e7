"""Names in pictures are readable, whatever fonts there are."""

import io

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from waterflow.report.letters import draw_as_text, drawable

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def no_fonts_but_matplotlibs(monkeypatch):
    monkeypatch.setattr("waterflow.report.letters._FALLBACKS", ())


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("run \U0001f680", "run :rocket:"),
        ("\U0001f469\u200d\U0001f4bb x", ":woman::personal_computer: x"),
        ("\U0001f44d\U0001f3fd", ":thumbs_up_sign:"),
        ("\U0001f1e9\U0001f1ea", "DE"),
        ("\u6a21 a", r"\u6a21 a"),
        ("caf\xe9 $1$", "caf\xe9 $1$"),
        ("two\nlines", "two lines"),
        ("_x", "\u200b_x"),
        ("\ud800", r"\ud800"),
    ],
    ids=ascii,
)
def test_letters_that_no_font_has_are_told_in_words(name, drawn, recwarn):
    assert drawable(name) == drawn
    figure = Figure()
    FigureCanvasAgg(figure)
    draw_as_text([figure.text(0, 0, drawable(name))])
    figure.savefig(io.BytesIO())
    assert not list(recwarn)  # matplotlib warns of each letter that its fonts have not


def test_long_names_are_shortened_after_that():
    assert len(drawable("\U0001f680" * 20, 32)) == 32
