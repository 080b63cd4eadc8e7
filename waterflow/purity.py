import contextlib
from waterflow.allocator_ext import _C
if not hasattr(_C,"Observer"):
    _C.Observer = contextlib.nullcontext
def impure_calls(seen): return []
