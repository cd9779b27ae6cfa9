"""Train an LSTM on words, by PyTorch's DistributedDataParallel.

    torchrun --nproc-per-node 2 word_lstm.py --epochs 2

The text is cut into columns, which are read in parallel, the hidden state goes from
one part of a column to the next. Each rank has some of the columns.
"""

from __future__ import annotations

import argparse
import itertools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

NOUNS, VERBS = ["a cat", "the dog", "no bird", "one fish"], ["sees", "likes", "hears"]
SENTENCES = itertools.islice(
    itertools.cycle(itertools.product(NOUNS, VERBS, NOUNS)), 300
)
WORDS = " . ".join(" ".join(sentence) for sentence in SENTENCES).split()
VOCABULARY = sorted(set(WORDS))


class WordModel(nn.Module):
    """Predicts the next word from the words before."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.words = nn.Embedding(len(VOCABULARY), width)
        self.lstm = nn.LSTM(width, width, num_layers=2)
        self.head = nn.Linear(width, len(VOCABULARY))

    def forward(self, words, state):
        found, state = self.lstm(self.words(words), state)
        return self.head(found), state


def columns(words: list[str], count: int) -> torch.Tensor:
    """Return the numbers of the words, `(length, count)`."""
    numbers = torch.tensor([VOCABULARY.index(word) for word in words])
    return numbers[: len(numbers) // count * count].view(count, -1).t().contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--columns", type=int, default=12)
    parser.add_argument("--length", type=int, default=10)
    asked = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(WordModel())
    optimizer = torch.optim.SGD(model.parameters(), 2.0, momentum=0.5)
    text = columns(WORDS, asked.columns)
    mine = text.chunk(ranks, 1)[rank]
    for epoch in range(asked.epochs):
        state, total, count = None, torch.zeros(()), 0
        for start in range(0, len(mine) - 1, asked.length):  # the last one is shorter
            words = mine[start : start + asked.length + 1]
            if state is not None:
                state = tuple(part.detach() for part in state)
            logits, state = model(words[:-1], state)
            loss = cross_entropy(logits.flatten(0, 1), words[1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            total += loss.detach() * (len(words) - 1)
            count += len(words) - 1
        dist.all_reduce(total)
        loss = total.item() / count / ranks
        if rank == 0:
            print(f"epoch={epoch} perplexity={math.exp(loss):.4f} loss={loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
