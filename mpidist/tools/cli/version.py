"""`mpidist version`: the installed versions."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform

from mpidist.tools.cli import arguments

__all__ = ["add"]

_VERSION = """Print the versions of mpidist, Python, the packages that it uses, and MPI.

Loads the MPI library in a process of its own, and does not start it."""
_PACKAGES = (
    *("numpy", "h5py", "mpi4py", "optree", "torch", "jax"),
    *("cupy-cuda12x", "cupy-cuda13x"),
)


def add(commands: arguments.Commands) -> None:
    """Add the command."""
    parser = arguments.add_command(
        commands,
        "version",
        _version,
        "print the installed versions, for bug reports",
        _VERSION,
        ["mpidist version --json"],
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _version(given: argparse.Namespace) -> int:
    """Print the versions."""
    from mpidist._version import __version__
    from mpidist.errors import LaunchError
    from mpidist.launch.starting import find_library

    found = {"mpidist": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        library = find_library()
        found["MPI"] = " ".join(library.version.replace("\0", " ").split())[:60]
        found["MPI library"] = str(library.path or "not known")
    except LaunchError as error:
        found["MPI"] = str(error)
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        width = max(map(len, found))
        print("\n".join(f"{name:{width}}  {text}" for name, text in found.items()))
    return 0
