"""Optional: a batch that may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpidist import values
from mpidist.data.spec import TensorSpec, spec_of
from mpidist.errors import ArgumentError
from mpidist.util import nest, validation

if TYPE_CHECKING:
    from mpidist.data.distributed.iterator import DistributedIterator


class Optional:
    """A batch or none, returned by `DistributedIterator.get_next_as_optional`.

    `from_value` and `empty` create one. Its methods do not communicate.

    Example:
      >>> rows = mpidist.Dataset.range(4).batch(4)
      >>> iterator = iter(strategy.experimental_distribute_dataset(rows))
      >>> batch = iterator.get_next_as_optional()
      >>> while batch.has_value():
      ...     print(strategy.gather(batch.get_value(), axis=0))
      ...     batch = iterator.get_next_as_optional()
      [0 1 2 3]
      >>> batch.element_spec, mpidist.Optional.from_value(3).get_value()
      (TensorSpec(shape=(None,), dtype=int64), 3)
    """

    # The iterator with the element_spec, which the value alone does not show
    _spec_of: DistributedIterator | None = None
    _spec: Any = None

    def __init__(self, *values: Any):
        self._values = values

    @staticmethod
    def empty(element_spec: Any) -> Optional:
        """Return an Optional without a value.

        Args:
          element_spec: a nest of `TensorSpec` for the missing value.

        Raises:
          ArgumentTypeError: a leaf is not a TensorSpec.
        """
        for leaf in nest.flatten(element_spec)[0]:
            validation.instance("element_spec", leaf, TensorSpec)
        optional = Optional()
        optional._spec = element_spec
        return optional

    @staticmethod
    def from_value(value: Any) -> Optional:
        """Return an Optional of a value: an array, a number, or a nest of them."""
        return Optional(value)

    @property
    def element_spec(self) -> Any:
        """A nest of `TensorSpec` like the value, even if there is no value.

        For a distributed iterator it is `DistributedIterator.element_spec`.
        """
        if self._spec_of is not None:
            return self._spec_of.element_spec
        if not self._values:
            return self._spec
        return spec_of(values.select_replica(self._values[0]), is_batch=False)

    def has_value(self, name: str | None = None) -> bool:
        """Return whether there is a batch; the same on all replicas."""
        return bool(self._values)

    def get_value(self, name: str | None = None) -> Any:
        """Return the batch.

        Raises:
          ArgumentError: there is no batch.
        """
        if not self._values:
            raise ArgumentError("the Optional has no value; check has_value() first")
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional({', '.join(map(repr, self._values))})"
