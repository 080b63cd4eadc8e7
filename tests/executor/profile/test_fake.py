"""A profile from fake tensors is the one that running the step gives, where kernels are known."""

from __future__ import annotations

import functools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from tests.support import jobs
from tests.support.data import squares
from tests.support.graphs import step_of, step_of_twins
from tests.support.jobs import build, sgd
from tests.support.models import Mlp
from waterflow.capture.stride_rules import CaptureMode
from waterflow.executor.device.select import get_device
from waterflow.executor.profile.cpu_workspaces import host_script
from waterflow.executor.profile.fake import fake_profile
from waterflow.executor.run.rng import JobRng
from waterflow.executor.run.tape import compile_step
from waterflow.models.bert import bert_tiny
from waterflow.models.lstm import LstmModel
from waterflow.models.resnet import ResNet
from waterflow.steps.job_steps import JobSteps

pytestmark = pytest.mark.cpu


def tokens(count=4, length=6):
    ids = torch.arange(count * length).reshape(count, length) % 11
    return [(ids, ids.flip(1))]


def token_loss(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def plain_sgd(parameters):
    return optim.SGD(parameters, lr=0.1)


def masked_loss(model, batch):
    ids, labels = batch
    mask = (ids > 0).long()
    logits = model(ids, mask, torch.zeros_like(ids))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def odd_batches():
    """Batches that cover their storage with gaps, backwards dimensions or the same bytes twice."""
    x = torch.linspace(-1, 1, 96).reshape(4, 3, 8)
    return [(x[:, 0, ::2], x.transpose(0, 2)[::2, 2], x[0, 0, :4].expand(5, 4))]


def odd_loss(model, batch):
    return sum((part.reshape(-1, 4) * model.weight[0]).sin().sum() for part in batch)


def mixed_loss(model, batch):
    """Numbers, types and reductions that the host's kernels cast on the way."""
    y = model(batch[0])
    total = (y + 2).mean() + (1 - y).clamp(-1, 1).sum() + (y > 0.5).float().mean()
    total = total + torch.where(y > 0, y, 0.0).norm() + (y.double() * y).sum().float()
    return total + (y**3 / 2).exp().sum() + (y.argmax(1) * 2 + 1).float().mean() * y.sum()


KNOWN = {
    "mlp_adam": partial(build, "mlp_adam", Mlp, lambda p: optim.Adam(p)),
    "mlp_momentum": partial(build, "mlp_momentum", Mlp, sgd),
    "lstm": partial(
        build, "lstm", lambda: LstmModel(11, 12, 2), lambda p: optim.Adam(p), tokens, token_loss
    ),
    "bert": partial(build, "bert", bert_tiny, plain_sgd, tokens, masked_loss),
    "batch_norms": partial(
        build,
        "batch_norms",
        lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 20), nn.BatchNorm1d(20)),
        plain_sgd,
        data=lambda: [torch.linspace(0, 1, 24).reshape(6, 4)],
        loss=squares,
    ),
    "batch_norm_images": partial(
        build,
        "batch_norm_images",
        lambda: nn.Sequential(nn.BatchNorm2d(6), nn.ReLU(), nn.BatchNorm2d(6), nn.AvgPool2d(2)),
        plain_sgd,
        data=lambda: [torch.linspace(0, 1, 6 * 4 * 6 * 6).reshape(4, 6, 6, 6)],
        loss=squares,
    ),
    "odd_batches": partial(build, "odd", lambda: nn.Linear(4, 3), plain_sgd, odd_batches, odd_loss),
    "mixed": partial(build, "mixed", Mlp, plain_sgd, loss=mixed_loss),
    **{
        name: build
        for table in (jobs.MODELS, jobs.TRAINING, jobs.OPTIMIZERS)
        for name, build in table.items()
        if name
        in (
            *("in_place", "custom", "clip_foreach", "groups_sgd", "adamw_fused", "radam_plain"),
            "adadelta_foreach",
        )
    },
}


@functools.cache
def known_profiles(name):
    return list(profiles(KNOWN[name]()))


def profiles(job):
    """Per step of the job: its step graph, its measured profile and its fake one."""
    device, threads = get_device("cpu"), torch.get_num_threads()
    steps = JobSteps(job, device, JobRng(0), threads)
    found = steps.preparer.prepare(next(iter(job.data))).specialization
    for step in (found.first, found.steady):
        if step is not None:
            fake = fake_profile(
                step.graph,
                step.compiled,
                alignment=device.alignment,
                name=job.name,
                threads=threads,
            )
            yield step, step.memory.profile, fake


@pytest.mark.parametrize("name", KNOWN)
def test_equal_to_the_measured_profile_event_for_event(name):
    for step, measured, fake in known_profiles(name):
        assert fake.num_nodes == measured.num_nodes == len(step.compiled.tape)
        assert different_operators(step, measured, fake) == set()
        np.testing.assert_array_equal(fake.events, measured.events)
        assert (fake.source, fake.name) == ("fake", measured.name)
        assert fake.seconds == fake.persistent_bytes == 0


def different_operators(step, measured, fake):
    def by_node(profile):
        found = [[] for _ in range(profile.num_nodes)]
        for node, size, _ in profile.events.tolist():
            found[node].append(size)
        return found

    pairs = zip(by_node(measured), by_node(fake), step.compiled.names, strict=True)
    return {name for one, other, name in pairs if one != other}


