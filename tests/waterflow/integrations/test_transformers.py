"""A Trainer's training as a job has the bits of `trainer.train()`."""

import this
from pathlib import Path

import numpy as np
import pytest
import torch

import waterflow as wf

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.cpu

TEXT = Path(this.__file__).read_bytes()
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
ENCODER = {**SMALL, "vocab_size": 64, "intermediate_size": 24, "max_position_embeddings": 32}
SEED = 42


def sentences(labels, rows=20, length=12):
    """Rows of bytes of a text; labelled with themselves, or with a class."""
    found = []
    for row in range(rows):
        ids = torch.tensor([1 + byte % 60 for byte in TEXT[row * length : (row + 1) * length]])
        found.append({"input_ids": ids, "labels": ids if labels == "text" else row % 3})
    return found


def pictures(rows=20):
    pixels = torch.rand(rows, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    return [{"pixel_values": pixels[row], "labels": row % 3} for row in range(rows)]


def encoder(name, **options):
    config = getattr(transformers, f"{name}Config")(**{**ENCODER, **options}, num_labels=3)
    return getattr(transformers, f"{name}ForSequenceClassification")(config), sentences("class")


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config), sentences("text")


def llama():
    config = transformers.LlamaConfig(**ENCODER, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config), sentences("text")


def opt():
    config = transformers.OPTConfig(**SMALL, vocab_size=64, ffn_dim=24, word_embed_proj_dim=16)
    return transformers.OPTForCausalLM(config), sentences("text")


def t5():
    config = transformers.T5Config(
        vocab_size=64,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), sentences("text")


def vit():
    config = transformers.ViTConfig(
        **SMALL, intermediate_size=24, image_size=8, patch_size=4, num_labels=3
    )
    return transformers.ViTForImageClassification(config), pictures()


MODELS = {
    "bert": lambda: encoder("Bert"),
    "roberta": lambda: encoder("Roberta"),
    "distilbert": lambda: encoder("DistilBert", dim=16, n_layers=1, n_heads=2, hidden_dim=24),
    "albert": lambda: encoder("Albert", embedding_size=8),
    "electra": lambda: encoder("Electra", embedding_size=8),
    "gpt2": gpt2,
    "llama": llama,
    "opt": opt,
    "t5": t5,
    "vit": vit,
}


def trainer(make, tmp_path, kind=transformers.Trainer, keywords=(), **options):
    torch.manual_seed(1)
    model, data = make()
    arguments = {
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "max_grad_norm": 0,
        "seed": SEED,
        **options,
    }
    args = transformers.TrainingArguments(output_dir=str(tmp_path), **arguments)
    return kind(model=model, args=args, train_dataset=data, **dict(keywords))


def trained_by_host(host):
    """The losses of a Trainer's own training, each as it was differentiated."""
    losses = []
    step = host.training_step

    def training_step(*arguments):
        loss = step(*arguments)
        losses.append(float(loss))
        return loss

    host.training_step = training_step
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.set_seed(SEED)
    host.train()
    torch.set_num_threads(before)
    return losses


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


def same_weights(one, other):
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory):
    """All models trained in one call, and their Trainers."""
    path = tmp_path_factory.mktemp("trainers")
    trainers = {name: trainer(make, path) for name, make in MODELS.items()}
    jobs = [wf.from_trainer(one, name) for name, one in trainers.items()]
    return wf.run(jobs, memory="512MiB", threads=1), trainers


@pytest.mark.parametrize("name", MODELS)
def test_models_side_by_side_train_as_by_their_host(name, side_by_side, tmp_path):
    report, trainers = side_by_side
    assert report[name].error is None
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
        {"max_steps": 5},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
        {"optim": "sgd"},
        {"optim": "adafactor"},
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


def masked_at_random(features):
    """A collator that draws: the batches after it see other random numbers."""
    batch = transformers.default_data_collator(features)
    hidden = torch.rand(batch["input_ids"].shape) < 0.2
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 3)
    return batch


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        (Weighted, {}),
        (transformers.Trainer, {"compute_loss_func": focal}),
        (transformers.Trainer, {"data_collator": masked_at_random}),
    ],
    ids=["compute_loss", "compute_loss_func", "collator"],
)
def test_losses_and_collators_of_the_users(kind, keywords, tmp_path):
    assert_equal(MODELS["bert"], tmp_path, kind=kind, keywords=keywords)


