"""Adapters of peft before and after pruning, and averages of the weights that follow every cut."""

import copy

import peft
import pytest
import timm.utils
import torch
import transformers
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import keepk
from keepk.errors import FileError

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft calls it
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(0))


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def adapted(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=ALL, init_lora_weights=False))


def pruner_of(model, ids, *optimizer, **options):
    spaces = [
        keepk.channels("*.self_attn*", keep=1, name="heads", **options),
        keepk.channels("*.mlp*", keep=12, name="mlp", metric=keepk.metrics.l2, **options),
    ]
    return keepk.Pruner(model, spaces, *optimizer, example={"input_ids": ids, "use_cache": False})


def trained(model, ids, steps=3):
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_pruning_then_adapters(ids, tmp_path):
    """The adapters are saved alone, for the pruned model, and merged into it."""
    model = llama()
    with pruner_of(model, ids) as pruner:
        pruner.step()
    assert keepk.save_pretrained(model, tmp_path / "base").plain
    tuned = trained(adapted(model), ids)
    tuned.save_pretrained(tmp_path / "adapters")
    wanted = logits(tuned, ids)
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.allclose(logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapters"), ids), wanted, atol=1e-6)
    with pytest.raises(FileError, match="merge_and_unload"):
        keepk.save_pretrained(tuned, tmp_path / "merged")
    merged = tuned.merge_and_unload()
    assert keepk.save_pretrained(merged, tmp_path / "merged").plain
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(loaded, ids), wanted, atol=1e-5)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in merged.state_dict().items())


def test_pruning_with_adapters(ids, tmp_path):
    """Adapters lose the rows and columns that their layers lose, and keep their ranks; only they are trained."""
    model = adapted(llama())
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=0.01)
    pruner = pruner_of(model, ids, optimizer, schedule=keepk.Cubic(epochs=2))
    frozen = {name for name, it in model.named_parameters() if not it.requires_grad}
    for _ in range(pruner.epochs):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        pruner.step()
    assert pruner.kept == {"heads": 1, "mlp": 12}
    layer = model.base_model.model.model.layers[0]
    sizes = {"q_proj": (24, 12), "k_proj": (24, 6), "o_proj": (12, 24), "up_proj": (24, 12), "down_proj": (12, 24)}
    for name, (inputs, outputs) in sizes.items():
        it = getattr(layer.self_attn if name[0] in "qko" else layer.mlp, name)
        assert it.base_layer.weight.shape == (outputs, inputs)
        assert it.lora_A["default"].weight.shape == (4, inputs)
        assert it.lora_B["default"].weight.shape == (outputs, 4)
    assert {name for name, it in model.named_parameters() if not it.requires_grad} == frozen
    assert all(
        it.shape == value.shape for it in optimizer.state for value in optimizer.state[it].values() if value.ndim
    )
    wanted = logits(model, ids)
    merged = model.merge_and_unload()
    assert torch.allclose(logits(merged, ids), wanted, atol=1e-5)
    saved = keepk.save_pretrained(merged, tmp_path)
    assert saved.config["intermediate_size"] == (32, 12)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(logits(loaded, ids), wanted, atol=1e-5)


def test_weights_below_adapters_give_a_warning(tmp_path):
    """Merging adds the adapters to the pruned weights, and the model that it returns has no Pruner."""
    model = adapted(llama())
    space = keepk.weights(["*q_proj.base_layer.weight", "*up_proj.base_layer.weight"], keep=300, name="w")
    with pytest.warns(keepk.KeepkWarning, match=r"'w': .*q_proj.* and 1 more are of a layer with adapters. merge_and"):
        pruner = keepk.Pruner(model, space)
    pruner.step()
    keepk.save(model.base_model.model, tmp_path / "part")  # whose weights are still as its Pruner left them
    merged = model.merge_and_unload()
    for save in (keepk.save_pretrained, keepk.save):
        with pytest.raises(FileError, match=r"space 'w': the last event kept 300 units, but there are .* longer zero"):
            save(merged, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    pruner.close()
    layer = merged.model.layers[0]
    assert sum(int(it.weight.count_nonzero()) for it in (layer.self_attn.q_proj, layer.mlp.up_proj)) > 300
    for select in ("*.lora_A.*", "*norm.weight"):  # neither is changed by merging
        keepk.Pruner(adapted(llama()), keepk.weights(select, keep=20)).close()
    merged_first = adapted(llama()).merge_and_unload()
    keepk.Pruner(merged_first, keepk.weights("*proj.weight", keep=300)).close()


# Averages


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


def averaged_by_torch(net):
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    return average, lambda _: average.update_parameters(net)


def averaged_by_timm(net):
    average = timm.utils.ModelEmaV3(net, decay=0.9)
    return average, lambda step: average.update(net, step=step)


@pytest.mark.parametrize("averaged", [averaged_by_torch, averaged_by_timm])
def test_an_average_follows_every_cut(averaged):
    """It is that of a run in which the channels are masked and removed afterwards."""
    ends = []
    for shrink in ("each", "never"):
        torch.manual_seed(0)
        net = Net()
        average, update = averaged(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        spaces = [
            keepk.channels("first", keep=10, schedule=[16, 10], metric=keepk.metrics.product),
            keepk.weights("last.weight", keep=17, schedule=[30, 17]),
        ]
        pruner = keepk.Pruner(net, spaces, optimizer, example=torch.randn(2, 6), followers=[average], shrink=shrink)
        generator = torch.Generator().manual_seed(1)
        for step in range(12):
            optimizer.zero_grad()
            net(torch.randn(8, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            update(step)
            if step % 4 == 3:
                pruner.step()
        inner = average.module
        assert inner.first.out_features == (10 if shrink == "each" else 24)
        assert int(inner.last.weight.count_nonzero()) <= 17
        rows = torch.randn(5, 6, generator=generator)
        ends.append(copy.deepcopy(inner).eval()(rows))
    assert torch.allclose(ends[0], ends[1], atol=1e-6)
    assert not torch.allclose(ends[0], net.eval()(rows), atol=1e-3)  # it is an average, not the model
