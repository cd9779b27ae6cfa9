"""How JAX computations call collectives: threads, devices, errors; their batches.

A collective inside `jit` is an ordered callback into Python. JAX calls it in the thread
that dispatched the computation, or in one of XLA's threads while that thread waits for
the computation. XLA's thread then communicates in place of the waiting one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, xla_bridge
from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.public_calls import announcing
from mpidist.comm.consensus.signatures import skip_folder
from mpidist.comm.topology import job_size
from mpidist.context import (
    get_replica_context,
    get_strategy,
    has_strategy,
    in_replica_of,
    require_cross_replica,
)
from mpidist.data.dataset import Dataset
from mpidist.data.distributed.converted import ConvertedDataset, ConvertedIterator
from mpidist.device import arrays
from mpidist.errors import ArgumentTypeError, ContextError, UnsupportedError
from mpidist.strategy.replica_context import DefaultReplicaContext
from mpidist.util import nest
from mpidist.util.cpython import ThreadFrames
from mpidist.util.dtypes import require_range

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy


# What is private in JAX was tried on 0.6 and 0.10. Here JAX logs the errors of
# callbacks, which it raises as well
_CALLBACK_LOGGER = logging.getLogger("jax._src.callback")
trace_state_clean: Callable[[], bool] = core.trace_state_clean
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
_JAX_FOLDER = str(Path(jax.__file__).parent)
skip_folder(_JAX_FOLDER)


def _dispatch_synchronously() -> bool:
    """Make JAX dispatch synchronously; return False if it is too late for that."""
    was_synchronous = not jax.config.values["jax_cpu_enable_async_dispatch"]
    is_early = not xla_bridge.backends_are_initialized()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    return was_synchronous or is_early


_is_synchronous = _dispatch_synchronously()
_errors: list[Exception] = []  # of the last callback that failed


def find_strategy(strategy: Strategy | None, call: str) -> Strategy:
    """Return `strategy`, or the current one, in which `call` may communicate.

    Raises:
      ArgumentTypeError: it is not a strategy.
      ContextError: it is None and no strategy is current; another strategy is current;
        or it was finalized.
    """
    if strategy is None:
        context = get_replica_context()
        if isinstance(context, DefaultReplicaContext):
            try:
                context._require_current(call)  # one process among several
            except ContextError as error:
                instead = "Or pass strategy=strategy, or use `with strategy.scope():`"
                raise ContextError(f"{error}. {instead}") from None
        return get_strategy()
    if not hasattr(strategy, "extended"):
        raise ArgumentTypeError(
            f"{call}: strategy must be a Strategy or None, not {strategy!r:.80}"
        )
    if has_strategy() and not in_replica_of(strategy):
        require_cross_replica(strategy, call)
    strategy.extended.topology.require_open()
    return strategy


def announced(function: F) -> F:
    """Make a public function announce what escapes from it: see `public_calls`."""

    def work(of: Strategy | None, *args: Any, **kwargs: Any) -> Any:
        return function(*args, strategy=of, **kwargs)

    inner = announcing(functools.wraps(function)(work), _consensus_of)

    @functools.wraps(function)
    def call(*args: Any, strategy: Strategy | None = None, **kwargs: Any) -> Any:
        return inner(strategy, *args, **kwargs)

    return cast(F, call)


def _consensus_of(strategy: Strategy | None) -> Consensus:
    return (get_strategy() if strategy is None else strategy).extended.consensus


def require_dispatch(strategy: Strategy, call: str) -> None:
    """Raise unless compiled JAX computations can make collectives.

    Raises:
      UnsupportedError: JAX computes on a GPU, or has several devices in this process.
      ContextError: JAX dispatches asynchronously, or this is not the thread that
        created the strategy.
    """
    platform = jax.default_backend()
    if platform != "cpu":
        raise UnsupportedError(
            f"{call} was called inside jit (or grad, vmap) on JAX's backend "
            f"{platform!r}, but there it works on CPUs only; call it outside jit"
        )
    count = jax.local_device_count()
    if count > 1 or jax.process_count() > 1:
        raise UnsupportedError(
            f"{call} was called inside jit, where a replica needs one process with one "
            f"device, but JAX has {count} devices here and {jax.process_count()} "
            "processes; unset jax_num_cpu_devices and "
            "--xla_force_host_platform_device_count, and do not call "
            "jax.distributed.initialize"
        )
    if not _is_synchronous:
        raise ContextError(
            f"{call} was called inside jit, but JAX dispatches computations "
            "asynchronously; import mpidist.jax before JAX computes anything, or set "
            "the environment variable JAX_CPU_ENABLE_ASYNC_DISPATCH=0"
        )
    if not strategy.extended.consensus.lock.is_creator():
        raise ContextError(
            f"{call} was called inside jit in thread "
            f"{threading.current_thread().name!r}, but inside jit only the thread that "
            "created the strategy can communicate"
        )
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ContextError(
            f"{call} was called inside jit, which needs MPI_THREAD_SERIALIZED, but MPI "
            "was initialised with a lower thread level; remove the program's setting "
            "of mpi4py.rc.thread_level"
        )


def checked(strategy: Strategy, operation: str, fn: Callable[[], T]) -> T:
    """Return `fn()`. If it raises, all ranks do, in place of their next collective.

    That may be one in compiled code: while JAX traces, no agreement follows, so an open
    `Call` cannot reserve `fn`.
    """
    try:
        return fn()
    except BaseException as error:
        strategy.extended.consensus.call(operation).fail(error)


def call_host(strategy: Strategy, operation: str, work: Callable[[], Any]) -> Any:
    """Return `work()`, which communicates; called in a callback of JAX.

    Raises, on all ranks: what `work` raises on any. JAX replaces it; `jit` does not.
    """
    try:
        with _as_dispatcher(strategy, operation):
            return work()
    except Exception as error:
        _errors[:] = [error]
        raise


@contextlib.contextmanager
def _as_dispatcher(strategy: Strategy, operation: str) -> Iterator[None]:
    """Let an XLA thread communicate in place of the thread that waits for it.

    Raises:
      ContextError: no thread waits, so its calls would mix with those of other threads.
    """
    extended = strategy.extended
    extended.topology.require_open()
    consensus = extended.consensus
    lock = consensus.lock
    if lock.is_creator():
        # Plain `jax.jit` keeps the strategy with which it was traced
        if has_strategy() and not in_replica_of(strategy):
            checked(
                strategy, operation, lambda: require_cross_replica(strategy, operation)
            )
        yield
        return
    # An XLA thread calls while the creator waits inside JAX, which its frame shows
    with ThreadFrames() as frames:
        code = frames[lock.creator].f_code if lock.creator in frames else None
    is_waiting = code is not None and code.co_filename.startswith(_JAX_FOLDER)
    if not is_waiting:
        error = ContextError(
            f"{operation} inside jit was called while the thread that created the "
            "strategy was not waiting for it; dispatch such computations in that "
            "thread, with jax_cpu_enable_async_dispatch=False"
        )
        consensus.mark_broken(error)
        raise error
    with lock.stand_in():
        yield


def jit(fun: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Return `jax.jit(fun, **options)`, which raises the errors of mpidist.

    With plain `jax.jit`, a failed collective raises `jax.errors.JaxRuntimeError` with
    the same text, on all ranks.

    Args:
      fun: as in `jax.jit`; or None, to decorate a function.
      options: the options of `jax.jit`.

    Returns:
      A function with the methods of `jax.jit`'s, such as `lower`. It is compiled for
      each strategy that is current when it is called.

    Example:
      >>> @mpidist.jax.jit
      ... def average(x):
      ...     return mpidist.jax.all_reduce("MEAN", x, strategy=strategy)
      >>> average(jnp.ones(2))
      Array([1., 1.], dtype=float32)
    """
    if fun is None:
        return functools.partial(jit, **options)
    function = fun
    # Compiled code contains the strategy's collectives
    compiled: dict[Strategy, Any] = {}

    def current() -> Any:
        strategy = get_strategy()
        if strategy not in compiled:
            for old in [s for s in compiled if s.extended.topology.closed]:
                del compiled[old]
            # JAX caches by function, so each strategy needs one of its own
            alias = functools.wraps(function)(
                lambda *args, **kwargs: function(*args, **kwargs)
            )
            compiled[strategy] = jax.jit(alias, **options)
        return compiled[strategy]

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return call_with_own_errors(current(), *args, **kwargs)

    def method(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(current(), name)(*args, **kwargs)

    for name in ("eval_shape", "lower", "trace"):
        setattr(call, name, method(name))
    call.clear_cache = compiled.clear  # type: ignore[attr-defined]  # as jax.jit's
    return call


def call_with_own_errors(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Return `function(*args, **kwargs)`; raise mpidist's errors in place of JAX's."""
    _errors.clear()  # of calls whose errors nobody asked for
    try:
        return function(*args, **kwargs)
    except jax.errors.JaxRuntimeError:
        if not _errors:
            raise
    raise _errors.pop()


class _Known(logging.Filter):
    """Drops JAX's log records of errors that `call_host` raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return error is None or all(error is not known for known in _errors)


_CALLBACK_LOGGER.addFilter(_Known())


def as_jax(dataset: Any) -> JaxDataset:
    """Return a distributed dataset whose batches are this replica's rows in JAX arrays.

    Large batches are not copied: JAX uses their memory until the arrays are freed. (JAX
    copies arrays that do not begin at a cache line, and 64-bit numbers without
    jax_enable_x64.)

    Args:
      dataset: a distributed dataset, or another iterable of nests of arrays. In a job
        of several ranks no `Dataset`, of which each would read all rows.

    Example:
      >>> rows = mpidist.Dataset.range(8).batch(4)
      >>> data = mpidist.jax.as_jax(strategy.experimental_distribute_dataset(rows))
      >>> next(iter(data))
      Array([0, 1], dtype=int32)
    """
    if isinstance(dataset, Dataset) and job_size() > 1:
        raise ArgumentTypeError(
            "as_jax got a dataset that is not distributed: each replica would read all "
            "of it. Pass what strategy.experimental_distribute_dataset returns, or "
            "iter(dataset) if that is meant"
        )
    if not hasattr(dataset, "__iter__"):
        raise ArgumentTypeError(
            f"as_jax needs a distributed dataset, not {type(dataset).__name__}"
        )
    return JaxDataset(dataset)


class JaxIterator(ConvertedIterator):
    """Gives batches as JAX arrays; a `Checkpoint` saves it like an iterator.

    Example:
      >>> rows = mpidist.Dataset.range(8).batch(4)
      >>> data = mpidist.jax.as_jax(strategy.experimental_distribute_dataset(rows))
      >>> batches = iter(data)
      >>> next(batches)
      Array([0, 1], dtype=int32)
      >>> checkpoint = mpidist.Checkpoint(strategy=strategy, batches=batches)
    """

    def __init__(self, iterator: Any):
        super().__init__(iterator, functools.partial(nest.map_leaves, _to_jax))


class JaxDataset(ConvertedDataset):
    """The result of `as_jax`. Iterating over it is collective.

    Example:
      >>> rows = mpidist.Dataset.range(8).batch(4)
      >>> data = mpidist.jax.as_jax(strategy.experimental_distribute_dataset(rows))
      >>> len(data)
      2
    """

    _iterator_type = JaxIterator


def _to_jax(leaf: Any) -> Any:
    """Return an array of numbers as a JAX array, and other leaves unchanged.

    Raises:
      DTypeError: 64-bit integers that do not fit JAX's 32 bits.
    """
    arrays.require_plain(leaf, "a batch for JAX")
    array = leaf if arrays.is_device_array(leaf) else np.asarray(leaf)
    if not arrays.fits_device(array):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype != array.dtype:
        require_range(array, dtype, "a batch for JAX")
        array = array.astype(dtype)
    # Read-only memory may belong to a file, or to code that can still change it
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        return jnp.array(array, copy=True)
    return arrays.like(array, jnp.zeros(()))
