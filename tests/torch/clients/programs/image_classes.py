"""Train a small residual network on images, by PyTorch's DistributedDataParallel.

    torchrun --nproc-per-node 2 image_classes.py --epochs 2

Without torchrun it trains in one process. Each rank has a part of each batch.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    """Two convolutions, and what they add to."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(3))
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = relu(self.norms[0](self.first(x)))
        return relu(self.norms[1](self.second(y)) + self.norms[2](self.short(x)))


def images(count: int, seed: int) -> TensorDataset:
    """Return noise with a bright square, whose place is the class."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(count, 1, 8, 8, generator=generator)
    labels = torch.randint(4, (count,), generator=generator)
    for picture, label in zip(pictures, labels.tolist()):
        top, left = 4 * (label // 2), 4 * (label % 2)
        picture[0, top : top + 4, left : left + 4] += 1
    return TensorDataset(pictures, labels)


def evaluate(model: nn.Module, loader: DataLoader, is_distributed: bool) -> list[float]:
    """Return the mean loss and the accuracy of all rows."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, y in loader:
            output = model(x.double())
            loss = cross_entropy(output, y, reduction="sum")
            hits = (output.argmax(1) == y).sum()
            sums += torch.stack([loss, hits, torch.tensor(len(y))]).double()
    model.train()
    if is_distributed:
        dist.all_reduce(sums)
    return (sums[:2] / sums[2]).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=24)
    asked = parser.parse_args()

    is_distributed = "RANK" in os.environ
    if is_distributed:
        dist.init_process_group("gloo")
    ranks = dist.get_world_size() if is_distributed else 1
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [Block(1, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(16, 4)).double()
    if is_distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train, test = images(240, seed=1), images(96, seed=2)
    samplers = [None, None]
    if is_distributed:
        samplers = [DistributedSampler(data, shuffle=False) for data in (train, test)]
    size = asked.batch_size // ranks
    loaders = [DataLoader(d, size, sampler=s) for d, s in zip((train, test), samplers)]
    for epoch in range(asked.epochs):
        for x, y in loaders[0]:
            optimizer.zero_grad()
            cross_entropy(model(x.double()), y).backward()
            optimizer.step()
        schedule.step()
        loss, accuracy = evaluate(model, loaders[1], is_distributed)
        if not is_distributed or dist.get_rank() == 0:
            print(f"epoch {epoch} loss={loss:.6f} accuracy={accuracy:.3f}")
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
