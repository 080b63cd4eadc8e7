"""What an observer sees: code that is entered and C functions that it calls, on its own thread."""

import importlib
import importlib.util
import os
import sys
import threading

import pytest
import torch

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.virtual


def plain():
    return len("a")


def numbers():
    yield 1
    yield 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_code_and_calls():
    with _C.Observer() as seen:
        plain()
        plain()
        [].append(1)
    assert seen.codes() == [plain.__code__]
    calls = [(function, code.co_name, line) for function, code, line in seen.calls()]
    here = sys._getframe().f_code
    assert calls == [
        (len, "plain", plain.__code__.co_firstlineno + 1),
        (list.append, here.co_name, here.co_firstlineno + 4),
    ]


def test_callbacks_from_c():
    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    generator = numbers()
    next(generator)
    with _C.Observer() as seen:
        Square.apply(x).sum().backward()
        sorted([2, 1], key=lambda v: v)
        next(generator)
    names = {code.co_qualname for code in seen.codes()}
    assert {"hook", "Square.forward", "Square.backward", "numbers"} <= names
    assert any(name.endswith("<lambda>") for name in names)


def divided(x):
    return 1 / x


def hook(gradient):
    return gradient


def test_objects_are_not_kept():
    tensor = torch.ones(2)
    before = sys.getrefcount(tensor)
    with _C.Observer() as seen:
        tensor.add(1)
    assert sys.getrefcount(tensor) == before
    assert [call[0].__name__ for call in seen.calls()] == ["add"]


def test_other_threads_are_not_seen():
    ready, go = threading.Event(), threading.Event()

    def work():
        ready.set()
        assert go.wait(60)
        plain()

    thread = threading.Thread(target=work)
    thread.start()
    assert ready.wait(60)
    with _C.Observer() as seen:
        go.set()
        thread.join()
    assert plain.__code__ not in seen.codes()


def test_a_profiler_that_was_set_goes_on():
    events = []
    sys.setprofile(lambda frame, event, argument: events.append((event, frame.f_code.co_name)))
    try:
        with _C.Observer() as seen:
            plain()
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert ("call", "plain") in events
    assert seen.codes() == [plain.__code__]


def test_errors_end_the_observation():
    observer = _C.Observer()
    with pytest.raises(ZeroDivisionError), observer:
        divided(0)
    assert sys.getprofile() is None
    assert observer.codes() == [divided.__code__]


def test_observers_nest():
    with _C.Observer() as outer:
        with _C.Observer() as inner:
            plain()
        hook(1)
    assert inner.codes() == [plain.__code__]
    assert outer.codes() == [plain.__code__, hook.__code__]


def test_calls_are_those_of_the_code_not_seen_through():
    def outer():
        return plain()

    with _C.Observer(lambda code: code is plain.__code__) as seen:
        outer()
    assert [(function, code) for function, code, _ in seen.calls()] == [(len, outer.__code__)]
    with pytest.raises(KeyError), _C.Observer(lambda code: {}[code]):
        plain()


class Hook:
    """A finder of modules that has others do its work, as packages install them."""

    def find_spec(self, name, path, target=None):
        looked_for(name)
        return None


def looked_for(name):
    os.stat(os.curdir)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("def twice(x):\n    return abs(x) * 2\n\ntwice(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [Hook(), *sys.meta_path])
    yield "imported_late"
    sys.modules.pop("imported_late", None)


def test_what_imports_a_module_is_not_kept_and_its_body_is(module):
    with _C.Observer() as seen:
        importlib.import_module(module)
    names = [code.co_name for code in seen.codes()]
    assert names == ["import_module", "_gcd_import", "_sanity_check", "<module>", "twice"]
    called = {(function, code.co_name) for function, code, _ in seen.calls()}
    assert (abs, "twice") in called
    assert "looked_for" not in {name for _, name in called}
    with _C.Observer() as again:
        looked_for(module)  # outside of an import it is code as any other
    assert again.codes() == [looked_for.__code__]


def test_who_looks_for_a_module_asks_the_files(module):
    def looks():
        return importlib.util.find_spec(module)

    through = ("importlib", "os.py")
    with _C.Observer(lambda code: any(map(code.co_filename.__contains__, through))) as seen:
        looks()
    assert looked_for.__code__ not in seen.codes()
    assert (os.stat, looks.__code__) in [(function, code) for function, code, _ in seen.calls()]
