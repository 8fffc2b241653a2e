"""How torch's tools handle the two layer classes that a cut introduces, as documented in docs/deploy.md."""

import pytest
import torch
from torch import nn

import keepk
from networks import NETWORKS
from traced_once import traced_network

WITH_SWAPPED_LAYERS = {"dense_block": "SelectingBatchNorm2d", "multihead_attention": "HeadwiseAttention"}


@pytest.fixture(params=WITH_SWAPPED_LAYERS)
def cut(request):
    model, example, graph = traced_network(request.param)
    keepk.shrink(model, graph, graph.choose(0.5, seed=3))
    assert WITH_SWAPPED_LAYERS[request.param] in {type(module).__name__ for module in model.modules()}
    return model.eval(), example


def test_torch_export_and_torch_compile_take_them(cut):
    model, example = cut
    wanted = model(example)
    assert torch.allclose(torch.export.export(model, (example,)).module()(example), wanted)
    assert torch.allclose(torch.compile(model, backend="eager", fullgraph=True)(example), wanted)


def test_symbolic_tracing_steps_into_them_and_fails(cut):
    with pytest.raises(torch.fx.proxy.TraceError, match="control flow"):
        torch.fx.symbolic_trace(cut[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripting_compiles_them_and_fails(cut):
    with pytest.raises(RuntimeError):
        torch.jit.script(cut[0])


def test_synchronised_batchnorms_lose_the_selection_unless_they_were_there_before_the_cut():
    model, example = NETWORKS["dense_block"]()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    graph = keepk.trace(model, example)
    keepk.shrink(model, graph, graph.choose(0.5, seed=3))
    before = model.eval()(example)
    with pytest.raises(RuntimeError, match="running_mean should contain"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)(example)
    assert before.isfinite().all()
