"""Law 8: bad input is refused before the first batch, with what, where, got what, do what; nothing changes."""

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization.quantize_fx import prepare_qat_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import distribute_module

import keepk
from keepk.cut.record import alive_weights, certified_alive, certify, untrue_weights
from keepk.errors import (
    CheckpointError,
    FileError,
    KeepkError,
    OptimizerError,
    RankError,
    ShrinkError,
    SpaceError,
    StateError,
    TraceError,
)
from keepk.plan import spaces
from strategies import mlp
from untyped import untyped


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"select": "*"}, "neither keep= nor prune="),
        ({"select": "*", "keep": 3, "prune": 0.5}, "both keep=3 and prune=0.5"),
        ({"select": "*", "keep": True}, "keep=True: got bool"),
        ({"select": "*", "keep": 0}, "keep=0: too small"),
        ({"select": "*", "keep": -3}, "keep=-3: too small"),
        ({"select": "*", "keep": 0.5}, "keep=0.5: got float"),
        ({"select": "*", "prune": 1.5}, "prune=1.5: a share"),
        ({"select": "*", "prune": 1.0}, r"space '\*': prune=1.0 keeps none. Prune less, or pass keep=."),
        ({"select": "*", "prune": 1}, "prune=1 keeps none"),
        ({"select": "*", "prune": -0.5}, "prune=-0.5: negative"),
        ({"select": "*", "prune": False}, "prune=False: got bool"),
        ({"select": "*", "prune": float("nan")}, "not a finite number"),
        ({"select": 3, "keep": 3}, "not globs"),
        ({"select": [], "keep": 3}, "not globs"),
        ({"select": "*", "keep": 3, "exclude": [1]}, "not globs"),
        ({"select": "*", "keep": 3, "name": ""}, "not a name"),
        ({"select": "*", "keep": 3, "metric": "magnitude"}, "not callable"),
        ({"select": "*", "keep": 3, "layer_floor": -1}, "layer_floor=-1: too small"),
    ],
)
def test_a_space_that_makes_no_sense(arguments, words):
    with pytest.raises(SpaceError, match=words):
        keepk.weights(**arguments)


@pytest.mark.parametrize(
    ("spaces", "words"),
    [
        ([keepk.weights("0.wieght", keep=1)], r"select='0.wieght' matches no parameter. Nearest names: '0.weight'"),
        ([keepk.weights("*", exclude="1.bias", keep=1)], r"exclude='1.bias' matches no parameter"),
        ([keepk.weights("*", exclude="*", keep=1)], "leaves no weight"),
        ([keepk.weights("*", keep=24)], r"keep=24, but \['\*'\] matches only 23 weights. Choose keep <= 23"),
        ([keepk.weights("*", prune=0.99)], "prune=0.99 of 23 weights keeps none"),
        ([keepk.weights("*", keep=3, layer_floor=2)], "layer_floor=2 needs 4 weights, but only 3 are kept"),
        ([keepk.weights("*", keep=1), keepk.weights("0.*", keep=1)], "'0.weight' is in space .* too"),
        ([keepk.weights("0.*", keep=1), keepk.weights("0.*", keep=2)], "two spaces have this name"),
        ([], "at least one"),
        ("*", r"Pass a list of keepk.weights"),
        ([keepk.weights("*", keep=1), 3], r"Pass a list of keepk.weights"),
    ],
)
def test_spaces_that_do_not_fit_the_model(spaces, words):
    with pytest.raises(SpaceError, match=words):
        keepk.Pruner(small(), spaces)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("metric", [None, lambda weight: weight.abs()])
def test_weights_that_are_not_finite(value, metric):
    net = small()
    with torch.no_grad():
        net[2].weight[1, 1] = value
    space = keepk.weights("*", keep=3, metric=metric)
    with pytest.raises(RankError, match=r"'2.weight'.*1 of 6 weights are NaN or infinite"):
        keepk.Pruner(net, [space])


