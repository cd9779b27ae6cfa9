"""Train a transformer on characters, by PyTorch's DistributedDataParallel.

    torchrun --nproc-per-node 2 char_transformer.py --steps 20

Without torchrun it trains in one process. A batch is that of all ranks together, in
micro-batches whose gradients are accumulated.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

TEXT = "".join(
    f"{n} times {n + 3} is {n * (n + 3)}, modulo 7 {n % 7}.\n" for n in range(400)
)
ALPHABET = sorted(set(TEXT))


class Block(nn.Module):
    """Causal attention and a network of two layers, each behind a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.mix(self.norms[0](x)).view(rows, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(rows, length, width))
        return x + self.net(self.norms[1](x))


class CharTransformer(nn.Module):
    """Predicts the next character; the last layer shares the embedding's weight."""

    def __init__(self, length: int, width: int = 16, heads: int = 2, layers: int = 2):
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.head.weight = self.characters.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        x = self.characters(x) + self.places(places)
        return self.head(self.norm(self.blocks(x)))


def learning_rate(step: int, steps: int, highest: float = 1e-2) -> float:
    """Return the rate of a step: warm-up, then half a cosine."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    return highest * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--length", type=int, default=16)
    asked = parser.parse_args()

    is_distributed = "RANK" in os.environ
    rank, ranks = 0, 1
    if is_distributed:
        dist.init_process_group("gloo")
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CharTransformer(asked.length)
    if is_distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    text = torch.tensor([ALPHABET.index(c) for c in TEXT])
    generator = torch.Generator().manual_seed(1)
    for step in range(asked.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, asked.steps)
        total = torch.zeros(())
        for micro in range(asked.micro_batches):
            starts = torch.randint(
                len(text) - asked.length - 1, (asked.rows,), generator=generator
            )
            mine = starts.view(ranks, -1)[rank]
            rows = torch.stack([text[i : i + asked.length + 1] for i in mine.tolist()])
            is_last = micro == asked.micro_batches - 1
            with contextlib.ExitStack() as held:
                if is_distributed and not is_last:
                    held.enter_context(model.no_sync())
                logits = model(rows[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
                (loss / asked.micro_batches).backward()
            total += loss.detach() / asked.micro_batches
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if is_distributed:
        dist.all_reduce(total)
        total /= ranks
    if rank == 0:
        print(f"loss={total.item():.5f}")
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
