"""Removing channels: the shrunk network computes what the masked one computes, and everything else stays as it was.

The slow tests over random networks: `make test-slow`.
"""

import copy
import os
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import keepk
from keepk.errors import ShrinkError
from masked import call, leaves, masked, relative_error, without_dropout, zero_slices
from networks import EXPECTED, NETWORKS, WITH_EXACT_UNITS, WITHOUT_EXACT_UNITS
from random_networks import random_network, random_networks, random_trap
from strategies import seeds
from traced_once import traced_network

TOLERANCE = 1e-10
SLOW_SEEDS = range(1_000) if os.environ.get("KEEPK_SLOW") == "1" else ()
SLOW_TRAPS = range(1_000, 3_000) if os.environ.get("KEEPK_SLOW") == "1" else ()
SWAPPED = (nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention)  # may be replaced by a subclass

# Removed channels are zero wherever they are read, so a masked slice gets no gradient and stays zero.
ZERO_PRESERVING = (
    "linears",
    "conv_bn_flatten",
    "residual",
    "preactivation_residual",
    "depthwise",
    "grouped",
    "concat",
    "dense_block",
    "se_gate",
    "attention_by_hand",
    "lstm",
    "gru",
    "tied_autoencoder",
    "tied_embedding",
)


# Networks without any unit, exact or lossy.
WITHOUT_UNITS = (
    "messages_by_channel",
    "messages_in_part",
    "another_width",
    "one_in_the_middle",
    "one_before_the_last",
    "two_in_the_middle",
    "all_but_the_ends",
    "two_near_the_end",
    "size_as_a_factor",
    "size_counted_by_ones",
    "size_counted_by_repeated_ones",
    "size_as_a_number_of_copies",
    "groups_in_a_literal",
    "a_slice_of_the_input",
    "a_dtype_by_the_size",
    "groups_of_the_input",
    "the_size_picks_an_output",
    "training_scales_small_ones",
    "dropout_by_the_size",
    "the_median_of_all",
    "literal_size_in_training",
    "roll_in_training",
    "features_returned_in_training",
    "literal_size_in_the_other_branch",
    "topk_over_channels",
    "sort_over_channels",
    "literal_sizes",
    "copies_that_are_summed",
)

# A quarter of their heads or pairs, rounded down, is zero.
WITHOUT_A_QUARTER = (
    "attention_by_hand",
    "fused_qkv",
    "grouped_query_attention",
    "one_norm_for_all_heads",
    "complex_rotary",
    "complex_rotary_in_a_buffer",
    "complex_rotary_made_in_forward",
    "norm_of_two_halves",
)

# Besides exact units they have a single group of lossy units.
LOSSY_BESIDE_EXACT = (
    "encoder_layer",
    "scale_from_shape",
    "scale_from_tensor",
    "scale_from_default",
    "softmax_in_the_other_branch",
    "either_of_two_values",
    "attention_maps_pool_features",
    "norm_of_pairs",
    "count_of_pairs",
    "pairwise_distance",
    "pairwise_sum",
    "outer_product_by_einsum",
    "expanded_pairs",
    "mixture_of_sigmoid_gates",
    "activation_times_shared_parameter",
    "dynamic_kernel",
    "weight_norm",
    "spectral_norm",
    "spectral_norm_by_hooks",
)


def with_choice(model, example, graph, *, share=0.5, seed=0):
    """A traced network and about this share of its exact units."""
    return model, example, graph, graph.choose(share, seed=seed)


def chosen(name, share=0.5, seed=0):
    """One of the networks and about this share of its exact units, at least one."""
    found = with_choice(*traced_network(name), share=share, seed=seed)
    assert len(found[-1])
    return found


def traced(network):
    model, example = network
    return model, example, keepk.trace(model, example)


def output(model, example):
    with torch.no_grad():
        return call(model.eval(), example)


def training_output(model, example):
    """The output in train mode without dropout, whose random numbers depend on the shape."""
    with torch.no_grad():
        return call(without_dropout(model), example)


