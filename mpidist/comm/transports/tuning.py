"""Tables of the fastest transports by size: defaults, and files of `mpidist tune`.

A file holds a table for each layout of a job. Needs no MPI.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm.transports.base import MESSAGE_BYTES, MOST_RANKS, Transport
from mpidist.errors import LaunchError
from mpidist.util import logs
from mpidist.util.files import read_regular, replace_file, user_directory
from mpidist.util.schemas import COUNT, conform
from mpidist.util.settings import TRANSPORTS

# For each method: minimum sizes in bytes, with the transport to use
Table = Mapping[str, Sequence[tuple[int, str]]]

_FORMAT = 1
METHODS = ("allreduce", "allgatherv", "broadcast")
_CONTENT = {
    "tables": [
        {
            "mpi": str,
            "node_sizes": [COUNT],
            "device": str,
            "table": {method: [(COUNT, str)] for method in METHODS},
        }
    ]
}


class Layout(NamedTuple):
    """The job layout of a table.

    Args:
      mpi: the library and its version, see `short_name`.
      node_sizes: how many ranks each node has, ascending.
      device: "CPU" or "GPU".
    """

    mpi: str
    node_sizes: tuple[int, ...]
    device: str


def short_name(library: str) -> str:
    """Return name and version from `MPI.Get_library_version()`."""
    line = library.partition("\n")[0].partition(",")[0]
    return " ".join(line.replace("\0", " ").split())


def table_path(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the tuning file: MPIDIST_TRANSPORTS, or a file in the user's settings.

    None if there is no place for the latter.
    """
    named = TRANSPORTS.read(environ)
    if named is not None:
        return named
    settings = user_directory("XDG_CONFIG_HOME", ".config", environ)
    return None if settings is None else settings / "mpidist" / "transports.json"


def tables_in_use(
    environ: Mapping[str, str] = os.environ,
) -> list[tuple[Layout, Table]]:
    """Return all tables of the tuning file that strategies use.

    Only what a setting names must be readable: else the file does not count, as if it
    were not there, and the log says so.

    Raises:
      LaunchError: see `find_table`; for the file that MPIDIST_TRANSPORTS names.
    """
    path = table_path(environ)
    try:
        return [] if path is None else read_tables(path)
    except LaunchError as error:
        if TRANSPORTS.text(environ):
            raise
        logs.info("comm", f"the default transports are used: {error}")
        return []


def find_table(path: Path, layout: Layout) -> Table | None:
    """Return the table for a layout, if there is one; the file need not exist.

    Raises:
      LaunchError: the file cannot be read, or is not a tuning file.
    """
    return dict(read_tables(path)).get(layout)


