"""Measured figures of public artefacts, each with its source and licence in the file."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


@cache
def load_json(name: str) -> Any:
    """A table, by the name of its file without the ending."""
    return json.loads((_FOLDER / f"{name}.json").read_text())


@cache
def muri_overheads() -> dict[tuple[int, str], float]:
    """Seconds to start a job, by GPUs and model (Rivendile/Muri, simulator, Apache-2.0)."""
    with (_FOLDER / "muri_overheads.csv").open() as file:
        rows = csv.DictReader(file)
        return {(int(r["num_gpu"]), r["model_name"]): float(r["seconds"]) for r in rows}


@cache
def tiresias_services() -> tuple[float, ...]:
    """GPU seconds of 1,001 jobs, sorted (SymbioticLab/Tiresias, yarn-gput1000.csv, Apache-2.0)."""
    with (_FOLDER / "tiresias_gpu_seconds.csv").open() as file:
        return tuple(sorted(float(row["duration"]) for row in csv.DictReader(file)))
