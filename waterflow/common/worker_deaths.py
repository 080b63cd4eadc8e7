"""Worker processes of data loaders that die while somebody else waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils.data._utils import signal_handling


@contextlib.contextmanager
def unless_a_worker_dies() -> Iterator[None]:
    """Around a wait, which is over early where torch tells the main thread, in the middle of
    whatever that does, that a worker of some loader has died: the job whose loader it is hears of
    it from that, and it is nobody else's affair."""
    try:
        yield
    except RuntimeError as error:
        if not _is_told_by_signal(error):
            raise


def _is_told_by_signal(error: RuntimeError) -> bool:
    where = error.__traceback__
    while where is not None and where.tb_next is not None:
        where = where.tb_next
    return where is not None and where.tb_frame.f_code.co_filename == signal_handling.__file__
