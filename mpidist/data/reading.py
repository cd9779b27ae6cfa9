"""One use of a pipeline: its files and buffers are there while somebody reads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from mpidist.data.pipeline import Pipeline
from mpidist.data.sources import BlockSource, BufferedSource

__all__ = ["Reading"]

T = TypeVar("T")


class Reading:
    """Counts the reads that are going on in threads, so that none loses its files.

    Args:
      pipeline: whose sources are used until `end` or `close`.
    """

    def __init__(self, pipeline: Pipeline):
        self._sources = [s for s in pipeline.sources if isinstance(s, BlockSource)]
        self._buffers = [
            s.buffers
            for s in pipeline.sources
            if isinstance(s, BufferedSource) and not isinstance(s, BlockSource)
        ]
        self._lock = threading.Lock()
        self._going_on = 0
        self._is_closed = False
        self._left_open: list[BlockSource] = []
        for source in self._sources:
            source.retain()

    def do(self, read: Callable[[], T]) -> T:
        """Return `read()`, which reads the pipeline."""
        with self._lock:
            self._going_on += 1
        try:
            return read()
        finally:
            with self._lock:
                self._going_on -= 1
            self._release(keep_files=False)

    def end(self) -> None:
        """Say that all was read, and will probably be read again: files stay open.

        Unless `close` is called after it.
        """
        self._is_closed = True
        self._release(keep_files=True)

    def close(self) -> None:
        """Close the files, once no read is going on; a second call does nothing."""
        self._is_closed = True
        self._release(keep_files=False)
        while self._left_open:
            source = self._left_open.pop()
            source.retain()
            source.release()

    def _release(self, keep_files: bool) -> None:
        with self._lock:
            if not self._is_closed or self._going_on:
                return
            sources, self._sources = self._sources, []
            if keep_files:
                self._left_open = list(sources)
        for source in sources:
            source.release(keep_files)
        for buffers in self._buffers:
            buffers.clear()
