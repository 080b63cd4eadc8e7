"""The largest batch that fits: a search, and what it finds for one job alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from waterflow.common.errors import BudgetError, JobError
from waterflow.common.units import format_bytes
from waterflow.study.estimate import fits_in_turn
from waterflow.study.job_specs import StudyJob

#: No search goes beyond this batch: sizes stay within what 64 bits count.
_LARGEST_BATCH = 1 << 30


def largest_alone(job: StudyJob, budget: int) -> int | None:
    """The largest batch with which it fits alone; None where its batch is fixed.

    Raises BudgetError where not even one sample fits, or not what was asked for.
    """
    if job.is_fixed or job.batch is not None:
        _check_alone(job, job.batch, budget)
        return job.batch
    found = largest_size(lambda size: fits_in_turn([job.sized_job(size)], budget), None)
    if not found:
        _check_alone(job, 1, budget)
    return found


def _check_alone(job: StudyJob, batch: int | None, budget: int) -> None:
    first = job.sized_job(batch)
    if first.solo_bytes > budget:
        what = "it" if batch is None else f"a batch of {batch}"
        raise BudgetError(
            f"{job.name}: {what} needs {first.solo_bytes} bytes "
            f"({format_bytes(first.solo_bytes)}) alone, the budget is {budget} bytes "
            f"({format_bytes(budget)}). Raise the budget, or use a smaller model"
        )


def largest_size(fits: Callable[[int], bool], bound: int | None) -> int:
    """The largest size that fits, where every smaller one does; 0 if there is none.

    Fragmentation may break that rule near the border: one that does not fit below one that does
    is not looked for. A batch of one is asked for last: its shapes are captured by themselves.
    """
    low, high = 0, 2
    for high in _doubling(bound):
        if not fits(high):
            break
        low = high
    else:
        return low
    if low == 0 and bound is None:
        return int(fits(1))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _doubling(bound: int | None) -> Iterator[int]:
    """Sizes to try, up to the bound: from the bound down costs least where there is one."""
    if bound is not None:
        yield from (bound,)
        return
    size = 2
    while size < _LARGEST_BATCH:
        yield size
        size *= 2
    raise JobError(f"a batch of {_LARGEST_BATCH} fits still: does the model depend on the batch?")
