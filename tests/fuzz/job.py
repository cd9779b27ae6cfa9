"""Play programs of one model, on all ranks of a job; see `run`.

A model is a module with two functions::

    def draw(random: random.Random) -> list    # of steps that JSON can hold
    def play(world: World, steps: list) -> None  # raises if the library is wrong

Steps are drawn on each rank alike. A program without some of its steps is one, too:
that is how those that fail are shrunk.
"""

import argparse
import importlib
import itertools
import json
import math
import random
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


class World:
    """What programs are played with.

    Attributes:
      comm: all ranks; nothing of the library uses it.
      rank, size: of this process.
      folder: an empty one for each program, which all ranks see.
    """

    def __init__(self) -> None:
        from mpi4py import MPI  # a model may have to start the program again first

        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.folder = Path()
        self._strategies: dict[int, Any] = {}
        self._parts: dict[int, Any] = {}

    def part(self, ranks: int) -> Any:
        """Return a communicator of the first ranks; None on others. Collective."""
        if ranks not in self._parts:
            part = self.comm.Split(int(self.rank >= ranks), self.rank)
            self._parts[ranks] = part if self.rank < ranks else None
        return self._parts[ranks]

    def forget(self) -> None:
        """Use no strategy that was made before: ranks have left it differently."""
        self._strategies.clear()

    def strategy(self, ranks: int | None = None) -> Any:
        """Return a strategy of the first ranks; None on others. Collective."""
        import mpidist

        ranks = ranks or self.size
        made = self._strategies.get(ranks)
        if made is None or not made.extended.consensus.is_usable:
            part = self.part(ranks)
            if part is not None:
                cpu = ["CPU:0"]
                made = mpidist.MirroredStrategy(cpu, communicator=part)
                self._strategies[ranks] = made
        return made

    def attempt(self, call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """Return what a call returns, and its error of the library; one is None.

        Collective: all ranks raise, or none.
        """
        import mpidist

        result, error, other = None, None, ""
        try:
            result = call()
        except mpidist.MpidistError as caught:
            error = caught
        except Exception:
            other = traceback.format_exc()
        self.require(not other, other)
        errors = self.comm.allgather(error and f"{type(error).__name__}: {error}")
        self.require(len({e is None for e in errors}) == 1, f"some raise: {errors}")
        return result, error

    def require(self, is_right: bool, text: Any = "") -> None:
        """Raise on all ranks unless it is right on all. Collective."""
        wrong = self.comm.allgather("" if is_right else f"{text}" or "wrong")
        texts = [f"rank {i}: {text}" for i, text in enumerate(wrong) if text]
        if texts:
            raise AssertionError("\n".join(texts))


def draw(model: str, seed: int | str) -> list[Any]:
    """Return the program of a seed."""
    return list(importlib.import_module(model).draw(random.Random(f"{model} {seed}")))


def play(world: World, model: str, steps: list[Any]) -> None:
    """Play a program in a folder of its own; raise if the library is wrong."""
    folder = tempfile.mkdtemp(prefix=f"fuzz-{model}-") if world.rank == 0 else None
    world.folder = Path(world.comm.bcast(folder))
    try:
        importlib.import_module(model).play(world, steps)
        world.comm.Barrier()
    finally:
        if world.rank == 0:
            shutil.rmtree(world.folder, ignore_errors=True)


def main() -> None:
    """Play one program, or those of many seeds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--program", help="a JSON file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--count", type=int, help="play so many, however long it takes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    importlib.import_module(options.model)
    world, end = World(), time.monotonic() + options.seconds
    if options.program:
        programs = iter([("", json.loads(Path(options.program).read_text()))])
    else:
        seeds = itertools.count(options.seed)
        if options.count:
            seeds, end = itertools.islice(seeds, options.count), math.inf
        programs = ((f"seed {seed}", draw(options.model, seed)) for seed in seeds)
    for name, steps in programs:
        if world.rank == 0:
            print(name, flush=True)
        try:
            play(world, options.model, steps)
        except BaseException:
            print(f"rank {world.rank}: {traceback.format_exc()}", flush=True)
            # Others may wait in a call that this rank has left
            time.sleep(1.0)
            world.comm.Abort(1)
        if not world.comm.bcast(time.monotonic() < end):
            break


if __name__ == "__main__":
    main()