def write_table(path: Path, layout: Layout, table: Table, note: Any) -> None:
    """Put a table into the file, replacing one for the same layout.

    The file is replaced atomically.

    Raises:
      LaunchError: the existing file is not a tuning file.
      OSError: it cannot be written.
    """
    entries = []
    if path.exists():
        read_tables(path)
        former = json.loads(read_regular(path))["tables"]
        entries = [entry for entry in former if _layout(entry) != layout]
    entries.append({**layout._asdict(), "table": table, **note})
    text = json.dumps({"format": _FORMAT, "tables": entries}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(text.encode())


def read_tables(path: Path) -> list[tuple[Layout, Table]]:
    """Return all tables of a file, with their layouts; none if there is no file.

    Raises:
      LaunchError: see `find_table`.
    """
    try:
        return _parse(read_regular(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LaunchError(
            f"the tuning file {path} cannot be read{_said_by(path)}: {error}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise LaunchError(
            f"{path}{_said_by(path)} is not a tuning file ({error}); delete it, or "
            "write it again with `python -m mpidist tune`"
        ) from None


def _said_by(path: Path) -> str:
    return f" ({TRANSPORTS.name})" if TRANSPORTS.read() == path else ""


def _parse(text: bytes) -> list[tuple[Layout, Table]]:
    content = json.loads(text)
    number = conform(content, {"format": COUNT})["format"]
    if number != _FORMAT:
        raise ValueError(f"format {number}, not {_FORMAT}")
    entries = conform(content, _CONTENT)["tables"]
    return [(_layout(entry), _table(entry["table"])) for entry in entries]


def _layout(entry: Mapping[str, Any]) -> Layout:
    return Layout(entry["mpi"], tuple(entry["node_sizes"]), entry["device"])


def _table(rows_of: Mapping[str, Any]) -> Table:
    table = {m: [(edge, name) for edge, name in rows_of[m]] for m in METHODS}
    for method, rows in table.items():
        edges = [edge for edge, _ in rows]
        if not edges or edges[0] != 0 or edges != sorted(set(edges)):
            raise ValueError(
                f"{method} must begin with 0 bytes and ascend, not {edges}"
            )
    return table


Count = Callable[[str, int], None]


def no_count(transport: str, size_bytes: int) -> None:
    """Count nothing."""


class BySizeTransport(Transport):
    """Passes each call to the transport for its size in a table.

    The size is that of the result in bytes, which all ranks know.

    Args:
      transports: by name; all on the host or all on the device.
      table: for "allreduce", "allgatherv" and "broadcast" rows that begin with 0 bytes;
        equal on all ranks.
      count: called with the name of the transport and the bytes of each call.
    """

    def __init__(
        self, transports: Mapping[str, Transport], table: Table, count: Count = no_count
    ):
        used = {name for rows in table.values() for _, name in rows}
        self.name = ", ".join(sorted(used))
        self.device = all(transports[name].device for name in used)
        adders = {name for _, name in table["allreduce"]}
        self.is_ordered = all(transports[name].is_ordered for name in adders)
        self._count = count
        self._edges = {m: [edge for edge, _ in rows] for m, rows in table.items()}
        self._rows = {m: [transports[n] for _, n in rows] for m, rows in table.items()}

    def for_size(self, method: str, size_bytes: int) -> Transport:
        """Return the transport for results of this size, whose calls are not counted.

        Args:
          method: "allreduce", "allgatherv" or "broadcast".
          size_bytes: of the result.
        """
        edges = self._edges[method]
        return self._rows[method][bisect.bisect(edges, size_bytes) - 1]

    def _pick(self, method: str, receive: Any) -> Transport:
        transport = self.for_size(method, receive.nbytes)
        self._count(transport.name, receive.nbytes)
        return transport

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        self._pick("allreduce", receive).allreduce(sends, receive, deadline, wire)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        transport = self._pick("allgatherv", receive)
        transport.allgatherv(send, receive, counts, deadline)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        self._pick("broadcast", buffer).broadcast(buffer, root, deadline)


# Between nodes: below this size, MPI's own algorithms have fewer steps
_HIERARCHICAL_BYTES = 64 << 10
_BLOCKS_BYTES = 256 << 10
# A ring has as many steps as ranks, so it needs larger messages
_RING_RANKS = 64
_RING_MESSAGES_PER_RANK = 8
# On GPUs: below this size, copies to the host and back are faster than two kernels
_IPC_BYTES = 32 << 10
_DEVICE_BYTES = 64 << 10
# Inside a node, Intel MPI is faster if arrays fit in caches
_INTEL_BYTES = 16 << 20


def default_table(in_node: str, library: str, ranks: int) -> Table:
    """Return a table for a layout.

    Args:
      in_node: the transport of ranks that share memory; "mpi" if none do.
      library: what `MPI.Get_library_version()` begins with.
      ranks: how many there are.
    """
    by_mpi = [(0, "mpi")]
    if in_node in ("mpi", "hierarchical"):
        reduce = move = by_mpi
        if in_node == "hierarchical":
            reduce = [*by_mpi, (_HIERARCHICAL_BYTES, "hierarchical")]
        elif ranks <= MOST_RANKS:
            reduce = [*by_mpi, (_BLOCKS_BYTES, "ordered")]
        if 1 < ranks <= _RING_RANKS:
            edge = _RING_MESSAGES_PER_RANK * ranks * MESSAGE_BYTES
            move = [*by_mpi, (edge, "ring")]
        return {"allreduce": reduce, "allgatherv": move, "broadcast": move}
    by_node = [(0, in_node)]
    if in_node == "shared" and library.startswith("Intel"):
        reduce = [(0, "mpi"), (_INTEL_BYTES, "shared")]
        return {"allreduce": reduce, "allgatherv": by_mpi, "broadcast": by_node}
    if library.startswith("Open MPI"):  # the system copies for it, once
        return {"allreduce": by_node, "allgatherv": by_mpi, "broadcast": by_node}
    return {"allreduce": by_node, "allgatherv": by_node, "broadcast": by_node}


def default_device_table(names: Container[str]) -> Table:
    """Return a table for arrays on GPUs.

    Args:
      names: of the transports that there are.
    """
    if "nccl" in names:
        return all_by([(0, "nccl")])
    if "ipc" in names:
        return all_by([(0, "staging"), (_IPC_BYTES, "ipc")])
    if "device" in names:
        # Most MPI libraries reduce GPU arrays on the host
        reduce = [(0, "mpi"), (_DEVICE_BYTES, "device")]
        return {**all_by([(0, "mpi")]), "allreduce": reduce}
    return all_by([(0, "staging")])


def all_by(rows: list[tuple[int, str]]) -> dict[str, list[tuple[int, str]]]:
    """Return a table whose rows are the same for all methods."""
    return {"allreduce": rows, "allgatherv": rows, "broadcast": rows}
