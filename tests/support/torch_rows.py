"""Rows that ranks divide, and the gradients of models, for tests with PyTorch."""

import numpy as np
import torch


def rows_of(strategy, count, seed=0, device="cpu"):
    """Return all rows, and this rank's: slices of ceil(n / ranks)."""
    random = np.random.default_rng(seed)
    x = torch.from_numpy(random.normal(size=(count, 6)).astype("f4")).to(device)
    y = torch.from_numpy(random.integers(0, 3, count)).to(device)
    ranks, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    share = -(-count // ranks)
    mine = slice(rank * share, (rank + 1) * share)
    return (x, y), (x[mine], y[mine])


def loss_of(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)
