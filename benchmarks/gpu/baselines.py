"""What a user would run instead of waterflow, each at its best: pinned batches, no reads of losses.

All are contenders: they make their jobs once and advance them by any number of steps, again and
again, and are timed alike.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

import waterflow as wf
from benchmarks.gpu.jobs import Batch, Case, make_batches, make_job, make_model, make_optimizer


class Unsupported(Exception):
    """This contender cannot train this case; says why."""


def synchronize(device: str) -> None:
    """Waits for all that the device was given."""
    if device != "cpu":
        torch.cuda.synchronize()


class Contender(ABC):
    """Trains `jobs` jobs of a case."""

    def __init__(self, case: Case, jobs: int) -> None:
        self.case = case
        self.jobs = jobs

    @abstractmethod
    def advance(self, steps: int) -> None:
        """Every job makes so many steps; the device may still be at work on them."""

    def measure(self, steps: int) -> dict[str, float]:
        """Seconds, and seconds of processor time, of so many steps; a few untimed ones first."""
        self.advance(max(2, steps // 5))
        synchronize(self.case.device)
        started, used = time.perf_counter(), time.process_time()
        self.advance(steps)
        synchronize(self.case.device)
        seconds, host = time.perf_counter() - started, time.process_time() - used
        self.rest()
        return {"seconds": seconds, "host_seconds": host}

    def rest(self) -> None:
        """Gives cached memory back: others are measured on this device meanwhile."""
        if self.case.device != "cpu":
            torch.cuda.empty_cache()

    def close(self) -> dict[str, Any]:
        """Ends the jobs; returns what is worth keeping of them."""
        return {}


class Eager(Contender):
    """The plain loop, one job after another, with nothing in it that waits for the device."""

    def __init__(self, case: Case, jobs: int) -> None:
        super().__init__(case, jobs)
        self.batches = make_batches(case)
        self.made = [make_job(case, f"job-{index}", seed=index) for index in range(jobs)]
        self._turn = 0

    def advance(self, steps: int) -> None:
        for job in self.made:
            self.train(job, steps)

    def train(self, job: wf.Job, steps: int) -> None:
        for number in range(steps):
            batch = self.batches[number % len(self.batches)]
            self.after_step(self.step(job, self.on_device(batch)))

    def on_device(self, batch: Batch) -> Batch:
        inputs, labels = (part.to(self.case.device, non_blocking=True) for part in batch)
        return inputs, labels

    def step(self, job: wf.Job, batch: Batch) -> torch.Tensor:
        job.optimizer.zero_grad(set_to_none=True)
        loss = job.loss(job.model, batch)
        loss.backward()
        job.optimizer.step()
        return loss.detach()

    def after_step(self, loss: torch.Tensor) -> None:
        """Nothing: the loss stays on the device."""


class EagerReading(Eager):
    """The plain loop as most write it: every step reads its loss, and so waits for the device."""

    def after_step(self, loss: torch.Tensor) -> None:
        loss.item()


class Compiled(Eager):
    """One job after another, their models under torch.compile."""

    def __init__(self, case: Case, jobs: int) -> None:
        super().__init__(case, jobs)
        for job in self.made:
            job.model.compile()


class Threads(Eager):
    """A thread and a stream for each job. The threads stay: cuDNN's plans belong to them."""

    def __init__(self, case: Case, jobs: int) -> None:
        super().__init__(case, jobs)
        self._pools = [ThreadPoolExecutor(1) for _ in self.made]
        on_cpu = case.device == "cpu"
        self._streams = [None if on_cpu else torch.cuda.Stream() for _ in self.made]
        synchronize(case.device)  # the models were made on another stream

    def advance(self, steps: int) -> None:
        turns = zip(self._pools, self.made, self._streams, strict=True)
        running = [pool.submit(self._train_on, stream, job, steps) for pool, job, stream in turns]
        for thread in running:
            thread.result()

    def _train_on(self, stream: torch.cuda.Stream | None, job: wf.Job, steps: int) -> None:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self.train(job, steps)

    def close(self) -> dict[str, Any]:
        for pool in self._pools:
            pool.shutdown()
        return {}


class Vmap(Contender):
    """Identical jobs fused into one model by torch.func.vmap; elementwise optimizers fuse, too."""

    def __init__(self, case: Case, jobs: int) -> None:
        super().__init__(case, jobs)
        models = [make_model(case, seed=index) for index in range(jobs)]
        if any(isinstance(part, torch.nn.BatchNorm2d) for part in models[0].modules()):
            raise Unsupported("vmap cannot update the running statistics of BatchNorm")
        self._model = models[0]
        self._state, self._buffers = torch.func.stack_module_state(models)
        self._optimizer = make_optimizer(case, self._state.values())
        self._loss = make_job(case).loss
        stacked = [[torch.stack([part] * jobs) for part in batch] for batch in make_batches(case)]
        pinned = case.device != "cpu"
        self._batches = [[p.pin_memory() if pinned else p for p in batch] for batch in stacked]

    def advance(self, steps: int) -> None:
        losses = torch.func.vmap(self._loss_of_one, randomness="different")
        for number in range(steps):
            batch = self._batches[number % len(self._batches)]
            moved = [part.to(self.case.device, non_blocking=True) for part in batch]
            self._optimizer.zero_grad(set_to_none=True)
            losses(self._state, self._buffers, *moved).sum().backward()
            self._optimizer.step()

    def _loss_of_one(
        self, state: Any, buffers: Any, inputs: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        def model(inputs: torch.Tensor) -> Any:
            return torch.func.functional_call(self._model, (state, buffers), (inputs,))

        return self._loss(model, (inputs, labels))  # type: ignore[arg-type]


def use_rmm() -> bool:
    """Makes RMM's pool torch's allocator in this process, before anything is on the device."""
    global _rmm
    if _rmm:
        return True
    try:
        import rmm
        from rmm.allocators.torch import rmm_torch_allocator
    except ImportError as error:
        raise Unsupported(f"rmm does not import: {error}") from None
    rmm.reinitialize(pool_allocator=True)
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    _rmm = True
    return True


_rmm = False
