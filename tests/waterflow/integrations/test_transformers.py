"""A Trainer's training as a job has the bits of `trainer.train()`."""

import pytest
import torch

import waterflow as wf
from tests.support.tables import soaked, thinned
from tests.support.trainers import (
    MODELS,
    gpt2,
    masked_at_random,
    same_weights,
    sentences,
    trained_by_host,
    trainer,
)

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.cpu


def assert_equal(make, tmp_path, report=None, host_losses=None, **options):
    """That a host's training, and the same Trainer's as a job, give the same bits."""
    host, guest = (trainer(make, tmp_path, **options) for _ in range(2))
    job = wf.from_trainer(guest, "guest")
    other = wf.from_trainer(trainer(gpt2, tmp_path, max_steps=7), "other")
    report = wf.run([job, other], memory="512MiB", threads=1)
    assert report.ok, [found.error for found in report]
    losses = trained_by_host(host)
    assert len(losses) > 3
    assert report["guest"].losses == losses
    same_weights(host.model, guest.model)
    return report["guest"]


#: One of several encoders for texts, and what is made otherwise.
USUAL = ("bert", "gpt2", "llama", "t5", "vit", "padded llama")


@pytest.fixture(scope="module")
def side_by_side(request, tmp_path_factory):
    """The models that tests ask for trained in one call, and their Trainers."""
    path = tmp_path_factory.mktemp("trainers")
    tests = [item for item in request.session.items if "side_by_side" in item.fixturenames]
    names = {item.callspec.params["name"] for item in tests}
    trainers = {name: trainer(make, path) for name, make in MODELS.items() if name in names}
    jobs = [wf.from_trainer(one, name) for name, one in trainers.items()]
    return wf.run(jobs, memory="512MiB", threads=1), trainers


@pytest.mark.parametrize("name", thinned(MODELS, USUAL))
def test_models_side_by_side_train_as_by_their_host(name, side_by_side, tmp_path):
    report, trainers = side_by_side
    assert report[name].error is None
    if name != "gpt2":  # which logs in the first step of its kind in a process
        assert report[name].captured == "captured", report[name].notes
    host = trainer(MODELS[name], tmp_path)
    assert report[name].losses == trained_by_host(host)
    assert report[name].steps == host.state.global_step == 6
    same_weights(host.model, trainers[name].model)
    rates = [one.optimizer.param_groups[0]["lr"] for one in (host, trainers[name])]
    assert rates[0] == rates[1]


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 0.0},
        soaked({"max_steps": 5}),
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
        {"optim": "sgd"},
        soaked({"optim": "adafactor"}),
        {"label_smoothing_factor": 0.1},
        {"bf16": True},
        {"train_sampling_strategy": "group_by_length"},
        {"dataloader_drop_last": True, "per_device_train_batch_size": 6, "data_seed": 7},
    ],
    ids=lambda options: ",".join(options),
)
def test_arguments_do_what_they_do_in_the_host(options, tmp_path):
    assert_equal(MODELS["bert"], tmp_path, **options)


class Weighted(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weight = torch.tensor([1.0, 2.0, 3.0])
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weight)
        return (loss, outputs) if return_outputs else loss


def focal(outputs, labels, num_items_in_batch=None):
    return (
        torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        / num_items_in_batch
    )


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        soaked(Weighted, {}),  # as accumulated below
        (transformers.Trainer, {"compute_loss_func": focal}),
        soaked(transformers.Trainer, {"data_collator": masked_at_random}),  # as beside evaluations
    ],
    ids=["compute_loss", "compute_loss_func", "collator"],
)
def test_losses_and_collators_of_the_users(kind, keywords, tmp_path):
    assert_equal(MODELS["bert"], tmp_path, kind=kind, keywords=keywords)


@pytest.mark.parametrize("kind", [transformers.Trainer, Weighted])
@pytest.mark.parametrize("name", ["gpt2", "bert", soaked("t5")])
def test_gradients_accumulate_as_in_the_host(name, kind, tmp_path):
    if kind is Weighted and name != "bert":
        pytest.skip("its loss is for classes")
    options = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    host, guest = (trainer(MODELS[name], tmp_path, kind, **options) for _ in range(2))
    report = wf.run([wf.from_trainer(guest, "guest")], memory="256MiB", threads=1)
    losses = iter(trained_by_host(host))
    updates = [3, 3, 1, 3, 3, 1]  # 7 batches an epoch
    summed = [sum((torch.tensor(next(losses)) for _ in range(n)), torch.zeros(())) for n in updates]
    assert report["guest"].error is None
    assert report["guest"].losses == [float(loss) for loss in summed]
    same_weights(host.model, guest.model)


def test_an_optimizer_of_the_users(tmp_path):
    def with_optimizer():
        one = trainer(gpt2, tmp_path)
        one.optimizer = torch.optim.RMSprop(one.model.parameters(), lr=1e-3)
        return one

    host, guest = with_optimizer(), with_optimizer()
    report = wf.run([wf.from_trainer(guest)], memory="256MiB", threads=1)
    assert report["GPT2LMHeadModel"].losses == trained_by_host(host)
    same_weights(host.model, guest.model)


class Stepping(transformers.Trainer):
    def training_step(self, *arguments, **options):
        return super().training_step(*arguments, **options) * 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"fp16": True}, "fp16=True"),
        ({"gradient_checkpointing": True}, "activation_checkpointing=True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
        ({"kind": Stepping}, "Stepping.training_step"),
        ({"eval_on_start": True}, "eval_on_start=True without an eval_strategy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_taken_over_is_refused_by_name(change, named, tmp_path):
    if "eval_on_start" in change:
        change = {**change, "keywords": {"eval_dataset": sentences("class")}}
    with pytest.raises(wf.JobError, match="from_trainer") as refused:
        wf.from_trainer(trainer(MODELS["bert"], tmp_path, **change), "mine")
    assert named in str(refused.value)
    assert "'mine'" in str(refused.value)


def test_a_model_that_the_host_would_make_anew_is_refused(tmp_path):
    guest = trainer(MODELS["bert"], tmp_path)
    guest.model_init = lambda: guest.model
    with pytest.raises(wf.JobError, match="'mine': from_trainer cannot take over model_init"):
        wf.from_trainer(guest, "mine")


def test_a_trainer_that_has_trained_is_refused(tmp_path):
    host = trainer(MODELS["bert"], tmp_path, max_steps=1)
    host.train()
    with pytest.raises(wf.JobError, match="has done 1 steps"):
        wf.from_trainer(host)


def test_the_trainers_own_is_not_said_twice(tmp_path):
    with pytest.raises(wf.JobError, match="it is the Trainer's to say"):
        wf.from_trainer(trainer(gpt2, tmp_path), seed=3)
    with pytest.raises(wf.JobError, match=r"transformers\.Trainer"):
        wf.from_trainer("trainer")


def test_after_training_the_trainer_evaluates_and_saves(tmp_path):
    one = trainer(MODELS["bert"], tmp_path, max_steps=2)
    assert wf.run([wf.from_trainer(one)], memory="256MiB").ok
    assert one.evaluate(sentences("class"))["eval_loss"] > 0
    one.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
