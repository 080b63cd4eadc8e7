"""Three Transformers models fine-tuned side by side, each as its own Trainer would do it."""

import inspect
import tempfile

import torch
import transformers as hf

import waterflow as wf

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256}
ENCODER = {**SIZES, "intermediate_size": 128, "num_labels": 2}
MODELS = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**ENCODER)),
    "electra": lambda: hf.ElectraForSequenceClassification(hf.ElectraConfig(**ENCODER)),
    "roberta": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**ENCODER)),
}


def lines() -> list[dict[str, torch.Tensor]]:
    """Lines of torch's source as bytes; those that are comments have label 1."""
    source = inspect.getsource(torch).splitlines()[:256]
    texts = [line.strip().encode()[:32].ljust(32) for line in source]
    labels = [int(text.startswith(b"#")) for text in texts]
    pairs = zip(texts, labels, strict=True)
    return [{"input_ids": torch.tensor(list(t)), "labels": torch.tensor(n)} for t, n in pairs]


def trainer(name: str) -> hf.Trainer:
    torch.manual_seed(0)
    arguments = hf.TrainingArguments(tempfile.mkdtemp(), num_train_epochs=1, report_to="none")
    return hf.Trainer(model=MODELS[name](), args=arguments, train_dataset=lines())


if __name__ == "__main__":
    for job in wf.run([wf.from_trainer(trainer(name), name) for name in MODELS], "256MiB"):
        print(f"{job.name}: {job.state}, loss {job.losses[0]:.3f} to {job.losses[-1]:.3f}")
