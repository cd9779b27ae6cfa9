"""Run PyTorch's own tests of torch.distributed over this library's backend.

    python tests/support/torch_suite.py --ranks 3 [--rules mpidist] [--over gloo] [name]

Each test runs on all ranks of one MPI job, in a process group of its own. A test that
fails on one rank may leave the others waiting: the job then ends, and another one goes
on with the next test. Prints a line for each test, and the counts. It fails if a test
fails that is not in `EXPECTED`, or one passes that is there.

PyTorch skips and expects what it does for gloo, or for the backend of `--rules`.
`--over gloo` runs the tests over gloo itself, to compare. Needs the package expecttest.
"""

import argparse
import collections
import json
import os
import posix
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

_SECONDS = 90  # for one test

_WORDS = "expects the words of gloo's errors; ours name rank, operation and line"
_GPU = "asks for a GPU although the rules of gloo do not say so"
# Why tests fail that are none of this backend's, each over gloo or by its name
EXPECTED = {
    "test_SyncBatchNorm_process_group": "needs torchvision",
    "test_all_to_all_cuda": _GPU,
    "test_all_to_all_cuda_complex": _GPU,
    "test_all_to_all_full_group_cuda": _GPU,
    "test_barrier_timeout_full_group": _WORDS,
    "test_batch_isend_irecv_mixed_backend_err": _GPU,
    "test_batch_isend_irecv_op_err": _GPU,
    "test_monitored_barrier_gloo": _WORDS,
    "test_monitored_barrier_gloo_rank_0_timeout": _WORDS,
    "test_monitored_barrier_gloo_subgroup": _WORDS,
    "test_monitored_barrier_wait_all_ranks": _WORDS,
    "test_sparse_all_reduce_sum": "sparse tensors are refused",
    "test_get_backend": "the name is mpidist, and the rules are gloo's",
}
_OF_4_RANKS = {
    "test_new_subgroups_with_group_param": "needs 4 ranks, and does not say so"
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rules", default="gloo")
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
    expected = EXPECTED | (_OF_4_RANKS if asked.ranks < 4 else {})
    outcomes = {}
    while left:
        results, end = run_job(asked, base, left)
        for name, (outcome, detail) in results.items():
            detail = end if outcome == "begun" else detail
            outcome = "FAILED" if outcome == "begun" else outcome
            if name in expected and asked.over == "mpidist" and outcome != "skipped":
                outcome = "expected" if outcome == "FAILED" else "UNEXPECTED"
                detail = expected[name]
            outcomes[name] = outcome
            print(f"{outcome:10} {name} {detail}", flush=True)
        left = [name for name in left if name not in outcomes]
    counts = collections.Counter(outcomes.values())
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    return int(counts["FAILED"] + counts["UNEXPECTED"] > 0)


def run_job(asked, base, names):
    """Run tests until all have run, or one does not end.

    Returns the outcome and detail of each that has begun, and how the job has ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results")
        for part in ("barrier", "test_dir", "init_dir"):
            Path(folder, part).mkdir()
        with Path(folder, "log").open("w+") as log:
            job = subprocess.Popen(
                [*_launch(asked.ranks), *base, "--inside", str(file), *names],
                stdin=subprocess.DEVNULL,
                env=_environment(asked, folder),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            is_ended = _watch(job, file)
            log.seek(0)
            end = _last_error(log.read()) if is_ended else "hang"
        return _read(file) or {names[0]: ("begun", "")}, end


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
    from torch.testing._internal.common_distributed import TEST_SKIPS, DistTestCases

    reasons = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
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
        _reset_barrier(distributed_test.Barrier, world)
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
            detail = reasons.get(exit_.code, exit_.code) if exit_.code else ""
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
    posix._exit(0)  # without the clean-up of broken groups


def _reset_barrier(barrier, world):
    """Let the tests' own barrier count from 0 again on all ranks."""
    world.Barrier()
    barrier.barrier_id = 0
    if world.rank == 0:
        barrier.init()
    world.Barrier()


if __name__ == "__main__":
    main()
