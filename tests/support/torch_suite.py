"""Run PyTorch's own tests of torch.distributed over this library's backend.

    python tests/support/torch_suite.py --ranks 3 [--rules gloo] [--over gloo] [name]

Each test runs on all ranks of one MPI job, in a process group of its own. A test that
fails on one rank may leave the others waiting: the job then ends, and another one goes
on with the next test. Prints a line for each test, and the counts.

`--rules gloo`: what PyTorch skips and expects for gloo. `--over gloo`: gloo itself.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

_SECONDS = 90  # for one test


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rules", default="mpidist")
    parser.add_argument("--over", default="mpidist")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    if asked.inside:
        run_here(asked)
    else:
        sys.exit(run_jobs(asked))


def run_jobs(asked):
    """Start jobs until all tests have run; return the exit code."""
    base = [sys.executable, __file__, "--rules", asked.rules, "--over", asked.over]
    listed = subprocess.run(
        [*base, "--inside", "-", "--list", *asked.names],
        env=_environment(asked, "."),
        capture_output=True,
        text=True,
        check=True,
    )
    left = json.loads(listed.stdout.splitlines()[-1])
    results = {}
    while left:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "results")
            for part in ("barrier", "test_dir", "init_dir"):
                Path(folder, part).mkdir()
            command = [*_launch(asked.ranks), *base, "--inside", str(file), *left]
            with Path(folder, "log").open("w+") as log:
                job = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    env=_environment(asked, folder),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
                ended = _watch(job, file)
                log.seek(0)
                text = log.read()
            found = _read(file)
        for name, (outcome, detail) in found.items():
            if outcome != "begun":
                results[name] = outcome, detail
                print(f"{outcome:8} {name} {detail}", flush=True)
        begun = [name for name, (outcome, _) in found.items() if outcome == "begun"]
        lost = begun or ([] if found else left[:1])
        for name in lost:
            why = "hang" if not ended else _last_error(text)
            results[name] = "FAILED", why
            print(f"FAILED   {name} {why}", flush=True)
        left = [name for name in left if name not in results]
    counts = collections.Counter(outcome for outcome, _ in results.values())
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    return int(counts["FAILED"] > 0)


def _launch(ranks):
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True)
    is_open = "Open MPI" in version.stdout or "prte" in version.stdout.lower()
    return [mpirun, *(["--oversubscribe"] if is_open else []), "-n", str(ranks)]


def _environment(asked, folder):
    return {
        **os.environ,
        "BACKEND": asked.rules,
        "WORLD_SIZE": str(asked.ranks),
        "TEMP_DIR": folder,
        "MPIDIST_BANNER": "0",
        "OMP_NUM_THREADS": "1",
        "MPIDIST_DUMPS": folder,
    }


def _watch(job, file):
    """Wait for a job; end it if a test takes too long. Return whether it ended."""
    size = -1
    while True:
        try:
            job.wait(_SECONDS)
            return True
        except subprocess.TimeoutExpired:
            before, size = size, file.stat().st_size if file.exists() else 0
            if before == size:
                job.terminate()
                job.wait()
                return False


def _read(file):
    if not file.exists():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {name: (outcome, detail) for name, outcome, detail in lines}


def _last_error(text):
    lines = [line for line in text.splitlines() if "Error" in line or "ERROR" in line]
    return (lines or ["no error"])[-1][:200]


def run_here(asked):
    """Run tests on this rank, and write what all ranks found to a file."""
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("mpidist")
    import unittest

    import torch.distributed as dist
    from torch.testing._internal.common_utils import set_rng_seed
    from torch.testing._internal.distributed import distributed_test

    base = (
        distributed_test.TestDistBackend,
        distributed_test.DistributedTest._DistTestBase,
    )
    suite = type("TestOverMpi", base, {})
    names = unittest.TestLoader().getTestCaseNames(suite)
    if asked.list:
        chosen = [
            n for n in names if not asked.names or any(a in n for a in asked.names)
        ]
        print(json.dumps(chosen))
        return
    from mpi4py import MPI

    from mpidist.torch import process_group

    process_group.register()
    world = MPI.COMM_WORLD
    start = dist.init_process_group

    def write(*row):
        if world.rank == 0:
            with Path(asked.inside).open("a") as out:
                print(json.dumps(row), file=out)

    for name in asked.names:
        write(name, "begun", "")
        case = suite(name)
        case.rank, case.file_name = world.rank, ""
        test = getattr(suite, name)
        outcome, detail = "passed", ""
        try:
            start(asked.over)
            case._barrier()
            set_rng_seed()
            test(case)
            case._barrier()
        except unittest.SkipTest as skip:
            outcome, detail = "skipped", str(skip)[:100]
        except SystemExit as exit_:
            outcome = "passed" if not exit_.code else "skipped"
            detail = "" if not exit_.code else f"exit code {exit_.code}"
        except BaseException as error:
            traceback.print_exc()
            outcome, detail = "FAILED", f"{type(error).__name__}: {str(error)[:300]}"
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except BaseException as error:
            outcome, detail = "FAILED", f"destroy: {error}"
        everyone = world.allgather((outcome, detail))
        worst = max(
            everyone, key=lambda pair: ("passed", "skipped", "FAILED").index(pair[0])
        )
        write(name, *worst)
        if worst[0] == "FAILED":
            break  # ranks may be at different calls
    os._exit(0)


if __name__ == "__main__":
    main()
