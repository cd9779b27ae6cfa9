"""Tensors as flat NumPy arrays, and the reductions of torch.distributed on them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DTypeError,
    UnsupportedError,
)
from mpidist.reductions import ReduceOp
from mpidist.torch import compat
from mpidist.util.dtypes import dtype_of, is_integer

_REDUCE_OPS = {**ReduceOp.__members__, "PREMUL_SUM": ReduceOp.SUM}
# In which booleans, as bytes of 0 and 1, are reduced
_OF_BOOLEANS = {"SUM": "MAX", "PRODUCT": "MIN", "AVG": "", "PREMUL_SUM": ""}
# Sums of others are formed in wider ones, or may not fit
_IN_PLACE_DTYPES = {torch.float32, torch.float64, torch.complex64, torch.complex128}


class FlatTensor:
    """The elements of a tensor as a contiguous array, which shares its memory.

    Where the tensor is on a GPU, not contiguous, or has lazy bits, the array is a copy,
    and `store` writes it back.
    """

    def __init__(self, tensor: Any):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(f"a tensor is needed, not {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise UnsupportedError(f"a {tensor.layout} tensor; pass a dense one")
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"a tensor on {tensor.device}: this backend moves tensors of the CPU "
                "and of CUDA's GPUs"
            )
        self._original = tensor
        data = tensor.detach()
        is_lazy = data.is_conj() or data.is_neg()
        self.is_copy = data.is_cuda or is_lazy or not data.is_contiguous()
        if self.is_copy:
            data = torch.empty(data.shape, dtype=data.dtype, device="cpu").copy_(data)
        # As `reshape(-1)`, which keeps strides of 0 where there is one element
        self.tensor = data.as_strided((data.numel(),), (1,), data.storage_offset())
        self.size, self.itemsize = data.numel(), data.element_size()
        self.nbytes = self.size * self.itemsize

    @functools.cached_property
    def bytes(self) -> Any:
        """The memory."""
        if not self.size:
            return np.empty(0, np.uint8)
        # Not `numpy()`, after which PyTorch does not resize the storage, as FSDP does
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.tensor.data_ptr())
        memory.owner = self.tensor  # arrays keep it alive
        return np.frombuffer(memory, np.uint8)

    @functools.cached_property
    def array(self) -> Any:
        """The elements, in NumPy's or ml_dtypes's dtype; booleans as bytes."""
        dtype = self.tensor.dtype
        return self.bytes if dtype is torch.bool else self.bytes.view(_numpy_of(dtype))

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def fields(self) -> tuple[tuple[str, Any], ...]:
        """What must be equal on all ranks."""
        return ("dtype", self.dtype), ("elements", self.size)

    def copy(self) -> FlatTensor:
        """Return the elements in memory of their own."""
        return FlatTensor(self.tensor.clone())

    def parts(self, sizes: Sequence[int]) -> list[FlatTensor]:
        """Return the elements in parts, which share this memory."""
        return [FlatTensor(part) for part in self.tensor.split(list(sizes))]

    def require(self, name: str, like: FlatTensor, size: int) -> None:
        """Raise an ArgumentError unless this has the dtype of another, and a size."""
        if self.tensor.dtype is not like.tensor.dtype or self.size != size:
            raise ArgumentError(
                f"{name}: a tensor of {self.size} elements of {self.dtype} stands "
                f"where {size} of {like.dtype} are needed"
            )

    def store(self) -> None:
        """Write the elements to the tensor, if they are a copy."""
        if self.is_copy:
            shaped = self.tensor.view(self._original.shape)
            self._original.data.copy_(shaped)  # without another version


class Reduction(NamedTuple):
    """A reduction of torch.distributed, and the factor of PREMUL_SUM."""

    name: str
    factor: Any = None

    @classmethod
    def of(cls, opts: Any) -> Reduction:
        """Return the reduction of options, or of a `ReduceOp` itself."""
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        name = compat.name_of(op)
        return cls(name, compat.factor_of(op) if name == "PREMUL_SUM" else None)

    def prepare(self, source: FlatTensor) -> tuple[ReduceOp, Any]:
        """Return this library's reduction, and the array to reduce.

        For averages of integers that is their sum, see `finish`.
        """
        name = self.name
        if source.tensor.dtype is torch.bool:
            name = _OF_BOOLEANS.get(name, name)
        if name not in _REDUCE_OPS:
            raise DTypeError(f"{source.dtype} cannot be reduced by {self.name}")
        array = source.array
        if name == "PREMUL_SUM":
            array = array * np.asarray(self.factor, array.dtype)
        is_sum = name == "AVG" and is_integer(array.dtype)
        return ReduceOp.SUM if is_sum else _REDUCE_OPS[name], array

    def adds_in_place(self, source: FlatTensor) -> bool:
        """Return whether a tensor's memory may hold the sum."""
        is_sum = self.name in ("SUM", "AVG", "PREMUL_SUM")
        return is_sum and source.tensor.dtype in _IN_PLACE_DTYPES

    def finish(self, sums: Any, ranks: int) -> Any:
        """Return what was reduced; for an average of integers, of their sum.

        It is rounded towards zero, as by NCCL.
        """
        if self.name != "AVG" or not is_integer(sums.dtype):
            return sums
        # divmod rounds down: negative quotients with a rest are one too small
        quotient, rest = np.divmod(sums, ranks)
        return quotient + ((rest != 0) & (sums < 0))

    def require_integers(self, source: FlatTensor) -> None:
        """Raise a DTypeError if a tensor cannot be reduced bit by bit."""
        if not is_integer(source.array.dtype):
            raise DTypeError(f"{source.dtype} cannot be reduced by {self.name}")


def output_of(tensor: Any) -> FlatTensor:
    """Return a tensor that will be written, which needs an element for each number."""
    flat = FlatTensor(tensor)
    if flat.is_copy and _may_overlap(tensor):
        raise UnsupportedError(
            "a tensor whose elements share memory, such as an expanded one, cannot be "
            "written; pass tensor.contiguous()"
        )
    return flat


def _may_overlap(tensor: Any) -> bool:
    reach = 0  # of the dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride <= reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def concatenate(tensors: Any) -> FlatTensor:
    """Return the elements of tensors of one dtype, one after another."""
    if isinstance(tensors, torch.Tensor):
        return FlatTensor(tensors)
    flats = [FlatTensor(tensor) for tensor in tensors]
    for flat in flats:
        flat.require("a list of tensors", flats[0], flat.size)
    return FlatTensor(torch.cat([flat.tensor for flat in flats]))


@functools.lru_cache
def _numpy_of(dtype: Any) -> Any:
    if dtype is torch.bfloat16:
        return dtype_of("bfloat16")
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        name = str(dtype).removeprefix("torch.")
        raise DTypeError(f"{name} cannot be reduced; it can only be moved") from None