def check_shrunk_is_masked(model, example, graph, units):
    """Check that shrinking equals masking, in eval and in train mode.

    In the oracle every slice of a unit is zero, also in its readers, and a BatchNorm treats channels separately. So the
    batch statistics of a masked channel affect nothing, and train mode agrees wherever eval mode does. Units that share
    a norm with others (LayerNorm, part of a group of a GroupNorm) are lossy, and are not chosen here.
    """
    oracle = masked(model, graph, units)
    before = sum(parameter.numel() for parameter in model.parameters())
    keepk.shrink(model, graph, units)
    after = sum(parameter.numel() for parameter in model.parameters())
    assert (after < before) == (len(units) > 0)
    assert relative_error(output(oracle, example), output(model, example)) < TOLERANCE
    assert relative_error(training_output(oracle, example), training_output(model, example)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "share", "seed"),
    [
        (name, share, seed)
        for name in WITH_EXACT_UNITS
        for share, seed in [(0.5, None), (0.5, 0), (0.25, 1), (0.9, 2)]
        if share > 0.25 or name not in WITHOUT_A_QUARTER
    ],
)
def test_shrunk_is_masked(name, share, seed):
    check_shrunk_is_masked(*chosen(name, share, seed))


@pytest.mark.parametrize("name", NETWORKS)
def test_what_can_be_removed_is_as_declared(name):
    """Other tests select their networks by these declarations, without a trace."""
    *_, graph = traced_network(name)
    assert (len(graph.units) == 0) == (name in WITHOUT_UNITS)
    assert (not graph.units.lossy.all()) == (name in WITH_EXACT_UNITS)
    assert (len(graph.choose(0.25, seed=1)) == 0) == (name in (*WITHOUT_A_QUARTER, *WITHOUT_EXACT_UNITS))


def test_most_networks_have_exact_units():
    assert (len(WITH_EXACT_UNITS), len(WITHOUT_EXACT_UNITS), len(WITHOUT_UNITS)) == (161, 85, 28)


def test_shrunk_is_masked_in_random_networks():
    cut = []

    @given(network=random_networks(), seed=seeds)
    @settings(deadline=None, max_examples=60)
    def check(network, seed):
        found = with_choice(*traced(network), seed=seed)
        check_shrunk_is_masked(*found)
        cut.append(len(found[-1]) > 0)

    check()
    assert sum(cut) > 0.5 * len(cut), "most of these networks have something that can be removed"


@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_slow_shrunk_is_masked_in_a_thousand_networks(seed):
    check_shrunk_is_masked(*with_choice(*traced(random_network(seed)), seed=seed))


def check_never_silently_wrong(network, seed=0):
    """Check that a cut is refused and changes nothing, or equals masking on all paths. Returns whether it was made.

    The negative example takes different branches in networks that branch on values.
    """
    model, example, graph, units = with_choice(*traced(network), seed=seed)
    oracle, untouched = masked(model, graph, units), copy.deepcopy(model)
    inputs = (example, -example, 3 * example)
    try:
        keepk.shrink(model, graph, units)
    except ShrinkError:  # at these widths, forward would behave differently
        assert all(relative_error(output(untouched, x), output(model, x)) == 0 for x in inputs)
        return False
    for x in inputs:
        assert relative_error(output(oracle, x), output(model, x)) < TOLERANCE
        assert relative_error(training_output(oracle, x), training_output(model, x)) < TOLERANCE
    return len(units) > 0


def test_traps_are_cut_right_or_refused():
    cut = [check_never_silently_wrong(random_trap(seed), seed) for seed in range(40)]
    assert sum(cut) >= 20, "most of these networks have something that can be removed"


@pytest.mark.parametrize("seed", SLOW_TRAPS)
def test_slow_traps_are_cut_right_or_refused(seed):
    check_never_silently_wrong(random_trap(seed), seed)


def check_spaces_shrink_alone(model, example, graph):
    """Cut each group alone. Returns how many were cut, and how many were refused, by reason.

    Widths that are equal by coincidence become unequal, which a cut of the same share everywhere does not test.
    """
    counts = Counter[str]()
    for number in range(len(graph.choices())):
        twin, own = copy.deepcopy((model, graph))
        blocks = own.choices()[number]
        some = [block[~own.units.lossy[block]] for block in blocks]
        if min(len(block) for block in blocks) < 2:
            counts["only one unit"] += 1
            continue
        if min(map(len, some)) == 0:
            counts["lossy"] += 1
            continue
        units = np.concatenate([block[:1] for block in some])
        try:
            gone = own.edits(units).units  # removing a source removes all of its reads
        except ShrinkError:
            counts["all that a layer has"] += 1
            continue
        oracle = masked(twin, own, gone)
        keepk.shrink(twin, own, units)
        assert relative_error(output(oracle, example), output(twin, example)) < TOLERANCE
        counts["cut"] += 1
    assert counts.total() == len(graph.choices())
    return counts


