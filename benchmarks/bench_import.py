"""What `import mpidist` costs beside the imports of its dependencies.

    python benchmarks/bench_import.py [--tries 15]

Fresh processes, in turn; printed are medians of the whole process's wall time and
their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

ALONE = "import numpy, h5py; from mpi4py import MPI"
OURS = "import mpidist"


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=15)
    tries = parser.parse_args(arguments).tries
    pairs = [(seconds(ALONE), seconds(OURS)) for _ in range(tries)]
    alone, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"numpy, h5py, mpi4py {alone * 1e3:.0f} ms; mpidist {ours * 1e3:.0f} ms")
    print(f"ratio {ratio:.2f}, median of {tries} pairs")


if __name__ == "__main__":
    main()
