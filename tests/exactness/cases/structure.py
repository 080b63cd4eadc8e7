"""Cases: the model itself is changed while it trains."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.exactness.case import KEPT, Net, at, case, every, job, mlp, sgd


def reshaped(name, change, make_model=mlp, *expected, **options):
    """Enters a case whose callback changes the model, or the optimizer with it, after step 4."""

    def make(live):
        model = make_model()
        optimizer = sgd(model)
        return job(
            model, optimizer=optimizer, on_step=at(4, live, lambda: change(model, optimizer))
        )

    make.__name__ = name
    case(*(expected or ("recaptured",)), **options)(make)


def dropping():
    return mlp(0.3)


def normed():
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))


class Masked(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(32))

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)) * self.mask)


# -- layers


def _replace_last(model, optimizer):
    model[2] = nn.Linear(32, 4)
    optimizer.param_groups[0]["params"][-2:] = list(model[2].parameters())


def _replace_frozen(model, optimizer):
    model[0] = nn.Linear(16, 32)


def _deepen(model, optimizer):
    model.insert(1, nn.Linear(32, 32))
    optimizer.add_param_group({"params": list(model[1].parameters())})


def _rename(model, optimizer):
    model.head = model.pop(2)


def _bypass(model, optimizer):
    model[1] = nn.Identity()


def _other_class(model, optimizer):
    class Doubled(type(model)):
        def forward(self, x):
            return 2 * super().forward(x)

    model.__class__ = Doubled


def _lora(model, optimizer):
    """A low-rank path beside a frozen layer."""

    class Lora(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 32, bias=False)

        def forward(self, x):
            return self.layer(x) + self.up(self.down(x))

    model[0] = Lora(model[0])
    optimizer.add_param_group({"params": [model[0].down.weight, model[0].up.weight]})


reshaped("layer_replaced", _replace_last)
reshaped("layer_replaced_and_not_trained", _replace_frozen)
reshaped("layer_added", _deepen)
reshaped("layer_renamed", _rename)
reshaped("layer_bypassed", _bypass)
reshaped("activation_replaced", lambda m, o: m.__setitem__(1, nn.ReLU()))
reshaped("class_of_the_model_changed", _other_class)
reshaped("low_rank_path_added", _lora)
reshaped("layers_exchanged", lambda m, o: m.append(m.pop(1)), lambda: mlp().append(nn.Linear(4, 4)))
reshaped("dropout_added", lambda m, o: m.insert(2, nn.Dropout(0.3)))
reshaped("method_of_a_layer_patched", lambda m, o: setattr(m[1], "forward", torch.sigmoid))

# -- parametrizations, pruning, hooks


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def _hook(module, inputs, out):
    return out * 2


def _with_hook():
    model = mlp()
    model.handle = model[0].register_forward_hook(_hook)
    return model


def _with_parametrization():
    model = mlp()
    parametrize.register_parametrization(model[0], "weight", Scaled())
    return model


def _remove_parametrization(model, optimizer):
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)


def _weight_norm(model, optimizer):
    parametrizations.weight_norm(model[0])
    optimizer.param_groups[0]["params"] = list(model.parameters())


def _spectral_norm(model, optimizer):
    parametrizations.spectral_norm(model[0])


reshaped(
    "parametrization_added",
    lambda m, o: parametrize.register_parametrization(m[0], "weight", Scaled()),
)
reshaped("parametrization_removed", _remove_parametrization, _with_parametrization)
reshaped("weight_norm_added", _weight_norm)
reshaped("spectral_norm_added", _spectral_norm, mlp, "recaptured", "opaque")
reshaped(
    "pruned", lambda m, o: prune.l1_unstructured(m[0], "weight", 0.5), mlp, "recaptured", "opaque"
)
reshaped(
    "pruned_for_good",
    lambda m, o: prune.remove(prune.random_unstructured(m[0], "weight", 0.5), "weight"),
    mlp,
    *KEPT,
)
reshaped("hook_added", lambda m, o: m[0].register_forward_hook(_hook))
reshaped("hook_before_added", lambda m, o: m[0].register_forward_pre_hook(lambda m, x: (2 * x[0],)))
reshaped("hook_backwards_added", lambda m, o: m[0].weight.register_hook(lambda g: g * 2))
reshaped(
    "hook_of_a_module_backwards_added",
    lambda m, o: m[2].register_full_backward_hook(lambda m, into, out: (into[0] * 2,)),
)
reshaped("hook_removed", lambda m, o: m.handle.remove(), _with_hook)

# -- weights and buffers


def _tied():
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))
    model[2].weight = model[0].weight
    return model


def _tie(model, optimizer):
    model[2].weight = model[0].weight


def _untied():
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


def _untie(model, optimizer):
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    optimizer.param_groups[0]["params"].append(model[2].weight)


def _new_parameter(model, optimizer):
    model[0].weight = nn.Parameter(model[0].weight.detach() * 0.5)
    optimizer.param_groups[0]["params"][0] = model[0].weight


def _assign(model, optimizer):
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}, assign=True)


def _freeze(model, optimizer):
    model[0].requires_grad_(False)


def _half_frozen():
    model = mlp()
    model[0].requires_grad_(False)
    return model


def _set_storage(model, optimizer):
    with torch.no_grad():
        model[0].weight.set_(torch.ones(32, 16))


def _swap(model, optimizer):
    torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.zeros(32, 16)))


reshaped("weights_tied", _tie, _untied)
reshaped("weights_untied", _untie, _tied)
reshaped("parameter_replaced", _new_parameter)
reshaped(
    "data_of_a_weight_replaced",
    lambda m, o: setattr(m[0].weight, "data", torch.ones(32, 16)),
    mlp,
    *KEPT,
)
reshaped(
    "data_of_a_weight_copied", lambda m, o: m[0].weight.data.copy_(torch.ones(32, 16)), mlp, *KEPT
)
reshaped("storage_of_a_weight_set", _set_storage, mlp, *KEPT)
reshaped("weights_assigned", _assign, mlp, *KEPT)
reshaped("weights_swapped", _swap, mlp, *KEPT)
reshaped("layer_frozen", _freeze)
reshaped("layer_unfrozen", lambda m, o: m[0].requires_grad_(True), _half_frozen)
reshaped("layer_without_bias", lambda m, o: m[2].register_parameter("bias", None))
reshaped(
    "buffer_replaced",
    lambda m, o: setattr(m, "mask", (torch.arange(32) % 2).float()),
    Masked,
    *KEPT,
)
reshaped(
    "buffer_registered", lambda m, o: m.register_buffer("mask", torch.zeros(32)), Masked, *KEPT
)
reshaped("buffer_of_another_type", lambda m, o: setattr(m, "mask", torch.arange(32) % 2), Masked)
reshaped("buffer_of_another_shape", lambda m, o: setattr(m, "mask", torch.tensor(0.5)), Masked)

# -- modes and numbers of layers

reshaped("dropout_changed", lambda m, o: setattr(m[2], "p", 0.6), dropping, *KEPT)
reshaped("dropout_switched_off", lambda m, o: m[2].eval(), dropping)
reshaped("model_set_to_evaluate", lambda m, o: m.eval(), normed)
reshaped("norm_frozen", lambda m, o: m[1].eval().requires_grad_(False), normed)
reshaped("momentum_of_a_norm", lambda m, o: setattr(m[1], "momentum", 0.5), normed, *KEPT)
reshaped("epsilon_of_a_norm", lambda m, o: setattr(m[1], "eps", 0.1), normed, *KEPT)
reshaped("statistics_reset", lambda m, o: m[1].reset_running_stats(), normed, *KEPT)
reshaped("statistics_not_kept", lambda m, o: setattr(m[1], "track_running_stats", False), normed)


@case("recaptured")
def stages_grown(live):
    """The active path of a growing network is a key that the callback moves on."""

    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleDict({"small": nn.Linear(16, 4), "large": mlp()})
            self.active = "small"

        def forward(self, x):
            return self.heads[self.active](x)

    model = Growing()
    return job(model, on_step=at(4, live, lambda: setattr(model, "active", "large")))


@case("recaptured")
def adversaries_in_turn(live):
    """Generator and critic in turn: what needs a gradient changes with every step."""
    model = mlp()

    def turn(step):
        model[0].requires_grad_(step % 2 == 0)
        model[2].requires_grad_(step % 2 == 1)

    return job(model, on_step=every(live, turn))


@case("captured", "opaque", matters=False)
def norm_with_a_cumulative_average(live):
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32, momentum=None), nn.Linear(32, 4))
    return job(model)


@case("captured", "opaque", matters=False)
def spectral_norm_from_the_start(live):
    model = mlp()
    parametrizations.spectral_norm(model[0])
    return job(model)


@case("captured", "opaque", matters=False)
def spectral_norm_of_old(live):
    model = mlp()
    nn.utils.spectral_norm(model[0])
    return job(model)


# -- something changes places, and later back: captures of before are right again


def swapped(name, swap, make_model=mlp, make_optimizer=sgd, **options):
    """Enters a case whose callback changes the model after step 4, and back after step 8."""

    def make(live):
        model = make_model()
        optimizer = make_optimizer(model)

        def change(step):
            if step in (4, 8):
                swap(model, optimizer)

        on_step = every(live, change)
        return job(model, optimizer=optimizer, on_step=on_step, steps=14)

    make.__name__ = name
    case(*KEPT, **options)(make)


def square():
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4))


class Shifted(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 32))
        self.register_buffer("shift", torch.ones(32))

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)) * self.scale + self.shift)


def _swap_buffers(model, optimizer):
    model.scale, model.shift = model.shift, model.scale


def _swap_weights(model, optimizer):
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


def _swap_layers(model, optimizer):
    model[0], model[2] = model[2], model[0]


def _swap_trained(model, optimizer):
    parameters = optimizer.param_groups[0]["params"]
    parameters[0], parameters[2] = parameters[2], parameters[0]


def _swap_momenta(model, optimizer):
    one, two = model[0].weight, model[2].weight
    state = optimizer.state
    state[one], state[two] = state[two], state[one]


def _tie_or_untie(model, optimizer):
    mine = optimizer.param_groups[0]["params"][2]
    is_tied = model[2].weight is model[0].weight
    model[2].weight = mine if is_tied else model[0].weight


swapped("buffers_swapped_and_back", _swap_buffers, Shifted)
swapped("weights_swapped_and_back", _swap_weights, square)
swapped("layers_swapped_and_back", _swap_layers, square)
swapped("trained_parameters_swapped_and_back", _swap_trained, square, matters=False)
swapped("momenta_swapped_and_back", _swap_momenta, square)
swapped("tied_and_untied", _tie_or_untie, square)
