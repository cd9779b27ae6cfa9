"""Batches that go to the replica's device as soon as they are read."""

from __future__ import annotations

from typing import Any

from mpidist import arrays, copy_streams, nest, uploads
from mpidist.data import feed
from mpidist.data.feed import Feed, Group, Plan, Portion
from mpidist.data.pipeline import Pass

__all__ = ["hand_out", "place", "start"]


def start(plan: Plan, order: Pass) -> Feed:
    """Return this replica's batches of one pass; see `hand_out`."""
    source = feed.start(plan, order)
    if not plan.options.experimental_fetch_to_device:
        return source
    stream = copy_streams.copy_stream(plan.extended.device)
    return source if stream is None else _Fetched(source, uploads.Uploads(stream))


def hand_out(portion: Portion | None) -> Portion | None:
    """Return what a feed has read, for use in the calling thread. Once per portion."""
    if portion is None or not isinstance(portion.batch, uploads.Upload):
        return portion
    return portion._replace(batch=uploads.take(portion.batch))


def place(plan: Plan, batch: Any) -> Any:
    """Return a batch of no rows where this replica computes."""
    if not plan.options.experimental_fetch_to_device:
        return batch
    device = plan.extended.device
    return nest.map_leaves(lambda a: arrays.to_device(a, device), batch)


class _Fetched:
    """Starts to copy batches in the thread that has read them."""

    def __init__(self, source: Feed, uploads: uploads.Uploads):
        self.group = source.group
        self._source = source
        self._uploads = uploads

    def read(self, step: int) -> Portion | None:
        """See `Feed.read`."""
        return self._upload(self._source.read(step))

    def read_group(self, step: int) -> Group:
        """See `Feed.read_group`."""
        return [
            portion if isinstance(portion, Exception) else self._upload(portion)
            for portion in self._source.read_group(step)
        ]

    def _upload(self, portion: Portion | None) -> Portion | None:
        if portion is None:
            return None
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
