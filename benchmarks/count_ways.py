"""How many files and functions of mpidist a call runs, from the call to its return.

    [mpirun -n 2] python benchmarks/count_ways.py [--verbose] [array] [row] [variable]

- array: an array through `all_reduce`;
- row: a batch of rows of an HDF5 file through `next`;
- variable: a variable through `CheckpointManager.save`.

Each call is made with fresh objects and again with the same ones. Everything that runs
in this process counts, in threads too; imports do not, as another strategy has made the
same call before. Lambdas and generator expressions are no functions of their own.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import h5py
import numpy as np
from mpi4py import MPI

import mpidist

PACKAGE = str(Path(mpidist.__file__).parent) + os.sep
ROWS, BATCH = 4096, 64
Calls = Iterator[Callable[[], Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    comm = MPI.COMM_WORLD
    trace = Trace()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(comm.bcast(made))
        for name in options.ways or WAYS:
            for call in WAYS[name](folder / "before"):
                call()
            for when, call in zip(("first", "again"), WAYS[name](folder / "counted")):
                found = trace(call)
                if comm.rank == 0:
                    report(f"{name}, {when}", found, options.verbose)
        comm.Barrier()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", choices=[[], *WAYS], metavar="way")
    parser.add_argument("--verbose", action="store_true", help="name the functions")
    return parser.parse_args(arguments)


class Trace:
    """The functions that run while it is on, in this thread and in those it starts."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, None] | None = None
        # A thread takes the profile function that there is when it starts
        threading.setprofile(self._note)

    def __call__(self, call: Callable[[], Any]) -> dict[str, list[str]]:
        """Return the functions that run during a call, by file, in order."""
        codes = self._codes = {}
        sys.setprofile(self._note)
        try:
            call()
        finally:
            sys.setprofile(None)
            self._codes = None
        found: dict[str, list[str]] = collections.defaultdict(list)
        for code in codes:
            if code.co_filename.startswith(PACKAGE):
                functions = found[code.co_filename.removeprefix(PACKAGE)]
                if not code.co_name.startswith("<"):
                    functions.append(code.co_name)
        return found

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._codes is not None:
            self._codes.setdefault(frame.f_code)


def report(title: str, found: dict[str, list[str]], is_verbose: bool) -> None:
    functions = sum(map(len, found.values()))
    rooms = collections.Counter(os.path.dirname(file) or "." for file in found)
    by_room = ", ".join(f"{room} {n}" for room, n in rooms.most_common())
    print(f"{title}: {len(found)} files, {functions} functions ({by_room})")
    for file, names in found.items() if is_verbose else ():
        print(f"  {file}: {', '.join(names)}")


def reduce_array(folder: Path) -> Calls:
    strategy = mpidist.MirroredStrategy()
    x = np.ones(1000)
    with strategy.scope():
        for _ in range(2):
            yield lambda: strategy.run(reduce_in_replica, (x,))


def reduce_in_replica(x: Any) -> Any:
    context = mpidist.get_replica_context()
    assert context is not None
    return context.all_reduce("sum", x)


def read_row(folder: Path) -> Calls:
    path = folder.with_suffix(".h5")
    if MPI.COMM_WORLD.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(ROWS * 8.0).reshape(ROWS, 8)
    MPI.COMM_WORLD.Barrier()
    strategy = mpidist.MirroredStrategy()
    dataset = mpidist.Dataset.from_hdf5(str(path), "x").shuffle(seed=1).batch(BATCH)
    rows = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(2):
        yield lambda: next(rows)


def save_variable(folder: Path) -> Calls:
    strategy = mpidist.MirroredStrategy()
    with strategy.scope():
        w = mpidist.Variable(np.zeros(1000))
    checkpoint = mpidist.Checkpoint(w=w)
    manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=2)
    for _ in range(2):
        yield manager.save


WAYS = {"array": reduce_array, "row": read_row, "variable": save_variable}


if __name__ == "__main__":
    main()
