"""The reductions: one table, which everything that asks which one it is reads.

A member of `ReduceOp` is its row; a new reduction is a new member, and its line in
`tests/comm/collectives/test_reductions.py`, which runs it everywhere.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.options import VariableAggregation
from mpidist.util.dtypes import accumulator_dtype, is_integer, mean_dtype
from mpidist.util.validation import shown

_Dtype = np.dtype[Any]


class Reduction(NamedTuple):
    """What a reduction does.

    Args:
      combine: reduces two arrays, element by element, that of the lower rank first.
      along: given an array, axes and a dtype, reduces the array over the axes, in that
        dtype or, where this is exact, in the array's own.
      result: given the dtype of values, returns that of results.
      wide: given the dtype of values, returns the one for reductions over an axis.
      adds: whether results are sums, which transports form; the derivative of such a
        reduction is the same reduction. Of the others, ranks get each other's values.
      divides: whether results are divided by the number of ranks, or of elements.
      has_empty: whether there is a result for no elements.
      overflow: what integers may overflow in, for messages; "" if they do not.
      bound: given the largest integer of a dtype and the number of ranks, returns
        another: results fit the dtype if no rank's values are beyond that.
      narrowest: size in bytes of the narrowest integers that may overflow the 64 bits
        of reductions over an axis.
      orders: whether values are compared, which complex ones cannot be.
    """

    combine: np.ufunc
    along: Callable[[Any, tuple[int, ...], _Dtype], Any]
    result: Callable[[_Dtype], _Dtype]
    wide: Callable[[_Dtype], _Dtype]
    adds: bool
    divides: bool
    has_empty: bool
    overflow: str
    bound: Callable[[int, int], int]
    narrowest: int
    orders: bool


def _same(dtype: _Dtype) -> _Dtype:
    return dtype


def _wide(dtype: _Dtype) -> _Dtype:
    # Sums of 8 to 32 bits cannot overflow 64 bits before 2**31 elements were added
    if is_integer(dtype):
        return np.dtype(f"{dtype.kind}8")
    return np.result_type(dtype, np.float64)


def _wide_of_mean(dtype: _Dtype) -> _Dtype:
    # As NumPy's for 64-bit integers, whose sum need not fit
    is_large = is_integer(dtype) and dtype.itemsize == 8
    return np.dtype(np.float64) if is_large else _wide(dtype)


def _any_fits(most: int, _: int) -> int:
    return most


def _root(most: int, ranks: int) -> int:
    return max(int(most ** (1 / ranks)) - 1, 1)  # one less, as roots are rounded


_SUM = Reduction(
    combine=np.add,
    along=lambda array, axes, dtype: array.sum(axis=axes, dtype=dtype),
    result=_same,
    wide=_wide,
    adds=True,
    divides=False,
    has_empty=True,
    overflow="sum",
    bound=lambda most, ranks: most // ranks,
    narrowest=8,
    orders=False,
)
_MEAN = _SUM._replace(
    result=mean_dtype, wide=_wide_of_mean, divides=True, overflow="", bound=_any_fits
)
_PRODUCT = _SUM._replace(
    combine=np.multiply,
    along=lambda array, axes, dtype: array.prod(axis=axes, dtype=dtype),
    adds=False,
    overflow="product",
    bound=_root,
    narrowest=1,
)
_MIN = Reduction(
    combine=np.minimum,
    along=lambda array, axes, _: array.min(axis=axes),
    result=_same,
    wide=accumulator_dtype,
    adds=False,
    divides=False,
    has_empty=False,
    overflow="",
    bound=_any_fits,
    narrowest=8,
    orders=True,
)
_MAX = _MIN._replace(
    combine=np.maximum, along=lambda array, axes, _: array.max(axis=axes)
)


class ReduceOp(enum.Enum):
    """How the values of all replicas are combined, element by element.

    SUM and MEAN are tf.distribute's. MIN and MAX are nan where any value is, as in
    NumPy. Methods also accept the name of an operation, upper or lower case: `"sum"`.

    Example:
      >>> strategy.reduce(mpidist.ReduceOp.SUM, np.array([1.0, 2.0]))
      array([2., 4.])
      >>> mpidist.ReduceOp.parse("mean")
      <ReduceOp.MEAN: 'MEAN'>
    """

    _value_: str
    rule: Reduction

    SUM = "SUM", _SUM
    MEAN = "MEAN", _MEAN
    AVG = MEAN  # PyTorch's name for the same
    MIN = "MIN", _MIN
    MAX = "MAX", _MAX
    PRODUCT = "PRODUCT", _PRODUCT

    __hash__ = object.__hash__  # of Enum it is a function of Python

    def __new__(cls, name: str, rule: Reduction) -> ReduceOp:
        """Make a member, whose value is its name."""
        member = object.__new__(cls)
        member._value_, member.rule = name, rule
        return member

    @property
    def adds(self) -> bool:
        """Whether values are added up (SUM and MEAN)."""
        return self.rule.adds

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """Return the operation that `op` is or names.

        Raises:
          ArgumentError: a string that names no operation.
          ArgumentTypeError: `op` is not a ReduceOp or a string.
        """
        if isinstance(op, cls):
            return op
        if not isinstance(op, str):
            raise ArgumentTypeError(
                "reduce_op must be a ReduceOp or its name, and comes first, as in "
                f"reduce('SUM', value); not {shown(op)} ({type(op).__name__})"
            )
        try:
            return cls[op.upper()]
        except KeyError:
            names = ", ".join(known.name for known in cls)
            raise ArgumentError(
                f"reduce_op must be one of {names}, not {shown(op)}"
            ) from None

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Return the operation for updates of a variable with this aggregation.

        Raises:
          ArgumentError: NONE, ONLY_FIRST_REPLICA, or not an aggregation.
        """
        if aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return ReduceOp[aggregation.name]
        is_member = isinstance(aggregation, VariableAggregation)
        name = str(aggregation) if is_member else shown(aggregation)
        raise ArgumentError(
            f"{name} has no ReduceOp; only SUM and MEAN of VariableAggregation have one"
        )
