"""Prune a model that FSDP2 shards over several processes, with checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/prune_with_fsdp.py [--channels 24] [--weights 400] [--out folder]

It removes channels while the network trains, then prunes the weights that are left. The data are the handwritten digits
that come with scikit-learn. To adapt the script, change `make_network`, `shard`, `load_pictures` and the spaces in
`run`. If it was killed, run it again with the same ``--out``, with any number of processes, and it continues. On GPUs,
start it with one process per GPU; nothing else changes.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import keepk
from keepk.typing import Space


def make_network() -> nn.Module:
    """The dense network, with 16 + 32 channels and 64 hidden neurons. `keepk.load` starts from it, too."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 4, 64), nn.ReLU(), nn.Linear(64, 10))


def shard(network: nn.Module) -> nn.Module:
    """Shard the network in place. The Pruner calls this again after it has removed channels."""
    for layer in network.children():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            fully_shard(layer)
    fully_shard(network)
    return network


def load_pictures(device: torch.device) -> tuple[Tensor, Tensor]:
    """Pictures of 8 x 8 pixels and their labels, those of this process."""
    pictures, labels = load_digits(return_X_y=True)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    images = torch.tensor(pictures / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return images[mine].to(device), torch.tensor(labels)[mine].to(device)


def prune(network: nn.Module, space: Space, data: tuple[Tensor, Tensor], folder: Path) -> keepk.Pruner:
    """Train and prune by the plan of one space, with a checkpoint after every epoch."""
    images, labels = data
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.01)
    pruner = keepk.Pruner(network, space, optimizer, example=images[:2])
    state: dict[str, Any] = {"model": network, "optimizer": optimizer, "pruner": pruner}
    if (folder / "checkpoint.json").exists():
        keepk.load_checkpoint(folder, **state, wrap=shard)
    while not pruner.done:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(pruner.epoch)).to(images.device)
        for batch in order.split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimizer.step()
        pruner.step(network, wrap=shard)
        keepk.save_checkpoint(folder, **state)
    pruner.close()
    return pruner


def run(*, channels: int, weights: int, epochs: int, folder: Path, log: Callable[[str], object] = print) -> nn.Module:
    """Prune, save to ``folder / "small"``, and return what `keepk.load` reads from there."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)  # all processes start from the same weights
    network, data = shard(make_network().to(device)), load_pictures(device)
    narrow = keepk.channels("*", keep=channels, name="channels", layer_floor=4, schedule=keepk.Cubic(epochs=epochs))
    thin = keepk.weights("*.weight", keep=weights, name="weights", schedule=keepk.Cubic(epochs=epochs))
    first = prune(network, narrow, data, folder / "channels")
    log(str(first.report()))
    second = prune(network, thin, data, folder / "weights")
    log(str(second.report()))
    # To save one plain model, gather the weights into a network of the same size.
    whole = get_model_state_dict(network, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        plain = make_network()
        with keepk.Pruner(plain, narrow, example=torch.zeros(2, 1, 8, 8)) as pruner:
            pruner.load_state_dict(first.state_dict())
        plain.load_state_dict(whole)
        keepk.save(plain, folder / "small")
    dist.barrier()
    return keepk.load(make_network(), folder / "small").eval()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=48, help="channels and hidden neurons to keep, of 112")
    parser.add_argument("--weights", type=int, default=1500, help="weights to keep afterwards")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of each of the two phases")
    parser.add_argument("--out", type=Path, help="folder to write to; by default a temporary one")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    chosen = [options.out or Path(tempfile.mkdtemp()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(chosen)  # the processes write to the same folder
    assert chosen[0] is not None
    asked = {"channels": options.channels, "weights": options.weights, "epochs": options.epochs}
    small = run(**asked, folder=chosen[0], log=print if dist.get_rank() == 0 else str)
    if dist.get_rank() == 0:
        left = sum(int(it.count_nonzero()) for name, it in small.named_parameters() if name.endswith("weight"))
        total = sum(it.numel() for it in small.parameters())
        print(f"{chosen[0] / 'small'}: a network of {total:,} parameters, {left:,} weights are not zero")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
