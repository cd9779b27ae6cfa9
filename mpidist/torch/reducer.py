"""Average the gradients of a model over all ranks, in place in `.grad`.

Hooks on the parameters record which gradients a backward pass computes. At its end they
are summed in one collective, in shared memory on one node. Between nodes and on GPUs, a
thread sends them during the pass (see `overlap`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mpidist.comm.consensus.signatures import CallSignature, digest, name_ranks
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.errors import ArgumentError, ContextError, DTypeError
from mpidist.options import CommunicationOptions
from mpidist.torch import devices
from mpidist.torch.overlap import Overlap
from mpidist.torch.parameters import CALL, Parameters
from mpidist.torch.passes import (
    Backward,
    Forward,
    Joining,
    Share,
    add_rows,
    current_task,
    require_eager_backward,
    watch,
)
from mpidist.torch.pieces import Pieces, broadcast
from mpidist.util.counters import BACKWARD
from mpidist.util.hashing import hash62

__all__ = ["Reducer"]

_OPERATION = f"the gradients of {CALL}"
_MOST_ADDRESSES = 1000
# Sending fewer bytes takes no longer than starting the thread
_OVERLAP_BYTES = 1 << 20
# The dtype in which gradients of each dtype are summed
_SUMS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}


class Reducer:
    """Averages gradients over the ranks of a strategy. Collective to create.

    Args:
      group: the ranks.
      model: its parameters; the same on all ranks.
      buffers: the model's buffers, by name; rank 0's are sent with the gradients.
      finds_unused: whether a backward pass may omit parameters.
      options: see `CommunicationOptions`.
      bucket_bytes: see `Overlap`.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        model: Parameters,
        buffers: Mapping[str, Any],
        finds_unused: bool,
        options: CommunicationOptions,
        bucket_bytes: int | None = None,
    ):
        self._group, self._options = group, options
        self._consensus = group.consensus
        self._model = model
        self._names = list(model.trained)
        self._parameters = list(model.trained.values())
        self._finds_unused = finds_unused
        self._dtypes = [p.dtype for p in self._parameters]
        self._all = len(self._parameters)
        self._sums = self._consensus.guard(CALL, self._sum_dtypes)
        state = self._parameters, self._sums
        self._buffers = list(buffers.values())
        # Between nodes and on GPUs, a thread sends gradients during the backward pass
        self._overlap: Overlap | None = None
        self._pieces: Pieces | None = None
        self._trainer = threading.get_ident()
        size_bytes = sum(p.numel() * d.itemsize for p, d in zip(*state))
        is_far = not group.topology.is_one_node and size_bytes >= _OVERLAP_BYTES
        is_far = is_far or devices.is_on_gpu(self._parameters[0])
        if group.num_replicas > 1 and is_far:
            self._overlap = Overlap(group, *state, options, bucket_bytes)
        elif group.num_replicas > 1:
            self._pieces = Pieces(group, *state, self._buffers, options)
        self._calls: dict[Any, tuple[CallSignature, int]] = {}
        self.is_syncing = True
        self.joining: Joining | None = None
        self.steps = 0  # steps in which this rank had a batch
        self._addresses: dict[Share, int] = {}
        # Whether a forward pass may have changed buffers since they were synchronised
        self.has_stale_buffers = False
        # Rows of this step: set by the user, or of passes that were not reduced
        self._rows: int | None = None
        self._generation = 0  # the number of calls of set_rows
        # Forward passes that a backward pass may still reach
        self._forwards: weakref.WeakSet[Forward] = weakref.WeakSet()
        self._begun = -1, 0.0  # rows and weight with which `Overlap` started
        self._error: Exception | None = None
        self._ready: list[int] = []
        self._pass: Any = None  # a weak reference to the current backward pass
        # Passes that exceptions ended, and the number of the last collective then
        self._dropped = 0
        self._dropped_at = 0
        self._handles = [
            p.register_post_accumulate_grad_hook(_hook(weakref.ref(self), j))
            for j, p in enumerate(self._parameters)
        ]

    def _sum_dtypes(self) -> list[Any]:
        for name, dtype in zip(self._names, self._dtypes):
            if dtype not in _SUMS:
                raise DTypeError(f"parameter {name} has dtype {dtype}, not a real one")
        return [_SUMS[dtype] for dtype in self._dtypes]

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def note_forward(self, output: Any, rows: int, is_syncing: bool) -> None:
        """Record a forward pass: its rows count if a backward pass reaches `output`.

        If `output` contains no tensors with a graph, they count at once.
        """
        self.is_syncing = is_syncing
        self._trainer = threading.get_ident()
        forward = Forward(rows, is_syncing, self._generation)
        if not watch(output, functools.partial(self._reach, forward)):
            self._rows = add_rows(self._rows, rows)
        elif self._overlap is not None:
            self._forwards.add(forward)

    def set_rows(self, rows: int) -> None:
        """Set the number of rows of this step's forward passes until now."""
        self._rows = rows
        self._generation += 1

    def _reach(self, forward: Forward) -> None:
        """Record that a backward pass reached the output of a forward pass."""
        task = current_task()
        if forward.task == task:
            return
        forward.task = task
        current = None if self._pass is None else self._pass()
        if current is None:
            current = self._begin_pass(task, forward.is_syncing)
        elif current.task != task:
            self._error = ContextError(f"{CALL}: a backward pass inside another one")
            return
        current.has_outputs = True
        current.is_syncing |= forward.is_syncing
        if forward.generation == self._generation:
            current.rows = add_rows(current.rows, forward.rows)

    def _on_grad(self, number: int, parameter: Any) -> None:
        """Record that a gradient was computed. A hook: PyTorch calls it."""
        last = self._pass
        current = None if last is None else last()
        if current is None:
            current = self._begin_pass(current_task(), self.is_syncing)
        current.has_gradients = True
        if not current.is_syncing:
            return
        overlap = self._overlap
        if current.task != current_task() and not current.has_outputs:
            self._error = ContextError(
                f"{CALL}: a backward pass began inside another one, as in "
                "torch.utils.checkpoint with use_reentrant=True; use "
                "use_reentrant=False"
            )
        if overlap is not None and not overlap.has_begun:
            self._begin_early(overlap, current)
        gradient = parameter.grad
        if gradient.dtype is not self._dtypes[number] or gradient.is_sparse:
            self._refuse_gradient(number, gradient)
            return
        self._ready.append(number)
        if self._pieces is not None:
            self._pieces.put(number, gradient)
        elif overlap is not None:
            overlap.put(number, gradient)

    def _begin_pass(self, task: int, is_syncing: bool) -> Backward:
        require_eager_backward()
        started = Backward(task, is_syncing, self._end_pass, self._drop_pass)
        self._pass = weakref.ref(started)
        torch.autograd.Variable._execution_engine.queue_callback(started)
        return started

    def _begin_early(self, overlap: Overlap, current: Backward) -> None:
        """Start sending as if all outputs were reached, which is checked later."""
        rows = add_rows(self._rows, current.rows)
        for forward in self._forwards:
            if forward.task == -1 and forward.generation == self._generation:
                rows = add_rows(rows, forward.rows)
        share = Share(-1 if rows is None else rows, -1)
        try:
            with self._as_trainer():
                self._begin_overlap(overlap, share)
        except Exception:  # raised on all ranks
            current.is_finished = True
            self._reset()
            raise

    def _refuse_gradient(self, number: int, gradient: Any) -> None:
        name, dtype = self._names[number], self._dtypes[number]
        if gradient.is_sparse:
            text = "is sparse; make the layer with sparse=False"
        else:
            text = f"is {gradient.dtype}, but was {dtype} when {CALL} was created"
        self._error = DTypeError(f"the gradient of parameter {name} {text}")

    def _drop_pass(self) -> None:
        """Record that an exception ended a backward pass."""
        calls = self._consensus.calls
        self._dropped = 1 + self._dropped * (self._dropped_at == calls)
        self._dropped_at = calls
        if self._overlap is not None:
            self._overlap.abandon(
                ContextError(f"{CALL}: an exception ended a backward pass")
            )
        self._reset()

    def _reset(self) -> None:
        self._ready.clear()
        self._error = None
        self._pass = None
        self._rows = None

    def _end_pass(self, current: Backward) -> None:
        """Average the gradients of a pass. Collective, unless in `no_sync`."""
        self._error = self._error or self._model.find_change()
        if not current.has_gradients and self._error is None:  # torch.autograd.grad
            self._pass = None
            return
        rows = add_rows(self._rows, current.rows)
        if not current.is_syncing:
            self._pass, self._rows = None, rows
            return
        try:
            with torch.no_grad(), self._as_trainer():
                self.reduce(self._find_share(-1 if rows is None else rows))
            self._consensus.recorder.counters.mark(BACKWARD)
        finally:
            self._reset()

    def _as_trainer(self) -> contextlib.AbstractContextManager[Any]:
        parameter = self._parameters[0]
        return devices.as_trainer(self._group, parameter, self._trainer, CALL)

    def _find_share(self, rows: int) -> Share:
        """Return this rank's share; an error is kept for `reduce`."""
        ready = set(self._ready)
        if len(ready) < len(self._ready) and self._error is None:
            self._error = ContextError(
                f"{CALL}: a parameter got two gradients in one backward pass, as by "
                "two torch.utils.checkpoint with use_reentrant=True; use "
                "use_reentrant=False"
            )
        if len(ready) == self._all:
            return Share(rows, -1)
        missing = [
            name
            for j, (name, p) in enumerate(zip(self._names, self._parameters))
            if j not in ready and p.requires_grad
        ]
        if missing and not self._finds_unused and self._error is None:
            self._error = ArgumentError(
                f"the backward pass computed no gradients of parameters: {missing[:5]}"
                f"{' ...' if len(missing) > 5 else ''}; use all in the loss, or pass "
                f"find_unused_parameters=True to {CALL}"
            )
        frozen_now = [j for j, p in enumerate(self._parameters) if not p.requires_grad]
        used, frozen = (sum(1 << j for j in found) for found in (ready, frozen_now))
        return Share(rows, used, frozen)

    def _call(self, phase: str = "") -> tuple[CallSignature, int]:
        """Return the signature that the ranks compare, and its digest.

        It has the number of passes that exceptions ended on this rank: a rank that went
        on must not average its gradients with those of another step.
        """
        if self._dropped and self._dropped_at != self._consensus.calls:
            self._dropped = 0  # an error was raised on the other ranks since
        found = self._calls.get((phase, self._dropped))
        if found is None:
            count = self._dropped
            after = f", after {count} backward passes that exceptions ended"
            operation = phase + _OPERATION + after * (count > 0)
            call = CallSignature(operation, (("parameters", self._all),))
            found = self._calls[phase, self._dropped] = call, digest(call)
        self._dropped = 0
        return found

    def reduce(self, share: Share) -> bool:
        """Average gradients over all ranks, into `.grad`. Collective.

        Args:
          share: this rank's share; its gradients are in `.grad`.

        Returns:
          Whether no rank has batches any more, so that nothing was reduced.

        Raises, on all ranks:
          The error of any rank's backward pass.
          DivergenceError: another rank called another collective, or lost a pass.
        """
        if self._overlap is not None:
            return self._reduce_overlapped(self._overlap, share)
        consensus, pieces = self._consensus, self._pieces
        call, number = self._call()
        error, self._error = self._error, None
        timeout = self._options.timeout_seconds
        if pieces is None:  # a single rank
            consensus.require_same(call, error)
            self.has_stale_buffers = False
            self.steps += not share.has_ended
            return share.has_ended
        put = None if share.used == -1 else set(self._ready)
        if error is None:
            try:
                pieces.fill(put)
            except Exception as caught:
                error = caught
        with consensus.lock:
            if error is not None:
                consensus.require_same(call, error, timeout)
            used = share.used
            is_same = consensus.compare(call, number, self._address(share), timeout)
            if is_same and share.has_ended:
                return True
            if not is_same:
                shares = consensus.gather(_OPERATION, share)
                used = self._used(shares)
                weight, source = self._weigh(shares)
                pieces.fill_buffers(source)
                if weight is not None:
                    pieces.weigh(weight)
            pieces.add(used, is_same)
            self.has_stale_buffers = False
            self.steps += not share.has_ended
        return False

    def _address(self, share: Share) -> int:
        """Return a number that identifies a share; see `Consensus.compare`."""
        found = self._addresses.get(share)
        if found is None:
            if len(self._addresses) >= _MOST_ADDRESSES:
                self._addresses.clear()
            found = self._addresses[share] = hash62(repr(tuple(share))) or 1
        return found

    def follow(self) -> None:
        """Take part without gradients until no rank has batches any more. Collective.

        Then all ranks get the parameters and buffers of a rank with the most steps.
        """
        while not self.reduce(Share(0, 0, has_ended=True)):
            self._reset()
        steps = self._consensus.gather(f"{CALL}.join", self.steps)
        tensors = [*self._parameters, *self._buffers]
        broadcast(self._group, f"{CALL}.join", tensors, steps.index(max(steps)))

    def broadcast_buffers(self, source: int = 0) -> None:
        """Broadcast the buffers of rank `source`. Collective."""
        call = f"the buffers of {CALL}"
        broadcast(self._group, call, self._buffers, source)
        self.has_stale_buffers = False

    def _begin_overlap(self, overlap: Overlap, share: Share) -> bool:
        """Start sending; return whether no rank has batches any more. Collective."""
        call, number = self._call("the begin of ")
        timeout, consensus = self._options.timeout_seconds, self._consensus
        weight, self._source = 1 / consensus.size, 0
        with consensus.lock:
            if not consensus.compare(call, number, self._address(share), timeout):
                found, self._source = self._weigh(consensus.gather(_OPERATION, share))
                weight = weight if found is None else found
            elif share.has_ended:
                return True
            overlap.begin(weight)
        self._begun = share.rows, weight
        return False

    def _reduce_overlapped(self, overlap: Overlap, share: Share) -> bool:
        """Do what `reduce` does, if a thread sends gradients during the pass."""
        if not overlap.has_begun and self._begin_overlap(overlap, share):
            return True
        error, self._error = self._error, None
        try:
            overlap.put_rest()
        except Exception as caught:
            error = error or caught
        call, number = self._call()
        timeout, consensus = self._options.timeout_seconds, self._consensus
        used = share.used
        address = self._address(share._replace(rows=share.rows - self._begun[0]))
        with consensus.lock:
            try:
                if error is not None:
                    consensus.require_same(call, error, timeout)
                if not consensus.compare(call, number, address, timeout):
                    shares = consensus.gather(_OPERATION, share)
                    used = self._used(shares)
                    self._require_weight(shares)
            except Exception as raised:
                overlap.finish(raised)
                raise
            consensus.sync_errors(_OPERATION, overlap.give_back(used))
            if self._buffers:
                self.broadcast_buffers(self._source)
            self.steps += not share.has_ended
        return False

    def _require_weight(self, shares: Sequence[Share]) -> None:
        """Raise, on all ranks, if gradients had wrong weights. Collective."""
        weight, _ = self._weigh(shares)
        rows, begun = self._begun
        error: Exception | None = None
        if begun != (1 / self._consensus.size if weight is None else weight):
            own = shares[self._consensus.rank].rows
            error = ContextError(
                f"{CALL}: the loss depends on {own} rows, but outputs of {rows} "
                "rows have a graph; compute the others under torch.no_grad(), or "
                "delete them before backward()"
            )
        self._consensus.sync_errors(_OPERATION, error)

    def _used(self, shares: Sequence[Share]) -> int:
        """Return a bit for each parameter with a gradient on any rank; -1 for all."""
        frozen = {r: s.frozen for r, s in enumerate(shares) if not s.has_ended}
        with self._consensus.same_on_all():
            self._model.require_same_frozen(frozen)
        used = functools.reduce(int.__or__, (share.used for share in shares))
        if used == -1 and any(share.used != -1 for share in shares):
            return (1 << self._all) - 1  # not -1: on some ranks `.grad` may be None
        return used

    def _weigh(self, shares: Sequence[Share]) -> tuple[float | None, int]:
        """Return this rank's weight (None if all are equal) and the buffers' rank."""
        rows = [share.rows for share in shares]
        ended = [j for j, share in enumerate(shares) if share.has_ended]
        if ended:
            return self._leave_out(ended, rows)
        if len(set(rows)) == 1:
            return None, 0
        with self._consensus.same_on_all():
            if min(rows) < 0:
                raise ArgumentError(
                    "forward got no tensor whose rows can be counted on "
                    f"{name_ranks([j for j, n in enumerate(rows) if n < 0])}; call "
                    "set_rows, or pass batch_dim=None"
                )
        return rows[self._consensus.rank] / sum(rows), 0

    def _leave_out(
        self, ended: Sequence[int], rows: Sequence[int]
    ) -> tuple[float, int]:
        """Do what `_weigh` does if some ranks have no batches any more."""
        joining, ranks = self.joining, len(rows)
        with self._consensus.same_on_all():
            if joining is None or joining.raises:
                raise ContextError(
                    f"{name_ranks(ended)} ran out of batches, and other ranks have more"
                )
        others = [j for j in range(ranks) if j not in ended]
        total: float = sum(rows[j] for j in others)
        own: float = rows[self._consensus.rank]
        if min(rows) < 0:  # ranks have the same weight
            total = ranks if joining.counts_all else len(others)
            own = self._consensus.rank in others
        return own / total if total else 0.0, others[0]


def _hook(reference: Any, number: int) -> Any:
    """Return the hook of a parameter, which does not keep the reducer alive."""

    def on_grad(parameter: Any) -> None:
        reducer = reference()
        if reducer is not None:
            reducer._on_grad(number, parameter)

    return on_grad
