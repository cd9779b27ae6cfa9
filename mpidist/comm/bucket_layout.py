"""Arrays that are reduced in buckets during the computation that produces them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mpidist.errors import ArgumentTypeError, CollectiveError
from mpidist.util import nest

__all__ = ["BucketStep", "bucket_bytes_of", "divide", "leaves_by_key"]

Reduce = Callable[[int, Sequence[Any], Sequence[Any], Exception | None], Sequence[Any]]


# Enough buckets that the network starts early and has little work left at the end. The
# number does not depend on times, since the last bits of results may depend on the
# buckets
_BUCKETS = 16
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 8 << 20


def bucket_bytes_of(sizes: Sequence[int]) -> int:
    """Return the size of a bucket, given the sizes of all arrays in bytes."""
    return min(max(sum(sizes) // _BUCKETS, _LEAST_BYTES), _MOST_BYTES)


def divide(
    sizes: Sequence[int], order: Sequence[int], bucket_bytes: int
) -> list[list[int]]:
    """Return the arrays of each bucket, by their numbers.

    The first and the last bucket have a quarter of the size of others, so that
    reductions begin early and little is left after the last array.

    Args:
      sizes: of all arrays, in bytes.
      order: all numbers, in the order of reduction.
      bucket_bytes: the size of a bucket; larger arrays get their own bucket.
    """
    if not order:
        return []
    small_bytes = bucket_bytes // 4
    last = _count_fitting([sizes[j] for j in reversed(order)], small_bytes)
    edge = len(order) - last
    buckets: list[list[int]] = []
    room = -1
    for j in order[:edge]:
        if sizes[j] > room:
            room = bucket_bytes if buckets else small_bytes
            buckets.append([])
        buckets[-1].append(j)
        room -= sizes[j]
    return [*buckets, list(order[edge:])]


def _count_fitting(sizes: Sequence[int], limit: int) -> int:
    """Return how many of the first sizes fit a limit in total; at least 1."""
    fitting = [total for total in itertools.accumulate(sizes) if total <= limit]
    return max(len(fitting), min(len(sizes), 1))


def leaves_by_key(
    spec: nest.Spec, count: int
) -> dict[Any, tuple[list[int], nest.Spec]]:
    """Return the numbers of the leaves below each key of a nest, and their structure.

    Raises:
      ArgumentTypeError: the nest is not a mapping, list or tuple.
    """
    numbers = nest.unflatten(spec, range(count))
    if isinstance(numbers, Mapping):
        return {key: nest.flatten(part) for key, part in numbers.items()}
    if isinstance(numbers, list | tuple):
        return {j: nest.flatten(part) for j, part in enumerate(numbers)}
    what = "one array" if isinstance(numbers, int) else type(numbers).__name__
    raise ArgumentTypeError(
        f"gradient_buckets needs a mapping, a list or a tuple of gradients, not {what}"
    )


class BucketStep:
    """One step: the gradients so far, and the thread that reduces them.

    Args:
      buckets: the leaves of each, in the order in which they are reduced.
      reduce: given the number of a bucket, its arrays and when they are made, returns
        their reductions; given an error, raises it on all ranks. Collective.
      is_threaded: whether there is a thread; else `finish` does its work.
    """

    def __init__(
        self, buckets: Sequence[Sequence[int]], reduce: Reduce, is_threaded: bool
    ):
        self._buckets = buckets
        self._reduce = reduce
        self._given: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._is_ready = [threading.Event() for _ in buckets]
        self._is_over = [threading.Event() for _ in buckets]
        self._reduced = 0  # number of buckets
        self._bucket_of = {
            leaf: j for j, leaves in enumerate(buckets) for leaf in leaves
        }
        self._lacking = [len(leaves) for leaves in buckets]
        self.order: list[int] = []  # in which the leaves were put
        self.error: Exception | None = None
        self._failure: Exception | None = None
        self._is_cancelled = False
        self._thread: threading.Thread | None = None
        if is_threaded:
            self._thread = threading.Thread(
                target=self._work, name="mpidist-reduce", daemon=True
            )
            self._thread.start()

    def has(self, leaf: int) -> bool:
        """Return whether a leaf was put."""
        return leaf in self._given

    def missing(self) -> set[int]:
        """Return the leaves that were not put."""
        return set(self._bucket_of) - set(self._given)

    def put(self, leaf: int, array: Any, made: Any = None) -> None:
        """Take a leaf; its bucket may be ready with it.

        Args:
          leaf: its number.
          array: its values.
          made: the event that the GPU has computed them.
        """
        self._given[leaf] = array
        if made is not None:
            self._made[leaf] = made
        self.order.append(leaf)
        bucket = self._bucket_of[leaf]
        self._lacking[bucket] -= 1
        if not self._lacking[bucket]:
            self._is_ready[bucket].set()

    def cancel(self, error: BaseException) -> None:
        """Let the thread end if no rank has put a leaf."""
        self._is_cancelled = True
        self.fail(error)

    def finish(self, error: BaseException | None = None) -> None:
        """Wait until all buckets are reduced, or raise `error`.

        Args:
          error: raised in place of the first bucket that lacks arrays, on all ranks.
        """
        if error is not None:
            self.fail(error)
        if self._thread is not None:
            self._thread.join()
        elif not all(event.is_set() for event in self._is_over):
            self._work()

    def wait_for(self, bucket: int) -> bool:
        """Wait for a bucket; return whether it was reduced."""
        if self._thread is None:
            self.finish()
        self._is_over[bucket].wait()
        return bucket < self._reduced

    def results(self) -> Iterator[Any]:
        """Yield the reductions of all leaves in their order."""
        return (self._results[leaf] for leaf in range(len(self._results)))

    def fail(self, error: BaseException) -> None:
        """Let the first bucket that lacks arrays raise an error, on all ranks."""
        if not isinstance(error, Exception):  # only this rank raises it as it is
            error = CollectiveError(f"a rank has left its step by {error!r}")
        self._failure = error
        for is_ready in self._is_ready:
            is_ready.set()

    def _work(self) -> None:
        try:
            for bucket, leaves in enumerate(self._buckets):
                self._is_ready[bucket].wait()
                if self._is_cancelled:
                    return
                lacks = self._lacking[bucket] > 0
                values = [] if lacks else [self._given[leaf] for leaf in leaves]
                failure = self._failure if lacks else None
                made = [self._made[leaf] for leaf in leaves if leaf in self._made]
                reduced = self._reduce(bucket, values, made, failure)
                self._results.update(zip(leaves, reduced, strict=True))
                self._reduced += 1
                self._is_over[bucket].set()
        except Exception as caught:
            self.error = caught
        finally:
            for event in self._is_over:
                event.set()
