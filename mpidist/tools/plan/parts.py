"""The parts of a plan: plain data, with the names and values of the JSON output."""

from __future__ import annotations

import dataclasses

from mpidist.options import AutoShardPolicy
from mpidist.util.representation import html_table, one_line

__all__ = [
    "DatasetPart",
    "InputPlan",
    "LayoutPart",
    "NodePart",
    "OrderPart",
    "RankGroup",
    "ReadPart",
    "Request",
    "SourcePart",
    "StepPart",
]


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of the command; see `python -m mpidist plan --help`."""

    files: tuple[str, ...]
    batch_size: int
    ranks: int
    datasets: tuple[str, ...] = ()
    policy: AutoShardPolicy = AutoShardPolicy.DATA
    drop_remainder: bool = False
    is_shuffled: bool = False
    seed: int | None = None
    window_chunks: int | None = None
    ranks_per_node: int | None = None


@dataclasses.dataclass(frozen=True)
class LayoutPart:
    """The layout of a dataset in some of the files.

    Args:
      files: their number.
      chunk: the shape of a chunk; None without chunks.
      chunk_bytes: of one, before filters; 0 without chunks.
      chunks: how many there are in all these files.
      filters: the names of those that mpidist decodes itself.
      way: how rows are read.
      why: why h5py reads them, if so.
    """

    files: int
    chunk: tuple[int, ...] | None
    chunk_bytes: int
    chunks: int
    filters: tuple[str, ...]
    way: str
    why: str


@dataclasses.dataclass(frozen=True)
class DatasetPart:
    """One dataset, in all files.

    Args:
      name: of the HDF5 dataset.
      dtype: of rows in memory.
      row_shape: of a row.
      row_bytes: of a row in memory.
      memory_bytes: of all rows in memory.
      stored_bytes: of all rows in the files; in memory where h5py reads them.
      layouts: one for each kind, with the number of its files.
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    row_bytes: int
    memory_bytes: int
    stored_bytes: int
    layouts: tuple[LayoutPart, ...]


@dataclasses.dataclass(frozen=True)
class SourcePart:
    """The files and datasets to read.

    Args:
      files: how many.
      fewest_rows: of a file.
      most_rows: of a file.
      file_bytes: size of all files.
      rows: of all files.
      memory_bytes: of all rows in memory.
      datasets: those that are read.
      other_datasets: the other ones of the first file, if none were named.
      chunks: how many rows of chunks there are that are read whole.
      chunk_bytes: of these in memory.
    """

    files: int
    fewest_rows: int
    most_rows: int
    file_bytes: int
    rows: int
    memory_bytes: int
    datasets: tuple[DatasetPart, ...]
    other_datasets: tuple[str, ...]
    chunks: int
    chunk_bytes: int


@dataclasses.dataclass(frozen=True)
class OrderPart:
    """The order of rows; the first rank's if ranks read files of their own.

    Args:
      kind: "files", "permutation" or "blocks".
      block_rows: the rows that are read together.
      window_blocks: how many of these blocks a stripe mixes at a time.
      lanes: the number of stripes that contribute to each batch (see `data.shuffling`).
      lane_rows: the rows that a stripe contributes to a batch.
      kept_bytes: of decoded chunks in each rank's memory, at most.
    """

    kind: str
    block_rows: int | None
    window_blocks: int | None
    lanes: int | None
    lane_rows: int | None
    kept_bytes: int


@dataclasses.dataclass(frozen=True)
class StepPart:
    """The steps of an epoch, and the rows in them.

    Args:
      steps: of all ranks.
      rows: in the first step, of all ranks.
      rows_in_last: in the last step, of all ranks.
      dropped_rows: that no rank gets.
      fewest_rows: of a rank.
      mean_rows: of a rank.
      most_rows: of a rank.
      imbalance: of `most_rows` over `mean_rows`, less one.
    """

    steps: int
    rows: int
    rows_in_last: int
    dropped_rows: int
    fewest_rows: int
    mean_rows: float
    most_rows: int
    imbalance: float


@dataclasses.dataclass(frozen=True)
class ReadPart:
    """What all ranks read in an epoch; None for what is not estimated.

    Args:
      read_bytes: from files, in rows or chunks as they are stored; of what h5py reads,
        as many as it has in memory.
      decoded_chunks: how many rows of chunks are read whole; again if they were not
        kept, or by another rank.
      counted_ranks: of how many ranks this was counted.
      is_exact: whether it was counted for all ranks.
      are_files_counted: whether the files that ranks read were counted.
    """

    read_bytes: int | None
    decoded_chunks: int | None
    counted_ranks: int
    is_exact: bool
    are_files_counted: bool


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """Ranks that get equal numbers of rows.

    Args:
      ranks: the first and the last of each run of them.
      count: their number.
      rows: of each, per epoch.
      rows_per_step: of each batch but the last.
      rows_in_last_step: of the job's last step.
      empty_steps: in how many steps they get no rows.
      files: from how many files each reads, at most.
      read_bytes: what each reads per epoch, in the mean; None if not estimated.
      decoded_chunks: how many rows of chunks each decodes per epoch, in the mean; None
        if not estimated.
    """

    ranks: tuple[tuple[int, int], ...]
    count: int
    rows: int
    rows_per_step: int
    rows_in_last_step: int
    empty_steps: int
    files: int
    read_bytes: float | None
    decoded_chunks: float | None


@dataclasses.dataclass(frozen=True)
class NodePart:
    """What all ranks of a node read and keep.

    Args:
      nodes: their number.
      ranks: on each; there may be fewer on the last.
      kept_bytes: of decoded chunks in memory, at most.
      read_bytes: per epoch, in the mean; None if not estimated.
    """

    nodes: int
    ranks: int
    kept_bytes: int
    read_bytes: float | None


@dataclasses.dataclass(frozen=True, repr=False)
class InputPlan:
    """What each rank reads.

    Args:
      request: the arguments.
      source: the files and datasets.
      order: of the rows.
      steps: of an epoch.
      reads: of all ranks.
      groups: of ranks with equal numbers of rows, by their first ranks.
      node: the ranks of a node together; None if their number is not given.
    """

    request: Request
    source: SourcePart
    order: OrderPart
    steps: StepPart
    reads: ReadPart
    groups: tuple[RankGroup, ...]
    node: NodePart | None

    def __repr__(self) -> str:
        return one_line(self, lambda: ", ".join(f"{v} {k}" for k, v in self._facts()))

    def _repr_html_(self) -> str:
        return html_table("InputPlan", self._facts())

    def _facts(self) -> list[tuple[str, object]]:
        read = self.reads.read_bytes
        return [
            ("files", f"{self.source.files:,}"),
            ("rows", f"{self.source.rows:,}"),
            ("ranks", f"{self.request.ranks:,}"),
            ("steps of an epoch", f"{self.steps.steps:,}"),
            ("rows of a rank at most", f"{self.steps.most_rows:,}"),
            ("bytes read by all ranks", "?" if read is None else f"{read:,}"),
        ]