@pytest.mark.parametrize("name", WITH_EXACT_UNITS)
def test_every_space_shrinks_alone(name):
    counts = check_spaces_shrink_alone(*traced_network(name))
    assert counts.pop("cut") > 0
    assert counts == ({"lossy": 1} if name in LOSSY_BESIDE_EXACT else {})


def test_every_space_of_random_networks_shrinks_alone():
    counts = Counter[str]()

    @given(network=random_networks())
    @settings(deadline=None, max_examples=15)
    def check(network):
        counts.update(check_spaces_shrink_alone(*traced(network)))

    check()
    assert counts["cut"] >= 10, counts


@pytest.mark.parametrize(
    ("seed", "counts"),
    [(457, {"cut": 2, "all that a layer has": 1, "only one unit": 1}), (632, {"lossy": 2}), (791, {"cut": 4})],
)
def test_sources_shrink_alone_with_their_reads(seed, counts):
    """Sources that would empty a layer, that have lossy reads, or that precede a shuffle with dependent groups."""
    assert check_spaces_shrink_alone(*traced(random_network(seed))) == counts


@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_slow_every_space_shrinks_alone(seed):
    check_spaces_shrink_alone(*traced(random_network(seed)))


def halves(graph, units):
    """Two parts of a choice, each with equal numbers from every block."""
    wanted, first = set(units.tolist()), set()
    bound = {unit for blocks in graph.bindings for block in blocks for unit in block.tolist()}
    loose = [[unit for unit in space.units.tolist() if unit not in bound] for space in graph.groups]
    for block in [*(block.tolist() for blocks in graph.bindings for block in blocks), *loose]:
        inside = [unit for unit in block if unit in wanted]
        first.update(inside[: len(inside) // 2])
    return sorted(first), sorted(wanted - first)


@pytest.mark.parametrize("name", WITH_EXACT_UNITS)
def test_two_shrinks_in_a_row_are_one(name):
    """Unit ids stay valid, so that a second removal needs no new trace, and the order does not matter."""
    model, example, graph, units = chosen(name, share=0.6)
    oracle = masked(model, graph, units)
    for part in halves(graph, units):
        keepk.shrink(model, graph, part)
        output(model, example)
    assert relative_error(output(oracle, example), output(model, example)) < TOLERANCE
    at_once, _, graph, same = chosen(name, share=0.6)
    assert np.array_equal(units, same)
    keepk.shrink(at_once, graph, units)
    assert model.state_dict().keys() == at_once.state_dict().keys()
    assert all(torch.equal(value, at_once.state_dict()[key]) for key, value in model.state_dict().items())


# Content of the graph


def units_of(graph, tensor, axis):
    """The units with a slice on that axis, each with the reasons why it is lossy."""
    return {
        int(unit): space.lossy
        for space in graph.groups
        for unit in space.units
        if any(slice_[:2] == (tensor, axis) for slice_ in graph.slices(int(unit)))
    }


def reasons(graph, tensor, axis):
    return [(record.why, record.place) for record in graph.fixed if (record.tensor, record.axis) == (tensor, axis)]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_verdict_is_the_expected_one(name):
    verdict, tensor, axis, _ = EXPECTED[name]
    *_, graph = traced_network(name)
    units, why = units_of(graph, tensor, axis), reasons(graph, tensor, axis)
    if verdict == "exact":
        assert any(not lossy for lossy in units.values()), why
    elif verdict == "fixed":
        assert not units
    else:
        assert all(units.values()), "a unit that is not exact is called exact"
    if verdict == "lossy":
        assert units, why
    if not units:
        assert why
        assert all(reason and place for reason, place in why)


@pytest.mark.parametrize("name", NETWORKS)
def test_an_axis_without_units_has_a_reason(name):
    model, _, graph = traced_network(name)
    covered = {slice_[:2] for space in graph.groups for unit in space.units for slice_ in graph.slices(int(unit))}
    for tensor, parameter in model.named_parameters():
        for axis, size in enumerate(parameter.shape[:2]):  # later axes may be those of a kernel
            if size > 1 and (tensor, axis) not in covered:
                assert any(why for why, _ in reasons(graph, tensor, axis)), f"{tensor}, axis {axis}"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_slice_belongs_to_one_unit(name):
    *_, graph = traced_network(name)
    units = [int(unit) for space in graph.groups for unit in space.units]
    assert len(units) == len(set(units))
    slices = [slice_ for unit in units for slice_ in graph.slices(unit)]
    assert len(slices) == len(set(slices))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_choice_keeps_the_rules(name, share):
    *_, graph = traced_network(name)
    units = graph.choose(share, seed=3)
    assert not len(units) or name in WITH_EXACT_UNITS
    assert len(units) or share < 0.5 or name in WITHOUT_EXACT_UNITS
    assert np.array_equal(units, graph.choose(share, seed=3))
    removed = set(units.tolist())
    assert len(removed) == len(units)
    for space in graph.groups:
        gone = removed & set(space.units.tolist())
        assert not (gone and space.lossy)
        assert len(gone) < len(space.units)
    for blocks in graph.bindings:
        assert len({len(removed & set(block.tolist())) for block in blocks}) == 1


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in WITHOUT_UNITS])
def test_lossy_units_can_go_as_well(name):
    """The result does not equal the masked network, but it runs and has the same output shapes."""
    model, example, graph = traced_network(name)
    before = output(model, example)
    units = graph.choose(0.5, seed=0, lossy=True)
    assert len(units)
    keepk.shrink(model, graph, units)
    for old, new in zip(leaves(before), leaves(output(model, example)), strict=True):
        assert old.shape == new.shape
        assert new.isfinite().all()


