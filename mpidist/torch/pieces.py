"""The memory in which gradients are summed, and copies to it and from it.

The small gradients of one dtype are concatenated in one piece. A large gradient is a
piece of its own, and its sum is written directly to `.grad`. Ranks of one node have the
pieces in shared memory, so that each rank reads those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from mpidist.comm.arithmetic import add_in_order
from mpidist.comm.collectives.arguments import deadline_of
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.options import CommunicationOptions
from mpidist.torch import devices

__all__ = ["Pieces", "broadcast", "weigh", "write"]

# Up to this size (of all ranks together) each rank sums everything by itself: that
# saves the barrier after a sum that is divided among the ranks
_ALONE_BYTES = 1 << 20
# From this size on, writing the sum in place saves more time than its own call costs
_LARGE_BYTES = 64 << 10
_ALIGNMENT_BYTES = 16


class _Small(NamedTuple):
    """The small gradients of one dtype.

    Args:
      parameters: their parameters.
      numbers: the numbers of the parameters.
      flat: the memory of all of them.
      sends: views of `flat`, one per parameter.
      totals: views of the memory of the sums, one per parameter.
    """

    parameters: Sequence[Any]
    numbers: Sequence[int]
    flat: Any
    sends: Sequence[Any]
    totals: Sequence[Any]


class _Large(NamedTuple):
    """A large gradient.

    Args:
      piece: the number of its piece.
      send: its memory.
      total: the memory of its sum, if that cannot be written to `.grad`.
    """

    piece: int
    send: Any
    total: Any


class _Side:
    """One of the two sets of pieces, which steps use alternately.

    Args:
      sends: this rank's pieces.
      totals: the memory of the sums, by piece.
      everyone: for each piece, that of each rank of the node, by rank; None if they are
        not in shared memory.
      small: the pieces of small gradients.
      large: the large gradients, by the numbers of their parameters.
      buffer_sends: views of this rank's piece of the buffers.
      buffer_totals: views of the buffers' sum: one rank's, as the others send zeros.
    """

    def __init__(
        self,
        sends: Sequence[Any],
        totals: Sequence[Any],
        everyone: Sequence[Sequence[Any]] | None,
        small: Sequence[_Small],
        large: Mapping[int, _Large],
        buffer_sends: Sequence[Any],
        buffer_totals: Sequence[Any],
    ):
        self.sends, self.totals, self.everyone = sends, totals, everyone
        self.small, self.large = small, large
        self.buffer_sends, self.buffer_totals = buffer_sends, buffer_totals
        self.has_buffers = False  # whether `sends` has this rank's buffers, not zeros


class Pieces:
    """The memory of a model's gradients and buffers. Collective to create.

    Args:
      group: the ranks.
      parameters: the model's parameters.
      dtypes: the dtype in which each gradient is summed.
      buffers: the model's buffers; one rank's are sent to all.
      options: see `CommunicationOptions`.

    Raises, on all ranks:
      ArgumentError: a node has too little free shared memory.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        parameters: Sequence[Any],
        dtypes: Sequence[Any],
        buffers: Sequence[Any],
        options: CommunicationOptions,
    ):
        self._group, self._options = group, options
        self._parameters, self._buffers = parameters, buffers
        self._weight = 1 / group.num_replicas
        sizes = [p.numel() * d.itemsize for p, d in zip(parameters, dtypes)]
        large = [j for j, size in enumerate(sizes) if size >= _LARGE_BYTES]
        small: dict[Any, list[int]] = {}
        for j, dtype in enumerate(dtypes):
            if sizes[j] < _LARGE_BYTES:
                small.setdefault(dtype, []).append(j)
        like = [
            np.broadcast_to(_zero(d), sum(parameters[j].numel() for j in numbers))
            for d, numbers in small.items()
        ]
        like += [np.broadcast_to(_zero(dtypes[j]), parameters[j].shape) for j in large]
        starts, end = _offsets(buffers)
        like += [np.broadcast_to(np.int64(0), end // 8)] * bool(buffers)
        size_bytes = sum(a.size * a.itemsize for a in like)
        # Without the second barrier, other ranks may still read the last step's pieces
        # while this rank writes those of the next step: so there are two sets
        self._is_alone = (
            group.topology.is_one_node
            and size_bytes * group.num_replicas <= _ALONE_BYTES
        )
        totals = [np.empty(a.shape, a.dtype) for a in like]
        made = group.symmetric_like(
            "DistributedDataParallel", like * (1 + self._is_alone)
        )
        sends = [made[: len(like)], made[len(like) :]][: 1 + self._is_alone]
        layout = list(small.values()), large, starts
        self._sides = [self._make_side(memory, totals, *layout) for memory in sends]
        self._next = 0
        self._side = self._sides[0]
        self._sums = group.collectives.sums
        self._packs: Any = None

    def _make_side(
        self,
        sends: Sequence[Any],
        totals: Sequence[Any],
        small: Sequence[Sequence[int]],
        large: Sequence[int],
        starts: Sequence[int],
    ) -> _Side:
        tensors = [
            (torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(sends, totals)
        ]
        buffers = [
            [_typed(memory, start, b) for start, b in zip(starts, self._buffers)]
            for memory in tensors[-1]
        ]
        everyone: Any = None
        group = self._group
        if group.num_replicas > 1 and group.collectives.sums.place_of(
            sends, self._options
        ):
            find = group.symmetric_memory.everyone
            everyone = [find(a) if a.size else [a] for a in sends]
        return _Side(
            sends,
            totals,
            everyone,
            [self._divide(j, numbers, tensors[j]) for j, numbers in enumerate(small)],
            {j: _Large(p, *tensors[p]) for p, j in enumerate(large, len(small))},
            *buffers,
        )

    def _divide(self, piece: int, numbers: Sequence[int], pair: Any) -> _Small:
        shapes = [self._parameters[j].shape for j in numbers]
        sizes = [self._parameters[j].numel() for j in numbers]
        sends, totals = (
            [part.view(shape) for part, shape in zip(memory.split(sizes), shapes)]
            for memory in pair
        )
        return _Small(
            [self._parameters[j] for j in numbers], numbers, pair[0], sends, totals
        )

    def put(self, number: int, gradient: Any) -> None:
        """Copy a gradient that was just computed, if it is large."""
        large = self._side.large.get(number)
        if large is not None:
            _scale(large.send, gradient, self._weight)

    def fill(self, put: set[int] | None) -> None:
        """Copy all other gradients: small ones, and those that the pass omitted.

        Not collective; it may raise on one rank alone.

        Args:
          put: the parameters whose gradients the pass computed; None for all.
        """
        side = self._side
        for small in side.small:
            if put is None:
                torch._foreach_copy_(small.sends, [p.grad for p in small.parameters])
            else:
                for p, send in zip(small.parameters, small.sends):
                    _copy_or_zero(send, p.grad)
            small.flat.mul_(self._weight)
        if put is not None:
            for j, large in side.large.items():
                if j not in put:
                    _copy_or_zero(large.send, self._parameters[j].grad)
                    large.send.mul_(self._weight)
        self.fill_buffers(0)
        if side.everyone is None:
            self._packs = self._sums.reserve(side.sends, self._options)

    def fill_buffers(self, source: int) -> None:
        """Copy the buffers, if this is the rank that sends them."""
        if not self._buffers:
            return
        side = self._side
        if source == self._group.replica_id:
            torch._foreach_copy_(side.buffer_sends, self._buffers)
            side.has_buffers = True
        elif side.has_buffers:
            side.sends[-1][...] = 0
            side.has_buffers = False

    def weigh(self, weight: float) -> None:
        """Copy all gradients again, with another weight than 1 / ranks.

        Args:
          weight: this rank's weight; if 0, it contributes 0 even for NaN gradients.
        """
        for small in self._side.small:
            for p, send in zip(small.parameters, small.sends):
                weigh(send, p.grad, weight)
        for j, large in self._side.large.items():
            weigh(large.send, self._parameters[j].grad, weight)

    def add(self, used: int, is_published: bool) -> None:
        """Write the sums over all ranks to `.grad` and to the buffers. Collective.

        Args:
          used: a bit for each parameter with a gradient on any rank (the others keep
            their `.grad`); -1 if all ranks have all gradients.
          is_published: whether there was a barrier since the ranks wrote their pieces.
        """
        side = self._side
        receives = list(side.totals)
        in_place: set[int] = set()
        if side.everyone is None:
            packs, self._packs = self._packs, None
            found = self._sums.sum_packs(packs, self._options)
            for total, result in zip(side.totals, found, strict=True):
                total[...] = result
        else:
            for j, large in side.large.items():
                gradient = self._parameters[j].grad
                if used >> j & 1 and _is_plain(gradient, large.total):
                    receives[large.piece] = gradient.detach().numpy()
                    in_place.add(j)
            with np.errstate(invalid="ignore", over="ignore"):
                self._add_in_node(side.everyone, receives, is_published)
        self._give_back(used, in_place)
        if self._buffers and not side.has_buffers:
            torch._foreach_copy_(self._buffers, side.buffer_totals)
        # All ranks have agreed on this step, so all use the other set for the next one
        self._next = (self._next + 1) % len(self._sides)
        self._side = self._sides[self._next]

    def _add_in_node(
        self, everyone: Sequence[Any], receives: Sequence[Any], is_published: bool
    ) -> None:
        if is_published and self._is_alone:
            for parts, receive in zip(everyone, receives):
                add_in_order(parts, out=receive)
            return
        transports = self._group.collectives.transports
        transport = transports.intra_node
        assert transport is not None
        transports.count(transport.name, sum(a.nbytes for a in receives))
        transport.allreduce_symmetric(everyone, receives, deadline_of(self._options))

    def _give_back(self, used: int, in_place: set[int]) -> None:
        """Write the sums to `.grad`, except those that were written in place."""
        for small in self._side.small:
            if used == -1:
                gradients = [p.grad for p in small.parameters]
                torch._foreach_copy_(gradients, small.totals)
                continue
            for j, p, total in zip(small.numbers, small.parameters, small.totals):
                if used >> j & 1:
                    write(p, total)
        for j, large in self._side.large.items():
            if used >> j & 1 and j not in in_place:
                write(self._parameters[j], large.total)


def broadcast(
    group: ReplicaGroup, operation: str, tensors: Sequence[Any], root: int = 0
) -> None:
    """Broadcast tensors from one rank, in place. Collective.

    Args:
      group: the ranks.
      operation: the public function that needs this, for messages.
      tensors: the tensors, with the same shapes and dtypes on all ranks.
      root: the rank.
    """
    plain = [t.detach().contiguous().reshape(-1) for t in tensors]
    given = [t.view(torch.uint8) for t in plain]
    with devices.on_stream_of(tensors[0]):
        packed = devices.as_array(torch.cat(given))
        found = group.collectives.broadcast(operation, packed, root=root)
        received = devices.as_tensor(found)
    if group.replica_id == root:
        return
    parts = received.split([part.numel() for part in given])
    for tensor, part in zip(tensors, parts):
        # Cloned: the part may not be aligned for its dtype
        tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _zero(dtype: Any) -> Any:
    """Return 0 as a NumPy array of a torch dtype."""
    return torch.zeros((), dtype=dtype).numpy()


def _offsets(buffers: Sequence[Any]) -> tuple[list[int], int]:
    """Return the offsets of concatenated buffers in bytes, and their end."""
    starts, end = [], 0
    for buffer in buffers:
        starts.append(end)
        used = buffer.numel() * buffer.dtype.itemsize
        end += -(-used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return starts, end


def _typed(memory: Any, start: int, like: Any) -> Any:
    """Return a view of `memory` from byte `start` on, as a tensor like `like`."""
    size = like.numel() * like.dtype.itemsize
    taken = memory.view(torch.uint8)[start : start + size]
    return taken.view(like.dtype).view(like.shape)


def _scale(out: Any, gradient: Any, weight: float) -> None:
    if out.dtype is gradient.dtype:
        torch.mul(gradient.detach(), weight, out=out)
    else:
        out.copy_(gradient.detach()).mul_(weight)


def _copy_or_zero(out: Any, gradient: Any) -> None:
    if gradient is None:
        out.zero_()
    else:
        out.copy_(gradient)


def weigh(out: Any, gradient: Any, weight: float) -> None:
    """Write `gradient * weight` to `out`; 0 if the gradient is None or the weight 0."""
    if gradient is None or not weight:
        out.zero_()
    else:
        _scale(out, gradient, weight)


def _is_plain(gradient: Any, total: Any) -> bool:
    """Return whether NumPy can write the sum directly to a gradient's memory."""
    return (
        gradient is not None
        and gradient.dtype is total.dtype
        and gradient.is_contiguous()
        and not gradient.is_neg()
        and not gradient.is_conj()
    )


def write(parameter: Any, total: Any) -> None:
    """Write a sum to a parameter's `.grad`."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(total)
