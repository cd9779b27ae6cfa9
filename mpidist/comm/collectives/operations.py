"""Collectives on nests of arrays: check, convert, pack, move, unpack, return.

Each method is collective over the strategy's ranks. Leaves of one dtype are sent
together, so a nest costs one MPI call per dtype (and per `bytes_per_pack`).
"""

from __future__ import annotations

from typing import Any

from mpidist.comm.collectives.arguments import (
    axis_field,
    check_each,
    describe,
    describe_but,
    gather_axes,
    implementation_of,
    option_fields,
    require_dense,
    to_arrays,
)
from mpidist.comm.collectives.counts import CountExchange
from mpidist.comm.collectives.exchanges import Exchanges
from mpidist.comm.collectives.gather import GatherPlan, Gathers
from mpidist.comm.collectives.objects import Objects
from mpidist.comm.collectives.outputs import Results
from mpidist.comm.collectives.over_axis import AxisReductions
from mpidist.comm.collectives.plans import (
    PlanCache,
    Structure,
    detail_of,
    kind_along,
    kind_of,
)
from mpidist.comm.collectives.reduce import Reductions
from mpidist.comm.collectives.slices import SliceReductions
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.shared_memory.symmetric import SymmetricMemory
from mpidist.comm.transports.selector import TransportSelector
from mpidist.device import arrays
from mpidist.options import CommunicationOptions
from mpidist.util import nest, validation

__all__ = ["Collectives"]

_DEFAULT = CommunicationOptions()


class Collectives:
    """The collectives of one strategy.

    Args:
      consensus: of all ranks.
      transports: the transports.
      symmetric: the arrays that lie in memory of the node.
      results: allocates the results.

    Attributes:
      reductions, over_axis, exchanges, objects: those with rooms of their own.
    """

    def __init__(
        self,
        consensus: Consensus,
        transports: TransportSelector,
        symmetric: SymmetricMemory,
        results: Results,
    ):
        self.consensus = consensus
        self.transports = transports
        self.transport = transports.default
        self.size = consensus.size
        counts = CountExchange(consensus, transports)
        self._plans = PlanCache(consensus)
        self._gathers = Gathers(consensus, transports, results, counts)
        self.reductions = Reductions(
            consensus,
            transports,
            symmetric,
            results,
            self._plans,
            SliceReductions(consensus, self._gathers, transports.require_reachable),
            self._take,
        )
        self.over_axis = AxisReductions(
            consensus, self._plans, self.reductions, self._gathers, self._take
        )
        self.exchanges = Exchanges(
            consensus, transports, self._plans, self.reductions, counts, self._take
        )
        self.objects = Objects(consensus, transports, self._gathers)

    def _take(
        self, value: Any, options: CommunicationOptions = _DEFAULT
    ) -> tuple[list[Any], nest.Spec, list[Any]]:
        """Like `to_arrays`; also checks that there are transports for the arrays."""
        validation.instance("options", options, CommunicationOptions)
        leaves, spec, given = to_arrays(value)
        # One rank moves nothing, so it can reduce arrays wherever they are.
        if self.size > 1:
            check_each(given, spec, self.transports.require_reachable)
            self.transports.require_implementation(implementation_of(options))
        return leaves, spec, given

    def all_gather(
        self,
        operation: str,
        value: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the ranks' values concatenated along `axis`, on every rank.

        Lengths along `axis` may differ between ranks and may be zero; the dtype and the
        other dimensions must agree.

        Raises, on all ranks: see `all_reduce`; ArgumentError also for values without
        dimensions and an axis out of range.
        """
        kind = kind_along(axis)
        wanted = _DEFAULT if options is None else options

        def make() -> tuple[GatherPlan, list[Any], list[Any]]:
            require_dense(operation, value)
            leaves, spec, given = self._take(value, wanted)
            axes = gather_axes(axis, given, spec)
            agreed = axis_field(axes), *option_fields(wanted)
            signature = CallSignature(
                operation, agreed, spec, describe_but(given, axes)
            )
            call = self.consensus.call(signature, wanted.timeout_seconds)
            structure = Structure.of(spec, leaves)
            plan = self._gathers.plan(call, given, axes, wanted, structure)
            return plan, leaves, given

        return self._plans.run(
            operation,
            None if kind is None else detail_of(axis, options),
            value,
            kind or kind_of,
            make,
            self._gathers.execute,
        )

    def broadcast(self, operation: str, value: Any, root: int = 0) -> Any:
        """Return, on every rank, the nest of arrays that rank `root` passed.

        Every rank passes a value of the same structure, shapes and dtypes.
        """

        def prepare() -> tuple[list[Any], nest.Spec, list[Any]]:
            leaves, spec, given = self._take(value)
            # MPI writes into the copy: arguments stay unchanged.
            return leaves, spec, [array.copy(order="C") for array in given]

        with self.consensus.call(operation) as call:
            leaves, spec, results = call.reserve(prepare)
            self.consensus.require_same(
                CallSignature(operation, (), spec, describe(results))
            )
            for result in results:
                if self.size > 1:
                    is_device = arrays.is_device_array(result)
                    how = implementation_of(_DEFAULT)
                    way = self.transports.pick(how, False, is_device)
                    way.broadcast(result, root, None)
        return nest.unflatten(spec, map(arrays.like, results, leaves))
