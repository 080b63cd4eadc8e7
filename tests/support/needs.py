"""What a job needs, as users are told."""

from __future__ import annotations

import re

import pytest

import waterflow as wf


def needed(job: wf.Job) -> int:
    """Bytes under which the job runs alone."""
    with pytest.raises(wf.BudgetError) as caught:
        wf.run([job], memory="1KiB", threads=1)
    found = re.search(r"needs (\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])
