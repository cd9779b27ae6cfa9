"""Suggestions for missing names: those of other libraries, and near misses.

AttributeErrors show them. Access to existing attributes is not slowed down: Python
calls `__getattr__` only for names that it does not find.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["DATASET", "DISTRIBUTED", "MODULE", "REPLICA_CONTEXT", "STRATEGY", "refuse"]

_IN_REPLICA = "in a function that strategy.run runs, get_replica_context()"
_RANK = "strategy.extended.replica_id (in a replica function, get_replica_context()"
_RANK += ".replica_id_in_sync_group)"
_SIZE = "strategy.num_replicas_in_sync"
_REDUCE = f"strategy.reduce; {_IN_REPLICA}.all_reduce"
_GATHER = f"strategy.gather; {_IN_REPLICA}.all_gather"
_MAKE = "mpidist.MirroredStrategy(), which starts everything"
_VARIABLES = "a Variable made in strategy.scope(), which takes replica 0's value"
_DIVIDED = "strategy.experimental_distribute_dataset, which divides a Dataset"
_GRADIENTS = (
    "strategy.gradient_buckets, or all_reduce of the gradients in replica context; for "
    "a PyTorch model, DistributedDataParallel of mpidist.torch"
)
_TORCH = "mpidist.torch.{} (import mpidist.torch)"
_JAX = "mpidist.jax.{} (import mpidist.jax, before JAX computes anything)"
_MIRRORED = "mpidist.MirroredStrategy, whose replicas are the ranks, on any nodes"

STRATEGY = {
    "all_reduce": _REDUCE,
    "allreduce": _REDUCE,
    "all_gather": _GATHER,
    "allgather": _GATHER,
    "merge_call": f"{_IN_REPLICA}.merge_call",
    "all_to_all": f"{_IN_REPLICA}.all_to_all",
    "reduce_scatter": f"{_IN_REPLICA}.reduce_scatter",
    "all_gather_object": "strategy.gather_objects",
    "rank": _RANK,
    "local_rank": "strategy.extended.topology.local_rank",
    "replica_id": _RANK,
    "replica_id_in_sync_group": _RANK,
    "size": _SIZE,
    "world_size": _SIZE,
    "num_replicas": _SIZE,
    "num_workers": _SIZE,
    "device": "strategy.extended.worker_devices",
    "distribute_dataset": "strategy.experimental_distribute_dataset",
    "distribute_datasets": "strategy.experimental_distribute_dataset",
    "experimental_run_v2": "strategy.run",
    "local_results": "strategy.experimental_local_results",
    "update": "strategy.extended.update",
    "reduce_to": "strategy.extended.reduce_to",
    "call_for_each_replica": "strategy.extended.call_for_each_replica",
    "close": "strategy.experimental_finalize",
    "finalize": "strategy.experimental_finalize",
    "shutdown": "strategy.experimental_finalize",
}

REPLICA_CONTEXT = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reduce": "all_reduce, or strategy.reduce in cross-replica context",
    "gather": "all_gather, or strategy.gather in cross-replica context",
    "rank": "replica_id_in_sync_group",
    "replica_id": "replica_id_in_sync_group",
    "size": "num_replicas_in_sync",
    "world_size": "num_replicas_in_sync",
    "num_replicas": "num_replicas_in_sync",
    "run": "a call of the function, as strategy.run runs this one",
    "device": "devices",
}

DATASET = {
    "from_hdf": "Dataset.from_hdf5",
    "from_h5": "Dataset.from_hdf5",
    "from_h5py": "Dataset.from_hdf5",
    "from_file": "Dataset.from_hdf5",
    "from_files": "Dataset.from_hdf5, which takes several files",
    "from_array": "Dataset.from_tensor_slices",
    "from_arrays": "Dataset.from_tensor_slices",
    "from_numpy": "Dataset.from_tensor_slices",
    "from_list": "Dataset.from_tensor_slices",
    "from_slices": "Dataset.from_tensor_slices",
    "from_tensor": "Dataset.from_tensors, or Dataset.from_tensor_slices for the rows",
    "from_iterable": "Dataset.from_generator",
    "list_files": "Dataset.from_hdf5, which takes a pattern such as 'data/*.h5'",
    "apply": "a call of the function with the dataset",
    "as_numpy_iterator": "iter(dataset), whose elements are NumPy arrays",
    "padded_batch": "map() with a function that pads, then batch()",
    "ragged_batch": "map() with a function that pads, then batch()",
    "flat_map": "interleave(map_func, cycle_length=1)",
    "make_one_shot_iterator": "iter(dataset)",
    "make_initializable_iterator": "iter(dataset)",
    "rebatch": "unbatch().batch(batch_size)",
    "size": "len(dataset), or cardinality()",
    "shape": "element_spec",
    "split": "take() and skip(), or shard()",
}

_BEFORE = "dataset.{}, before the dataset is distributed"
DISTRIBUTED = {
    name: _BEFORE.format(name)
    for name in (
        *("batch", "cache", "concatenate", "enumerate", "filter", "interleave", "map"),
        *("options", "prefetch", "repeat", "shard", "shuffle", "skip", "take"),
        *("unbatch", "with_options", "zip"),
    )
} | {
    "get_next": "iter(dataset).get_next()",
    "get_next_as_optional": "iter(dataset).get_next_as_optional()",
    "get_state": "iter(dataset).get_state()",
    "set_state": "iter(dataset).set_state(state)",
}

MODULE = {
    "init": _MAKE,
    "init_process_group": _MAKE,
    "destroy_process_group": "strategy.experimental_finalize",
    "shutdown": "strategy.experimental_finalize",
    "rank": _RANK,
    "get_rank": _RANK,
    "local_rank": "strategy.extended.topology.local_rank",
    "size": _SIZE,
    "get_world_size": _SIZE,
    "allreduce": _REDUCE,
    "all_reduce": _REDUCE,
    "allgather": _GATHER,
    "all_gather": _GATHER,
    "alltoall": f"{_IN_REPLICA}.all_to_all",
    "all_to_all": f"{_IN_REPLICA}.all_to_all",
    "reducescatter": f"{_IN_REPLICA}.reduce_scatter",
    "reduce_scatter": f"{_IN_REPLICA}.reduce_scatter",
    "barrier": "strategy.barrier",
    "broadcast": "strategy.broadcast",
    "broadcast_object": "strategy.broadcast_object",
    "broadcast_object_list": "strategy.broadcast_object",
    "allgather_object": "strategy.gather_objects",
    "all_gather_object": "strategy.gather_objects",
    "broadcast_parameters": _VARIABLES,
    "broadcast_variables": _VARIABLES,
    "broadcast_global_variables": _VARIABLES,
    "broadcast_optimizer_state": _VARIABLES,
    "DistributedOptimizer": _GRADIENTS,
    "DistributedGradientTape": _GRADIENTS,
    "DistributedDataParallel": _TORCH.format("DistributedDataParallel"),
    "DDP": _TORCH.format("DistributedDataParallel"),
    "SyncBatchNorm": _TORCH.format("SyncBatchNorm"),
    "DistributedSampler": f"{_DIVIDED}; mpidist.torch.from_dataset takes PyTorch's",
    "DataLoader": f"{_DIVIDED}; mpidist.torch.from_dataset takes PyTorch's",
    "jax": "import mpidist.jax, before JAX computes anything",
    "jit": _JAX.format("jit"),
    "grad": _JAX.format("grad"),
    "value_and_grad": _JAX.format("value_and_grad"),
    "pmap": f"strategy.run, or {_JAX.format('jit')}",
    "MultiWorkerMirroredStrategy": _MIRRORED,
    "CollectiveAllReduceStrategy": _MIRRORED,
    "OneDeviceStrategy": "mpidist.MirroredStrategy, on one rank",
    "GradientTape": "gradients of your own (by hand, by JAX, by PyTorch)",
    "CollectiveCommunication": "CommunicationImplementation",
    "CollectiveHints": "CommunicationOptions",
    "distribute": "the names in mpidist itself, as mpidist.MirroredStrategy",
    "experimental": "the names in mpidist itself, as mpidist.Dataset",
    "train": "the names in mpidist itself, as mpidist.Checkpoint",
}


def refuse(owner: Any, name: str, meant: Mapping[str, str]) -> NoReturn:
    """Raise an AttributeError with a suggestion, if there is one.

    Args:
      owner: the object or class that lacks the attribute.
      name: the name of the attribute.
      meant: suggestions by name.
    """
    if any(name in vars(cls) for cls in type(owner).__mro__):
        object.__getattribute__(owner, name)  # a property failed: raise its error again
    if isinstance(owner, type):
        text = f"type object {owner.__name__!r}"
    elif isinstance(owner, ModuleType):
        text = f"module {owner.__name__!r}"
    else:
        text = f"{type(owner).__name__!r} object"
    text = f"{text} has no attribute {name!r}"
    if name in meant:
        text = f"{text}; instead: {meant[name]}"
    raise AttributeError(text, name=name, obj=owner)
