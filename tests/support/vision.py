"""What tests of image models compare: parameters, maps, multiplications, logits."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def traced(task, training=False):
    """Shapes of what each part gives for two images, and a forward's multiplications per image."""
    shapes = {}

    def note(name):
        def hook(module, inputs, output):
            shapes[name] = tree_map(lambda tensor: tuple(tensor.shape), output)

        return hook

    with FakeTensorMode(), FlopCounterMode(display=False) as counter, torch.no_grad():
        model = task.model().train(training)
        for name, part in model.named_modules():
            part.register_forward_hook(note(name))
        model(task.batch(2)[0])
    return shapes, counter.get_total_flops() / 2 / 2


def pair(mine, theirs):
    """Both models with equal, random contents; batch norms whose statistics matter, too."""
    torch.manual_seed(0)
    for part in theirs.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias, std=0.1)
            nn.init.normal_(part.running_mean, std=0.1)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    values = theirs.state_dict().values()
    mine.load_state_dict(dict(zip(mine.state_dict(), values, strict=True)))
    return mine, theirs
