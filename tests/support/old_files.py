"""Files written by an earlier version of the library, which later ones must read.

``python tests/support/old_files.py`` writes them. They are committed under ``tests/fixtures`` and are not written again
when the code changes; a new file format gets a new folder.
"""

from pathlib import Path

import torch
from torch import nn

import keepk

FOLDER = Path(__file__).parents[1] / "fixtures" / "version-1"


class Net(nn.Module):
    """A residual stream, a concatenation whose BatchNorm reads a selection, attention heads, and a tied layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.branch = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.more, self.norm, self.squeeze = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(12), nn.Conv2d(12, 8, 1)
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)
        self.wide, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.again = self.wide

    def forward(self, x):
        h = torch.relu(self.stem(x))
        h = h + self.branch(h)
        h = self.squeeze(torch.relu(self.norm(torch.cat([h, self.more(h)], 1))))
        tokens = h.flatten(2).transpose(1, 2)
        tokens = tokens + self.heads(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(torch.relu(self.again(tokens.mean(1))))


def pictures():
    """Eight images that do not depend on a random generator."""
    return torch.sin(torch.arange(8 * 3 * 5 * 5, dtype=torch.float32)).view(8, 3, 5, 5)


def build():
    """A model with values that do not depend on torch's generators."""
    net = Net().eval()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) * 0.7 + number).view_as(parameter) * 0.3)
    return net


def run_of(net):
    """The run that was saved half-way: channels and weights, four epochs."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    spaces = [
        keepk.channels(["stem", "branch", "more", "wide"], name="channels", keep=20, schedule=[26, 24, 22, 20]),
        keepk.weights("head.weight", name="head", keep=12, schedule=[60, 40, 20, 12]),
    ]
    return keepk.Pruner(net, spaces, optimizer, example=pictures()), optimizer, scheduler


def epoch(net, pruner, optimizer, scheduler):
    """Run one update, then the event."""
    optimizer.zero_grad()
    net(pictures()).square().mean().backward()
    optimizer.step()
    scheduler.step()
    pruner.step()


def main():
    """Write all files."""
    net = build()
    pruner, optimizer, scheduler = run_of(net)
    for _ in range(2):
        epoch(net, pruner, optimizer, scheduler)
    FOLDER.mkdir(parents=True, exist_ok=True)
    keepk.save_checkpoint(
        FOLDER / "checkpoint", model=net, pruner=pruner, optimizer=optimizer, scheduler=scheduler, extra={"epoch": 2}
    )
    torch.save(pruner.state_dict(), FOLDER / "pruner.pt")
    middle = net(pictures()).detach()
    for _ in range(2):
        epoch(net, pruner, optimizer, scheduler)
    keepk.save(net, FOLDER / "model")
    torch.save({"middle": middle, "end": net(pictures()).detach()}, FOLDER / "outputs.pt")


if __name__ == "__main__":
    main()
