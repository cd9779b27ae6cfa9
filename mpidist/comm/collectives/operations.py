"""The collectives of one strategy: one operation, or two that are alike, is a file."""

from __future__ import annotations

from typing import Any

from mpidist.comm.collectives.arguments import describe, implementation_of
from mpidist.comm.collectives.exchanges import all_to_all, reduce_scatter
from mpidist.comm.collectives.gather import all_gather
from mpidist.comm.collectives.objects import broadcast_object, gather_objects
from mpidist.comm.collectives.over_axis import reduce_over_axis
from mpidist.comm.collectives.plans import CollectiveContext, prepare_inputs
from mpidist.comm.collectives.reduce import (
    all_reduce,
    prepare_reduction,
    reduce_large,
    sum_of,
)
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.device import arrays
from mpidist.options import CommunicationOptions
from mpidist.util import nest

_DEFAULT = CommunicationOptions()


class Collectives(CollectiveContext):
    """The collectives of one strategy, over its ranks; see `CollectiveContext`."""

    all_reduce = all_reduce
    reduce_large = reduce_large
    prepare_reduction = prepare_reduction
    sum_of = sum_of
    reduce_over_axis = reduce_over_axis
    all_gather = all_gather
    all_to_all = all_to_all
    reduce_scatter = reduce_scatter
    broadcast_object = broadcast_object
    gather_objects = gather_objects

    def broadcast(self, operation: str, value: Any, root: int = 0) -> Any:
        """Return, on every rank, the nest of arrays that rank `root` passed.

        Every rank passes a value of the same structure, shapes and dtypes.
        """

        def prepare() -> tuple[list[Any], nest.Spec, list[Any]]:
            leaves, spec, inputs = prepare_inputs(self, value, _DEFAULT)
            # MPI writes into the copy: arguments stay unchanged.
            return leaves, spec, [array.copy(order="C") for array in inputs]

        with self.consensus.call(operation) as call:
            leaves, spec, results = call.reserve(prepare)
            self.consensus.require_same(
                CallSignature(operation, (), spec, describe(results))
            )
            for result in results:
                if self.size > 1:
                    is_device = arrays.is_device_array(result)
                    how = implementation_of(_DEFAULT)
                    transport = self.transports.pick(how, False, is_device)
                    transport.broadcast(result, root, None)
        return nest.unflatten(spec, map(arrays.like, results, leaves))
