"""The tuning file: the fastest transports, as measured by `mpidist tune`.

It holds a table for each layout of a job. Needs no MPI.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.errors import LaunchError
from mpidist.util import logs
from mpidist.util.files import read_regular, replace_file, user_directory
from mpidist.util.schemas import COUNT, conform
from mpidist.util.settings import TRANSPORTS

__all__ = [
    "METHODS",
    "Layout",
    "Table",
    "find_table",
    "read_tables",
    "short_name",
    "table_path",
    "tables_in_use",
    "write_table",
]

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
    """Return the variable that names the file, for messages; "" if none."""
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
