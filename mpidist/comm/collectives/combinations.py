"""MIN, MAX and PRODUCT over all ranks: gathered block by block, and combined here.

MPI and NCCL do not define the result for nan and for integer overflow. So each rank
gets the numbers of all ranks and combines them in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpidist.comm import arithmetic, packing
from mpidist.comm.collectives.arguments import deadline_of, implementation_of
from mpidist.comm.collectives.plans import State
from mpidist.comm.transports.base import Transport
from mpidist.device import arrays
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.util.dtypes import is_integer

# Of all ranks, gathered at a time
_BLOCK_BYTES = 32 << 20


class _Pack(NamedTuple):
    """Arrays of one dtype that are combined together, and memory for it.

    Args:
      members: their positions among the arrays that were passed.
      send: these arrays, concatenated.
      received: for a block of all ranks.
      total: for the result, of `send`'s size.
      results: for each array, in its own dtype; None if it is a part of `total`.
    """

    members: Sequence[int]
    send: Any
    received: Any
    total: Any
    results: Sequence[Any]


def reserve_combination(
    state: State, op: ReduceOp, values: Sequence[Any], options: CommunicationOptions
) -> list[_Pack]:
    """Allocate memory. Not collective.

    Args:
      state: of the strategy.
      op: the operation.
      values: arrays, equal in number, shapes and dtypes on all ranks.
      options: see `CommunicationOptions`.
    """
    # `to_add` widens float16 and bfloat16, in which MIN and MAX are exact, and
    # PRODUCT not.
    _, wide = arithmetic.to_add(op, values)
    sizes, kinds = [a.nbytes for a in wide], list(map(packing.kind_of, wide))
    packs = []
    for members in packing.groups(kinds, sizes, options.bytes_per_pack):
        send = packing.pack([wide[j] for j in members]).reshape(-1)
        # Room for one block of every rank, however long the arrays are.
        step = min(send.size, _step(state, send)) * state.consensus.size
        received = state.results.empty(step, send)
        total = state.results.empty(send.size, send)
        narrow = [
            None if a.dtype == send.dtype else state.results.empty(a.size, a)
            for a in (values[j] for j in members)
        ]
        packs.append(_Pack(members, send, received, total, narrow))
    return packs


def _step(state: State, send: Any) -> int:
    row_bytes: int = send.dtype.itemsize * state.consensus.size
    return max(1, _BLOCK_BYTES // row_bytes)


def combine(
    state: State,
    op: ReduceOp,
    packs: Sequence[_Pack],
    values: Sequence[Any],
    options: CommunicationOptions,
) -> list[Any]:
    """Return reductions of the arrays that `reserve` was called for. Collective.

    Raises, on all ranks: ArgumentError for a product of integers that does not fit
      their dtype.
    """
    deadline = deadline_of(options)
    results: list[Any] = [None] * len(values)
    for pack in packs:
        _combine_pack(state, op, pack, options, deadline)
        shapes = [values[j].shape for j in pack.members]
        parts = packing.unpack(pack.total, shapes)
        for j, part, narrow in zip(pack.members, parts, pack.results, strict=True):
            results[j] = part
            if narrow is not None:
                results[j] = narrow.reshape(part.shape)
                results[j][...] = part
    return results


def _combine_pack(
    state: State,
    op: ReduceOp,
    pack: _Pack,
    options: CommunicationOptions,
    deadline: float | None,
) -> None:
    send, ranks, step = pack.send, state.consensus.size, _step(state, pack.send)
    transport: Transport | None = None
    if ranks > 1:
        is_device = arrays.is_device_array(send)
        transport = state.transports.pick(implementation_of(options), False, is_device)
    for start in range(0, send.size, step):
        mine = send[start : start + step]
        parts = [mine]
        if transport is not None:
            received = pack.received[: mine.size * ranks]
            transport.allgatherv(mine, received, [mine.size] * ranks, deadline)
            parts = list(received.reshape(ranks, -1))
        total = pack.total[start : start + step]
        if len(parts) == 1:
            total[...] = mine
        arithmetic.combine_in_order(op, parts, out=total)
        if op is ReduceOp.PRODUCT and is_integer(total.dtype):
            _check_product(state, total, parts, start)


def _check_product(state: State, total: Any, parts: Sequence[Any], start: int) -> None:
    """Raise, on all ranks, if integers have overflowed."""
    # All ranks have the same parts, so all raise, or none does.
    with state.consensus.same_on_all():
        for block, *others in arithmetic.in_blocks([total, *parts]):
            name = f"value (numbers {start} to {start + block.size - 1})"
            arithmetic.check_product((block, others), name)
            start += block.size
