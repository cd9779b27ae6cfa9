"""Shared by the commands: parsers with examples, and types of arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpidist.util.representation import printable

__all__ = [
    "Commands",
    "add_command",
    "complain",
    "integer",
    "is_console_script",
    "of_files",
    "path",
    "program_name",
    "seconds",
]

LARGEST = (1 << 63) - 1  # of the integers in arrays
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
    text = printable(str(error), "\n")
    print(f"{program_name()} {command}: error: {text}", file=sys.stderr)


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


def integer(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Return a function that returns an integer between two bounds."""

    def parse(text: str) -> int:
        number = int(text)
        if not least <= number <= most:
            bound = f">= {least}" if number < least else f"<= {most}"
            raise argparse.ArgumentTypeError(f"must be {bound}, not {text}")
        return number

    parse.__name__ = "integer"  # in argparse's messages
    return parse
