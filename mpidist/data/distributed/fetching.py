"""Batches that go to the replica's device as soon as they are read."""

from __future__ import annotations

from typing import Any

from mpidist import arrays, copy_streams, nest, uploads

from mpidist.data.distributed.feed import Feed, Group, Plan, Portion, start_reader
from mpidist.data.pipeline import Pass, Pipeline
from mpidist.data.sources import BufferedSource

__all__ = ["can_fail", "hand_out", "place", "start"]


def start(plan: Plan, order: Pass) -> Feed:
    """Return this replica's batches of one pass; see `hand_out`."""
    source = start_reader(plan, order)
    if not plan.options.experimental_fetch_to_device:
        return source
    stream = copy_streams.copy_stream(plan.extended.device)
    if stream is None:
        return source
    if isinstance(plan.pipeline, Pipeline):
        for rows in plan.pipeline.sources:
            if isinstance(rows, BufferedSource):
                rows.buffers.allocate_by(uploads.page_locked(stream))
    return _Fetched(source, uploads.Uploads(stream))


def hand_out(portion: Portion | None) -> Portion | None:
    """Return what a feed has read, for use in the calling thread. Once per portion.

    Raises: what CuPy does where memory on the GPU does not suffice.
    """
    if portion is None or not isinstance(portion.batch, uploads.Upload):
        return portion
    return portion._replace(batch=uploads.take(portion.batch))


def can_fail(plan: Plan) -> bool:
    """Return whether `hand_out` may raise on some replica; the same on all replicas."""
    devices = plan.extended.topology.devices
    is_asked_for = plan.options.experimental_fetch_to_device
    return is_asked_for and not all(device.startswith("CPU") for device in devices)


def place(plan: Plan, batch: Any) -> Any:
    """Return a batch of no rows where this replica computes."""
    if not plan.options.experimental_fetch_to_device:
        return batch
    device = plan.extended.device
    return nest.map_leaves(lambda a: arrays.to_device(a, device), batch)


class _Fetched:
    """Starts to copy batches in the thread that has read them."""

    may_change_thread = False

    def __init__(self, source: Feed, uploads: uploads.Uploads):
        self.group = source.group
        self.is_slow_to_start = source.is_slow_to_start
        self._source = source
        self._uploads = uploads

    def read(self, step: int) -> Portion | None:
        """See `Feed.read`."""
        portion = self._source.read(step)
        return None if portion is None else self._send(portion)

    def read_group(self, step: int, count: int) -> Group:
        """See `Feed.read_group`."""
        found: Group = []
        for portion in self._source.read_group(step, count):
            if not isinstance(portion, Portion):  # the end, or an error
                found.append(portion)
                continue
            try:
                found.append(self._send(portion))
            except Exception as error:
                found.append(error)
                break
        return found

    def _send(self, portion: Portion) -> Portion:
        return portion._replace(batch=self._uploads.upload(portion.batch))

    def end(self) -> None:
        """See `Feed.end`."""
        self._source.end()
        self._uploads.close()

    def skip(self, steps: int) -> int:
        """See `Feed.skip`."""
        return self._source.skip(steps)

    def close(self) -> None:
        """See `Feed.close`."""
        self._source.close()
        self._uploads.close()
