"""Run all benchmarks under one MPI, and write their results.

    python benchmarks/run_all.py --mpirun .venv/bin/mpirun --name mpich

Start it with the Python that the ranks are to have. The machine should do nothing else:
it takes half an hour. What fails is said at the end, and the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
# Script, numbers of ranks (0: it starts jobs itself), name of the results, arguments.
# In the latter two, NAME is the MPI library's, FOLDER that of results
TABLE: list[tuple[str, tuple[int, ...], str, list[str]]] = [
    ("bench_collectives", (2, 4), "collectives-NAME-RANKS", []),
    ("cost_model", (0,), "model-NAME", ["FOLDER/collectives-NAME-2ranks.json"]),
    ("bench_scaling", (0,), "scaling-NAME", ["--mpirun=MPIRUN"]),
    ("bench_large", (2,), "large-NAME", []),
    ("bench_checkpoint", (2,), "checkpoint-NAME", []),
    ("bench_frameworks", (2,), "frameworks-NAME", []),
    ("bench_step", (0,), "step-NAME", ["--mpirun=MPIRUN"]),
    ("bench_input", (1, 2), "input-NAME-RANKS", []),
]
NEEDED = {"bench_frameworks": "torch"}


def commands(options: argparse.Namespace) -> Iterator[list[str]]:
    """Yield what is run."""
    for script, numbers, stem, arguments in TABLE:
        if importlib.util.find_spec(NEEDED.get(script, "mpi4py")) is None:
            print(f"{script} is left out: {NEEDED[script]} is not installed")
            continue
        for ranks in numbers:
            words = [*arguments, f"--output=FOLDER/{stem}.json"]
            for word, text in {
                "FOLDER": str(options.folder),
                "NAME": options.name,
                "RANKS": f"{ranks}rank{'s' if ranks > 1 else ''}",
                "MPIRUN": options.mpirun,
            }.items():
                words = [argument.replace(word, text) for argument in words]
            mpirun = [*shlex.split(options.mpirun), "-n", str(ranks)] if ranks else []
            tiny = ["--tiny"] if options.tiny else []
            yield [*mpirun, sys.executable, str(HERE / f"{script}.py"), *tiny, *words]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mpirun", default="mpirun", help="with its options, in quotes")
    add("--name", default="mpi", help="of the MPI library, in the files' names")
    add("--folder", type=Path, default=HERE / "results", help="for the results")
    add("--tiny", action="store_true", help="only see that all run")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for command in commands(options):
        print(f"\n$ {shlex.join(command)}", flush=True)
        start = time.perf_counter()
        if subprocess.run(command).returncode:
            failed.append(shlex.join(command))
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
    print("\nfailed:" if failed else "\nall ran", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