# Preserved objects


def parameter_facts(model):
    return {
        name: (id(parameter), parameter.dtype, parameter.requires_grad, parameter.is_leaf)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def freeze_some(model):
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 != 1)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_trace_changes_nothing(name):
    model, example = NETWORKS[name]()
    model.train()
    next(iter(model.children())).eval()
    freeze_some(model)
    facts, values = parameter_facts(model), copy.deepcopy(model.state_dict())
    modules = {path: (type(module), module.training) for path, module in model.named_modules()}
    state = torch.random.get_rng_state()
    graph = keepk.trace(model, example)
    assert facts_of(graph) == facts_of(traced_network(name)[2])
    assert torch.equal(state, torch.random.get_rng_state())
    assert parameter_facts(model) == facts
    assert {path: (type(module), module.training) for path, module in model.named_modules()} == modules
    assert model.state_dict().keys() == values.keys()
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def facts_of(graph):
    """The content of a graph, which must not depend on modes, on gradients, or on earlier forward passes."""
    units = [(int(unit), graph.slices(int(unit))) for space in graph.groups for unit in space.units]
    spaces = [(space.name, space.kind, space.lossy, space.multiple, space.axes) for space in graph.groups]
    bindings = [[block.tolist() for block in blocks] for blocks in graph.bindings]
    return units, spaces, bindings, graph.fixed, graph.alive.all(), graph.unknown, graph.links().tolist()


@pytest.mark.parametrize("name", WITH_EXACT_UNITS)
def test_the_objects_stay(name):
    """Parameters and their ties, module classes except for two, and the keys of the state_dict."""
    model, _, graph, units = chosen(name)
    freeze_some(model)
    facts, keys = parameter_facts(model), list(model.state_dict())
    classes = {path: type(module) for path, module in model.named_modules()}
    keepk.shrink(model, graph, units)
    assert parameter_facts(model) == facts
    assert classes.keys() == dict(model.named_modules()).keys()
    for path, module in model.named_modules():
        assert type(module) is classes[path] or issubclass(classes[path], SWAPPED), path
        assert isinstance(module, classes[path])
    state = model.state_dict()
    assert [key for key in state if key in keys] == keys
    for key in state.keys() - set(keys):
        module = model.get_submodule(key.rpartition(".")[0])
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        assert not state[key].is_floating_point()


def has_pictures(name):
    return any(parameter.dim() == 4 for parameter in NETWORKS[name]()[0].parameters())


