"""The slower tier, and moves of storages by a tape alone."""

from __future__ import annotations

import pytest
import torch

from waterflow.allocator_ext import _C

pytestmark = pytest.mark.cpu

SLOT = _C.ArgumentKind.SLOT


def tier(kind, tmp_path, size=1 << 22):
    return _C.Tier.memory(size) if kind == "memory" else _C.Tier.file(str(tmp_path), size)


def moving_tape(*, away=False):
    """Doubles what is in slot 0, has it leave, and adds two to a view of it once it is back."""
    tape = _C.Tape(4, 0)
    if away:
        tape.add_move(_C.MoveEnd.FETCH, 0, -1, 0, True)
        tape.add_move(_C.MoveEnd.BACK, 0, -1, 0, True)
    tape.add_operator("aten::mul_", "Tensor", [(SLOT, 0), (SLOT, 1)], [0], [])
    tape.add_operator("aten::view", "", [(SLOT, 0), (_C.ArgumentKind.CONSTANT, [-1])], [2], [])
    for end in (_C.MoveEnd.LEAVE, _C.MoveEnd.GONE, _C.MoveEnd.FETCH, _C.MoveEnd.BACK):
        tape.add_move(end, 0, -1 if away else 0, 4096, True)
    added = [(SLOT, 2), (SLOT, 1), (_C.ArgumentKind.CONSTANT, 1)]
    tape.add_operator("aten::add_", "Tensor", added, [2], [])
    if away:
        tape.add_move(_C.MoveEnd.LEAVE, 0, -1, 0, True)
        tape.add_move(_C.MoveEnd.GONE, 0, -1, 0, True)
    tape.set_slot(1, torch.tensor(2.0))
    return tape


@pytest.mark.parametrize("kind", ["memory", "disk"])
@pytest.mark.parametrize("count", [1, 1000, 700_000])
def test_a_storage_comes_back_with_all_tensors_over_it(kind, count, tmp_path):
    tape, store = moving_tape(), tier(kind, tmp_path)
    tape.set_tier(store)
    values = torch.arange(count, dtype=torch.float32)
    held = values.clone().view(count, 1)
    tape.set_slot(0, held)
    tape.run(0, len(tape))
    assert torch.equal(held.view(-1), 2 * values + 2)
    assert torch.equal(tape.slot(2), 2 * values + 2)
    assert tape.slot(2).data_ptr() == held.data_ptr()
    assert store.moved == 2 * held.nbytes
    assert list(tmp_path.iterdir()) == []  # a file has no name


def test_while_it_is_away_its_bytes_are_at_home(tmp_path):
    tape, store = moving_tape(), tier("memory", tmp_path)
    tape.set_tier(store)
    held = torch.full((5000,), 3.0)
    tape.set_slot(0, held)
    tape.run(0, 4)  # until it is gone
    away = held.data_ptr()
    assert torch.equal(held, torch.full((5000,), 6.0))
    tape.run(4, len(tape))
    assert held.data_ptr() != away
    assert torch.equal(held, torch.full((5000,), 8.0))


def test_a_persistent_value_stays_where_its_user_has_it():
    tape = moving_tape(away=True)
    tape.set_tier(_C.Tier.memory(1 << 16))
    own = torch.arange(6000, dtype=torch.float32)
    expected, address = 2 * own + 2, own.data_ptr()
    stand_in = tape.keep_away(0, own)
    inside = torch.empty(0).set_(stand_in.untyped_storage(), 0, own.shape, own.stride())
    assert inside.data_ptr() == address
    tape.set_slot(0, inside)
    tape.run(0, 2)
    assert inside.data_ptr() != address  # fetched
    tape.run(2, len(tape))
    assert own.data_ptr() == inside.data_ptr() == address
    assert torch.equal(own, expected)
    tape.clear([0, 2])
    tape.forget_away()
    assert torch.equal(own, expected)


def test_a_step_that_stops_half_way_leaves_users_tensors_alone():
    tape = moving_tape(away=True)
    tape.set_tier(_C.Tier.memory(1 << 16))
    own = torch.ones(6000)
    stand_in = tape.keep_away(0, own)
    tape.set_slot(0, torch.empty(0).set_(stand_in.untyped_storage(), 0, own.shape, own.stride()))
    tape.run(0, 1)  # a copy is under way
    tape.clear([0])
    tape.forget_away()
    assert torch.equal(own, torch.ones(6000))


def test_no_folder_and_no_room_are_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"cannot spill 4096 bytes to .*nowhere"):
        _C.Tier.file(str(tmp_path / "nowhere"), 4096)
    with pytest.raises(RuntimeError, match="cannot spill"):
        _C.Tier.file(str(tmp_path), 1 << 60)
    assert list(tmp_path.iterdir()) == []
