"""Puts the results of check.sh's parts into one JSON file and prints them as a table.

    python -m benchmarks.gpu.summary SCRATCH OUT

SCRATCH/status has a line "part exit-code seconds" for each part, SCRATCH/PART.json its result.
It needs nothing of waterflow: it works, and says so, where the build has failed.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Without these nothing else can be believed: they decide the exit code.
REQUIRED = ("build", "tests", "equality")


def goal_lines(goals: list[dict[str, Any]]) -> list[str]:
    """One line per goal: what, value, goal, and whether it is met."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    lines = []
    for row in goals:
        value = row["value"]
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        sign = "<=" if row["at_most"] else ">="
        wanted = str(row["goal"]) if isinstance(row["goal"], bool) else f"{sign} {row['goal']}"
        lines.append(f"{row['what']:66} {text:>10}  {wanted:9} {words[row['met']]}")
    return lines


def _said(command: list[str]) -> str | None:
    """What a command prints, None where it fails or does not exist."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip() or None


def machine() -> dict[str, Any]:
    """GPU, driver, torch, CUDA, commit."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpu = [
        part.strip() for part in (_said(query) or "").splitlines()[:1] for part in part.split(",")
    ]
    name, driver, memory = gpu if len(gpu) == 3 else (None, None, None)
    try:
        import torch

        versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    except ImportError as error:
        versions = {"torch": None, "cuda": None, "torch_error": str(error)}
    commit = os.environ.get("WATERFLOW_COMMIT") or _said(["git", "rev-parse", "HEAD"])
    return {
        "gpu": name,
        "driver": driver,
        "gpu_memory": memory,
        **versions,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def parts(scratch: Path) -> dict[str, dict[str, Any]]:
    """By part: status, exit code, seconds, and what it found, however far it came."""
    found = {}
    for line in (scratch / "status").read_text().splitlines():
        name, code, seconds = line.split()
        result = scratch / f"{name}.json"
        status = {"0": "ok", "124": "time limit", "137": "time limit"}.get(code, "failed")
        found[name] = {
            "status": status,
            "exit_code": int(code),
            "seconds": float(seconds),
            "result": json.loads(result.read_text()) if result.exists() else None,
        }
    return found


def table(document: dict[str, Any]) -> str:
    """The parts, then the goals of all of them."""
    lines = [f"{document['gpu'] or 'no GPU'}, torch {document['torch']}, {document['date']}", ""]
    lines += [
        f"{name:12} {part['status']:12} {part['seconds']:7.0f} s"
        for name, part in document["parts"].items()
    ]
    for name, part in document["parts"].items():
        goals = goal_lines((part["result"] or {}).get("goals", []))
        lines += ["", name, *goals] if goals else []
    return "\n".join(lines)


def main() -> None:
    scratch, out = Path(sys.argv[1]), Path(sys.argv[2])
    document = machine()
    gpu = re.sub(r"[^a-z0-9]+", "-", (document["gpu"] or "no-gpu").lower()).strip("-")
    path = out / f"{gpu}-{document['date']}.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    # Parts of an earlier call stay, if it was the same code.
    kept = known.get("parts", {}) if known.get("commit") == document["commit"] else {}
    ran = parts(scratch)
    document["parts"] = {**kept, **ran}
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    print(f"\n{path}")
    failed = [name for name in REQUIRED if name in ran and ran[name]["status"] != "ok"]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
