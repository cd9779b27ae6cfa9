"""The parser of all commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mpidist.tools.cli import (
    arguments,
    config,
    diff,
    doctor,
    plan,
    report,
    run,
    tune,
    version,
)

__all__ = ["main", "make_parser"]

# Each has `add`; a command of another package is one more entry
COMMANDS = (run, doctor, plan, tune, diff, report, config, version)
_COMPLETION = """
Completion: mpidist --completion bash >
~/.local/share/bash-completion/completions/mpidist (or zsh, as _mpidist into $fpath)"""


def main(words: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status.

    Args:
      words: of the command line, by default this process's.
    """
    given = make_parser().parse_args(words)
    status: int = given.run(given)
    return status


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        arguments.program_name(),
        description="Start, examine and understand jobs of mpidist.",
        epilog=_COMPLETION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--completion",
        choices=["bash", "zsh"],
        action=_PrintCompletion,
        help="print a completion script for a shell, and exit",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return parser


class _PrintCompletion(argparse.Action):
    """Print the completion script of a shell, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            import shtab
        except ImportError:
            parser.exit(
                1,
                f"{arguments.program_name()}: error: completion needs the package "
                "shtab: pip install shtab\n",
            )
        parser.prog = "mpidist"  # what shells complete
        sys.stdout.write(f"{shtab.complete(parser, values)}\n")
        parser.exit()
