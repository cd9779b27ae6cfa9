"""Element specs: the structure, shapes and dtypes of a dataset's elements."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mpidist.errors import ArgumentTypeError
from mpidist.util import nest, validation
from mpidist.util.dtypes import traits


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of an array in the elements of a dataset.

    Args:
      shape: with None for a length that may differ from element to element.
      dtype: a NumPy dtype, or an argument of `np.dtype`.

    Raises:
      ArgumentError: a length below 0.
      ArgumentTypeError: `shape` is not a tuple or list, or `dtype` not a dtype.

    Example:
      >>> mpidist.Dataset.range(4).batch(2).element_spec
      TensorSpec(shape=(None,), dtype=int64)
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple | list):
            raise ArgumentTypeError(
                f"shape must be a tuple of lengths, not {validation.shown(self.shape)}"
            )
        shape = (validation.optional_integer("each of shape", n, 0) for n in self.shape)
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", validation.dtype("dtype", self.dtype))

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape}, dtype={self.dtype.name})"


def spec_of(element: Any, is_batch: bool) -> Any:
    """Return a nest of TensorSpec like `element`; a batch has any number of rows."""

    def describe(leaf: Any) -> TensorSpec:
        shape = tuple(np.shape(leaf))
        # Foreign arrays keep their own dtype; numbers have NumPy's.
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        return TensorSpec((None, *shape[1:]) if is_batch and shape else shape, dtype)

    return nest.map_leaves(describe, element)


def batch_of(spec: Any) -> Any:
    """Return the nest of TensorSpec of batches of elements like `spec`."""
    return nest.map_leaves(lambda s: TensorSpec((None, *s.shape), s.dtype), spec)


def require_like_members(first: Any, second: Any) -> None:
    """Raise if enums of two datasets have other members, where both are known.

    Raises:
      ArgumentTypeError: has both.
    """
    if isinstance(first, tuple) and isinstance(second, tuple):
        for one, other in zip(first, second, strict=False):
            require_like_members(one, other)
    elif first and second and first != second:
        raise ArgumentTypeError(
            "the enums of concatenated or interleaved datasets need the same members, "
            f"not {first} and {second}"
        )


def require_like(first: Any, second: Any) -> None:
    """Raise if elements of two specs cannot be concatenated.

    Shapes and lengths of strings may differ.

    Raises:
      ArgumentTypeError: names the first difference.
    """
    needs = "concatenate needs datasets whose elements have the same structure and "
    specs, structure = nest.flatten(first)
    others, other_structure = nest.flatten(second)
    if structure != other_structure:
        raise ArgumentTypeError(
            f"{needs}dtypes, not the structures {structure} and {other_structure}"
        )
    names = nest.leaf_names(structure, "element")
    for name, spec, other in zip(names, specs, others, strict=True):
        # Strings of unlike lengths can be joined: NumPy widens them.
        families = {traits(spec.dtype).family, traits(other.dtype).family}
        are_strings = families in ({"bytes"}, {"text"})
        # Batches of them are in the byte order of this machine
        dtypes = {s.dtype.newbyteorder("=") for s in (spec, other)}
        if len(dtypes) > 1 and not are_strings:
            raise ArgumentTypeError(
                f"{needs}dtypes, but {name} has dtype {spec.dtype.name} in the first "
                f"and {other.dtype.name} in the second; convert one of them with map()"
            )
