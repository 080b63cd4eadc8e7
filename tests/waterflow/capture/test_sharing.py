"""Which jobs have a Python object in common that one of them may change."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import waterflow as wf
from tests.support import libraries, shared_objects
from tests.support.shared_objects import (
    IMAGES,
    LABELS,
    NOTES,
    SHARED,
    Criterion,
    Locked,
    Metric,
    OfClass,
    OfItsOwn,
    OwnNotes,
    Reading,
    answering_class,
    evaluation,
    job,
    plain_loss,
    scaled,
    sharing,
    stepping,
    weighted,
)
from tests.support.shared_ways import WAYS, Tick, apart
from waterflow.capture import sharing as sharing_module
from waterflow.capture.sharing import Sharing


def reason(one: wf.Job, other: wf.Job) -> str | None:
    """The same whichever comes first."""
    first, second = Sharing(one), Sharing(other)
    found, turned = first.reason(second), second.reason(first)
    assert (found is None) == (turned is None)
    return found


@pytest.mark.parametrize("kind", SHARED)
def test_what_one_of_two_jobs_changes_keeps_them_apart(kind: str) -> None:
    make = sharing(kind)
    found = reason(job(**make()), job(**make()))
    assert found is not None
    assert "may change" in found


@pytest.mark.parametrize("kind", [kind for kind in SHARED if kind not in ("global", "default")])
def test_jobs_that_have_each_their_own_are_not_kept_apart(kind: str) -> None:
    assert reason(job(**sharing(kind)()), job(**sharing(kind)())) is None


def counted_by(tick: Tick, **given: Any) -> wf.Job:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return plain_loss(model, batch) / (1 + tick() % 7)

    return job(loss=loss, **given)


def named(jobs: list[wf.Job]) -> list[wf.Job]:
    """The two jobs, called a and b."""
    for name, each in zip("ab", jobs, strict=True):
        each.name = name
    return jobs


def assert_numbers_of_the_loops(made: Callable[[], list[wf.Job]]) -> None:
    """Jobs a and b, made anew for each run, have the losses of one loop after the other."""
    losses = [wf.run_eager(each, threads=1).losses for each in made()]
    report = wf.run(made(), memory="64MiB", threads=1)
    assert [report[name].losses for name in "ab"] == losses


class Stream:
    """Data that hands out what it was made of."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def __iter__(self) -> Any:
        return self.found


@pytest.mark.parametrize("made_of", [lambda found: found, Stream])
@pytest.mark.filterwarnings("ignore::waterflow.SharingWarning")
def test_jobs_whose_data_are_one_iterator_take_from_it_one_after_another(made_of: Any) -> None:
    def made() -> list[wf.Job]:
        torch.manual_seed(0)
        found = iter([(IMAGES[:4] * scale, LABELS[:4]) for scale in range(1, 13)])
        return named([job(data=made_of(found), steps=6) for _ in "ab"])

    assert_numbers_of_the_loops(made)


@pytest.mark.parametrize("way", WAYS)
def test_whoever_shares_a_count_is_kept_apart_and_has_the_numbers_of_the_loop(way: str) -> None:
    def made() -> list[wf.Job]:
        tick, jobs = WAYS[way](), []
        for number in range(2):
            torch.manual_seed(number)
            jobs.append(counted_by(tick(), steps=400 + number))
        return named(jobs)

    found = reason(*made())
    assert found is not None
    assert "may change" in found
    with pytest.warns(wf.SharingWarning, match="trains when job 'a' has ended"):
        assert_numbers_of_the_loops(made)


@pytest.mark.parametrize(("what", "make"), apart(), ids=[what for what, _ in apart()])
def test_what_tells_no_job_of_another_keeps_none_apart(what: str, make: Any) -> None:
    assert reason(counted_by(make()), counted_by(make())) is None