@pytest.mark.parametrize("metric", [None, lambda weight: weight.abs()])
def test_weights_that_diverge_later_change_nothing(metric):
    net = small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    spaces = [
        keepk.weights("0.*", keep=3, schedule=[5, 3], metric=metric),
        keepk.weights("2.*", keep=3, schedule=[5, 3], metric=metric),
    ]
    pruner = keepk.Pruner(net, spaces, optimizer)
    with torch.no_grad():
        net[2].bias[0] = float("nan")
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(RankError, match=r"'2.bias'"):
        pruner.step()
    assert pruner.epoch == 0
    assert pruner.kept == {"0.*": 15, "2.*": 8}
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items() if key != "2.bias")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.complex64])
def test_parameters_that_cannot_be_ranked(dtype):
    net = small()
    net.extra = nn.Parameter(torch.zeros(3).to(dtype), requires_grad=False)
    with pytest.raises(SpaceError, match=rf"parameter 'extra' is {dtype}.* exclude='extra'"):
        keepk.Pruner(net, [keepk.weights("*", keep=3)])
    keepk.Pruner(net, [keepk.weights("*", keep=3, exclude="extra")]).step()


def test_lazy_and_meta_parameters():
    with pytest.raises(SpaceError, match="Run one forward pass"):
        keepk.Pruner(nn.Sequential(nn.LazyLinear(3)), [keepk.weights("*.weight", keep=1)])
    with pytest.raises(SpaceError, match="meta device"):
        keepk.Pruner(nn.Linear(3, 3, device="meta"), [keepk.weights("*", keep=1)])


def test_two_parameters_over_one_memory():
    net = small()
    net.twin = nn.Parameter(net[0].weight.data)
    with pytest.raises(SpaceError, match="share memory but are two objects"):
        keepk.Pruner(net, [keepk.weights("*", keep=1)])


def test_a_parameter_with_gaps_over_one_memory():
    net, flat = small(), torch.ones(12)
    net.gaps, net.last = nn.Parameter(flat[::4]), nn.Parameter(flat[8:9])
    with pytest.raises(SpaceError, match="parameters 'gaps' and 'last' share memory but are two objects"):
        keepk.Pruner(net, [keepk.weights("*", keep=1)])
    net.last = nn.Parameter(flat[9:])
    keepk.Pruner(net, [keepk.weights("*", keep=1)])


def test_models_and_optimizers_of_the_wrong_kind():
    space = keepk.weights("*", keep=3)
    with pytest.raises(SpaceError, match="got dict as the model"):
        keepk.Pruner(untyped({}), [space])
    with pytest.raises(OptimizerError, match="got str"):
        keepk.Pruner(small(), [space], untyped("sgd"))
    with pytest.raises(OptimizerError, match="holds no parameter of the model"):
        keepk.Pruner(small(), [space], torch.optim.SGD(small().parameters(), lr=0.1))
    with pytest.raises(KeepkError, match="epochs=True: got bool"):
        keepk.Pruner(small(), [space], epochs=True)
    with pytest.raises(SpaceError, match=r"got the class Linear. Pass Linear\(\), a model"):
        keepk.Pruner(untyped(nn.Linear), keepk.weights("*", keep=1))


def test_state_that_is_not_per_weight_is_refused_by_name():
    net = small()
    with pytest.raises(OptimizerError, match="Adafactor: keeps its second moments per row and column"):
        keepk.Pruner(net, [keepk.weights("*", keep=3)], torch.optim.Adafactor(net.parameters()))

    class RowSums(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["rows"] = parameter.detach().sum(-1)

    optimizer = RowSums(net.parameters(), lr=0.1)
    pruner = keepk.Pruner(net, [keepk.weights("*.weight", keep=3)], optimizer)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(OptimizerError, match=r"RowSums: its state 'rows' of '0.weight' is of shape \(3,\)"):
        pruner.step()
    assert pruner.epoch == 0
    assert net[0].weight.all()


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (
            lambda weight: weight.sum(),
            r"returned torch.float32 of shape \(\) for parameter '0.weight' of shape \(3, 4\)",
        ),
        (lambda weight: weight > 0, "returned torch.bool"),
        (lambda weight: weight.tolist(), "returned list"),
        (lambda weight: weight.zero_(), "changed parameter '0.weight' in place"),
        (lambda weight: weight * float("nan"), "'0.weight'"),
        (
            lambda weight: weight * weight.grad,
            r"failed on parameter '0.weight' \(TypeError: .* Parameter '0.weight' has no gradient. Call step\(\) after",
        ),
        (
            lambda weight: weight.absolutely(),
            r"\(AttributeError: .*absolutely'\). Correct the metric; nothing was pruned",
        ),
    ],
)
def test_metrics_that_do_not_keep_the_contract(metric, words):
    net = small()
    pruner = keepk.Pruner(net, [keepk.weights("0.weight", keep=3, metric=metric)])
    with pytest.raises(RankError, match=words):
        pruner.step()


