"""Trials of an Optuna study side by side in one process, under one memory budget.

    import optuna
    import waterflow as wf

    study = optuna.create_study(direction="maximize")
    wf.optuna.optimize(study, make_job, n_trials=64, memory="2GiB")

Each trial is a job, asked for and told of by Optuna's ask-and-tell interface from the thread that
calls `optimize`, so any storage, sampler and pruner will do. Optuna is imported when it is used; it
comes with the extra `waterflow[optuna]`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from waterflow.common.errors import JobError
from waterflow.common.text import text_of
from waterflow.engine.engine import Engine
from waterflow.engine.handle import JobHandle, as_completed
from waterflow.job.evaluation import read_answer
from waterflow.job.job import STOP, Job
from waterflow.report.job_report import JobReport
from waterflow.report.report import Report

if TYPE_CHECKING:
    import optuna

MakeJob = Callable[["optuna.Trial"], Job]
StudyCallback = Callable[["optuna.Study", "optuna.trial.FrozenTrial"], None]
Errors = type[BaseException] | tuple[type[BaseException], ...]

#: The user attribute of a failed trial that says why.
ERROR_ATTRIBUTE = "waterflow_error"
#: How long a trial that could be asked for waits until others that need room have found it.
_LOOK_AGAIN_SECONDS = 0.1


def optimize(
    study: optuna.Study,
    make_job: MakeJob,
    n_trials: int | None = None,
    memory: int | str = "2GiB",
    *,
    timeout: float | None = None,
    at_once: int | None = None,
    objective: str | None = None,
    report: bool = True,
    catch: Errors = Exception,
    callbacks: Sequence[StudyCallback] = (),
    **engine: Any,
) -> Report:
    """Runs trials of a study as jobs, as many at once as memory and lanes allow.

    A trial's value is the number that its job's `evaluate` returned last; without `evaluate`, the
    loss of its last step. Each evaluation is reported to the trial (`Trial.report`, with the job's
    steps, or its epochs where it is evaluated by those), and a trial that the pruner gives up
    (`Trial.should_prune`) ends there: its memory is the others' at the next step. `evaluate` and
    `on_step` may also report by themselves, and raise `optuna.TrialPruned`. They and `make_job` run
    in the thread that calls this.

    How each trial ends is logged as Optuna does it (`optuna.logging.set_verbosity`); why one has
    failed is its user attribute "waterflow_error", too.

    A job's numbers are those that it has alone (docs/equality.md). Which parameters a sampler
    suggests depends on what it has been told of by then, as with any trials side by side.

    Args:
        study: of one objective, with any storage, sampler and pruner.
        make_job: makes the job of a trial; it may raise what a trial's objective may raise.
        n_trials: trials to make now, in addition to those that the study has. None: until the
            timeout, or until a callback calls `study.stop`.
        memory: bytes that all jobs together may hold, or a text such as "2GiB".
        timeout: seconds after which no trial begins; those under way go on to their ends.
        at_once: trials under way at most. None: as many as there are lanes, and one more whose
            first step is prepared meanwhile. In any case none is asked for while another waits for
            memory.
        objective: the name of the value, where `evaluate` returns several numbers.
        report: whether evaluations are reported to the trials.
        catch: errors that fail their trial alone. Any other fails its trial, too, ends all others,
            and is raised. (Optuna catches none by default.)
        callbacks: called with the study and each trial that has ended.
        **engine: whatever else `waterflow.Engine` takes: device, policy, lanes, threads, ...

    Returns:
        The report of all trials' jobs.

    Raises:
        JobError: an argument cannot be used; the study has several objectives.
        ImportError: Optuna is not installed.
        KeyboardInterrupt: Ctrl-C; trials under way are told as failed, and the study can go on.
        Whatever is not in `catch`.
    """
    _check(study, n_trials, timeout, at_once)
    catch = catch if isinstance(catch, type) else tuple(catch)
    search = _Search(study, make_job, objective, report, catch, callbacks)
    until = None if timeout is None else time.monotonic() + timeout
    opened = Engine(memory, callbacks="caller", **engine)
    with search.stoppable():
        try:
            with opened:
                search.run(opened, n_trials, until, at_once or opened.lanes + 1)
        finally:
            search.give_up()
    return opened.report()


def _check(
    study: optuna.Study, n_trials: int | None, timeout: float | None, at_once: int | None
) -> None:
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "waterflow.optuna needs Optuna: pip install 'waterflow[optuna]'"
        ) from error
    if len(study.directions) != 1:
        raise JobError(
            f"study {study.study_name!r} has {len(study.directions)} objectives; trials of several "
            "objectives are not supported: use a study of one, made of them by your evaluate"
        )
    for name, value in (("n_trials", n_trials), ("at_once", at_once)):
        if value is not None and (type(value) is not int or value < 1):
            raise JobError(f"{name} must be a positive whole number or None, got {value!r}")
    if timeout is not None and not timeout > 0:
        raise JobError(f"timeout must be a number of seconds above 0 or None, got {timeout!r}")


class _Search:
    """The trials of one call, from the thread that has called."""

    def __init__(
        self,
        study: optuna.Study,
        make_job: MakeJob,
        objective: str | None,
        reports: bool,
        catch: Errors,
        callbacks: Iterable[StudyCallback],
    ) -> None:
        self._study = study
        self._make_job = make_job
        self._objective = objective
        self._reports = reports
        self._catch = catch
        self._callbacks = list(callbacks)
        self._is_stopped = False
        self._under_way: dict[JobHandle, optuna.Trial] = {}
        self._asked: optuna.Trial | None = None  # without a job so far
        self._pruned: set[int] = set()
        self._names: set[str] = set()

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Inside, the study's `stop` ends the search, whoever calls it: a callback, or a sampler
        that has gone through all there is. Optuna's own knows only its own loop, and raises."""

        def stop() -> None:
            self._is_stopped = True

        vars(self._study)["stop"] = stop
        try:
            yield
        finally:
            vars(self._study).pop("stop", None)

    def run(self, engine: Engine, n_trials: int | None, until: float | None, most: int) -> None:
        """Makes trials until enough have been made, or the time is over."""
        left, made = math.inf if n_trials is None else n_trials, 0
        while True:
            late = until is not None and time.monotonic() >= until
            left = 0 if late or self._is_stopped else left
            if left and len(self._under_way) < most and not self._one_waits_for_room():
                left -= 1
                made += 1
                engine.expect(made if left == math.inf else int(left))  # for who knows how many
                self._begin(engine)
            elif self._under_way:
                self._end_some(bool(left) and len(self._under_way) < most)
            else:
                return

    def _one_waits_for_room(self) -> bool:
        return any(handle.waits_for_room for handle in self._under_way)

    def _begin(self, engine: Engine) -> None:
        trial = self._asked = self._study.ask()
        try:
            job = self._make_job(trial)
            if not isinstance(job, Job):
                raise JobError(f"make_job is to return a waterflow.Job, it returned {job!r}")
            self._prepare(job, trial)
            self._under_way[engine.submit(job)] = trial
            self._asked = None
        except Exception as error:
            self._asked = None
            self._end_with(trial, error)

    def _prepare(self, job: Job, trial: optuna.Trial) -> None:
        if job.name in self._names:
            job.name = f"{job.name} {trial.number}"
        self._names.add(job.name)
        if job.evaluate is not None:
            evaluate = self._reporting(job, job.evaluate, trial) if self._reports else job.evaluate
            job.evaluate = self._pruning(evaluate, trial)
        if job.on_step is not None:
            job.on_step = self._pruning(job.on_step, trial)

    def _pruning(self, function: Callable[[Any], Any], trial: optuna.Trial) -> Callable[[Any], Any]:
        """A function of the user's, which may prune its trial: that ends the job, and is no failure
        of it."""
        import optuna

        pruned, number = self._pruned, trial.number

        def ask(told: Any) -> Any:
            try:
                return function(told)
            except optuna.TrialPruned:
                pruned.add(number)
                return STOP

        return ask

    def _reporting(
        self, job: Job, evaluate: Callable[[Any], Any], trial: optuna.Trial
    ) -> Callable[[Any], Any]:
        """`evaluate`, whose value is reported to the trial; ends the job where that is pruned."""
        each = job.evaluate_every if isinstance(job.evaluate_every, int) else 1
        made = itertools.count(each, each)

        def evaluate_and_report(model: Any) -> Any:
            answer, step = evaluate(model), next(made)
            found = read_answer(job, answer)
            if found.values is None:
                return answer
            trial.report(self._value_of(found.values), step)
            if not trial.should_prune():
                return answer
            self._pruned.add(trial.number)
            return found.values, STOP

        return evaluate_and_report

    def _value_of(self, values: Mapping[str, float]) -> float:
        """The trial's value among these numbers."""
        name = self._objective
        if name is None:
            if len(values) != 1:
                raise JobError(
                    f"evaluate returned {len(values)} numbers, {', '.join(map(repr, values))}: say "
                    "which is the trial's value by objective="
                )
            (name,) = values
        if name not in values:
            known = ", ".join(map(repr, values))
            raise JobError(f"evaluate returned {known}, and no objective={name!r}")
        return values[name]

    def _end_some(self, may_ask: bool) -> None:
        """Waits until trials have ended, and tells of them; not for long where one may be asked."""
        timeout = _LOOK_AGAIN_SECONDS if may_ask else None
        try:
            handle = next(as_completed(list(self._under_way), timeout))
        except TimeoutError:
            return
        trial = self._under_way.pop(handle)
        self._asked = trial  # until it is told of
        found = handle.result()
        if not found.ok:
            assert found.exception is not None
            self._asked = None
            self._end_with(trial, found.exception, is_told=True)  # by a warning, when it failed
        elif trial.number in self._pruned:
            self._tell(trial, "PRUNED")
        else:
            self._complete(trial, found)

    def _complete(self, trial: optuna.Trial, found: JobReport) -> None:
        try:
            value = self._final_value(found)
        except JobError as error:
            self._end_with(trial, error)
            return
        if math.isnan(value):
            self._fail(trial, f"job {found.name!r}: its value is {value}")
        else:
            self._tell(trial, "COMPLETE", value)

    def _final_value(self, found: JobReport) -> float:
        if found.evaluations:
            return self._value_of(found.evaluations[-1].values)
        if self._objective is not None or not found.losses:
            what = "no evaluation" if found.losses else "no step"
            raise JobError(
                f"job {found.name!r} has made {what} and so has no value: let it train until one, "
                "by its steps, epochs or evaluate_every"
            )
        return found.losses[-1]

    def _end_with(self, trial: optuna.Trial, error: BaseException, is_told: bool = False) -> None:
        """A trial has failed, or was pruned by its own code.

        Args:
            trial: the trial.
            error: what it has raised.
            is_told: whether the user has been told of that.

        Raises:
            The error, where it is none to catch.
        """
        import optuna

        if isinstance(error, optuna.TrialPruned):
            self._tell(trial, "PRUNED")
            return
        shown = None if is_told or not isinstance(error, self._catch) else error
        self._fail(trial, f"{type(error).__name__}: {text_of(error)}", shown is None, shown)
        if not isinstance(error, self._catch):
            raise error

    def _fail(
        self,
        trial: optuna.Trial,
        why: str,
        is_told: bool = False,
        error: BaseException | None = None,
    ) -> None:
        trial.set_user_attr(ERROR_ATTRIBUTE, why)
        if not is_told:
            told = f"failed with parameters: {trial.params}: {why}"
            _log().warning(f"Trial {trial.number} {told}", exc_info=error)
        self._tell(trial, "FAIL")

    def _tell(self, trial: optuna.Trial, state: str, value: float | None = None) -> None:
        import optuna

        ended = self._study.tell(trial, value, state=optuna.trial.TrialState[state])
        self._asked = None
        if state == "COMPLETE":
            told = f"finished with value: {value} and parameters: {ended.params}."
            _log().info(f"Trial {trial.number} {told}")
        elif state == "PRUNED":
            _log().info(f"Trial {trial.number} pruned.")
        for callback in self._callbacks:
            callback(self._study, ended)

    def give_up(self) -> None:
        """Trials that nobody has been told of have failed: the search has been ended."""
        left = [*self._under_way.values(), *([] if self._asked is None else [self._asked])]
        self._under_way.clear()
        self._callbacks.clear()
        for trial in left:
            self._fail(trial, "interrupted: the search was ended before it", is_told=True)


def _log() -> logging.Logger:
    """Optuna's own, which its users know to set: ask and tell log nothing of how trials end."""
    import optuna

    return optuna.logging.get_logger("optuna.waterflow")