def test_convolutions_need_more_than_their_results():
    """Through oneDNN they reorder weights and inputs; what fakes tell is the least they need."""

    def images():
        x = torch.linspace(-1, 1, 4 * 3 * 32 * 32).reshape(4, 3, 32, 32)
        return [(x, torch.arange(4))]

    job = build("resnet", lambda: ResNet((1, 1), 10, 8), plain_sgd, images)
    for step, measured, fake in profiles(job):
        allowed = {"aten.convolution.default", "aten.convolution_backward.default"}
        assert different_operators(step, measured, fake) <= allowed
        assert fake.transient_peak_bytes <= measured.transient_peak_bytes
        assert measured.transient_peak_bytes < 1.5 * fake.transient_peak_bytes
        assert fake.surviving_bytes == measured.surviving_bytes


def rows(profile):
    return [tuple(int(part) for part in event) for event in profile.events]


X = torch.ones(8, 16)  # 512 bytes


def test_views_and_writes_make_nothing_and_keep_what_they_see():
    def function(x):
        y = x + x
        view = y.t()[2:]
        z = view.sum()
        return z, y.mul_(y)[0]

    fake = fake_profile(step_of(function, X), alignment=64, name="views")
    load, add, _, _, total, square, select, loss = range(8)
    assert fake.num_nodes == 8
    assert rows(fake) == [
        (load, 512, 0),
        (add, 512, 1),
        (add, -512, 0),
        (total, 64, 2),
        (loss, -64, 2),
    ], "the output is a view of y, so y survives the step"
    assert (square, select) == (5, 6)


def test_results_that_nobody_reads_go_at_once():
    step = step_of(lambda x: (x.max(dim=1)[0].sum(),), X)
    in_a_slot = fake_profile(step, alignment=64, name="unread")
    assert rows(in_a_slot)[1:5] == [(1, 64, 1), (1, 64, 2), (1, -512, 0), (1, -64, 2)]
    unread = next(node for node in step.nodes if node.args[1:] == (1,) and not node.users)
    step.graph.erase_node(unread)
    nowhere = fake_profile(step, alignment=64, name="unread")
    assert rows(nowhere)[1:5] == [(1, 64, 1), (1, 64, 2), (1, -64, 2), (1, -512, 0)]


def test_lists_of_results_die_one_by_one():
    def function(x):
        one, two = torch._foreach_sqrt([x, x + x])
        return one.sum() + two.sum(), two

    fake = fake_profile(step_of(function, X), alignment=512, name="lists")
    live = fake.node_live().tolist()
    assert live[-1] == 512
    assert fake.surviving_bytes == 512
    assert fake.transient_peak_bytes == 512 * 4


def test_the_arenas_alignment_counts():
    step = step_of(lambda x: (x.sin().sum(),), torch.ones(3, 3))
    for alignment in (1, 64, 512):
        sizes = {abs(size) for _, size, _ in rows(fake_profile(step, alignment=alignment, name=""))}
        assert sizes == {36, 4} if alignment == 1 else sizes == {alignment}


def test_empty_tensors_have_no_block():
    fake = fake_profile(
        step_of(lambda x: (x.sum() + x[:0].sin().sum(),), X), alignment=64, name="empty"
    )
    assert all(size for _, size, _ in rows(fake))


def test_a_gpus_kernels_are_not_the_hosts_and_its_step_counts_its_memory_only():
    """Numbers are passed to a GPU's kernels as they are; tensors on the host lie elsewhere."""
    mode = CaptureMode()
    with mode:
        twins = [torch.empty(8, 16, device="cuda"), torch.empty(4)]

    def function(x, on_host):
        return (x * 2.0).sum() * (on_host + 1.0).sum().to(x.device), x + 1.0

    step = step_of_twins(function, mode, twins, "parameter")
    fake = fake_profile(step, alignment=512, name="cuda")
    assert fake.transient_peak_bytes == 512 * 3
    assert {abs(size) for _, size, _ in rows(fake)} == {512}


def test_the_tape_of_another_step_is_noticed():
    one, other = (step_of(f, X) for f in (lambda x: (x.sum(),), lambda x: (x.sin().sum(),)))
    with pytest.raises(AssertionError, match="'mine': the tape is not that of the step"):
        fake_profile(one, compile_step(other), alignment=64, name="mine")
    assert fake_profile(one, compile_step(one), alignment=64, name="mine").num_nodes == 3


def test_every_known_kernel_gives_back_what_it_takes():
    seen = set()
    for name in ("bert", "mixed", "batch_norms", "mlp_adam", "adadelta_foreach"):
        for step, _, _ in known_profiles(name):
            for node in step.graph.nodes:
                if not isinstance(node.target, torch._ops.OpOverload) or node.target.is_view:
                    continue
                results = len(_new(node))
                script = host_script(node, results, 2)
                takes = sum(kind == "take" for kind, _ in script)
                gives = sorted(place for kind, place in script if kind == "give")
                assert gives == list(range(takes)), node.target
                places = [place for kind, place in script if kind == "result"]
                assert len(set(places)) == len(places)
                assert set(places) <= set(range(results))
                seen |= {str(node.target)} if takes else set()
    assert {"aten._safe_softmax.default", "aten.mean.default"} <= seen


def _new(node):
    """Results of a node that are not its arguments."""
    returns = node.target._schema.returns
    values = [node.meta.get("val")] if len(returns) == 1 else node.meta.get("val") or ()
    return [
        leaf
        for value, described in zip(values, returns, strict=False)
        if described.alias_info is None
        for leaf in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(leaf, torch.Tensor) and leaf.numel()
    ]
