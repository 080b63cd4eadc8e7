"""Makes batches ready to run: each with what its step was captured to, or for an eager step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

from waterflow.allocator_ext import _C
from waterflow.capture.caller import CallerContext
from waterflow.capture.opaque import why_opaque
from waterflow.capture.own_error import own_error
from waterflow.capture.own_step import UnsettledError
from waterflow.capture.torchs_calls import clips_by_others, has_own_zero_grad
from waterflow.capture.tracing import StateMovedError, capture_error, reason_of, users_line
from waterflow.common.errors import CaptureError, JobError
from waterflow.executor.data.staging import BatchPrefetcher, PinnedBatch
from waterflow.executor.device.base import Device
from waterflow.job.batch import FlatBatch, UnknownLeafError, flatten, flatten_like
from waterflow.job.job import Job
from waterflow.steps.opacity import Opacity
from waterflow.steps.persistent import PersistentTensors, is_lazy
from waterflow.steps.prepared import PreparedBatch, PreparedStep, Specialization
from waterflow.steps.recaptures import StillChangingError
from waterflow.steps.step_builder import StepBuilder
from waterflow.steps.step_cache import ManyShapesError, StepCache
from waterflow.steps.tiers import Tiers
from waterflow.steps.trials import TrialNeeded, Trials

#: So many steps of the user's own may make gradients or state that were not there before them.
MOST_UNSETTLED = 3

#: Of so many layouts of batches it is remembered how they are taken apart.
_MOST_LAYOUTS = 128

_Find = Callable[[Hashable], "Specialization | None"]


class BatchPreparer:
    """Prepares a job's batches, on its feeder's thread.

    `refresh` comes from the thread that runs the job's step; captures are guarded by the cache's
    lock, `_latest` is a hint, and whichever thread writes it last is right.
    """

    def __init__(
        self,
        job: Job,
        device: Device,
        caller: CallerContext,
        cache: StepCache,
        builder: StepBuilder,
        persistent: PersistentTensors,
        opacity: Opacity,
        trials: Trials,
        prefetcher: BatchPrefetcher | None = None,
        tiers: Tiers | None = None,
    ) -> None:
        self._job = job
        self._device = device
        self._cache = cache
        self._builder = builder
        self._persistent = persistent
        self._opacity = opacity
        self._trials = trials
        self._prefetcher = prefetcher
        self._tiers = tiers
        self._latest: Specialization | None = None  # of the batch prepared last
        self.batch_bytes = 0  # of that batch, as far as it could be taken apart
        self._caller = caller
        self._knows_refusal = False
        self._has_run = False  # a step, or one is about to
        self._unsettled = 0  # steps of the user's own that could not be captured yet
        self._looked_seconds = 0.0  # for what cannot be captured, before a capture
        self._is_tried = False  # whether its steps had to be tried
        # Batches that were taken apart, without their tensors: the latest, and one of each layout.
        self._flat: FlatBatch | None = None
        self._flats: dict[int | None, FlatBatch] = {}
        self._hiding: set[str] = set()  # kinds of objects in batches for which these stay eager
        if job.why_eager is not None:
            opacity.step = job.why_eager
        elif tiers is None and job.capture == "auto":
            self._refuse_what_is_opaque()

    def prepare(
        self, batch: Any, before_capture: Callable[[], None] = lambda: None
    ) -> PreparedBatch:
        """Makes a batch ready to run.

        Args:
            batch: as the data yields it.
            before_capture: called before a new shape is captured and profiled, which touches the
                job's tensors: returns when no step of the job is under way.

        Raises:
            CaptureError: the step cannot be captured exactly.
        """
        # A batch that is fetched ahead is looked at when its turn comes: the steps before it may
        # change what its step reads.
        find = self._known if self.draws_apart else self._cache.valid
        prepared = self._prepared(batch, before_capture, find)
        self._latest = prepared.specialization
        return prepared

    def captured_at_once(self, batch: Any) -> PreparedBatch | None:
        """Makes a batch ready for whose step there is a capture, right or not; None for any other.
        Where a batch needs no way to the device."""
        if self._opacity.step is not None or self._cache.is_empty:
            return None
        flat = self._flattened_if_known(batch)
        found = None if flat is None else self._known(flat.signature)
        if found is None:
            return None
        self._latest = found
        return PreparedBatch(batch, flat, found)

    def all_at_once(self) -> Callable[[Any], PreparedBatch | None]:
        """`captured_at_once` for several batches between which nothing of the job's runs that could
        change what its steps read: what that takes to know is looked at once."""
        former, reads = self._flat, self._job.batch_reads
        is_like = former is not None and former.layouts is not None and former.reads == reads
        if not is_like or self._opacity.step is not None or self._cache.questions:
            return self.captured_at_once
        assert former is not None
        found = self._known(former.signature)
        if found is None:
            return self.captured_at_once

        def captured(batch: Any) -> PreparedBatch | None:
            flat = flatten_like(batch, former)
            if flat is None:
                return self.captured_at_once(batch)
            self._latest = found
            return PreparedBatch(batch, flat, found)

        return captured

    def eager_at_once(self, batch: Any) -> PreparedBatch | None:
        """Makes a batch ready whose step is eager without further ado; None for any other."""
        if self._opacity.step is not None:
            return PreparedBatch(batch)
        if self._tiers is None:
            return None
        try:
            flat = self._flattened(batch, asks_reads=False)  # that is asked before a capture
        except UnknownLeafError as error:
            return PreparedBatch(batch) if error.args[0] in self._hiding else None
        if self._cache.questions.are_many:
            return None
        if not self._cache.is_empty and self._known(flat.signature) is not None:
            return None
        return PreparedBatch(batch, flat) if self._tiers.stays_eager(flat.signature) else None

    def refresh(self, prepared: PreparedBatch) -> PreparedBatch:
        """The same batch, captured again where what the step reads has changed since."""
        if not self._persistent.state_holds():
            self._cache.collect_persistent()
        if self._caller.opaque is not None and prepared.specialization is not None:
            if self._opacity.step is None:  # what the job's Python has just changed
                self._refuse_what_is_opaque()
            return PreparedBatch(prepared.batch)
        if self._cache.is_fresh(prepared):
            return self._collected_for(prepared)
        if self._job.step is None and has_own_zero_grad(self._job.optimizer):
            raise JobError(
                f"job {self._job.name!r}: its optimizer's zero_grad was replaced after captured "
                "steps, which leave no gradients for the next step to find: replace it before the "
                "first step, or give the job capture=False"
            )
        prepared = self._prepared(prepared.batch, lambda: None, self._cache.valid)
        self._latest = prepared.specialization
        return self._collected_for(prepared)

    def _collected_for(self, prepared: PreparedBatch) -> PreparedBatch:
        if prepared.specialization is not None:
            self._cache.collect_for(prepared.specialization)
        return prepared

    @property
    def draws_apart(self) -> bool:
        """Whether the batch behind the latest may be taken apart before the latest one's step,
        which leaves the job's random streams alone: it is captured, a check has shown what it does,
        and it draws nothing."""
        if self._opacity.step is not None or self._builder.draws:
            return False
        if self._flat is not None and self._flat.has_objects:  # a callback may change them
            return False
        latest = self._latest
        return latest is not None and latest.steady in latest.checked

    @property
    def latest_step(self) -> PreparedStep | None:
        """The captured step of the latest batch; None of an eager one."""
        latest = self._latest
        return None if latest is None else latest.steady

    def _refuse_what_is_opaque(self) -> None:
        """Gives up steps that are known to be opaque before anything is traced. To know takes a
        walk along all that callbacks reach, so it waits until a capture is wanted.

        Raises:
            CaptureError: the job insists on capture.
        """
        calls_others = has_own_zero_grad(self._job.optimizer) or clips_by_others(self._job)
        if not self._knows_refusal or self._caller.opaque is not None or calls_others:
            self._knows_refusal = True
            refusal = why_opaque(self._job, self._caller)
            if refusal is not None:
                self._opacity.give_up_step(refusal)

    def _known(self, signature: Hashable) -> Specialization | None:
        return self._cache.known(signature, self._latest)

    def _prepared(
        self, batch: Any, before_capture: Callable[[], None], find: _Find
    ) -> PreparedBatch:
        """The batch with what `find` has for its signature, captured where that is nothing."""
        if self._opacity.step is not None or (self._cache.is_empty and is_lazy(self._job.root)):
            return PreparedBatch(batch)
        try:
            flat = self._flattened(batch)
            self.batch_bytes = sum(tensor.nbytes for tensor in flat.tensors)
            if self._cache.questions.are_many:
                return self._refused(batch, self._asks_too_much())
            if self._stays_eager(flat, find):
                return PreparedBatch(batch, flat)
            began = time.thread_time()
            self._refuse_what_is_opaque()
            if self._opacity.step is not None:
                return PreparedBatch(batch, flat)
            looked = time.thread_time()
            self._looked_seconds += looked - began
            if self._comes_first:
                return PreparedBatch(batch, flat)
            return self._specialized(batch, flat, before_capture, find)
        except UnknownLeafError as error:
            kind = error.args[0]
            refused = self._refused(batch, self._hidden_leaf(kind), for_good=False)
            self._hiding.add(kind)
            return refused
        except TrialNeeded:
            seconds = time.thread_time() - looked
            if self._is_not_worth(flat, seconds):
                return PreparedBatch(batch, flat)
            self._is_tried = True
            self._looked_seconds += seconds
            return PreparedBatch(batch, flat, trial=True)
        except StillChangingError as error:
            assert self._tiers is not None
            self._tiers.postpone(flat.signature, error.steps, error.what)
            return PreparedBatch(batch, flat)
        except UnsettledError as error:  # first steps make what later ones have
            self._unsettled += 1
            if self._unsettled > MOST_UNSETTLED:
                return self._refused(batch, error)
            return PreparedBatch(batch, flat)
        except StateMovedError as error:  # what settles with the first step settles by trial
            if self._trials.has_passed(flat.signature):
                return self._refused(batch, error)
            return PreparedBatch(batch, flat, trial=True)
        except CaptureError as error:
            for_good = not isinstance(error, ManyShapesError)
            return self._refused(batch, error, for_good=for_good, flat=flat)
        except Exception as error:
            return self._refused(batch, error, flat=flat)

    def _is_not_worth(self, flat: FlatBatch, seconds: float) -> bool:
        """Whether steps that would have to be tried, as so long a look has shown, stay eager."""
        if self._tiers is None or self._is_tried:
            return False
        return self._tiers.gives_up_capture(flat.signature, seconds)

    @property
    def _comes_first(self) -> bool:
        """Whether the batch is for a first step of the user's own, which makes what later ones
        have: gradients, and state of its optimizers."""
        has_run, self._has_run = self._has_run, True
        return self._job.step is not None and not has_run

    def _flattened(self, batch: Any, asks_reads: bool = True) -> FlatBatch:
        """The batch taken apart; `asks_reads`: whether the step may read something else of it than
        of those before."""
        layouts = _C.layouts_hash(batch)
        former, flat = self._flats.get(layouts), None
        if former is not None and not (asks_reads and former.reads != self._job.batch_reads):
            flat = flatten_like(batch, former)
        if flat is None:
            flat = flatten(batch, self._job.batch_reads, packed=self._prefetcher is not None)
            former = dataclasses.replace(flat, tensors=[])
            if flat.layouts is not None:
                if len(self._flats) >= _MOST_LAYOUTS:
                    self._flats.clear()
                self._flats[layouts] = former
        self._flat = former
        return self._cache.questions.answered(flat)

    def _flattened_if_known(self, batch: Any) -> FlatBatch | None:
        """The same; None where the batch holds what is not known."""
        try:
            return self._flattened(batch)
        except UnknownLeafError:
            return None

    def _stays_eager(self, flat: FlatBatch, find: _Find) -> bool:
        """Whether a capture would not pay, or not yet."""
        if self._tiers is None or find(flat.signature) is not None:
            return False
        if self._tiers.guess is None:
            self._tiers.meet(self._persistent.bytes, self.batch_bytes)
        return self._tiers.stays_eager(flat.signature)

    def _specialized(
        self, batch: Any, flat: FlatBatch, before_capture: Callable[[], None], find: _Find
    ) -> PreparedBatch:
        flat, pinned = self._on_its_way(flat)
        specialization = find(flat.signature)
        if specialization is None:
            before_capture()  # not under the lock: the step under way may need it
            if self._opacity.step is not None:  # that step has shown it
                return PreparedBatch(batch)
            reads = self._job.batch_reads
            if reads != flat.reads:  # a callback has given the job another loss
                flat = flatten(batch, reads, packed=self._prefetcher is not None)
                return self._specialized(batch, flat, before_capture, find)
            specialization = self._captured(flat)
            flat = self._cache.questions.answered(flat)  # it may have shown what to ask
        return PreparedBatch(batch, flat, specialization, pinned)

    def _captured(self, flat: FlatBatch) -> Specialization:
        started, built = time.thread_time(), self._builder.seconds
        specialization = self._cache.valid_or_captured(flat)  # a callback may have run
        if self._tiers is not None and self._builder.seconds != built:
            shared = self._builder.shared_with is not None
            taken = time.thread_time() - started + self._looked_seconds
            self._looked_seconds = 0.0
            self._tiers.note_capture(flat.signature, taken, shared)
        return specialization

    def _on_its_way(self, flat: FlatBatch) -> tuple[FlatBatch, PinnedBatch | None]:
        """The batch packed for the device; one that the data has put there is brought as a whole.

        Lanes do not wait for the streams of the user's threads, so this one does.
        """
        if self._prefetcher is None:
            return flat, None
        if all(tensor.device.type == "cpu" for tensor in flat.tensors):
            return flat, self._prefetcher.pack(flat.tensors)
        there = [tensor.to(self._device.tensors) for tensor in flat.tensors]
        self._device.wait_for_thread()
        return dataclasses.replace(flat, tensors=there), None

    def _asks_too_much(self) -> CaptureError:
        reason = "the step goes by values of its batches that hardly ever are the same again"
        return capture_error(self._job.name, reason, users_line(None, self._job.function))

    def _hidden_leaf(self, kind: str) -> CaptureError:
        return CaptureError(
            f"job {self._job.name!r}: a batch holds a {kind}, which may hide "
            "tensors from the capture. Make batches of tensors, numbers, strings, "
            "sequences, mappings and data classes, or give the job capture=False.",
            f"a batch holds a {kind}, which may hide tensors from the capture",
        )

    def _refused(
        self, batch: Any, error: Exception, for_good: bool = True, flat: FlatBatch | None = None
    ) -> PreparedBatch:
        """The batch for an eager step, where the job allows that; with more shapes than are kept
        it has no choice.

        Args:
            batch: the batch.
            error: why it is refused.
            for_good: whether that holds for all batches.
            flat: the batch taken apart, where a bug in the user's own code may be the reason.
        """
        # A trace that has met an error knows what, but not whether the user's own code would.
        met = not isinstance(error, CaptureError) or isinstance(error.__cause__, Exception)
        if self._job.capture is True and not isinstance(error, ManyShapesError):
            self._raise(error, flat if met else None)
        reason = error.reason if isinstance(error, CaptureError) else None
        if reason is None:
            reason = str(error) if isinstance(error, CaptureError) else reason_of(error)
        if for_good:
            self._opacity.give_up_step(reason, proved=not met)
        else:
            self._opacity.note(f"some steps run as eager Python, because {reason}")
        return PreparedBatch(batch)

    def _raise(self, error: Exception, flat: FlatBatch | None) -> NoReturn:
        """Raises the user's own error for the batch, where there is one, or else this one."""
        own = None
        if flat is not None:
            own = own_error(self._job, flat, self._builder.rng, self._caller)
        if own is not None:
            raise own
        if isinstance(error, CaptureError):
            raise CaptureError(str(error), error.reason)
        raise error
