"""How long a job lasts after one of its ranks has failed, and what it then says.

    python benchmarks/faults.py [--ranks 3] [--tries 10] [--json FILE]

Each fault is a real job under the mpirun of this environment. Printed are, over all
tries: how many jobs ended, the median and the longest time from the failure to the end
of mpirun, and how many tracebacks were printed at most.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import launching

PROLOGUE = """
import time
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy()
rank = strategy.extended.replica_id

def fail():
    print(f"failed at {time.time()}", flush=True)
    raise KeyError("the reason")

"""

FAULTS = {
    "exception, others in a collective": """
if rank == 1:
    fail()
strategy.reduce("SUM", np.ones(1000))
""",
    "exception in run, others in all_reduce": """
def step():
    if rank == 1:
        fail()
    return mpidist.get_replica_context().all_reduce("SUM", np.ones(1000))

strategy.run(step)
""",
    "exception, others computing": """
if rank == 1:
    fail()
while True:
    np.ones(1000).sum()
""",
    "exception on all ranks": """
fail()
""",
    "exception in a mapped function": """
def bad(x):
    if rank == 1 and x > 20:
        fail()
    return x

data = mpidist.Dataset.from_tensor_slices(np.arange(60.0)).map(bad).batch(6)
for batch in strategy.experimental_distribute_dataset(data):
    strategy.reduce("SUM", batch, axis=0)
""",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of all tries of one fault."""

    fault: str
    tries: int
    ended: int
    median_seconds: float
    longest_seconds: float
    tracebacks: int


def measure(fault: str, ranks: int, tries: int) -> Outcome:
    """Run the job of one fault several times."""
    script = PROLOGUE + FAULTS[fault]
    command = [*launching.mpirun_command(ranks), sys.executable, "-c", script]
    seconds, tracebacks = [], []
    for _ in range(tries):
        try:
            job = launching.run(command, seconds=30)
        except AssertionError as error:
            print(error, file=sys.stderr)
            continue
        ended = time.time()
        failed = [
            line.split()[-1] for line in job.stdout.splitlines() if "failed" in line
        ]
        assert job.returncode != 0, job
        seconds.append(ended - min(map(float, failed)))
        tracebacks.append(job.stderr.count("Traceback (most recent call last)"))
    return Outcome(
        fault,
        tries,
        len(seconds),
        statistics.median(seconds),
        max(seconds),
        max(tracebacks),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)

    library = " ".join(map(str, MPI.get_vendor()))
    print(f"{library}, {options.ranks} ranks, Python {platform.python_version()}")
    print(f"{'fault':42} tries ended  median    max  tracebacks")
    outcomes = []
    for fault in FAULTS:
        o = measure(fault, options.ranks, options.tries)
        outcomes.append(dataclasses.asdict(o))
        print(
            f"{o.fault:42} {o.tries:5} {o.ended:5} {o.median_seconds:6.2f}s "
            f"{o.longest_seconds:5.2f}s {o.tracebacks:11}"
        )
    if options.json is not None:
        result = {"mpi": library, "ranks": options.ranks, "outcomes": outcomes}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
