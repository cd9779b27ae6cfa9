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


def commands(
    mpirun: Sequence[str], name: str, folder: Path, is_tiny: bool
) -> Iterator[list[str]]:
    """Yield what is run."""
    python = sys.executable
    tiny = ["--tiny"] if is_tiny else []

    def ranks(count: int) -> list[str]:
        return [*mpirun, "-n", str(count), python]

    def output(stem: str) -> str:
        return f"--output={folder / stem}.json"

    for count in (2, 4):
        stem = f"collectives-{name}-{count}ranks"
        yield [*ranks(count), str(HERE / "bench_collectives.py"), *tiny, output(stem)]
    stem = f"collectives-{name}-2ranks.json"
    yield [
        python,
        str(HERE / "cost_model.py"),
        str(folder / stem),
        output(f"model-{name}"),
    ]
    few = ["--ranks", "1", "2", "--repetitions=1", "--epochs=1"] if is_tiny else []
    yield [
        python,
        str(HERE / "bench_scaling.py"),
        f"--mpirun={shlex.join(mpirun)}",
        *few,
        output(f"scaling-{name}"),
    ]
    count = ["--count=100000"] if is_tiny else []
    yield [*ranks(2), str(HERE / "bench_large.py"), *count, output(f"large-{name}")]
    checkpoints = str(HERE / "bench_checkpoint.py")
    yield [*ranks(2), checkpoints, *tiny, output(f"checkpoint-{name}")]
    frameworks = str(HERE / "bench_frameworks.py")
    yield [*ranks(2), frameworks, *tiny, output(f"frameworks-{name}")]
    yield [*ranks(2), str(HERE / "bench_monitor.py"), *tiny]
    for number in (1, 2):
        stem = f"jax-{name}-{number}rank{'s' if number > 1 else ''}"
        if importlib.util.find_spec("jax") is not None:
            yield [*ranks(number), str(HERE / "bench_jax.py"), *tiny, output(stem)]
        stem = f"input-{name}-{number}rank{'s' if number > 1 else ''}"
        yield [*ranks(number), str(HERE / "bench_input.py"), *tiny, output(stem)]


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
    mpirun = shlex.split(options.mpirun)
    for command in commands(mpirun, options.name, options.folder, options.tiny):
        print(f"\n$ {shlex.join(command)}", flush=True)
        start = time.perf_counter()
        if subprocess.run(command).returncode:
            failed.append(shlex.join(command))
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
    print("\nfailed:" if failed else "\nall ran", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
