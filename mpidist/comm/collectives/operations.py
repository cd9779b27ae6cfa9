"""Collectives on nests of arrays: check, convert, pack, move, unpack, return.

Each method is collective over the strategy's ranks. Leaves of one dtype are sent
together, so a nest costs one MPI call per dtype (and per `bytes_per_pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.comm import arithmetic
from mpidist.comm.collectives.arguments import (
    axis_field,
    check_each,
    describe,
    describe_but,
    gather_axes,
    implementation_of,
    option_fields,
    require_dense,
    require_reducible,
    to_arrays,
)
from mpidist.comm.collectives.combinations import Combinations
from mpidist.comm.collectives.counts import CountExchange
from mpidist.comm.collectives.exchanges import Exchanges
from mpidist.comm.collectives.gather import GatherPlan, Gathers
from mpidist.comm.collectives.objects import Objects
from mpidist.comm.collectives.outputs import Results
from mpidist.comm.collectives.over_axis import AxisReductions, Summation
from mpidist.comm.collectives.packs import PackedReductions, ReducePlan
from mpidist.comm.collectives.plans import (
    OP_TYPES,
    PlanCache,
    Structure,
    detail_of,
    kind_along,
    kind_of,
)
from mpidist.comm.collectives.reduce import Sums
from mpidist.comm.collectives.slices import SliceReductions, has_slices
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.packing import Axis
from mpidist.comm.shared_memory.symmetric import SymmetricMemory
from mpidist.comm.transports.selector import TransportSelector
from mpidist.device import arrays
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.util import nest, validation

__all__ = ["Collectives", "Prepared", "Reduction", "Summation"]

# A symmetric address, or 0, and what moves the data once the ranks agree: it is given
# whether all ranks have passed that address
Prepared = tuple[int, Callable[[bool], list[Any]]]
Reduction = Callable[[ReduceOp, Sequence[Any], CommunicationOptions], Prepared]
_DEFAULT = CommunicationOptions()


class Collectives:
    """The collectives of one strategy.

    Args:
      consensus: of all ranks.
      transports: the transports.
      symmetric: the arrays that lie in memory of the node.
      results: allocates the results.
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
        self._packed = PackedReductions(consensus)
        self._gathers = Gathers(consensus, transports, results, counts)
        self.sums = Sums(self.size, transports, symmetric, results)
        self._combinations = Combinations(consensus, transports, results)
        self._over_axis = AxisReductions(
            consensus, self._plans, self._packed, self.sums, self._gathers, self._take
        )
        self._empty = results.empty
        self._exchanges = Exchanges(
            consensus, transports, self._plans, self._packed, counts, self._take
        )
        self.objects = Objects(consensus, transports, self._gathers)
        self._slices = SliceReductions(
            consensus, self._gathers, transports.require_reachable
        )

    def all_reduce(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        prepare: Reduction | None = None,
    ) -> Any:
        """Return the elementwise reduction of `value` over all ranks, on every rank.

        Args:
          operation: the public call, for messages.
          reduce_op: the operation, or its name.
          value: a nest of arrays or numbers, of equal structure, shapes and dtypes; or
            of IndexedSlices, see `SliceReductions`.
          options: see `CommunicationOptions`.
          prepare: prepares the reduction after all checks; by default `prepare`.

        Raises, on all ranks: see `Consensus.require_same` and `arrays.to_array`; also
          ArgumentError for a sum of integers that does not fit their dtype.
        """
        key, detail = None, None
        # A custom reduction gets a plan each time: it may not pack.
        if prepare is None and isinstance(reduce_op, OP_TYPES):
            detail = reduce_op if options is None else detail_of(reduce_op, options)
        if detail is not None:
            key, plan, leaves, spec = self._plans.find(
                operation, detail, value, kind_of
            )
            # Fast path for repeated all-reduces: skip the checks that already passed.
            if plan is not None:
                with self.consensus.lock:
                    results = self._execute(plan, leaves)
                return plan.structure.give_back(results, leaves, spec)
        # Sparse leaves are looked for only where no plan was found: a plan exists for
        # dense values alone.
        if key is None and self.consensus.guard(operation, lambda: has_slices(value)):
            return self._slices.reduce(
                operation,
                reduce_op,
                value,
                _DEFAULT if options is None else options,
                lambda op, dense: self.all_reduce(
                    operation, op, dense, options, prepare
                ),
            )

        # Everything that may fail for one rank's arguments, before the ranks compare
        # calls.
        def make() -> tuple[ReducePlan, list[Any], list[Any]]:
            return self._plan(
                operation,
                reduce_op,
                value,
                _DEFAULT if options is None else options,
                may_pack=prepare is None,
            )

        return self._plans.run_first(
            operation,
            key,
            make,
            lambda plan, given: self._execute(plan, given, prepare),
        )

    def _plan(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions,
        *,
        may_pack: bool,
    ) -> tuple[ReducePlan, list[Any], list[Any]]:
        """Return the plan of a reduction, the leaves, and the leaves as arrays."""
        op = ReduceOp.parse(reduce_op)
        leaves, spec, given = self._take(value, options)
        require_reducible(op, given, spec)
        agreed = (("reduce_op", op.name), *option_fields(options))
        call = CallSignature(operation, agreed, spec, describe(given))
        structure = Structure.of(spec, leaves)
        fits = may_pack and self._packed.fits(op, given, options)
        plan = self._packed.plan(call, op, options, structure, given, packed=fits)
        return plan, leaves, given

    def _execute(
        self,
        plan: ReducePlan,
        given: Sequence[Any],
        prepare: Reduction | None = None,
    ) -> list[Any]:
        """Return the reductions of the leaves, once the ranks agree. Collective.

        Args:
          plan: of the call.
          given: arrays, or numbers if the plan was known.
          prepare: prepares the reduction to use instead of transports.
        """
        # Small: the numbers are sent with the comparison of signatures, in one round.
        if plan.packs:
            return self._packed.reduce(plan, given)
        # Plain numbers become arrays only here: the packed path takes them as they are.
        values = [a if hasattr(a, "dtype") else np.asarray(a) for a in given]
        return self.reduce_large(
            plan.call, plan.number, plan.op, values, plan.options, prepare
        )

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

    def prepare(
        self,
        op: ReduceOp,
        values: Sequence[Any],
        options: CommunicationOptions,
        prepare_sums: Summation | None = None,
        is_sum: bool = True,
    ) -> Prepared:
        """Prepare the reduction of arrays that were checked before. Not collective.

        All memory that it needs is reserved here, where a failure of one rank can still
        be reported. float16 and bfloat16 are added up in float32, the mean of integers
        in float64.

        Args:
          op: the operation.
          values: the arrays.
          options: see `CommunicationOptions`.
          prepare_sums: replaces transports for SUM and MEAN.
          is_sum: whether it adds; else the result may be any integers.

        Returns: see `Prepared`. What moves the data raises, on all ranks, ArgumentError
          for integers that do not fit their dtype.
        """
        if not op.adds:
            packs = self._combinations.reserve(op, values, options)
            return 0, lambda _: self._combinations.combine(op, packs, values, options)
        out, partial = self._to_add(op, values, options)
        narrow = arithmetic.reserve_narrow(partial, out, self._empty)
        # The flag "may overflow" is added along with the arrays, without an extra
        # round.
        is_checked = is_sum and self.size > 1 and arithmetic.is_integer_sum(op, out)
        if is_checked:
            partial.append(self._count_large(partial))
        prepare, place = prepare_sums or self.sums.prepare, 0
        if prepare_sums is None and self.size > 1:
            place = self.sums.place_of(partial, options)
        if place:
            sum_here = self.sums.prepare(partial, options, is_symmetric=True)
        else:
            sum_here = prepare(partial, options)

        def move(is_symmetric: bool) -> list[Any]:
            if place and not is_symmetric:
                # Other ranks have passed other arrays, which are not symmetric to these
                totals = prepare(partial, options)()
            else:
                totals = sum_here()
            if is_checked:
                self._check_integers(partial, totals, options, prepare)
                del totals[-1]  # the flag is not a result
            return arithmetic.finish(op, totals, narrow, self.size)

        return place, move

    def _to_add(
        self, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
    ) -> tuple[list[Any], list[Any]]:
        """Like `arithmetic.to_add`; compresses on GPUs only.

        On the host, data are compressed when sent to other nodes: see `Sums.reserve`.
        """
        compression = options.compression if self.size > 1 else None
        is_narrow = compression is None or any(map(arrays.is_device_array, values))
        return arithmetic.to_add(op, values, compression, is_narrow)

    def _count_large(self, partial: Sequence[Any]) -> Any:
        """Return 1 if sums of integers over all ranks may overflow, else 0.

        Ranks add it along with the arrays. (It is a float, so that it is not packed
        with large integer arrays.)
        """
        is_large = any(arithmetic.may_overflow(a, self.size) for a in partial)
        return np.array([is_large], np.float64)

    def _check_integers(
        self,
        partial: Sequence[Any],
        totals: list[Any],
        options: CommunicationOptions,
        prepare: Summation,
    ) -> None:
        """Raise, on all ranks, if sums of integers do not fit. Collective.

        Only if some rank has large integers, all are added again in float64.

        Args:
          partial: the summands; the last one is the result of `_count_large`.
          totals: the sums; those of narrow dtypes are replaced by exact ones.
          options: see `CommunicationOptions`.
          prepare: prepares sums of arrays.
        """
        # The total of all ranks' flags: zero on all or none, so all return here
        # together.
        if not totals[-1][0]:
            return
        integers = [j for j, a in enumerate(partial) if a.dtype.kind in "iu"]
        call, consensus = CallSignature("a sum of large integers"), self.consensus
        sum_wide = consensus.guard(
            call.operation,
            lambda: prepare([partial[j].astype(np.float64) for j in integers], options),
        )
        consensus.require_same(call)
        wide = sum_wide()

        def check() -> None:
            for j, rough in zip(integers, wide, strict=True):
                dtype = partial[j].dtype
                if dtype.itemsize < 8:  # exact; Open MPI saturates sums of few bits
                    totals[j] = rough.astype(np.int64).astype(dtype)
                name = "value" if len(partial) == 2 else f"array {j} of the value"
                what = f"the sum of {name} over all replicas"
                arithmetic.require_fit(totals[j], rough, what)

        consensus.guard_last(call.operation, check)

    def reduce_large(
        self,
        call: CallSignature,
        number: int,
        op: ReduceOp,
        values: Sequence[Any],
        options: CommunicationOptions,
        prepare: Reduction | None = None,
    ) -> list[Any]:
        """Return the reductions of arrays that were checked before. Collective.

        Args:
          call: the signature that the ranks compare.
          number: its digest.
          op: the operation.
          values: the arrays.
          options: see `CommunicationOptions`.
          prepare: prepares the reduction; by default `prepare`.
        """
        consensus, timeout = self.consensus, options.timeout_seconds
        # Reserve, compare, move: what may fail comes before the comparison, and a
        # failure is reported in it.
        with consensus.lock:
            place, move = consensus.guard(
                call.operation, prepare or self.prepare, op, values, options
            )
            # `place` is compared with the call
            return move(consensus.compare(call, number, place, timeout))

    def reduce_over_axis(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: Axis,
        options: CommunicationOptions | None = None,
        prepare_sums: Summation | None = None,
    ) -> Any:
        """Return the reduction over `axis` and over all ranks, on every rank.

        Lengths along `axis` may differ between ranks and may be zero; the other
        dimensions must agree. A mean is the sum of all elements divided by the sum of
        all lengths, or nan if that is zero. Floating values are added up in double
        precision, integers in 64 bits; the result has the dtype of `value` (a mean of
        integers is float64; as in NumPy, 64-bit integers are added in float64 for it).
        `prepare_sums` replaces transports for SUM and MEAN.

        Raises, on all ranks: see `all_reduce`; also ArgumentError for an axis out of
        range, a sum or product of integers that does not fit their dtype, and MIN or
        MAX of no elements; ArgumentTypeError for an axis that is not an integer.
        """
        return self._over_axis.reduce(
            operation, reduce_op, value, axis, options, prepare_sums
        )

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
            call = CallSignature(operation, agreed, spec, describe_but(given, axes))
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

    def all_to_all(
        self,
        operation: str,
        value: Any,
        axis: int,
        lengths: Sequence[int] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """See `ReplicaContext.all_to_all`."""
        return self._exchanges.all_to_all(operation, value, axis, lengths, options)

    def reduce_scatter(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int,
        lengths: Sequence[int] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """See `ReplicaContext.reduce_scatter`."""
        return self._exchanges.reduce_scatter(
            operation, reduce_op, value, axis, lengths, options
        )

    def broadcast(self, operation: str, value: Any, root: int = 0) -> Any:
        """Return, on every rank, the nest of arrays that rank `root` passed.

        Every rank passes a value of the same structure, shapes and dtypes.
        """

        def prepare() -> tuple[list[Any], nest.Spec, list[Any]]:
            leaves, spec, given = self._take(value)
            # MPI writes into the copy: arguments stay unchanged.
            return leaves, spec, [array.copy(order="C") for array in given]

        with self.consensus.lock:
            leaves, spec, results = self.consensus.guard(operation, prepare)
            call = CallSignature(operation, (), spec, describe(results))
            self.consensus.require_same(call)
            for result in results:
                if self.size > 1:
                    is_device = arrays.is_device_array(result)
                    how = implementation_of(_DEFAULT)
                    way = self.transports.pick(how, False, is_device)
                    way.broadcast(result, root, None)
        return nest.unflatten(spec, map(arrays.like, results, leaves))
