"""The leaves of a user's nest as arrays, checked, and named in messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mpidist.comm import arithmetic, packing
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import nest, validation
from mpidist.util.dtypes import is_text
from mpidist.values import (
    DistributedValues,
    IndexedSlices,
    local_component,
    select_replica,
)

T = TypeVar("T")


def to_arrays(value: Any) -> tuple[list[Any], nest.Spec, list[Any]]:
    """Return the leaves of `value` (this rank's components), its structure, arrays."""
    leaves, spec = nest.flatten(value)
    if any(isinstance(leaf, DistributedValues) for leaf in leaves):
        # Once more, as the first flatten stopped at distributed values.
        # A component may be a nest itself
        local = nest.unflatten(spec, map(local_component, leaves))
        leaves, spec = nest.flatten(local)
    try:
        return leaves, spec, [arrays.to_array(leaf) for leaf in leaves]
    except ArgumentTypeError:
        names = nest.leaf_names(spec, "value")
    # Once more, to name the leaf; outside the handler, for a single traceback
    for leaf, name in zip(leaves, names):
        if isinstance(leaf, str):
            raise ArgumentTypeError(
                f"{name} must be an array or a number, not {validation.shown(leaf)}; "
                "for text, use gather_objects"
            )
    return leaves, spec, list(map(arrays.to_array, leaves, names))


def check_each(
    values: Sequence[Any], spec: nest.Spec, check: Callable[[Any, str], T]
) -> list[T]:
    """Return `check(array, its name)` of each; names are made only for an error."""
    try:
        # Names of leaves cost more than the checks; they are made in the error path
        # only.
        return [check(array, "value") for array in values]
    except (ArgumentError, ArgumentTypeError):
        names = nest.leaf_names(spec, "value")
    return [check(a, name) for a, name in zip(values, names, strict=True)]


def require_dense(operation: str, value: Any) -> None:
    """Raise if a leaf is sparse: only dense arrays can be concatenated.

    Raises:
      UnsupportedError: IndexedSlices, or a sparse array of SciPy, CuPy, PyTorch or JAX.
    """
    leaves, spec = nest.flatten(select_replica(value))
    for i, leaf in enumerate(leaves):
        # `is True`, as an array's is_sparse may be a method.
        is_sparse = (
            hasattr(leaf, "todense") or getattr(leaf, "is_sparse", False) is True
        )
        if is_sparse or isinstance(leaf, IndexedSlices):
            raise UnsupportedError(
                f"{operation}: {nest.leaf_names(spec, 'value')[i]} is sparse "
                f"({type(leaf).__name__}), and only dense arrays can be gathered; "
                "gather its values and its indices separately"
            )


def gather_axes(axis: int, values: Sequence[Any], spec: nest.Spec) -> list[int]:
    """Return for each array `axis` as a number in 0..ndim-1; a scalar has none."""

    def normalize(array: Any, name: str) -> int:
        if array.ndim == 0:
            raise ArgumentError(
                f"{name} is a scalar, which has no axis to gather along; make it an "
                "array of shape (1,) first"
            )
        return packing.normalize_axis(axis, array.ndim, name)

    return check_each(values, spec, normalize)


def require_reducible(op: ReduceOp, values: Sequence[Any], spec: nest.Spec) -> None:
    """Raise unless the dtypes of all arrays can be reduced."""
    check_each(
        values, spec, lambda a, name: arithmetic.require_reducible(op, a.dtype, name)
    )


def describe(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return what ranks compare: dtypes, shapes, and kinds of memory."""
    return tuple(describe_as(a, a.shape) for a in values)


def describe_but(values: Sequence[Any], axes: Sequence[int]) -> tuple[Any, ...]:
    """Like `describe`, with any length along each axis."""
    # "any" in place of the length: digests agree for any length.
    return tuple(
        describe_as(a, (*a.shape[:i], "any", *a.shape[i + 1 :]))
        for a, i in zip(values, axes)
    )


def describe_as(array: Any, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Like `describe` for one array, with the given shape."""
    if arrays.is_device_array(array):
        # Host and GPU arrays use different transports, so ranks must agree on the
        # memory too.
        return array.dtype, shape, "on a GPU"
    if is_text(array.dtype):
        return array.dtype, shape, "of text (pass one width, as astype('U20') has)"
    return array.dtype, shape


def axis_field(axes: Sequence[Any]) -> tuple[str, Any]:
    """Return the axes as part of a call: one if all leaves have the same."""
    return "axis", axes[0] if len(set(axes)) == 1 else tuple(axes)


def option_fields(options: CommunicationOptions) -> tuple[tuple[str, Any], ...]:
    """Return the options as part of a call: all ranks must have the same."""
    return tuple((f"options.{name}", value) for name, value in vars(options).items())


def is_direct(options: CommunicationOptions) -> bool:
    """Return whether the user asked for MPI's own collectives."""
    return options.implementation is CommunicationImplementation.MPI


def implementation_of(options: CommunicationOptions) -> CommunicationImplementation:
    """Return the requested implementation."""
    assert isinstance(options.implementation, CommunicationImplementation)
    return options.implementation


def deadline_of(options: CommunicationOptions) -> float | None:
    """Return the deadline, on time.monotonic's clock."""
    # An absolute time: several waits of one call share the limit.
    seconds = options.timeout_seconds
    return None if seconds is None else time.monotonic() + seconds