@pytest.mark.parametrize("name", [*filter(has_pictures, WITH_EXACT_UNITS)])
def test_channels_last_stays(name):
    """The trace runs in that format, too, because strides decide which operations torch runs."""
    model, example = NETWORKS[name]()
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    _, _, graph, units = with_choice(*traced((model, example)))
    assert len(units)
    keepk.shrink(model, graph, units)
    for path, parameter in model.named_parameters():
        assert parameter.dim() != 4 or parameter.is_contiguous(memory_format=torch.channels_last), path


def train_once(model, example, optimizer):
    optimizer.zero_grad()
    sum(leaf.square().mean() for leaf in leaves(call(without_dropout(model), example))).backward()
    optimizer.step()


@pytest.mark.parametrize("name", WITH_EXACT_UNITS)
def test_a_shrunk_network_trains_on(name):
    """The optimizer holds exactly the model's parameters, with matching state, and its next step changes them."""
    model, example, graph, units = chosen(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    train_once(model, example, optimizer)
    keepk.shrink(model, graph, units, optimizer=optimizer)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert list(map(id, held)) == list(map(id, model.parameters()))
    assert {id(parameter) for parameter in optimizer.state} <= set(map(id, held))
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
    before = {path: parameter.detach().clone() for path, parameter in model.named_parameters()}
    train_once(model, example, optimizer)
    for path, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.any():
            assert parameter.grad.shape == parameter.shape
            assert not torch.equal(before[path], parameter), path


OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ZERO_PRESERVING)
def test_training_goes_on_as_the_masked_network_would(name, kind):
    """The optimizer's state is cut as well, so two more steps lead both networks to the same outputs."""
    model, example, graph, units = chosen(name)
    optimizer = OPTIMIZERS[kind](model.parameters())
    train_once(model, example, optimizer)
    oracle, its_optimizer = copy.deepcopy((model, optimizer))
    mask_in_place(oracle, its_optimizer, graph, units)
    keepk.shrink(model, graph, units, optimizer=optimizer)
    for _ in range(2):
        train_once(oracle, example, its_optimizer)
        train_once(model, example, optimizer)
    assert relative_error(output(oracle, example), output(model, example)) < 1e-8


def mask_in_place(model, optimizer, graph, units):
    named = dict(model.named_parameters(remove_duplicate=False))
    zero_slices(named, model, graph, units)
    keys = {key for state in optimizer.state.values() for key, value in state.items() if torch.is_tensor(value)}
    for key in keys - {"step"}:
        zero_slices({name: optimizer.state[parameter][key] for name, parameter in named.items()}, model, graph, units)


@pytest.mark.parametrize("name", ["linears", "conv_bn_flatten", "dense_block", "lstm", "multihead_attention"])
def test_hooks_fire_as_before(name):
    model, example = NETWORKS[name]()
    fired = set()
    for path, parameter in model.named_parameters():
        parameter.register_hook(lambda _, path=path: fired.add(("gradient", path)))
        parameter.register_post_accumulate_grad_hook(lambda _, path=path: fired.add(("accumulated", path)))
    for path, module in model.named_modules():
        module.register_forward_hook(lambda *_, path=path: fired.add(("forward", path)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_once(model, example, optimizer)
    before = set(fired)
    graph = keepk.trace(model, example)  # with the hooks
    units = graph.choose(0.5, seed=0)
    assert len(units) > 0
    keepk.shrink(model, graph, units, optimizer=optimizer)
    fired.clear()
    train_once(model, example, optimizer)
    assert before <= fired


@pytest.mark.parametrize("name", ZERO_PRESERVING)
def test_followers_are_cut_along(name):
    """A copy with different weights, such as a moving average, gets the same cut."""
    model, example, graph, units = chosen(name)
    follower = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in follower.parameters():
            parameter.mul_(0.7)
    oracle = masked(follower, graph, units)
    keepk.shrink(model, graph, units, followers=(follower,))
    assert relative_error(output(oracle, example), output(follower, example)) < TOLERANCE


@pytest.mark.parametrize("name", ["residual", *WITHOUT_EXACT_UNITS])
def test_removing_nothing_changes_nothing(name):
    model, example, graph = traced_network(name)
    facts, values = parameter_facts(model), copy.deepcopy(model.state_dict())
    assert len(keepk.shrink(model, graph, [])) == 0
    assert parameter_facts(model) == facts
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    call(model, example)