@pytest.mark.filterwarnings("ignore::waterflow.SharingWarning")
def test_jobs_that_cannot_be_looked_into_train_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("an object that nobody knows")

    monkeypatch.setattr(Sharing, "_changing", fails)
    report = wf.run(named([job(steps=3), job(steps=3)]), memory="64MiB", threads=1)
    assert report.ok
    (note,) = [note for note in report["b"].notes if "looked into" in note]
    assert "an object that nobody knows" in note


@pytest.mark.parametrize("make", [OfItsOwn, answering_class])
@pytest.mark.filterwarnings("ignore::waterflow.SharingWarning")
def test_objects_that_answer_themselves_stop_no_job(make: Any) -> None:
    found = make()

    class Batches:
        def __iter__(self) -> Any:
            yield from [(IMAGES[:4], LABELS[:4])] * (1 if found is not None else 2)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return plain_loss(model, batch) * (1.0 if found is not None else 2.0)

    def made() -> list[wf.Job]:
        torch.manual_seed(0)
        return named([job(loss=loss, data=Batches(), steps=5) for _ in "ab"])

    assert_numbers_of_the_loops(made)


def test_that_a_pair_has_an_object_in_common_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = Metric()
    first, second, third = (Sharing(job(**evaluation(metric))) for _ in range(3))
    found = second.reason(first)
    looks: list[Sharing] = []
    look = Sharing._look

    def counted(one: Sharing) -> Any:
        looks.append(one)
        return look(one)

    monkeypatch.setattr(Sharing, "_look", counted)
    assert third.reason(second) == found
    assert looks == [third]
    assert Sharing(job(**evaluation(Metric()))).reason(third) is None


def test_classes_are_shared_by_all_their_objects() -> None:
    assert reason(job(model=OfClass()), job(model=OfClass())) is not None
    assert reason(job(model=OwnNotes()), job(model=OwnNotes())) is None


def test_what_all_read_is_nobodys() -> None:
    settings, weights, frozen = types.SimpleNamespace(scale=2.0), [1.0], nn.Linear(8, 8)
    frozen.requires_grad_(False)

    def make() -> wf.Job:
        loss = scaled(settings) if len(weights) == 1 else weighted(weights)
        return job(model=OwnNotes(frozen), loss=loss)

    assert reason(make(), make()) is None


def test_a_list_that_is_only_added_to_tells_nothing() -> None:
    losses: list[float] = []

    def noting(model: nn.Module, batch: Any) -> torch.Tensor:
        found = plain_loss(model, batch)
        losses.append(float(found.detach()))
        return found

    def reading(model: nn.Module, batch: Any) -> torch.Tensor:
        return plain_loss(model, batch) * (1 + len(losses))

    one, other = job(loss=noting), job(loss=reading)
    assert reason(one, job(loss=noting)) is None
    assert reason(one, other) is not None
    assert reason(other, job(loss=reading)) is None


def test_what_has_a_lock_is_left_to_its_maker() -> None:
    counts = stepping(Locked())
    assert reason(job(loss=counts), job(loss=counts)) is None


def test_attributes_of_results_are_not_those_of_what_was_handed_on() -> None:
    settings = types.SimpleNamespace(scale=2.0)

    def scaled_by(settings: Any, loss: torch.Tensor) -> Any:
        return types.SimpleNamespace(loss=loss * settings.scale)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        found = scaled_by(settings, plain_loss(model, batch))
        found.steps = 1
        return found.loss

    def changing(model: nn.Module, batch: Any) -> torch.Tensor:
        found = scaled_by(settings, plain_loss(model, batch))
        found.scale = 1
        return found.loss

    assert reason(job(loss=loss), job(loss=loss)) is None
    assert reason(job(loss=changing), job(loss=changing)) is not None


def test_what_only_callbacks_see_is_theirs() -> None:
    best: dict[str, float] = {}
    history: list[float] = []

    def on_step(result: wf.StepResult) -> None:
        history.append(result.loss)
        best["loss"] = min(best.get("loss", 9.0), result.loss)

    assert reason(job(on_step=on_step), job(on_step=on_step)) is None


