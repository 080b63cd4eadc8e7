"""A room that goes while somebody works in it: his tensors are never taken for ordinary memory."""

from __future__ import annotations

import pytest
import torch

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.cpu

MIB = 1 << 20


def test_tensors_made_after_its_arena_was_retired_go_back_to_it():
    _C.install_lane_allocator()
    arena = _C.Arena.host(MIB, 1)
    _C.register_arena(arena)
    with _C.LaneScope(arena, 0, 1, lambda size: False, arena):
        _C.retire_arena(arena)  # its job has ended
        first = torch.ones(1000)
        assert arena.owns(first.data_ptr())
        del first
        kept = torch.ones(1000)
    assert arena.held(1) > 0
    del kept
    assert arena.held(1) == 0


def test_whoever_works_in_it_after_it_was_retired_gives_his_tensors_back_to_it():
    _C.install_lane_allocator()
    arena = _C.Arena.host(MIB, 1)
    _C.register_arena(arena)
    _C.retire_arena(arena)  # nothing is in it, and nobody
    with _C.LaneScope(arena, 0, 1, lambda size: False, arena):
        kept = torch.ones(1000)
    assert _C.is_in_arena(kept.data_ptr())
    del kept
    assert arena.held(1) == 0