@pytest.mark.parametrize("name", ["l1", "l2", "l1_l2", "bn_scale", "product", "blend"])
def test_a_metric_of_channels_is_refused_before_the_run(name):
    metric = keepk.metrics.blend(0.5) if name == "blend" else getattr(keepk.metrics, name)
    words = rf"space '0.weight': metric {name} ranks channels, not weights. Use keepk.metrics.magnitude, or leave"
    with pytest.raises(SpaceError, match=rf"(?i){words}"):
        keepk.Pruner(small(), [keepk.weights("0.weight", keep=3, metric=metric)])


def test_a_state_of_another_model_plan_or_version():
    def pruner(net=None, keep=3, select="*", schedule=(10, 3)):
        return keepk.Pruner(net or small(), [keepk.weights(select, keep=keep, name="all", schedule=list(schedule))])

    source = pruner()
    source.step()
    state = source.state_dict()
    for other, words in [
        (pruner(mlp((4, 4))), "belongs to another model"),
        (pruner(schedule=(9, 3)), "belongs to another plan"),
        (pruner(keep=2, schedule=(10, 2)), "belongs to another plan"),
        (pruner(select="0.*", schedule=(10, 3)), "belongs to another model"),
    ]:
        with pytest.raises(StateError, match=words):
            other.load_state_dict(state)
        assert other.epoch == 0
    damages: list[tuple[dict[str, Any], str]] = [
        ({"version": 99}, "version 99, but this keepk reads version 1"),
        ({"epoch": 7}, "epoch 7, but the plan has 2"),
        ({"epoch": 2}, "space 'all' keeps 10 weights, the plan says 3"),
        ({"masks": {}}, "no bool mask"),
        ({"spaces": {}}, "has spaces"),
    ]
    for damage, words in damages:
        with pytest.raises(StateError, match=words):
            pruner().load_state_dict({**state, **damage})
    with pytest.raises(StateError, match="not the state of a Pruner"):
        pruner().load_state_dict({"epoch": 1})


def test_a_closed_pruner_and_a_changed_model():
    net = small()
    with keepk.Pruner(net, [keepk.weights("*", keep=3)]) as pruner:
        pass
    with pytest.raises(KeepkError, match="it was closed"):
        pruner.step()
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=3)])
    net[0] = nn.Linear(4, 3)
    with pytest.raises(SpaceError, match=r"'0.weight': the model has a different object"):
        pruner.step()


@pytest.fixture
def sharded():
    """A small network whose parameters are DTensors on a mesh of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # public, and not exported
    try:
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        yield distribute_module(net, init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def test_channels_of_a_sharded_model_are_refused(sharded):
    with pytest.raises(
        SpaceError, match=r"parameter '0.weight' is not sharded by fully_shard .* Prune channels before"
    ):
        keepk.Pruner(sharded, keepk.channels("0", keep=3), example=torch.zeros(2, 4))
    with pytest.raises(TraceError, match=r"tensor '0.weight' is sharded over processes. Trace and shrink before"):
        keepk.trace(sharded, torch.zeros(2, 4))


@pytest.fixture(params=["DTensor", "FSDP"])
def pruned_then_sharded(request):
    """A network that was traced, pruned and then sharded, with its earlier graph and its pruner."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # public, and not exported
    try:
        net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        graph = keepk.trace(net, torch.zeros(2, 4))
        pruner = keepk.Pruner(net, keepk.weights("*", keep=20, schedule=keepk.OneShot()))
        pruner.step()
        if request.param == "DTensor":
            yield distribute_module(net, init_device_mesh("cpu", (1,))), graph, r"tensor '0\.weight'"
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # FSDP warns without GPUs
                whole = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
            yield nn.Sequential(whole), graph, "module '0'"
    finally:
        dist.destroy_process_group()


