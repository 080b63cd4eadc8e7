"""A run that goes on where it was stopped: by Ctrl-C, a crash, or the end of its time.

python examples/resume.py      again and again, until all steps are done
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf

FOLDER = "waterflow-checkpoints"


def job(rate: float) -> wf.Job:
    torch.manual_seed(0)
    inputs = torch.randn(2048, 16)
    rows = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))
    return wf.Job(
        f"adam-{rate}",
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=rate),
        loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        data=DataLoader(rows, batch_size=32, shuffle=True),
        epochs=5,
        seed=0,
    )


if __name__ == "__main__":
    jobs = [job(rate) for rate in (1e-2, 1e-3)]
    report = wf.run(
        jobs, memory="64MiB", checkpoint=FOLDER, checkpoint_every="100 steps", resume=FOLDER
    )
    for each in report:
        print(f"{each.name}: {each.state}, {each.steps} steps, {each.resumed_steps} made before")
