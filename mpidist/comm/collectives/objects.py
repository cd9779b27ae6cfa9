"""Collectives on objects whose structure other replicas do not know."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.comm import arithmetic
from mpidist.comm.collectives.arguments import implementation_of
from mpidist.comm.collectives.gather import execute_gather, plan_gather
from mpidist.comm.collectives.plans import CollectiveContext
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.options import CommunicationOptions
from mpidist.util import validation
from mpidist.util.dtypes import dtype_of, text_of
from mpidist.util.serialization import decode, encode

_DEFAULT = CommunicationOptions()
_TAKEN = (
    "an object is None, a bool, number, text, bytes, or an array, or a dict, list or "
    "tuple of these: convert others, as by dataclasses.asdict, str(path) or isoformat()"
)


def broadcast_object(
    state: CollectiveContext, operation: str, value: Any, root: int
) -> Any:
    """See `Strategy.broadcast`. Collective."""
    ranks, rank = state.consensus.size, state.consensus.rank

    def prepare() -> tuple[int, str, list[Any]]:
        number = validation.integer("root", root)
        if not 0 <= number < ranks:
            raise ArgumentError(f"root must be a replica, 0..{ranks - 1}, not {number}")
        if number == rank:
            return number, *_encode(state, value)
        return number, "", []

    def reserve() -> list[Any]:
        made: list[Any] = []
        decode(text, lambda kind: made.append(_empty(state, kind)))
        return made

    with state.consensus.call(operation) as call:
        number, text, inputs = call.reserve(prepare)
        state.consensus.require_same(CallSignature(operation, (("root", number),)))
        if ranks > 1:
            text = _broadcast_text(state, text, number)
        # If one rank lacks memory, all ranks raise here
        memory = call.step("sending")
        received = memory.reserve(reserve)
        memory.agree()
        for i, array in enumerate(received):
            if number == rank:
                array[...] = inputs[i]
            if ranks > 1 and array.size:
                is_device = arrays.is_device_array(array)
                how = implementation_of(_DEFAULT)
                transport = state.transports.pick(how, False, is_device)
                transport.broadcast(array, number, None)
    leaves = iter(received)
    return decode(text, lambda kind: _as_given(next(leaves), kind))


def gather_objects(state: CollectiveContext, operation: str, value: Any) -> list[Any]:
    """See `Strategy.gather_objects`. Collective."""

    def prepare() -> list[Any]:
        text, inputs = _encode(state, value)
        header = text.encode()
        parts = [arrays.to_host(a).tobytes() for a in inputs]
        payload = np.frombuffer(b"".join([header, *parts]), np.uint8)
        # The sizes are gathered as a second array, since payloads differ in length.
        return [payload, np.array([len(header), payload.size])]

    def read() -> list[Any]:
        objects, start = [], 0
        for header, size in sizes.reshape(-1, 2).tolist():
            payload = payloads[start : start + size]
            objects.append(_decode_with_arrays(payload, header))
            start += size
        return objects

    with state.consensus.call(operation) as call:
        own = call.reserve(prepare)
        plan = plan_gather(state, call, own, [0, 0], _DEFAULT)
        payloads, sizes = execute_gather(state, plan, own)
        return call.finish(read)


def _encode(state: CollectiveContext, value: Any) -> tuple[str, list[Any]]:
    inputs: list[Any] = []

    def take(leaf: Any, name: str) -> Any:
        arrays.require_plain(leaf, name)
        if isinstance(leaf, np.recarray):
            raise ArgumentTypeError(
                f"{name} is a recarray, which would come back as a plain array; pass "
                "numpy.asarray of it"
            )
        try:
            array = arrays.to_array(leaf, name)
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{error}; {_TAKEN}") from None
        if arrays.is_device_array(array):
            state.transports.require_reachable(array, name)
        inputs.append(arithmetic.contiguous(array, array.dtype))
        kind = "scalar" if isinstance(leaf, np.generic) else "array"
        kind = "GPU" if arrays.is_device_array(array) else kind
        return [kind, text_of(array.dtype), array.shape]

    return encode(value, take), inputs


def _broadcast_text(state: CollectiveContext, text: str, root: int) -> str:
    """Return the text of rank `root`. Collective."""
    # MPI itself: the text is in host memory, whatever device the strategy uses.
    transport = state.transports.with_alltoallv(is_device=False)
    assert transport is not None
    data = np.frombuffer(text.encode(), np.uint8).copy()
    size = np.array([data.size])
    transport.broadcast(size, root, None)
    if root != state.consensus.rank:
        data = np.empty(int(size[0]), np.uint8)
    state.transports.count(transport.name, data.nbytes)
    transport.broadcast(data, root, None)
    return bytes(data).decode()


def _empty(state: CollectiveContext, kind: Any) -> Any:
    where, text, shape = kind
    made = np.empty(shape, dtype_of(text))
    return state.transports.to_device(made) if where == "GPU" else made


def _decode_with_arrays(payload: Any, header: int) -> Any:
    place = header

    def give(kind: Any) -> Any:
        nonlocal place
        _, text, shape = kind
        # Copied: a slice of bytes need not be aligned for its dtype.
        array = np.ndarray(shape, dtype_of(text), payload, place).copy()
        place += array.nbytes
        return _as_given(array, kind)

    return decode(payload[:header].tobytes(), give)


def _as_given(array: Any, kind: Any) -> Any:
    return array[()] if kind[0] == "scalar" else array