def test_a_model_that_was_sharded_later_is_refused_by_name(pruned_then_sharded, tmp_path):
    net, graph, what = pruned_then_sharded
    with pytest.raises(ShrinkError, match=rf"^verify: {what} is sharded over processes\. Trace, verify and shrink"):
        keepk.verify(net, graph, torch.zeros(2, 4))
    entry = {"select": ["*"], "exclude": [], "kind": "weights", "kept": 3}
    with pytest.raises(ShrinkError, match=rf"^certificate: {what} is sharded over processes, .*or gather"):
        alive_weights(net, entry)
    certify(net, {"a": entry}, {})
    for count in (untrue_weights, certified_alive):
        with pytest.raises(ShrinkError, match=rf"^certificate: {what} is sharded"):
            count(net)
    with pytest.raises(FileError, match=rf"^save: {what} is sharded over processes.*gather the full state_dict"):
        keepk.save(net, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    keepk.save(nn.Linear(2, 2), tmp_path / "other")
    with pytest.raises(FileError, match=rf"^load: {what} is sharded over processes.*shard it after keepk\.load"):
        keepk.load(net, tmp_path / "other")


def test_a_sharded_tensor_beside_the_objects_of_a_run_says_how_to_gather(sharded, tmp_path):
    with pytest.raises(CheckpointError, match=r"extra\[0\]: got a DTensor, sharded over processes; gather it"):
        keepk.save_checkpoint(tmp_path / "new", extra=[sharded[0].weight])
    assert not (tmp_path / "new").exists()


# Cures ---------------------------------------------------------------------------------------------------------------


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


PICTURES = torch.zeros(2, 3, 8, 8)


@pytest.mark.filterwarnings("ignore")  # warnings of torchao and torch, on import and about deprecations
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_a_model_that_torchao_quantised_is_to_be_pruned_first(config):
    quantization = pytest.importorskip("torchao.quantization")
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    graph = keepk.trace(net, torch.zeros(2, 64))
    quantization.quantize_(net, getattr(quantization, config)())
    words = r"parameter '0\.weight' is quantised \(Int8Tensor\).* Prune first and quantise afterwards"
    for space in (keepk.weights("*", keep=50), keepk.channels("0", keep=5)):
        with pytest.raises(SpaceError, match=words):
            keepk.Pruner(net, space, example=torch.zeros(2, 64))
    with pytest.raises(ShrinkError, match=words):
        keepk.compact(net, torch.zeros(2, 64))
    with pytest.raises(ShrinkError, match=words):
        keepk.shrink(net, graph, [0])
    keepk.Pruner(net, keepk.weights("*.bias", keep=5)).step()  # parameters that are not quantised can be pruned


class Wrapped(torch.Tensor):
    """A tensor subclass that stores different values than it shows, like torchao's."""

    inner: torch.Tensor  # type: ignore[assignment]  # hides the product of that name

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]  # torch's own is a stub
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


def test_a_parameter_of_a_quantised_class_is_refused_whoever_made_it():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    net[0].weight = nn.Parameter(Wrapped(torch.randn(4, 4)), requires_grad=False)
    with pytest.raises(SpaceError, match=r"'0\.weight' is quantised \(Wrapped\), .* or leave it out"):
        keepk.Pruner(net, keepk.weights("*", keep=5))
    with pytest.raises(ShrinkError, match=r"'0\.weight' is quantised \(Wrapped\)"):
        keepk.compact(net, torch.zeros(2, 4))


def prepared_for_training(net):
    net.train().qconfig = torch.ao.quantization.get_default_qat_qconfig()
    return torch.ao.quantization.prepare_qat(net)


def prepared_and_fused(net):
    return prepared_for_training(torch.ao.quantization.fuse_modules_qat(net.train(), [["0", "1", "2"]]))


def prepared_by_fx(net):
    mapping = torch.ao.quantization.get_default_qat_qconfig_mapping()
    return prepare_qat_fx(net.train(), mapping, (PICTURES,))


def observed(net):
    net.eval().qconfig = torch.ao.quantization.get_default_qconfig()
    net = torch.ao.quantization.prepare(net)
    net(torch.randn(2, 3, 8, 8))
    return net


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is going to move to torchao
@pytest.mark.parametrize("prepare", [prepared_for_training, prepared_and_fused, prepared_by_fx, observed])
def test_a_model_prepared_for_quantisation_is_to_be_pruned_first(prepare):
    net = prepare(small_net())
    words = r"space '0': module '.*' is quantised or prepared for it \(torch\.ao\..*Prune first and quantise"
    with pytest.raises(SpaceError, match=words):
        keepk.Pruner(net, keepk.channels("0", keep=5), example=PICTURES)
    with pytest.raises(SpaceError, match="matches no module"):  # a typo still gets its usual error
        keepk.Pruner(net, keepk.channels("no.such", keep=5), example=PICTURES)


@pytest.mark.filterwarnings("ignore")
def test_a_dynamically_quantised_model_has_nothing_to_prune():
    net = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(SpaceError, match=r"the model has no parameters, because module '0' is quantised.* Prune first"):
        keepk.Pruner(net, keepk.weights("*", keep=5))


