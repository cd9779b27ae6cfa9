"""One transport for small messages, another one for large ones, as a table says."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.blocks import MESSAGE_BYTES, MOST_RANKS
from mpidist.errors import LaunchError
from mpidist.util.files import replace_file

__all__ = [
    "BySizeTransport",
    "Count",
    "Layout",
    "Table",
    "all_by",
    "default_device_table",
    "default_table",
    "find_table",
    "no_count",
    "short_name",
    "table_path",
    "write_table",
]


# For each method of a transport: from how many bytes on which one is used
Table = Mapping[str, Sequence[tuple[int, str]]]
Count = Callable[[str, int], None]


def no_count(transport: str, size_bytes: int) -> None:
    """Count nothing."""


class BySizeTransport:
    """Gives each call to the transport that a table names for its size.

    The bytes are those of the result, which all ranks know.

    Args:
      transports: by name; all on the host or all on the device.
      table: for "allreduce", "allgatherv" and "broadcast" rows that begin with 0 bytes;
        equal on all ranks.
      count: given the name of the transport and the bytes of each call.
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

    def _pick(self, method: str, receive: Any) -> Transport:
        size_bytes = receive.nbytes
        way = self._rows[method][bisect.bisect(self._edges[method], size_bytes) - 1]
        self._count(way.name, size_bytes)
        return way

    def allreduce_sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        """See `Transport.allreduce_sum`."""
        self._pick("allreduce", receive).allreduce_sum(send, receive, deadline)

    def allreduce_packed(
        self, sends: Sequence[Any], receive: Any, deadline: float | None
    ) -> None:
        """See `Transport.allreduce_packed`."""
        self._pick("allreduce", receive).allreduce_packed(sends, receive, deadline)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`."""
        way = self._pick("allgatherv", receive)
        way.allgatherv(send, receive, counts, deadline)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """See `Transport.broadcast`."""
        self._pick("broadcast", buffer).broadcast(buffer, root, deadline)


_FORMAT = 1
_PATH = "MPIDIST_TRANSPORTS"
# What parsing raises of other files
_NO_TABLES = (ValueError, TypeError, KeyError, AttributeError, OverflowError)
_METHODS = ("allreduce", "allgatherv", "broadcast")


class Layout(NamedTuple):
    """What a table holds for.

    Args:
      mpi: the library and its version, see `short_name`.
      node_sizes: how many ranks each node has, ascending.
      device: "CPU" or "GPU".
    """

    mpi: str
    node_sizes: tuple[int, ...]
    device: str


def short_name(library: str) -> str:
    """Return name and version out of `MPI.Get_library_version()`."""
    line = library.partition("\n")[0].partition(",")[0]
    return " ".join(line.replace("\0", " ").split())


def table_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where tables are: MPIDIST_TRANSPORTS, or a file in the user's settings."""
    if environ.get(_PATH):
        return Path(environ[_PATH])
    settings = environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(settings, "mpidist", "transports.json")


def find_table(path: Path, layout: Layout) -> Table | None:
    """Return the table for a layout, if there is one; the file need not exist.

    Raises:
      LaunchError: the file cannot be read, or is no file of tables.
    """
    return dict(_read(path)).get(layout)


def write_table(path: Path, layout: Layout, table: Table, note: Any) -> None:
    """Put a table into the file, instead of a former one for the same layout.

    The file is replaced at once: no job sees half of it.

    Raises:
      LaunchError: what is there is no file of tables.
      OSError: it cannot be written.
    """
    entries = []
    if path.exists():
        _read(path)
        former = json.loads(path.read_text())["tables"]
        entries = [entry for entry in former if _layout(entry) != layout]
    entries.append({**layout._asdict(), "table": table, **note})
    text = json.dumps({"format": _FORMAT, "tables": entries}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        file.write(text.encode())


def _read(path: Path) -> list[tuple[Layout, Table]]:
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is no plain file")  # and may be one that never ends
        return _parse(path.read_text())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise LaunchError(
            f"the transports of {path} cannot be read{_said_by(path)}: {error}"
        ) from None
    except (*_NO_TABLES, RecursionError) as error:
        raise LaunchError(
            f"{path}{_said_by(path)} is no file of transports ({error!r}); delete it, "
            "or let `python -m mpidist tune` write it again"
        ) from None


def _said_by(path: Path) -> str:
    """Say which variable names the file, if one does."""
    named = os.environ.get(_PATH)
    return f" ({_PATH})" if named and Path(named) == path else ""


def _parse(text: str) -> list[tuple[Layout, Table]]:
    content = json.loads(text)
    if content["format"] != _FORMAT:
        raise ValueError(f"format {content['format']}, not {_FORMAT}")
    return [(_layout(entry), _table(entry["table"])) for entry in content["tables"]]


def _layout(entry: Mapping[str, Any]) -> Layout:
    return Layout(entry["mpi"], tuple(entry["node_sizes"]), entry["device"])


def _table(rows_of: Mapping[str, Any]) -> Table:
    table = {
        method: [(int(edge), str(name)) for edge, name in rows_of[method]]
        for method in _METHODS
    }
    for method, rows in table.items():
        edges = [edge for edge, _ in rows]
        if not edges or edges[0] != 0 or edges != sorted(set(edges)):
            raise ValueError(
                f"{method} must begin with 0 bytes and ascend, not {edges}"
            )
    return table


# Between nodes: below, the library's own ways have fewer steps
_HIERARCHICAL_BYTES = 64 << 10
_BLOCKS_BYTES = 256 << 10
# A ring has as many steps as ranks: it begins where messages are many times more
_RING_RANKS = 64
_RING_MESSAGES_PER_RANK = 8
# On GPUs: to copy less to the host and back takes less time than two kernels
_IPC_BYTES = 32 << 10
_DEVICE_BYTES = 64 << 10
# In a node, Intel MPI is faster as long as arrays fit into caches
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
    near = [(0, in_node)]
    if in_node == "shared" and library.startswith("Intel"):
        reduce = [(0, "mpi"), (_INTEL_BYTES, "shared")]
        return {"allreduce": reduce, "allgatherv": by_mpi, "broadcast": near}
    if library.startswith("Open MPI"):  # the system copies for it, once
        return {"allreduce": near, "allgatherv": by_mpi, "broadcast": near}
    return {"allreduce": near, "allgatherv": near, "broadcast": near}


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
        # Most MPI libraries add up on the host what lies on a GPU
        reduce = [(0, "mpi"), (_DEVICE_BYTES, "device")]
        return {**all_by([(0, "mpi")]), "allreduce": reduce}
    return all_by([(0, "staging")])


def all_by(rows: list[tuple[int, str]]) -> dict[str, list[tuple[int, str]]]:
    """Return a table whose rows are the same for all methods."""
    return {"allreduce": rows, "allgatherv": rows, "broadcast": rows}
