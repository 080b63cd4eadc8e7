"""Sizes and durations: what is read, what is refused, what is printed."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterflow.common.errors import JobError
from waterflow.common.units import format_bytes, format_seconds, parse_bytes

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("0.5 GiB", 2**29),
        (".5gib", 2**29),
        (1048576, 1048576),
        ("1048576", 1048576),
        (" 16 gb ", 16 * 10**9),
        ("0.1TB", 10**11),
        ("1.0000000001KiB", 1024),
        (np.int64(7), 7),
        ("1B", 1),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_reads(value, size):
    assert parse_bytes(value) == size
    assert type(parse_bytes(value)) is int


@pytest.mark.parametrize(
    "value",
    [
        *("", "MiB", "12 parsecs", "1e9", "-5MiB", "1,5GB", "5G", "1.", "٣MiB", "nan", "1 2MiB"),
        *("0", "0MiB", "0.5B", "9" * 5000, "9" * 25, 0, -1, 2**63, True, False, 1.5, None),
        *(b"5MiB", [1], np.float64(5)),
    ],
)
def test_refuses_and_names_the_value(value):
    with pytest.raises(JobError, match=re.escape(repr(value)[:40])) as caught:
        parse_bytes(value)
    assert "512MiB" in str(caught.value)  # an example of what would be right


@given(st.integers(1, 2**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "\t"]))
def test_every_unit_in_any_case(number, unit, gap):
    for spelled in (unit, unit.lower(), unit.upper()):
        assert parse_bytes(f"{number}{gap}{spelled}") == number * UNITS[unit]


@given(st.integers(1, 2**62))
def test_a_number_is_bytes(size):
    assert parse_bytes(size) == parse_bytes(str(size)) == parse_bytes(f"{size}B") == size


@given(st.integers(1, 2**60))
def test_what_is_printed_reads_back_within_its_last_digit(size):
    again = parse_bytes(format_bytes(size))
    assert abs(again - size) <= max(1, 0.0005 * size * 100)
    assert len(format_bytes(size)) <= len("1023.9 KiB") or size >= 2**50


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (512 * 2**20, "512.0 MiB"),
        (1536 * 2**20, "1.5 GiB"),
        (5 * 2**40, "5.0 TiB"),
        (-(2**21), "-2.0 MiB"),
    ],
)
def test_prints_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 ms"),
        (0.0032, "3.2 ms"),
        (0.9999, "1.0 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (float("inf"), "inf s"),
        (float("nan"), "nan s"),
    ],
)
def test_prints_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_sizes_with_more_decimals():
    assert [format_bytes(n, decimals=2) for n in (0, 1023, 1536, -1536, 3 << 29, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "-1.50 KiB",
        "1.50 GiB",
        "5.00 TiB",
    ]
    assert format_bytes((1 << 30) - 1, decimals=2) == "1.00 GiB"
