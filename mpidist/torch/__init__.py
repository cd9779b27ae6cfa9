"""Data-parallel training of PyTorch models over MPI ranks.

    import mpidist.torch

    model = mpidist.torch.DistributedDataParallel(model)

`import mpidist` does not import this. Needs `pip install torch`.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "mpidist.torch needs PyTorch, which is not installed: pip install torch"
    ) from error

from mpidist.torch.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from mpidist.torch.data import as_tensors, from_dataset
from mpidist.torch.data_parallel import DistributedDataParallel
from mpidist.torch.process_group import init_process_group
from mpidist.torch.process_group import register as _register

_register()

__all__ = [
    "DistributedDataParallel",
    "SyncBatchNorm",
    "as_tensors",
    "convert_sync_batchnorm",
    "from_dataset",
    "init_process_group",
]
