"""A process that calls functions for another one: what is measured has its own allocator and CUDA.

One JSON line asks for a function by name, one line answers. `Worker` is the side that asks.

    {"function": "package.module:name", "arguments": {...}}
    {"value": ...}  or  {"error": "message", "kind": "class of the exception"}
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]


class WorkerError(Exception):
    """The function raised, or its process died or did not answer; `kind` names the exception."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class Worker:
    """A process of its own, with more in its environment."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
        )

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def call(self, function: str, timeout: float, **arguments: Any) -> Any:
        """Calls a function over there and waits for its value.

        Raises:
            WorkerError: it raised, died, or took longer than `timeout` seconds; then it is ended.
        """
        self.ask(function, **arguments)
        return self.answer(timeout)

    def ask(self, function: str, **arguments: Any) -> None:
        """Asks, without waiting."""
        assert self._process.stdin is not None
        question = json.dumps({"function": function, "arguments": arguments})
        with contextlib.suppress(BrokenPipeError):  # if it has died, `answer` says so
            print(question, file=self._process.stdin, flush=True)

    def answer(self, timeout: float) -> Any:
        """Waits for what was asked last."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, timeout))
        if not ready:
            self.end()
            raise WorkerError(f"no answer within {timeout:.0f} s", "Timeout")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerError(f"its process ended with exit code {code}", "Death")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"], reply["kind"])
        return reply["value"]

    def close(self) -> None:
        """Lets it end by itself, for a while."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            self.end()

    def end(self) -> None:
        """Ends it now."""
        self._process.kill()
        self._process.wait()


def _answer(line: str) -> dict[str, Any]:
    asked = json.loads(line)
    module, _, name = asked["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        return {"value": function(**asked["arguments"])}
    except Exception as error:
        traceback.print_exc()
        traceback.clear_frames(error.__traceback__)
        return {"error": str(error) or type(error).__name__, "kind": type(error).__name__}


def serve(questions: TextIO, answers: TextIO) -> None:
    """Answers line by line until nobody asks any more."""
    for line in questions:
        print(json.dumps(_answer(line)), file=answers, flush=True)


def main() -> None:
    # Whatever prints goes to stderr: stdout belongs to the answers.
    importlib.import_module("benchmarks.gpu.contenders")  # while others start, too
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers)
    answers.flush()
    # Not through the interpreter's end: an engine that hangs would hold this process for ever.
    os._exit(0)


if __name__ == "__main__":
    main()
