"""Finding out where the rows of files lie: once, by one rank for all of them."""

from __future__ import annotations

import collections
import os
from typing import TYPE_CHECKING, Any

from mpidist.agreement.calls import Call
from mpidist.data.pipeline import Pipeline
from mpidist.data.sources import IndexedSource
from mpidist.data.stream import Stream
from mpidist.errors import DataError

if TYPE_CHECKING:
    from mpidist.extended import StrategyExtended

__all__ = ["index_own_files", "share_indexes"]


def share_indexes(
    extended: StrategyExtended, pipeline: Pipeline | Stream, call: str
) -> None:
    """Look into the files of a pipeline, each by one rank for all. Collective.

    Args:
      extended: of the strategy.
      pipeline: whose files all ranks read.
      call: what the user called.

    Raises, on all ranks:
      MismatchError: the ranks name different files.
      DataError: a file is missing, damaged, or does not fit the others.
    """
    agreement = extended.agreement
    if not (sources := _sources(pipeline)):
        return
    same = tuple(("dataset", source.identify()) for source in sources)
    agreement.require_same(Call(call, same))
    threads = _threads(extended, call)
    for source in sources:
        _share(extended, source, call, threads)


def index_own_files(
    extended: StrategyExtended, pipeline: Pipeline | Stream, call: str
) -> None:
    """Look into the files of this rank's own pipeline. Collective.

    Raises, on all ranks:
      DataError: a file of any rank is missing, damaged, or does not fit the others.
    """
    agreement = extended.agreement
    threads = _threads(extended, call)

    def index() -> None:
        for source in _sources(pipeline):
            try:
                files = source.inspect(range(source.file_count))
                source.adopt(files, agreement.rank, threads)
            except DataError as error:
                raise _with_rank(error, agreement.rank) from error

    agreement.prepare(call, index)


def _sources(pipeline: Pipeline | Stream) -> list[IndexedSource]:
    if isinstance(pipeline, Stream):
        return []
    return [s for s in pipeline.sources if isinstance(s, IndexedSource)]


def _share(
    extended: StrategyExtended, source: IndexedSource, call: str, threads: int
) -> None:
    """Look into every size-th file, tell the other ranks, and hear of theirs."""
    agreement, count = extended.agreement, source.file_count
    mine = range(agreement.rank, count, agreement.size)
    by_rank = agreement.gather(
        call, [_inspect_one(source, file, agreement.rank) for file in mine]
    )
    files = [by_rank[i % len(by_rank)][i // len(by_rank)] for i in range(count)]
    for file in files:
        if isinstance(file, DataError):  # of the first damaged file, on all ranks
            raise file
    agreement.prepare(call, lambda: source.adopt(files, agreement.rank, threads))


def _with_rank(error: DataError, rank: int) -> DataError:
    named = DataError(f"{error} (on rank {rank})")
    named.origin_rank = rank  # type: ignore[attr-defined]  # as agree.py has it
    return named


def _inspect_one(source: IndexedSource, file: int, rank: int) -> Any:
    """Return where the rows of a file lie, or why that is not known."""
    try:
        return source.inspect([file])[0]
    except DataError as error:
        return _with_rank(error, rank)


def _threads(extended: StrategyExtended, call: str) -> int:
    """Return how many threads of this rank may read: all cores but one. Collective.

    The cores are those of this process, shared with other ranks on the node; the one
    is for what the rank computes meanwhile.
    """
    mine = os.uname().nodename, sorted(os.sched_getaffinity(0))
    everyone = extended.agreement.gather(call, mine)
    users = collections.Counter(
        core for node, cores in everyone if node == mine[0] for core in cores
    )
    return max(1, int(sum(1 / users[core] for core in mine[1])) - 1)
