"""The parts of `run_all.py`: which commands they are, and running them in time."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

__all__ = ["Ended", "Job", "Plan", "run", "tests_of_gpus"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
_GRACE_SECONDS = 10
# How many ranks it needs, how many seconds it may take; what matters most comes first
PARTS = {
    "facts": (1, 100),
    "checks": (1, 60),
    "contract": (1, 240),
    "tune": (2, 60),
    "sizes": (2, 150),
    "gradients": (2, 40),
    "limit": (2, 30),
    "input": (1, 60),
    "job": (1, 60),
    "gathers": (2, 30),
    "impi": (2, 120),
}
# Each of their jobs stands for itself
SINGLY = ("contract", "impi")
_QUICK_SECONDS = 60
# A test that hangs ends with the stacks of all threads before the job is ended
_TEST_SECONDS = 120


@dataclasses.dataclass(frozen=True)
class Job:
    """One command of a part.

    Args:
      part: its name.
      ranks: of MPI.
      label: tells it from others of its part.
      command: what is run.
      variables: beside those of this process.
      seconds: after which it is ended.
      records: where it writes what it finds, if not to the file of `Plan.records`.
    """

    part: str
    ranks: int
    label: str
    command: list[str]
    variables: dict[str, str]
    seconds: float
    records: Path | None = None


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended: "ok" or what else, after how long, and what it printed."""

    how: str
    seconds: float
    output: str
    is_stopped: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """What all commands have in common.

    Args:
      mpirun: the launcher, with its options.
      work: a folder for what only the parts read.
      is_quick: whether only to see that all runs.
      impi: a folder with Intel MPI, as PyPI's impi-rt has it; None without.
    """

    mpirun: Sequence[str]
    work: Path
    is_quick: bool
    impi: Path | None = None

    def records(self, ranks: int) -> Path:
        """Return the file to which parts write what they find."""
        return self.work / f"found-{ranks}.jsonl"

    def table(self, ranks: int) -> Path:
        """Return the file of the table that `tune` writes."""
        return self.work / f"transports-{ranks}.json"

    @property
    def digits(self) -> Path:
        """The folder of the main job's data."""
        return self.work / "digits"

    def jobs(self, part: str, ranks: int, is_aware: bool) -> Iterator[Job]:
        """Yield the commands of a part on so many ranks; none if it needs more.

        Whether MPI takes addresses of memory on GPUs, the tests are told.
        """
        least, seconds = PARTS[part]
        if ranks < least:
            return
        if self.is_quick:
            seconds = min(seconds, _QUICK_SECONDS)
        make = {
            "contract": self._contract,
            "tune": self._tune,
            "job": self._job,
            "impi": self._impi,
        }
        if part in make:
            yield from make[part](ranks, seconds, is_aware)
            return
        script = self._bench(part, self.records(ranks), seconds)
        yield self._make(part, ranks, script, seconds, {})

    def _bench(self, part: str, records: Path, seconds: float) -> list[str]:
        script = [str(HERE / "bench_gpu.py"), part]
        script += ["--records", str(records), f"--seconds={0.7 * seconds}"]
        return [*script, "--quick"] if self.is_quick else script

    def _make(
        self,
        part: str,
        ranks: int,
        script: list[str],
        seconds: float,
        variables: dict[str, str],
        label: str = "",
    ) -> Job:
        command = [*self.mpirun, "-n", str(ranks), sys.executable, *script]
        common = {"MPIDIST_TRANSPORTS": str(self.table(ranks))}
        return Job(part, ranks, label, command, common | variables, seconds)

    def _contract(self, ranks: int, seconds: float, is_aware: bool) -> Iterator[Job]:
        """Yield a job for each file: a test that fails ends its job."""
        variables = {"MPIDIST_CUDA_AWARE": "1"} if is_aware else {}
        for path in tests_of_gpus():
            tests = [str(path)]
            if self.is_quick and path.stem != "test_gpu":
                continue
            if self.is_quick:
                tests += ["-k", "each_rank_has_a_gpu"]
            yield self._tests(ranks, seconds, tests, variables, path.stem)

    def _tests(
        self,
        ranks: int,
        seconds: float,
        tests: Sequence[str],
        variables: dict[str, str],
        label: str,
    ) -> Job:
        script = ["-m", "pytest", "--all", "-m", "gpu", "-q", "-rs", "-p", "pytest_mpi"]
        script += [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
        script += ["-o", f"faulthandler_timeout={_TEST_SECONDS}", *tests]
        common = {
            "MPIDIST_ALLOW_SHARED_GPU": "1",
            "MPIDIST_TRANSPORTS": str(self.work / "none.json"),
            # Of others that happen to be installed, the tests know nothing
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PY_COLORS": "0",
            # JAX would take three quarters of the GPU, on each rank
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        return self._make("contract", ranks, script, seconds, common | variables, label)

    def _tune(self, ranks: int, seconds: float, _: bool) -> Iterator[Job]:
        script = ["-m", "mpidist", "tune", f"--output={self.table(ranks)}"]
        size, times = (1 << 10, 1) if self.is_quick else (64 << 20, 3)
        script += [f"--largest-bytes={size}", f"--repetitions={times}"]
        variables = {"MPIDIST_ALLOW_SHARED_GPU": "1"}
        yield self._make("tune", ranks, script, seconds, variables)

    def _job(self, ranks: int, seconds: float, _: bool) -> Iterator[Job]:
        """Yield a run that compiles the kernels, one on the GPU, and one on the CPU."""
        script = [str(ROOT / "jobs" / "train_digits.py")]
        script.append(f"--data-dir={self.digits}")
        epochs = 2 if self.is_quick else 40
        for label, count in (("warm-up", 1), ("GPU", epochs), ("CPU", epochs)):
            arguments = [*script, f"--epochs={count}"]
            if label == "CPU":
                arguments.append("--devices=CPU:0")
            variables = {"MPIDIST_ALLOW_SHARED_GPU": "1", "TQDM_DISABLE": "1"}
            yield self._make("job", ranks, arguments, seconds, variables, label)

    def _impi(self, ranks: int, seconds: float, _: bool) -> Iterator[Job]:
        """Yield what tells whether Intel MPI takes addresses of GPUs, if told to."""
        if self.impi is None:
            return
        intel = dataclasses.replace(self, mpirun=[str(self.impi / "bin/mpiexec.hydra")])
        for offload in ("0", "1"):
            label = f"I_MPI_OFFLOAD={offload}"
            variables = {
                "I_MPI_ROOT": str(self.impi),
                "I_MPI_FABRICS": "shm",
                "I_MPI_OFFLOAD": offload,
                "I_MPI_OFFLOAD_CUDA_LIBRARY": "libcuda.so.1",
                "MPI4PY_LIBMPI": str(self.impi / "lib/libmpi.so.12"),
                "MPIDIST_ALLOW_SHARED_GPU": "1",
            }
            for part in ("facts", "sizes"):
                records = self.work / f"impi-{ranks}-{offload}-{part}.jsonl"
                script = self._bench(part, records, seconds)
                name = f"{label} {part}"
                job = intel._make("impi", ranks, script, seconds, variables, name)
                yield dataclasses.replace(job, records=records)
            # By the tests it shows, whatever a trial has found before
            variables["MPIDIST_CUDA_AWARE"] = offload
            tests = [str(ROOT / "tests" / "comm" / "transports" / "test_transports.py")]
            job = intel._tests(ranks, seconds, tests, variables, f"{label} tests")
            yield dataclasses.replace(job, part="impi")


def tests_of_gpus() -> list[Path]:
    """Return the files with tests that need a GPU, but for that of benchmarks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        path
        for path in files
        if "mark.gpu" in path.read_text() and path.stem != "test_benchmarks"
    ]


def run(job: Job, environment: Mapping[str, str], seconds: float, log: TextIO) -> Ended:
    """Run a command; what it prints goes to a log, and on to standard output.

    Its own variables come to those of `environment`. It is ended after its own limit,
    or after `seconds` if they are less.
    """
    limit, is_stopped = min(job.seconds, seconds), False
    started = time.monotonic()
    process = subprocess.Popen(
        job.command,
        env={**environment, **job.variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=_pass_on, args=(process, lines, log), daemon=True)
    reader.start()
    try:
        code = process.wait(limit)
        how = "ok" if code == 0 else f"failed with status {code}"
    except subprocess.TimeoutExpired:
        how, is_stopped = f"was stopped after {limit:.0f} s", True
    finally:
        if process.poll() is None:
            _end(process)
    reader.join(_GRACE_SECONDS)
    return Ended(how, time.monotonic() - started, "".join(lines), is_stopped)


def _pass_on(process: subprocess.Popen[str], lines: list[str], log: TextIO) -> None:
    assert process.stdout is not None
    with process.stdout:
        for printed in process.stdout:
            line = printed.replace("\0", "")
            lines.append(line)
            for stream in (log, sys.stdout):
                stream.write(line)
                stream.flush()


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher, which ends its ranks if it is given the time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(_GRACE_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
