"""How many files and functions of mpidist a call runs, from the call to its return.

    [mpirun -n 2] python benchmarks/count_ways.py [--verbose] [small] [large] ...

- small, large: 8 kB and 2 MiB through `Strategy.reduce`;
- assign: `Variable.assign_sub` in a replica function;
- row: a batch of rows of an HDF5 file through `next`;
- save: a small variable through `CheckpointManager.save`, with the number of all
  functions called, and of exchanges between the ranks;
- strategy: `MirroredStrategy()`.

Each call is made with fresh objects, and twice again with the same ones, of which the
last counts: what is recorded where a call is new is known then. Everything that runs
in this process counts, in threads too; imports do not, as another strategy has made the
same call before. What runs only while a rank waits for others does not. Lambdas and
generator expressions are no functions of their own.
"""

from __future__ import annotations

import argparse
import collections
import gc
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
from mpidist.comm.consensus.consensus import Consensus

PACKAGE = str(Path(mpidist.__file__).parent) + os.sep
ROWS, BATCH = 4096, 64
# These run, or not, by who comes first
WAITING = {
    "comm/consensus/barrier.py": {"_wait", "_progress_mpi"},
    "comm/consensus/comparison.py": {"late"},
    "comm/consensus/failures.py": {"require_none"},
    "comm/consensus/waiting.py": {"wait", "require_none", "find", "pause_seconds"},
}
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
            gc.disable()  # it would end earlier strategies while a call is counted
            whens = "first", "", "again"
            for when, call in zip(whens, WAYS[name](folder / "counted"), strict=True):
                before = {c: c.calls for c in Consensus.in_use}
                found = trace(call)
                exchanges = sum(c.calls - calls for c, calls in before.items())
                if comm.rank == 0 and when:
                    title = f"{name}, {when}"
                    report(title, found, trace.calls, exchanges, options.verbose)
            gc.enable()
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
        self.calls = 0
        # A thread takes the profile function that there is when it starts
        threading.setprofile(self._note)

    def __call__(self, call: Callable[[], Any]) -> dict[str, list[str]]:
        """Return the functions that run during a call, by file, in order."""
        codes = self._codes = {}
        self.calls = 0
        sys.setprofile(self._note)
        try:
            call()
        finally:
            sys.setprofile(None)
            self._codes = None
        found: dict[str, list[str]] = collections.defaultdict(list)
        for code in codes:
            file, name = code.co_filename.removeprefix(PACKAGE), code.co_name
            if file != code.co_filename and name not in WAITING.get(file, ()):
                functions = found[file]
                if not name.startswith("<"):
                    functions.append(name)
        return found

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and self._codes is not None:
            self._codes.setdefault(frame.f_code)
            self.calls += frame.f_code.co_filename.startswith(PACKAGE)


def report(
    title: str,
    found: dict[str, list[str]],
    calls: int,
    exchanges: int,
    is_verbose: bool,
) -> None:
    functions = sum(map(len, found.values()))
    print(
        f"{title}: {len(found)} files, {functions} functions, {calls} calls, "
        f"{exchanges} exchanges"
    )
    for file, names in found.items() if is_verbose else ():
        print(f"  {file}: {', '.join(names)}")


def reduce_small(folder: Path) -> Calls:
    return reduce_array(np.ones(1000))


def reduce_large(folder: Path) -> Calls:
    return reduce_array(np.ones(1 << 18))


def reduce_array(x: Any) -> Calls:
    strategy = mpidist.MirroredStrategy()
    for _ in range(3):
        yield lambda: strategy.reduce("SUM", x)


def assign(folder: Path) -> Calls:
    strategy = mpidist.MirroredStrategy()
    with strategy.scope():
        w = mpidist.Variable(np.zeros(10), aggregation=mpidist.VariableAggregation.SUM)
    for _ in range(3):
        yield lambda: strategy.run(w.assign_sub, (np.ones(10),))


def make_strategy(folder: Path) -> Calls:
    for _ in range(3):
        yield mpidist.MirroredStrategy


def read_row(folder: Path) -> Calls:
    path = folder.with_suffix(".h5")
    if MPI.COMM_WORLD.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(ROWS * 8.0).reshape(ROWS, 8)
    MPI.COMM_WORLD.Barrier()
    strategy = mpidist.MirroredStrategy()
    dataset = mpidist.Dataset.from_hdf5(str(path), "x").shuffle(seed=1).batch(BATCH)
    rows = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(3):
        yield lambda: next(rows)


def save_variable(folder: Path) -> Calls:
    strategy = mpidist.MirroredStrategy()
    with strategy.scope():
        w = mpidist.Variable(np.zeros(1000))
    checkpoint = mpidist.Checkpoint(w=w)
    manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=9)
    for _ in range(3):
        yield manager.save


WAYS = {
    "small": reduce_small,
    "large": reduce_large,
    "assign": assign,
    "row": read_row,
    "save": save_variable,
    "strategy": make_strategy,
}


if __name__ == "__main__":
    main()
