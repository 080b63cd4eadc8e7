"""Of the lock for what is done between steps, it is known who has it and who waits."""

from __future__ import annotations

import threading

import pytest

from waterflow.engine.python_lock import PythonLock

pytestmark = pytest.mark.cpu


def test_who_has_it_and_who_waits_is_known() -> None:
    asked = threading.Condition()
    lock, told = PythonLock(asked), threading.Event()

    def listen() -> None:
        with asked:
            listening.set()
            asked.wait(60)
        told.set()

    def want() -> None:
        with lock:
            owned.set()

    listening, owned = threading.Event(), threading.Event()
    listener, waiting = threading.Thread(target=listen), threading.Thread(target=want)
    listener.start()
    assert listening.wait(60)
    here = threading.get_ident()
    with lock, lock:
        waiting.start()
        assert told.wait(60), "who begins to wait is told of"
        assert waiting.ident is not None
        assert lock.is_kept_from([waiting.ident], [here])
        assert not lock.is_kept_from([here], [here]), "who has it does not wait"
        assert not lock.is_kept_from([waiting.ident], [waiting.ident])
        assert not owned.is_set()
    assert owned.wait(60)
    waiting.join(60)
    listener.join(60)
    assert not lock.is_kept_from([waiting.ident], [here])


def test_it_is_given_up_with_an_error() -> None:
    lock = PythonLock()
    with pytest.raises(ValueError, match="as wanted"), lock:
        raise ValueError("as wanted")
    other = threading.Thread(target=lock.__enter__)
    other.start()
    other.join(60)
    assert not other.is_alive()
