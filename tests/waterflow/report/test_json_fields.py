import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterflow.common.errors import ReportError
from waterflow.report.json_fields import Fields, decode_float, encode_float

pytestmark = pytest.mark.virtual

DOCUMENT = {
    "text": "a",
    "count": 3,
    "on": True,
    "rate": 1.5,
    "rates": [1, 2.5, "nan"],
    "names": ["a", "b"],
    "nothing": None,
    "inner": {"x": "y"},
}
FIELDS = Fields(DOCUMENT, "run.")


@given(st.floats())
def test_any_number_survives_strict_json(value):
    text = json.dumps(encode_float(value), allow_nan=False)
    back = decode_float(json.loads(text))
    assert math.isnan(back) if math.isnan(value) else back == value


@pytest.mark.parametrize("value", ["NaN", "1.5", True, None, [1.0]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ReportError, match="expected a number"):
        decode_float(value)


def test_each_reader_returns_its_kind():
    assert FIELDS.text("text") == "a"
    assert FIELDS.integer("count") == 3
    assert FIELDS.flag("on") is True
    assert FIELDS.number("rate") == 1.5
    assert FIELDS.numbers("rates")[:2] == [1.0, 2.5]
    assert math.isnan(FIELDS.numbers("rates")[2])
    assert FIELDS.texts("names") == FIELDS.items("names") == ["a", "b"]
    assert FIELDS.text_or_none("nothing") is None
    assert FIELDS.integer_or_none("nothing") is None
    assert FIELDS.integer_or_none("count") == 3
    assert FIELDS.inner("inner").text("x") == "y"
    assert FIELDS.text_map("inner") == {"x": "y"}


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: FIELDS.text("missing"), "run.missing is missing"),
        (lambda: FIELDS.text("count"), "run.count: expected str, found 3"),
        (lambda: FIELDS.integer("on"), "run.on: expected int, found True"),
        (lambda: FIELDS.text_or_none("missing"), "run.missing is missing"),
        (lambda: FIELDS.number("text"), "run.text: expected a number, found 'a'"),
        (lambda: FIELDS.texts("rates"), "run.rates: expected a list of texts"),
        (lambda: FIELDS.inner("names"), "run.names: expected dict"),
        (lambda: FIELDS.inner("inner").integer("x"), "run.inner.x: expected int, found 'y'"),
        (lambda: Fields([], ""), "the document: expected an object"),
        (lambda: FIELDS.numbers("text"), "run.text: expected list"),
    ],
)
def test_an_error_names_the_field(read, message):
    with pytest.raises(ReportError) as caught:
        read()
    assert message in str(caught.value)


def test_long_values_are_shown_short():
    with pytest.raises(ReportError) as caught:
        Fields({"x": "y" * 1000}, "").integer("x")
    assert len(str(caught.value)) < 100
