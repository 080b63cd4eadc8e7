"""Small jobs of the zoo, to plan and to train."""

from __future__ import annotations

import torch

import waterflow as wf
from waterflow.models.zoo import TASKS
from waterflow.study.job_specs import job_of

BERT, LSTM, TABLE, CNN = "bert_base_small", "lstm_lm_small", "deepfm_small", "resnet50_small"


def jobs_of(*tasks: str, batch: int = 8, steps: int = 4) -> list[wf.Job]:
    """Jobs that really train, numbered."""
    torch.manual_seed(0)
    made = [job_of(TASKS[task], batch, f"{task}-{n}") for n, task in enumerate(tasks)]
    for job in made:
        job.data, job.steps = list(job.data) * steps, steps
    return made
