"""The memory that a process can have: the machine's, or its control groups'."""

import os

import pytest

from waterflow.common.machine import memory_limit

pytestmark = pytest.mark.virtual
MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limit(tmp_path, own, files):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return memory_limit(tmp_path / "groups", tmp_path / "own")


def test_without_groups_it_is_the_machines(tmp_path):
    assert limit(tmp_path, "", {}) == (MACHINE, "this machine has")


@pytest.mark.parametrize(
    ("own", "files", "size"),
    [
        ("0::/\n", {"memory.max": "1000\n"}, 1000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000\n"}, 2000),
        ("0::/a/b\n", {"a/b/memory.max": "500\n", "a/memory.max": "2000\n"}, 500),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "3000\n"}, 3000),
        ("4:memory:/outside\n0::/\n", {"memory/memory.limit_in_bytes": "4000"}, 4000),
        ("7:blkio:/\n0::/\n", {"memory.max": "max"}, MACHINE),
        ("0::/\n", {"memory.max": str(2 * MACHINE)}, MACHINE),
    ],
)
def test_the_smallest_limit_counts(tmp_path, own, files, size):
    assert limit(tmp_path, own, files).size == size


def test_a_limit_says_where_it_is_from(tmp_path):
    found = limit(tmp_path, "0::/\n", {"memory.max": "1000\n"})
    assert found.source == "this container may have"