@pytest.mark.parametrize("kind", [transformers.Trainer, Weighted])
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5"])
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
        ({"eval_strategy": "epoch", "bf16": True}, "bf16=True with an eval_strategy"),
        ({"eval_strategy": "epoch", "eval_on_start": True}, "eval_on_start=True"),
        ({"kind": Stepping}, "Stepping.training_step"),
        (
            {"keywords": {"callbacks": [transformers.EarlyStoppingCallback()]}},
            "the callback EarlyStoppingCallback",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_taken_over_is_refused_by_name(change, named, tmp_path):
    if "eval_strategy" in change:
        change = {**change, "keywords": {"eval_dataset": sentences("class")}}
    with pytest.raises(wf.JobError, match="from_trainer") as refused:
        wf.from_trainer(trainer(MODELS["bert"], tmp_path, **change), "mine")
    assert named in str(refused.value)
    assert "'mine'" in str(refused.value)


def accuracy(prediction):
    logits, labels = prediction.predictions, prediction.label_ids
    noise = np.random.rand(*labels.shape) * 1e-3  # drawn, as some metrics do
    right = (logits.argmax(-1) == labels).mean()
    return {"accuracy": right + noise.mean(), "best_epoch": 3.0}


#: Evaluated in batches of four, the last of which has one row.
HELD_OUT = {"per_device_eval_batch_size": 4}


def evaluated(name, tmp_path, evaluation, **keywords):
    data = MODELS[name]()[1][:13]
    keywords = {"eval_dataset": data, **keywords}
    return trainer(MODELS[name], tmp_path, keywords=keywords, **HELD_OUT, **evaluation)


def told_by_host(host):
    """What the Trainer's log says of each evaluation, but for its times."""
    timings = ("_runtime", "_per_second", "_preparation_time")
    return [
        {k: v for k, v in entry.items() if k.startswith("eval_") and not k.endswith(timings)}
        for entry in host.state.log_history
        if any(key.startswith("eval_") for key in entry)
    ]


@pytest.mark.parametrize(
    ("name", "evaluation"),
    [
        ("gpt2", {"eval_strategy": "epoch"}),
        ("t5", {"eval_strategy": "epoch"}),
        ("bert", {"eval_strategy": "steps", "eval_steps": 2}),
        ("bert", {"eval_strategy": "steps", "eval_steps": 4, "eval_delay": 5}),
        ("gpt2", {"eval_strategy": "steps", "eval_steps": 0.5}),
        ("t5", {"eval_strategy": "epoch", "eval_delay": 2, "gradient_accumulation_steps": 2}),
        ("bert", {"eval_strategy": "epoch", "max_steps": 5, "eval_accumulation_steps": 1}),
    ],
    ids=lambda given: given if isinstance(given, str) else ",".join(map(str, given.values())),
)
def test_evaluations_are_those_of_the_host(name, evaluation, tmp_path):
    """They draw random numbers, as every loader does, so that what follows has others."""
    metrics = {"compute_metrics": accuracy} if name == "bert" else {}
    collated = {"data_collator": masked_at_random} if name == "bert" else {}
    host, guest, beside = (
        evaluated(name, tmp_path, evaluation, **metrics, **collated) for _ in range(3)
    )
    asked = []
    own = beside.get_eval_dataloader
    beside.get_eval_dataloader = lambda *data: asked.append(1) or own(*data)
    jobs = [wf.from_trainer(guest, "guest"), wf.from_trainer(beside, "beside")]
    transformers.set_seed(SEED)
    report = wf.run(jobs, memory="512MiB", threads=1)
    report.raise_errors()
    losses, told = trained_by_host(host), told_by_host(host)
    assert len(told) == len(asked) > 0
    for job, one in (("guest", guest), ("beside", beside)):
        assert [found.values for found in report[job].evaluations] == told
        assert told_by_host(one) == told
        if "gradient_accumulation_steps" not in evaluation:
            assert report[job].losses == losses
        same_weights(host.model, one.model)
    assert host.state.log_history[-2]["step"] == guest.state.log_history[-1]["step"]


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