def test_a_mode_that_an_evaluation_switches_counts_in_training_mode_alone() -> None:
    frozen = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).requires_grad_(False)
    one, other = job(model=OwnNotes(frozen)), job(model=OwnNotes(frozen))
    assert reason(one, other) is None  # nobody switches it
    evaluated = job(model=OwnNotes(frozen), **evaluation(Metric()))
    assert "mode" in str(reason(one, evaluated))
    frozen.eval()
    assert reason(one, evaluated) is None


def test_another_job_s_callback_may_step_an_optimizer_of_what_this_one_reads() -> None:
    teacher = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)

    def on_step(result: wf.StepResult) -> None:
        teacher(IMAGES).mean().backward()
        optimizer.step()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return plain_loss(model, batch) + teacher(batch[0]).detach().mean()

    assert "SGD" in str(reason(job(loss=loss), job(on_step=on_step)))
    assert reason(job(loss=loss), job(loss=loss)) is None


class Shifted:
    """Data that a function changes."""

    def __init__(self, shift: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.shift = shift

    def __iter__(self) -> Any:
        return ((IMAGES + self.shift(IMAGES).detach().mean(), LABELS) for _ in range(4))


class Shifting(Dataset[Any]):
    """The same, in items."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, place: int) -> Any:
        return IMAGES[place] + self.model(IMAGES).detach().mean(), LABELS[place]


def following(model: Any) -> Callable[..., torch.Tensor]:
    def loss(own: nn.Module, batch: Any) -> torch.Tensor:
        return plain_loss(own, batch) + functional.mse_loss(own(IMAGES), model(IMAGES).detach())

    return loss


def in_its_optimizer(own: nn.Module, model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)

    def on_step(result: wf.StepResult) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + float(model(IMAGES).norm()))

    return {"optimizer": optimizer, "on_step": on_step}


#: How a job, whose model is given first, reads what another trains.
READING: dict[str, Callable[[nn.Module, Any], dict[str, Any]]] = {
    "its loss": lambda own, model: {"loss": following(model)},
    "its data": lambda own, model: {"data": Shifted(model)},
    "its data, the statistics": lambda own, model: {
        "data": Shifted(lambda images: model[1].running_mean)
    },
    "its evaluation": lambda own, model: {
        "evaluate": lambda found: float((found(IMAGES) - model(IMAGES)).detach().abs().mean()),
        "evaluate_every": 10,
    },
    "its callback": in_its_optimizer,
    "a callback that loads it": lambda own, model: {
        "on_step": lambda result: own.load_state_dict(model.state_dict()) and None
    },
}


def trained_and_reading(way: str, turned: bool = False) -> list[wf.Job]:
    torch.manual_seed(0)
    trained, own = (
        nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)) for _ in range(2)
    )
    jobs = [job(model=trained, steps=200), job(model=own, steps=200, **READING[way](own, trained))]
    return named(jobs[::-1] if turned else jobs)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("way", READING)
def test_what_another_job_trains_is_read_before_or_after(way: str, turned: bool) -> None:
    assert "may change" in str(reason(*trained_and_reading(way, turned)))
    with pytest.warns(wf.SharingWarning, match="trains when job 'a' has ended"):
        assert_numbers_of_the_loops(lambda: trained_and_reading(way, turned))


def test_workers_have_copies_of_what_another_job_trains_by_then() -> None:
    trained = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    for workers in (0, 1):
        data = DataLoader(Shifting(trained), batch_size=4, num_workers=workers)
        assert "the training" in str(reason(job(model=trained), job(data=data)))


def test_what_nobody_trains_is_read_by_all() -> None:
    """A backbone in several models, a teacher, own averages and optimizers."""
    frozen = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).requires_grad_(False).eval()

    def make(**given: Any) -> wf.Job:
        model = nn.Sequential(frozen, nn.Linear(8, 3))
        return job(model=model, **{"loss": following(nn.Sequential(frozen)), **given})

    assert reason(make(), make()) is None
    own = [nn.Linear(8, 3) for _ in "ab"]
    assert reason(make(), job(model=own[0], **in_its_optimizer(own[0], frozen))) is None
    assert reason(*(job(model=m, loss=following(m), **in_its_optimizer(m, m)) for m in own)) is None


def test_what_two_models_have_in_common_is_not_for_here_to_refuse() -> None:
    shared = nn.Linear(8, 8)
    jobs = [job(model=nn.Sequential(shared, nn.Linear(8, 3))) for _ in "ab"]
    assert reason(*jobs) is None


def test_data_of_workers_are_copies() -> None:
    data = Reading("counted")
    loaders = [DataLoader(data, batch_size=4, num_workers=n) for n in (0, 0, 1, 1)]
    here, too, there, there_too = [job(data=loader) for loader in loaders]
    assert reason(here, too) is not None
    assert reason(there, there_too) is None


def test_a_function_that_is_replaced_between_two_jobs_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reads(model: nn.Module, batch: Any) -> torch.Tensor:
        return plain_loss(model, batch)

    assert reason(job(loss=reads), job(loss=reads)) is None
    monkeypatch.setitem(globals(), "plain_loss", counting_too)
    assert reason(job(loss=reads), job(loss=reads)) is not None


def counting_too(model: nn.Module, batch: Any) -> torch.Tensor:
    NOTES["count"] = NOTES.get("count", 0) + 1
    return functional.cross_entropy(model(batch[0]), batch[1]) * NOTES["count"]


def test_the_reason_says_what_is_changed_and_where() -> None:
    found = str(reason(job(loss=(one := Criterion())), job(loss=one)))
    assert found.startswith("loss, which Criterion.__call__ (")
    assert str(shared_objects.__file__) in found


class Listed(Dataset[Any]):
    """Thousands of samples."""

    def __init__(self) -> None:
        self.samples = [{"place": number % 8} for number in range(4000)]

    def __len__(self) -> int:
        return len(self.samples)


class ReadOnly(Listed):
    def __getitem__(self, place: int) -> Any:
        sample = self.samples[place]
        return IMAGES[sample["place"]], LABELS[sample["place"]]


class Keeping(Listed):
    def __getitem__(self, place: int) -> Any:
        sample = self.samples[place]
        sample["served"] = sample.get("served", 0) + 1
        return IMAGES[sample["place"]] * sample["served"], LABELS[sample["place"]]


def test_large_containers_are_looked_at_as_a_whole() -> None:
    for kind, shared in ((ReadOnly, False), (Keeping, True)):
        data = kind()
        jobs = [job(data=DataLoader(data, batch_size=4)) for _ in range(2)]
        assert (reason(*jobs) is not None) is shared
    pairs = [*zip(IMAGES, LABELS, strict=True)] * 1000
    criterion = Criterion()
    loaders = [DataLoader(pairs, batch_size=4) for _ in range(2)]  # type: ignore[arg-type]
    assert reason(*(job(data=each, loss=criterion) for each in loaders)) is not None
    assert reason(*(job(data=each, loss=Criterion()) for each in loaders)) is None


class TestLargeLibraries:
    """Jobs that reach thousands of functions of a package are told apart by what is their own."""

    @staticmethod
    def reason(make: Any, *given: Any) -> str | None:
        return reason(make(*given), make(*given))

    def test_they_reach_too_much(self) -> None:
        assert self.reason(libraries.bert_job) is None
        assert 1 in sharing_module._TOO_MUCH.values(), "nothing here would be looked at"

    @pytest.mark.parametrize("own", [True, False])
    def test_a_criterion_that_counts(self, own: bool) -> None:
        shared = libraries.CountingLoss()

        def make() -> wf.Job:
            return libraries.bert_job(loss=libraries.CountingLoss() if own else shared)

        found = self.reason(make)
        assert found is None if own else "CountingLoss.__call__" in str(found)

    @pytest.mark.parametrize("shared", ["nothing", "a metric of a package's", "of one's own"])
    def test_a_metric(self, shared: str) -> None:
        metric = {"nothing": None, "of one's own": Metric()}.get(shared, libraries.mean_metric())

        def make() -> wf.Job:
            used: Any = metric or libraries.mean_metric()

            def evaluate(model: nn.Module) -> float:
                used.reset()
                for batch in libraries.BATCHES[:2]:
                    logits = model(input_ids=batch["ids"]).logits
                    if isinstance(used, Metric):
                        used.update(logits, batch["labels"])
                    else:
                        used(logits.mean())
                return 0.0

            return libraries.bert_job(evaluate=evaluate)

        assert (self.reason(make) is None) is (shared == "nothing")

    @pytest.mark.parametrize("own", [True, False])
    def test_a_metric_that_a_module_holds(self, own: bool) -> None:
        shared = libraries.mean_metric()

        def make() -> wf.Job:
            model = libraries.Measured(libraries.mean_metric() if own else shared)
            return libraries.bert_job(model=model)

        assert (self.reason(make) is None) is own

    @pytest.mark.parametrize("own", [True, False])
    @pytest.mark.parametrize("called", ["tokenizer", "padding", "masking"])
    def test_what_loaders_call(self, called: str, own: bool) -> None:
        """A tokenizer keeps how it pads and truncates, a collator that masks its random numbers;
        one that pads keeps nothing."""
        shared = libraries.collator(called)

        def make() -> wf.Job:
            collate = libraries.collator(called) if own else shared
            return libraries.bert_job(data=DataLoader(libraries.BATCHES, collate_fn=collate))

        found = self.reason(make)
        assert found is None if own or called == "padding" else "may change" in str(found)

    @pytest.mark.parametrize("own", [True, False])
    def test_a_collator_of_trainers(self, own: bool, tmp_path: Any) -> None:
        from transformers import Trainer, TrainingArguments

        shared = libraries.collator("masking")

        def make() -> wf.Job:
            arguments = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
            collate = libraries.collator("masking") if own else shared
            data = libraries.samples()
            trainer = Trainer(libraries.bert(), arguments, collate, train_dataset=data)
            return wf.from_trainer(trainer, "a")

        found = self.reason(make)
        assert found is None if own else "data_collator" in str(found)

    def test_what_only_computes_or_is_only_read_is_nobodys(self) -> None:
        teacher, config = libraries.bert().requires_grad_(False), libraries.bert_config()

        def distilled(model: nn.Module, batch: Any) -> torch.Tensor:
            found, wanted = (each(input_ids=batch["ids"]).logits for each in (model, teacher))
            return functional.mse_loss(found, wanted)

        def make() -> wf.Job:
            return libraries.bert_job(model=libraries.bert(config), loss=distilled)

        assert self.reason(make) is None


@pytest.mark.parametrize("own", [True, False])
def test_what_is_no_python_may_change_when_it_is_called(own: bool) -> None:
    def make_tokenizer() -> Any:
        return libraries.tokenizer().backend_tokenizer

    shared = make_tokenizer()

    def make() -> wf.Job:
        tokenizer = make_tokenizer() if own else shared

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            tokenizer.enable_truncation(4)
            return plain_loss(model, batch) * len(tokenizer.encode("a b c d e f").ids)

        return job(loss=loss)

    assert (reason(make(), make()) is None) is own


def test_no_iteration_of_the_user_s_own_is_run() -> None:
    class Fails(list[Any]):
        def __iter__(self) -> Any:
            raise OSError("the disk is gone")

    def make() -> wf.Job:
        data = Fails([(IMAGES, LABELS)])
        counted = [0]

        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            counted[0] += len(data)
            return plain_loss(model, batch)

        return job(data=data, loss=loss)

    assert reason(make(), make()) is None
