"""Suggestions for missing names: those of other libraries, and near misses.

AttributeErrors show them. Access to existing attributes is not slowed down: Python
calls `__getattr__` only for names that it does not find.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

_IN_REPLICA = "in a function that strategy.run runs, get_replica_context()"
_RANK = "strategy.rank"
_MAKE = "mpidist.MirroredStrategy(), which starts everything"
_VARIABLES = "a Variable made in strategy.scope(), which takes replica 0's value"
_DIVIDED = "strategy.experimental_distribute_dataset, which divides a Dataset"
_TORCH = "mpidist.torch.{} (import mpidist.torch)"
_JAX = "mpidist.jax.{} (import mpidist.jax, before JAX computes anything)"
_MIRRORED = "mpidist.MirroredStrategy, whose replicas are the ranks, on any nodes"
_GRADIENTS = (
    "strategy.gradient_buckets, or all_reduce of the gradients in replica context; for "
    "a PyTorch model, DistributedDataParallel of mpidist.torch"
)
_BATCHED = (
    "batch cache concatenate enumerate filter interleave map options prefetch repeat "
    "shard shuffle skip take unbatch with_options zip"
)

# By owners, and names, both separated by spaces: what to use instead of NAME
_TABLE = {
    "strategy module": {
        "all_reduce allreduce": f"strategy.reduce; {_IN_REPLICA}.all_reduce",
        "all_gather allgather": f"strategy.gather; {_IN_REPLICA}.all_gather",
        "all_to_all alltoall": f"{_IN_REPLICA}.all_to_all",
        "reduce_scatter reducescatter": f"{_IN_REPLICA}.reduce_scatter",
        "all_gather_object allgather_object": "strategy.gather_objects",
        "get_rank Get_rank": _RANK,
        "local_rank": "strategy.extended.topology.local_rank",
        "world_size get_world_size Get_size": "strategy.size",
        "bcast Bcast": "strategy.broadcast",
        "shutdown": "strategy.experimental_finalize",
    },
    "strategy": {
        "merge_call": f"{_IN_REPLICA}.merge_call",
        "replica_id replica_id_in_sync_group": _RANK,
        "num_replicas num_workers": "strategy.size",
        "is_chief is_main_process is_root": "strategy.is_first",
        "device": "strategy.extended.worker_devices",
        "distribute_dataset distribute_datasets": (
            "strategy.experimental_distribute_dataset"
        ),
        "experimental_run_v2": "strategy.run",
        "local_results": "strategy.experimental_local_results",
        "update": "strategy.extended.update",
        "reduce_to": "strategy.extended.reduce_to",
        "call_for_each_replica": "strategy.extended.call_for_each_replica",
        "close finalize": "strategy.experimental_finalize",
    },
    "context": {
        "allreduce": "all_reduce",
        "allgather": "all_gather",
        "reduce": "all_reduce, or strategy.reduce in cross-replica context",
        "gather": "all_gather, or strategy.gather in cross-replica context",
        "rank replica_id": "replica_id_in_sync_group",
        "size world_size num_replicas": "num_replicas_in_sync",
        "run": "a call of the function, as strategy.run runs this one",
        "device": "devices",
    },
    "dataset": {
        "from_hdf from_h5 from_h5py from_file": "Dataset.from_hdf5",
        "from_array from_arrays from_numpy from_list from_slices": (
            "Dataset.from_tensor_slices"
        ),
        "from_tensor": "Dataset.from_tensors, or Dataset.from_tensor_slices for the "
        "rows",
        "from_iterable": "Dataset.from_generator",
        "from_dataset": "mpidist.torch.from_dataset, for a dataset of PyTorch's",
        "list_files": "Dataset.from_hdf5, which takes a pattern such as 'data/*.h5'",
        "apply": "a call of the function with the dataset",
        "as_numpy_iterator": "iter(dataset), whose elements are NumPy arrays",
        "padded_batch ragged_batch": "map() with a function that pads, then batch()",
        "flat_map": "interleave(map_func, cycle_length=1)",
        "make_one_shot_iterator make_initializable_iterator": "iter(dataset)",
        "rebatch": "unbatch().batch(batch_size)",
        "size": "len(dataset), or cardinality()",
        "shape": "element_spec",
        "split": "take() and skip(), or shard()",
    },
    "distributed": {
        _BATCHED: "dataset.NAME, before the dataset is distributed",
        "get_next get_next_as_optional get_state": "iter(dataset).NAME()",
        "set_state": "iter(dataset).set_state(state)",
    },
    "module": {
        "init init_process_group": _MAKE,
        "destroy_process_group": "strategy.experimental_finalize",
        "barrier broadcast rank size": "strategy.NAME",
        "broadcast_object broadcast_object_list": "strategy.broadcast_object",
        "broadcast_parameters broadcast_variables broadcast_global_variables "
        "broadcast_optimizer_state": _VARIABLES,
        "DistributedOptimizer DistributedGradientTape": _GRADIENTS,
        "DistributedDataParallel DDP": _TORCH.format("DistributedDataParallel"),
        "SyncBatchNorm": _TORCH.format("SyncBatchNorm"),
        "DistributedSampler DataLoader": (
            f"{_DIVIDED}; mpidist.torch.from_dataset takes PyTorch's"
        ),
        "jax": "import mpidist.jax, before JAX computes anything",
        "jit grad value_and_grad": _JAX.format("NAME"),
        "pmap": f"strategy.run, or {_JAX.format('jit')}",
        "MultiWorkerMirroredStrategy CollectiveAllReduceStrategy": _MIRRORED,
        "OneDeviceStrategy": "mpidist.MirroredStrategy, on one rank",
        "GradientTape": "gradients of your own (by hand, by JAX, by PyTorch)",
        "CollectiveCommunication": "CommunicationImplementation",
        "CollectiveHints": "CommunicationOptions",
        "distribute": "the names in mpidist itself, as mpidist.MirroredStrategy",
        "experimental": "the names in mpidist itself, as mpidist.Dataset",
        "train": "the names in mpidist itself, as mpidist.Checkpoint",
    },
}
INSTEAD: dict[str, dict[str, str]] = {
    owner: {
        name: text.replace("NAME", name)
        for owners, rows in _TABLE.items()
        if owner in owners.split()
        for names, text in rows.items()
        for name in names.split()
    }
    for owner in ("strategy", "context", "dataset", "distributed", "module")
}


def attribute_hint(kind: str) -> Callable[[Any, str], NoReturn]:
    """Return the `__getattr__` of a kind of owner; see `refuse`."""
    return lambda owner, name: refuse(owner, name, kind)


def refuse(owner: Any, name: str, kind: str) -> NoReturn:
    """Raise an AttributeError with a suggestion, if there is one.

    Args:
      owner: the object or class that lacks the attribute.
      name: the name of the attribute.
      kind: of the owner, in `INSTEAD`.
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
    if name in INSTEAD[kind]:
        text = f"{text}; instead: {INSTEAD[kind][name]}"
    raise AttributeError(text, name=name, obj=owner)
