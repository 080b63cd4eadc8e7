"""What a step asks of its batch: who answers, which batches a capture serves, who shares it."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

import waterflow as wf
from tests.support.kept_captures import counting
from waterflow.capture.asked_kinds import as_if_real
from waterflow.capture.stride_rules import CaptureMode
from waterflow.capture.tracing import fake_twin, trace
from waterflow.job.batch import flatten
from waterflow.steps.known_questions import MOST_WAYS, KnownQuestions

pytestmark = pytest.mark.cpu


def asked(function, *batch, device=None):
    """What `function` asks of these tensors, which are on a device by its time."""
    mode = CaptureMode()
    twins = [fake_twin(mode, tensor, device) for tensor in batch]

    def told(_, tensors):
        function(*tensors)
        return tensors

    return trace(told, mode, twins, batch=batch).answers


def test_an_answer_is_worked_out_from_the_batch():
    mask = torch.tensor([[1, 1], [1, 0]])
    ((question, answer),) = asked(lambda mask: bool(mask.all()), mask)
    assert answer == ("bool", False)
    assert question([torch.ones(2, 2, dtype=torch.long)]) == ("bool", True)
    assert asked(lambda mask: bool(mask.all()), torch.ones(2, 2).long())[0][0] == question
    assert asked(lambda mask: bool(mask.any()), mask)[0][0] != question


def test_a_truth_is_no_number():
    ones = torch.ones(2, dtype=torch.long)
    ((_, truth),) = asked(lambda one: bool(one.all()), ones)
    ((_, number),) = asked(lambda one: one.sum().item() - 1, ones)
    assert truth != ("int", 1)
    assert number == ("int", 2)


def test_what_is_asked_twice_is_one_question():
    def twice(mask):
        return mask.all().item(), mask.all().item()

    assert len(asked(twice, torch.ones(3).long())) == 1


def test_batches_are_asked_on_the_host_wherever_the_job_is():
    def ask(mask):
        places = torch.arange(2, device=mask.device)
        assert mask.device.type == "meta" or mask.device.type == "cuda"
        return (mask * places).sum().item()

    mask = torch.tensor([[3, 4], [5, 6]])
    ((question, answer),) = asked(ask, mask, device=torch.device("cuda"))
    assert answer == question([mask]) == ("int", 10)


@pytest.mark.parametrize(
    "ask",
    [
        lambda mask: mask.argmax().item(),
        lambda mask: mask.view(-1).topk(2).indices.sum().item(),
        lambda mask: mask.max(1).indices.sum().item(),
    ],
)
def test_places_of_equal_values_are_told_on_the_host_alone(ask):
    mask = torch.ones(2, 2).long()
    assert len(asked(ask, mask)) == 1
    with pytest.raises(DataDependentOutputException):
        asked(ask, mask, device=torch.device("cuda"))


@pytest.mark.parametrize(
    "ask",
    [
        lambda mask: (mask / 2).sum().item(),
        lambda mask: (mask.float() > 0).all().item(),
        lambda mask: torch.randint(0, 2, (1,)).item(),
        lambda mask: (mask + torch.randint_like(mask, 2)).sum().item(),
        lambda mask: mask.clone().mul_(2).sum().item(),
        lambda mask: (torch.empty_like(mask) * 0).sum().item(),
        lambda mask: (mask.sum() // (mask.sum() - mask.sum())).item(),
    ],
)
def test_what_may_come_out_otherwise_is_not_answered(ask):
    with pytest.raises(DataDependentOutputException):
        asked(ask, torch.ones(2, 2).long())


def test_an_error_is_an_answer():
    def ask(places):
        return places.gather(0, places).sum().item()

    ((question, _),) = asked(ask, torch.tensor([1, 0]))
    assert question([torch.tensor([1, 2])]) == ("error", "RuntimeError")
    with pytest.raises(DataDependentOutputException):
        asked(ask, torch.tensor([1, 2]))


def test_what_is_written_to_later_was_answered_before():
    def ask(mask):
        copy = mask.clone()
        before = copy.sum().item()
        copy.view(-1)[0] = 5
        return before

    assert len(asked(ask, torch.ones(3).long())) == 1


def test_only_others_on_a_thread_that_traces_are_told_that_nothing_is_fake():
    found = []

    def ask():
        found.append(torch._subclasses.FakeTensor)

    with as_if_real():
        ask()
        other = threading.Thread(target=ask)
        other.start()
        other.join()
        with CaptureMode():
            assert not isinstance(torch.empty(2), torch._subclasses.FakeTensor)
    ask()
    assert [kind is FakeTensor for kind in found] == [False, True, True]


def test_what_is_asked_next_depends_on_the_answers_before():
    known = KnownQuestions()
    ones, other = flatten([torch.ones(2).long()]), flatten([torch.zeros(2).long()])
    (first, _), (second, _) = asked(lambda x: (x.all().item(), x.sum().item()), *ones.tensors)
    learnt = known.learn(ones, [first, second])
    assert len(learnt.answers) == 2
    assert known.answered(flatten([torch.ones(2).long()])).signature == learnt.signature
    assert len(known.answered(other).answers) == 1
    assert known.learn(known.answered(ones), [first, second]).signature == learnt.signature


def test_values_that_hardly_repeat_are_too_many():
    known = KnownQuestions()
    batches = [flatten([torch.tensor(number)]) for number in range(MOST_WAYS + 1)]
    ((question, _),) = asked(lambda x: x.item(), *batches[0].tensors)
    known.learn(batches[0], [question])
    for batch in batches[:-1]:
        known.answered(batch)
    assert not known.are_many
    known.answered(batches[-1])
    assert known.are_many


def test_captures_that_serve_no_steps_are_too_many():
    known = KnownQuestions()
    known.weigh([40, 1, 1, 1, 1, 1])
    assert not known.are_many
    known.weigh([1, 1, 1, 1, 1, 1])
    assert known.are_many


def _job(name, masks, **options):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)

    def loss(model, batch):
        rows, mask = batch
        factor = 1.0 if mask.all() else 2.0
        return F.cross_entropy(model(rows), torch.arange(4) % 3) * factor

    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 6, generator=generator), mask) for mask in masks]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return wf.Job(name, model=model, optimizer=optimizer, loss=loss, data=data, **options)


def test_another_job_has_the_capture_whose_answers_are_its_own():
    ones, zeros = torch.ones(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    options = {"capture": True}
    jobs = [
        _job("ones", [ones] * 6, **options),
        _job("zeros", [zeros] * 6, **options),
        _job("both", [ones, zeros, zeros, ones, zeros, ones], **options),
    ]
    expected = [wf.run_eager(_job(job.name, [b[1] for b in job.data])).losses for job in jobs]
    with counting() as traces:
        report = wf.run(jobs, memory="16MiB", lanes=1)
    assert [one.losses for one in report] == expected
    assert len(traces) < 4, "two ways, of which one may have been traced by two at once"


def test_who_insists_on_captures_is_told_what_hardly_repeats():
    def loss(model, batch):
        return model(batch[0]).sum() / batch[1].sum().item()

    job = _job("counts", [torch.tensor([number, 5]) for number in range(60)], capture=True)
    job.loss = loss
    report = wf.run([job], memory="16MiB")["counts"]
    assert report.error_type == "CaptureError"
    assert "hardly ever" in report.error
