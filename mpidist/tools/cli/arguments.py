"""Shared by the commands: parsers with examples, and types of arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "Commands",
    "add_command",
    "complain",
    "is_console_script",
    "not_negative",
    "of_files",
    "path",
    "positive",
    "program_name",
    "seconds",
]

Commands = Any  # argparse has no public name for what `add_subparsers` returns
# As shtab's FILE, for which it need not be there
_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}


def is_console_script() -> bool:
    """Return whether the command was called as `mpidist`."""
    return Path(sys.argv[0]).name == "mpidist"


def program_name() -> str:
    """Return how the command was called."""
    return "mpidist" if is_console_script() else "python -m mpidist"


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    examples: Sequence[str],
    end: str = "",
) -> argparse.ArgumentParser:
    """Return the parser of a command; `run` executes it and returns the exit status.

    Args:
      commands: of the main parser.
      name: of the command.
      run: does it.
      summary: a line.
      description: a paragraph.
      examples: command lines.
      end: a last paragraph of the help, as on the exit status.
    """
    shown = "\n".join(["Example:", *(f"  {example}" for example in examples)])
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=f"{shown}\n\n{end}" if end else shown,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, examples=tuple(examples))
    return parser


def complain(command: str, error: object) -> None:
    """Write the error of a command to stderr."""
    print(f"{program_name()} {command}: error: {error}", file=sys.stderr)


def of_files(action: argparse.Action) -> None:
    """Make shells complete an argument with file names."""
    action.complete = _FILES  # type: ignore[attr-defined]  # as shtab has it


def path(text: str) -> str:
    """Return a path that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("must name a path, not ''")
    return text


def seconds(text: str) -> float:
    """Return seconds, above 0 and at most 3600."""
    number = float(text)
    if not 0 < number <= 3600:
        raise argparse.ArgumentTypeError(f"must be > 0 and <= 3600, not {text}")
    return number


def positive(text: str) -> int:
    """Return an integer from 1 on."""
    return _at_least(1, text)


def not_negative(text: str) -> int:
    """Return an integer from 0 on."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"must be >= {least}, not {number}")
    return number