@pytest.mark.parametrize("make", [keepk.weights, keepk.channels])
@pytest.mark.parametrize(("keep", "percent", "prune"), [(0.5, "50", "0.5"), (0.025, "2.5", "0.975")])
def test_a_share_as_keep_is_answered_with_prune(make, keep, percent, prune):
    words = rf"keep={keep}: got float, but keep= is a count\. To keep {percent} %, pass prune={prune};"
    with pytest.raises(SpaceError, match=words):
        make("*", keep=keep)


@pytest.mark.parametrize(
    ("make", "name", "cure"),
    [
        (keepk.channels, "l1", r"keepk\.metrics\.l1\.$"),
        (keepk.channels, "l1-l2", r"keepk\.metrics\.l1_l2"),
        (keepk.channels, "blend", r"keepk\.metrics\.blend\(alpha=0\.5\)\.$"),
        (keepk.weights, "magnitude", r"keepk\.metrics\.magnitude\.$"),
        (keepk.weights, "random", r"keepk\.metrics\.random\(seed=0\)\.$"),
        (keepk.weights, "l1", r"keepk\.metrics\.magnitude .*; keepk\.metrics\.l1 ranks channels\.$"),
    ],
)
def test_the_name_of_a_metric_is_answered_with_the_function(make, name, cure):
    with pytest.raises(
        SpaceError, match=rf"metric='{name}' is not callable\. Pass a function, see keepk\.metrics: .*{cure}"
    ):
        make("*", keep=5, metric=name)


def test_every_metric_that_is_named_as_a_cure_exists():
    names = {"keepk": keepk, "statistics": keepk.Statistics(nn.Linear(1, 1))}
    for call in (*spaces.OF_WEIGHTS, *spaces.OF_CHANNELS):
        assert callable(eval(f"keepk.metrics.{call}", names))


@pytest.mark.parametrize("several", [False, True])
def test_a_scheduler_in_the_place_of_the_optimizer_is_answered_with_its_optimizer(several):
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    ]
    for scheduler in schedulers:
        words = rf"got {type(scheduler).__name__}, a learning-rate scheduler\. .* which is its \.optimizer \(SGD\)"
        with pytest.raises(OptimizerError, match=words):
            keepk.Pruner(net, keepk.weights("*", keep=5), untyped([optimizer, scheduler] if several else scheduler))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.optim.SGD, r"got the class SGD\. Pass SGD\(model\.parameters\(\), \.\.\.\)"),
        (nn.Sequential(nn.Linear(2, 2)), "got Sequential, a part of the model"),
        ([nn.Parameter(torch.zeros(2))], "got Parameter, a part of the model"),
    ],
)
def test_other_things_in_the_place_of_the_optimizer(given, words):
    with pytest.raises(OptimizerError, match=words):
        keepk.Pruner(nn.Linear(4, 4), keepk.weights("*", keep=5), given)


def test_a_checkpoint_given_to_load_and_a_model_given_to_load_checkpoint(tmp_path):
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner = keepk.Pruner(net, keepk.weights("*", keep=5), optimizer)
    parts: dict[str, Any] = {"model": net, "optimizer": optimizer, "pruner": pruner}
    keepk.save_checkpoint(tmp_path / "run", **parts)
    pruner.step()
    keepk.save(net, tmp_path / "model")
    for given in ("run", "run/checkpoint.json"):
        with pytest.raises(FileError, match=r"run has a checkpoint: read it with keepk\.load_checkpoint\.$"):
            keepk.load(nn.Linear(4, 4), tmp_path / given)
    for given in ("model", "model/model.safetensors"):
        with pytest.raises(CheckpointError, match=r"has a model that keepk\.save wrote: read it with keepk\.load\.$"):
            keepk.load_checkpoint(tmp_path / given, **parts)
    with pytest.raises(FileError, match=r"model\.safetensors is a file inside one: pass .*model\.$"):
        keepk.load(nn.Linear(4, 4), tmp_path / "model/model.safetensors")
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is a file inside one: pass .*run\.$"):
        keepk.load_checkpoint(tmp_path / "run/checkpoint.json", **parts)


def deep_net():
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))


class Talkative:
    def __repr__(self):
        return "word\n" * 10_000


