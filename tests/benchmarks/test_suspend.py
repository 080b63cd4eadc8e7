"""The benchmark of checkpoints measures what it says, on a small model."""

import pytest
import torch

from benchmarks.suspend import case, measure

pytestmark = pytest.mark.cpu


def test_all_keys_and_the_state_comes_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with case("resnet50_small") as made:
        before = [parameter.clone() for parameter in made.job.model.parameters()]
        found = measure(made, 1)
        made.checkpoint()
        with torch.no_grad():
            for parameter in made.job.model.parameters():
                parameter.zero_()
        made.restore()
        assert all(map(torch.equal, before, made.job.model.parameters()))
    keys = {"snapshot_s", "checkpoint_s", "restore_s", "torch_save_s", "torch_load_s"}
    assert keys < found.keys()
    assert all(0 < found[key] < 60 for key in keys)
    assert not list(tmp_path.iterdir())
