"""`mpidist config`: the settings and their origin."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.errors import LaunchError
from mpidist.tools.cli import arguments
from mpidist.util.representation import printable
from mpidist.util.settings import SETTINGS, TRANSPORTS, Setting, resolve, unknown_names

__all__ = ["Row", "add", "make_rows", "manual_page"]

_CONFIG = """Print each setting, its value and its origin: an argument, the environment,
the tuning file, or the default.

Runs without MPI. Arguments NAME=VALUE act like arguments in a program."""
_CONFIG_END = """Exit status: 0; 1 if a variable is unknown or invalid, so that creating
a strategy would fail; 2 if the arguments are invalid."""
_WIDTH = 88


class Row(NamedTuple):
    """One setting.

    Args:
      name: of the variable, or of what the tuning file says.
      value: as text.
      source: "argument", "environment", "tuning file", "default" or "error".
      meaning: what it does, or what is wrong.
    """

    name: str
    value: str
    source: str
    meaning: str


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "config",
        _config,
        "print the settings and their origin, without MPI",
        _CONFIG,
        ["mpidist config", "mpidist config --json MPIDIST_HANG_SECONDS=60"],
        _CONFIG_END,
    )
    parser.add_argument(
        "assignments", nargs="*", type=_assignment, metavar="NAME=VALUE"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    # For docs/settings.md
    parser.add_argument("--markdown", action="store_true", help=argparse.SUPPRESS)


def _assignment(text: str) -> tuple[Setting[Any], Any]:
    """Return a setting and its value from "NAME=VALUE"."""
    name, _, value = text.partition("=")
    setting = next((known for known in SETTINGS if known.name == name), None)
    if setting is None:
        reason = unknown_names({name: "?"}).get(name, f"{name!r} is not a setting")
        raise argparse.ArgumentTypeError(reason)
    try:
        return setting, setting.read({name: value})
    except LaunchError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _config(given: argparse.Namespace) -> int:
    """Print the settings, and return the exit status."""
    from mpidist.tools.doctor.checks import is_silent

    if given.markdown:
        print(manual_page(), end="")
        return 0
    rows = make_rows(dict(given.assignments), os.environ)
    if not is_silent(os.environ):  # under mpirun one rank is enough
        print(
            json.dumps([row._asdict() for row in rows], indent=1)
            if given.json
            else printable(_as_text(rows), "\n")
        )
    return int(any(row.source == "error" for row in rows))


def make_rows(
    given: Mapping[Setting[Any], Any], environ: Mapping[str, str]
) -> list[Row]:
    """Return all settings, what the tuning file says, and variables that are none.

    Args:
      given: values as of a program's arguments.
      environ: the environment variables.
    """
    rows = []
    for setting in SETTINGS:
        try:
            value, source = resolve(setting, given.get(setting), environ)
        except LaunchError as error:
            text = setting.text(environ) or ""
            rows.append(Row(setting.name, text, "error", str(error)))
            continue
        shown = setting.default_text if source == "default" else _shown(value)
        rows.append(Row(setting.name, shown, source, setting.meaning))
    rows += _tuned(given.get(TRANSPORTS), environ)
    for name, reason in unknown_names(environ).items():
        rows.append(Row(name, environ[name], "error", reason))
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):  # of MPIDIST_LOG
        level, is_json = value
        return ",".join([*([level.lower()] if level else []), *["json"] * is_json])
    if isinstance(value, float):
        return "for ever" if value == float("inf") else f"{value:g}"
    return str(value)


def _tuned(given: Path | None, environ: Mapping[str, str]) -> list[Row]:
    """Return a row for each table of the tuning file, or one on the default."""
    from mpidist.comm.transports.tuning import table_path, tables_in_use
    from mpidist.util.available_memory import as_text

    if given is not None:
        environ = {**environ, TRANSPORTS.name: str(given)}
    path = table_path(environ)
    try:
        tables = tables_in_use(environ)
    except LaunchError as error:
        return [Row("transports", str(path), "error", str(error))]
    rows = []
    for layout, table in tables:
        nodes = " + ".join(map(str, layout.node_sizes))
        text = "; ".join(
            f"{method} by "
            + ", ".join(
                f"{name} from {as_text(edge)}" if edge else name
                for edge, name in entries
            )
            for method, entries in table.items()
        )
        meaning = f"On nodes of {nodes} ranks, {layout.device}, {layout.mpi}: {path}"
        rows.append(Row("transports", text, "tuning file", meaning))
    meaning = f"On all other layouts ({path} has none)."
    return [*rows, Row("transports", "chosen by the layout", "default", meaning)]


def _as_text(rows: list[Row]) -> str:
    lines = []
    for name, value, source, meaning in rows:
        lines.append(f"{name} = {value}  ({source})")
        lines.append(textwrap.indent(textwrap.fill(meaning, _WIDTH - 4), "    "))
    return "\n".join(lines)


_PAGE = """# Settings

These environment variables configure mpidist. The order of priority is: arguments in
the program, environment variables, the tuning file (written by `mpidist tune`),
defaults. An empty variable counts as not set.

When a strategy is created, an unknown variable that begins with `MPIDIST_`, or an
invalid value, raises an error on all ranks; the message suggests the nearest name.
`mpidist config` (or `python -m mpidist config`) prints each value and its origin.

This page is generated by `python -m mpidist config --markdown`.

| variable | values | default | meaning |
|---|---|---|---|
"""


def manual_page() -> str:
    """Return docs/settings.md."""
    rows = []
    for setting in SETTINGS:
        meaning = setting.meaning
        if setting.argument:
            meaning += f" In a program: `{setting.argument}`."
        cells = (f"`{setting.name}`", setting.allowed, setting.default_text, meaning)
        rows.append(f"| {' | '.join(cells)} |\n")
    readers = "".join(f"- `{s.name}`: `{s.read_by}`\n" for s in SETTINGS)
    return f"{_PAGE}{''.join(rows)}\n## Where they are read\n\n{readers}"