LARGE = {
    "a module": deep_net(),
    "modules": [deep_net()] * 20,
    "a tensor": torch.randn(500, 500),
    "tensors": {"a": torch.randn(500, 500), "b": [torch.randn(50)] * 50},
    "an array": np.zeros((300, 300)),
    "a long string": "x" * 50_000,
    "a long list": [None] * 50_000,
    "an object": Talkative(),
}
PLACES = {
    "spaces": lambda it: keepk.Pruner(nn.Linear(4, 4), it),
    "phases": lambda it: keepk.Pruner(nn.Linear(4, 4), keepk.weights("*", keep=5), phases=it),
    "shrink": lambda it: keepk.Pruner(nn.Linear(4, 4), keepk.weights("*", keep=5), shrink=it),
    "epochs": lambda it: keepk.Pruner(nn.Linear(4, 4), keepk.weights("*", keep=5), epochs=it),
    "optimizer": lambda it: keepk.Pruner(nn.Linear(4, 4), keepk.weights("*", keep=5), it),
    "followers": lambda it: keepk.Pruner(nn.Linear(4, 4), keepk.weights("*", keep=5), followers=it),
    "select": lambda it: keepk.weights(untyped([it, 3]), keep=5),
    "exclude": lambda it: keepk.weights("*", keep=5, exclude=untyped([it, 3])),
    "keep": lambda it: keepk.weights("*", keep=it),
    "prune": lambda it: keepk.channels("*", prune=it),
    "both": lambda it: keepk.channels("*", prune=it, keep=it),
    "name": lambda it: keepk.channels("*", keep=3, name=untyped([it])),
    "metric": lambda it: keepk.channels("*", keep=3, metric=untyped([it])),
    "layer_floor": lambda it: keepk.channels("*", keep=3, layer_floor=it),
    "round_to": lambda it: keepk.channels("*", keep=3, round_to=it),
    "at": lambda it: keepk.channels("*", keep=3, at=untyped([it])),
    "lossy": lambda it: keepk.channels("*", keep=3, lossy=it),
    "schedule": lambda it: keepk.channels("*", keep=3, schedule=untyped({"of": it})),
    "entries": lambda it: keepk.Pruner(nn.Linear(4, 4), keepk.weights("*", keep=3, schedule=[it])),
    "freeze": lambda it: keepk.Phase(3, freeze=untyped([it, 3])),
    "phase": keepk.Phase,
    "units": lambda it: keepk.shrink(net := nn.Linear(4, 4), keepk.trace(net, torch.zeros(2, 4)), [it]),
    "seed": lambda it: keepk.metrics.random(seed=it),
    "model": lambda it: keepk.Pruner(untyped([it]), keepk.weights("*", keep=3)),
    "state": lambda it: keepk.Pruner(nn.Linear(4, 4), keepk.weights("*", keep=3)).load_state_dict(
        {"version": it, "epoch": it, "spaces": it, "masks": it}
    ),
}


@pytest.mark.parametrize("what", LARGE)
@pytest.mark.parametrize("place", PLACES)
def test_a_message_does_not_print_all_of_what_was_given(place, what):
    with pytest.raises(KeepkError) as refused:
        PLACES[place](LARGE[what])
    message = str(refused.value)
    assert len(message) < 800, message
    assert "\n" not in message


def test_what_a_metric_raised_is_told_in_short():
    def fails(_weight):
        raise ValueError(str(deep_net()))

    with pytest.raises(RankError, match=r"^metric fails: failed on .* \(ValueError: Sequential\(.*Correct") as refused:
        keepk.Pruner(nn.Linear(4, 4), keepk.weights("*", keep=3, metric=fails)).step()
    assert len(str(refused.value)) < 800


def test_a_state_of_another_model_is_told_in_short():
    large, small = deep_net(), nn.Linear(2, 2)
    state = keepk.Pruner(large, keepk.weights("*", keep=9, name="all")).state_dict()
    with pytest.raises(
        StateError, match=r"belongs to another model: its parameters are \{.*, here they are \{"
    ) as refused:
        keepk.Pruner(small, keepk.weights("*", keep=3, name="all")).load_state_dict(state)
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize("normed", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_direction_of_weight_norm_keeps_a_weight(normed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older of torch's two implementations
        model = nn.Sequential(normed(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 2))
    direction = next(parameter for name, parameter in model.named_parameters() if parameter.shape == (8, 5))
    with torch.no_grad():
        direction[3] *= 1e-3
    before = copy.deepcopy(model.state_dict())
    pruner = keepk.Pruner(model, keepk.weights("*", keep=60))
    with pytest.raises(RankError, match=r"all weights of 1 of the 8 directions in '0\..*weight norm divides"):
        pruner.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    pruner.close()
    with torch.no_grad():
        direction[3] *= 1e3
    keepk.Pruner(model, keepk.weights("0.*", keep=50)).step()
    assert model(torch.randn(4, 5)).isfinite().all()
