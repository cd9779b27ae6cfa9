"""Measure and test mpidist on this machine's GPUs, by one command.

    python benchmarks/gpu/run_all.py --output results

Starts MPI jobs by itself, with the mpirun of the MPI library that mpi4py loads, on each
number of ranks (ranks may share a GPU). The machine should do nothing else: it takes
about 20 minutes. The parts:

    facts      the GPU, the MPI library, and whether that takes addresses of GPU memory
    checks     drivers and CuPy: whether they are as was thought, pass or FAIL
    contract   the tests that need a GPU, NumPy being the oracle; a job for each file,
               since a test that fails on one of two ranks ends its job
    tune       `python -m mpidist tune`; what it finds holds for the parts below
    sizes      all_reduce of 8 bytes to 1 GiB by each transport, raw CUDA-aware MPI, raw
               NCCL (where each rank has a GPU) and copies through pageable memory;
               8 bytes: raw <= 1.5x the time; 64 MiB, best: pageable >= 10x the speed
    gradients  those of ResNet-50: raw MPI, one array at a time >= 3x the speed
    limit      64 MiB by `ipc`: copies within the GPU's memory >= 0.6x the bytes per
               second, counted as it moves them, and as any way must
    input      HDF5 rows to GPU memory: copies from page-locked memory >= 0.8x
    job        jobs/train_digits.py on the GPU and on the CPU: the same digits
    gathers    all_gather along both axes
    torch      a step of torch's DDP by NCCL, each rank with a GPU of its own: as
               torchrun starts it <= 1.02x the time

Each part has a time limit; if one fails, the others go on. Into the output folder go,
named by the GPU, a JSON file of all that was found and the table of what must be shown;
and a log of all that was printed. Where a command may take some minutes only:
`--minutes 8 --go-on`, again and again, does what gpu-run.json there says is left.

The exit status is 0 if all parts ran, whatever they measured; 1 if one failed, or there
is no GPU; 3 if there was no time for some.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_findings
import harness

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
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
    "torch": (1, 60),
}
_QUICK_LIMIT_SECONDS = 60
_TEST_SECONDS = 120  # then pytest shows the stacks of all threads
_GRACE_SECONDS = 10
# Less time than that is too little to begin with a job
_LEAST_SECONDS, _QUICK_SECONDS = 45, 5
_MOST_FAILURES = 5  # of one file
_TIME_IS_OVER = 3
_NO_TESTS = 5  # of pytest, where a file is skipped whole for what is not installed
_CROWD = {  # more ranks than cores are no error, and ranks have threads of their own
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PYTHONUNBUFFERED": "1",
}
_PYTEST = {
    "MPIDIST_ALLOW_SHARED_GPU": "1",
    "MPIDIST_TRANSPORTS": "/not/there.json",
    # Of others that happen to be installed, the tests know nothing
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PY_COLORS": "0",
    # JAX would take three quarters of the GPU, on each rank
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# Loads MPI, and a process in MPI starts no MPI jobs
_LOOK = """
import json
from mpi4py import MPI
from mpidist.device import binding, probe
count, why = binding.gpu_count(), "CuPy is not installed"
try:
    import cupy
    why = f"CuPy {cupy.__version__} sees {cupy.cuda.runtime.getDeviceCount()}"
except ImportError:
    pass
except Exception as error:
    why = f"CuPy {cupy.__version__} says: {error}"
mpirun = probe._mpirun(probe.library_path())
name = MPI.Get_library_version().partition("\\n")[0].rstrip("\\0 ")
print(json.dumps([count, why, name, mpirun and str(mpirun)]))
"""


@dataclasses.dataclass(frozen=True)
class Job:
    """One command of a part, on so many ranks, with variables of its own."""

    part: str
    ranks: int
    label: str
    script: Sequence[str]
    variables: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """What is said of it."""
        return f"{self.part}{self.label and ' ' + self.label}, {_ranks(self.ranks)}"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a command ended: "ok" or what else, after how long, and what it printed."""

    how: str
    seconds: float = 0.0
    output: str = ""
    is_stopped: bool = True


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def tests_of_gpus() -> list[Path]:
    """Return the files with tests that need a GPU, but for that of benchmarks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    files.remove(ROOT / "tests" / "test_benchmarks.py")
    return [path for path in files if "mark.gpu" in path.read_text()]


class Run:
    """All parts on all numbers of ranks, and what they find."""

    def __init__(
        self, options: argparse.Namespace, mpirun: Sequence[str], work: Path
    ) -> None:
        self._options, self._mpirun, self._work = options, mpirun, work
        self._ends = time.monotonic() + 60 * options.minutes
        self._log = options.output / "gpu-run.log"
        name = "gpu-quick.json" if options.quick else "gpu-run.json"
        self._state = options.output / name
        # How each has ended, by name: of earlier calls, too
        self.ended: dict[str, dict[str, Any]] = {}
        if options.go_on and self._state.exists():
            self.ended = json.loads(self._state.read_text())

    def say(self, text: str) -> None:
        """Print a line, and log it."""
        print(text, flush=True)
        with self._log.open("a") as log:
            log.write(f"{text}\n")

    def jobs(self, part: str, ranks: int) -> Iterator[Job]:
        """Yield the commands of a part on so many ranks."""
        quick, is_tiny = ["--quick"] * self._options.quick, self._options.quick
        shared = {"MPIDIST_ALLOW_SHARED_GPU": "1"}
        if part == "contract":
            is_aware = self._facts(ranks).get("is_aware")
            variables = _PYTEST | ({"MPIDIST_CUDA_AWARE": "1"} if is_aware else {})
            script = ["-m", "pytest", "--all", "-mgpu", "-q", "-rs", "-ppytest_mpi"]
            script += [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
            script += ["-o", f"faulthandler_timeout={_TEST_SECONDS}"]
            script += ["-k", "each_rank_has_a_gpu"] * is_tiny
            for path in tests_of_gpus():
                if not is_tiny or path.stem == "test_gpu":
                    yield Job(part, ranks, path.stem, [*script, str(path)], variables)
        elif part == "tune":
            size, times = (1 << 10, 1) if is_tiny else (64 << 20, 3)
            script = ["-m", "mpidist", "tune", f"--output={self._tuned(ranks)}"]
            script += [f"--largest-bytes={size}", f"--repetitions={times}", "--force"]
            yield Job(part, ranks, "", script, shared)
        elif part == "job":
            script = [str(ROOT / "jobs" / "train_digits.py")]
            script.append(f"--data-dir={self._work / 'digits'}")
            epochs, on_cpu = 2 if is_tiny else 40, ["--devices=CPU:0"]
            # The first compiles the kernels
            for label, n, more in (
                ("warm-up", 1, []),
                ("GPU", epochs, []),
                ("CPU", epochs, on_cpu),
            ):
                variables = {**shared, "TQDM_DISABLE": "1"}
                command = [*script, f"--epochs={n}", *more]
                yield Job(part, ranks, label, command, variables)
        else:
            script = [str(HERE / "bench_gpu.py"), part, f"--records={self._records}"]
            script.append(f"--seconds={0.7 * self._limit(part)}")
            yield Job(part, ranks, "", [*script, *quick])

    @property
    def _records(self) -> Path:
        return self._work / "records.jsonl"

    def _tuned(self, ranks: int) -> Path:
        return self._options.output / f"gpu-transports-{ranks}.json"

    def _limit(self, part: str) -> float:
        most = _QUICK_LIMIT_SECONDS if self._options.quick else float("inf")
        return min(PARTS[part][1], most)

    def _facts(self, ranks: int) -> dict[str, Any]:
        records = self.ended.get(f"facts, {_ranks(ranks)}", {}).get("records") or [{}]
        return dict(records[-1])

    def run(self) -> None:
        """Run what is left of all parts; keep what was found after each job."""
        for part in self._options.parts:
            for ranks in sorted(self._options.ranks, reverse=True):
                jobs = list(self.jobs(part, ranks)) if ranks >= PARTS[part][0] else []
                left = [
                    j for j in jobs if not self.ended.get(j.name, {}).get("is_done")
                ]
                if left and part != "contract":  # each of whose jobs stands for itself
                    left = jobs
                for job in left:
                    self.ended[job.name] = self._run(job)
                    self._state.write_text(harness.as_text(self.ended) + "\n")

    def _run(self, job: Job) -> dict[str, Any]:
        """Run a job; return how it ended, and what it found unless it is run again."""
        self._records.unlink(missing_ok=True)
        left, ended = (
            self._ends - time.monotonic(),
            Ended("was not run: no time was left"),
        )
        if left > (_QUICK_SECONDS if self._options.quick else _LEAST_SECONDS):
            ended = self._run_past_failures(job)
        self.say(f"== {job.name}: {ended.how}, {ended.seconds:.1f} s")
        is_done = not ended.is_stopped or left >= self._limit(job.part)
        found: dict[str, Any] = {
            "ended": ended.how,
            "seconds": ended.seconds,
            "is_done": is_done,
            "label": job.label,
        }
        if not is_done:
            return found
        if "pytest" in job.script:
            found["tests"] = gpu_findings.contract_of(ended.output)
        if job.part == "job":
            found["learned"] = gpu_findings.job_of(ended.output)
        if job.part == "tune" and self._tuned(job.ranks).exists():
            found["tune"] = json.loads(self._tuned(job.ranks).read_text())
        if self._records.exists():
            lines = self._records.read_text().splitlines()
            found["records"] = list(map(json.loads, lines))
        return found

    def _run_past_failures(self, job: Job) -> Ended:
        """Run a job; one of tests again and again without those that have failed.

        Of several ranks, the first test that fails ends the job.
        """
        failures: list[str] = []
        first: Ended | None = None
        seconds, output = 0.0, ""
        for _ in range(_MOST_FAILURES):
            ended = self._start(job, [f"--deselect={test}" for test in failures])
            first = first or ended
            seconds, output = seconds + ended.seconds, output + ended.output
            tests = gpu_findings.contract_of(ended.output)["failures"]
            if ended.is_stopped or job.ranks == 1 or not tests:
                break
            failures += tests
            self.say(f"== again without {', '.join(tests)}")
        return Ended(first.how, seconds, output, ended.is_stopped)

    def _start(self, job: Job, more: Sequence[str]) -> Ended:
        """Run a command; what it prints goes to the log, too.

        It is ended after its own limit, or after the time of this call.
        """
        command = [
            *self._mpirun,
            "-n",
            str(job.ranks),
            sys.executable,
            *job.script,
            *more,
        ]
        self.say(f"\n== {job.name}\n$ {shlex.join(command)}")
        tuned = {"MPIDIST_TRANSPORTS": str(self._tuned(job.ranks))}
        started, lines = time.monotonic(), list[str]()
        limit = min(self._limit(job.part), self._ends - started)
        process = subprocess.Popen(
            command,
            env=environment() | tuned | job.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        def pass_on() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    lines.append(line.replace("\0", ""))
                    self.say(lines[-1].rstrip("\n"))

        reader = threading.Thread(target=pass_on, daemon=True)
        reader.start()
        try:
            code = process.wait(max(0, limit))
            is_ok = code == 0 or (code == _NO_TESTS and "pytest" in job.script)
            how, is_stopped = "ok" if is_ok else f"failed with status {code}", False
        except subprocess.TimeoutExpired:
            how, is_stopped = f"was stopped after {limit:.0f} s", True
        finally:
            _end(process)
        reader.join(_GRACE_SECONDS)
        return Ended(how, time.monotonic() - started, "".join(lines), is_stopped)

    def _asked_for(self) -> dict[str, dict[str, Any]]:
        """Return how the parts of this call have ended, for all numbers of ranks."""
        parts, ranks = self._options.parts, map(_ranks, self._options.ranks)
        ends = tuple(f", {each}" for each in ranks)
        asked = self.ended.items()
        return {
            name: job
            for name, job in asked
            if re.split("[ ,]", name)[0] in parts and name.endswith(ends)
        }

    @property
    def failed(self) -> list[str]:
        """What did not end well, of all that was asked for."""
        asked = self._asked_for().items()
        return [f"{n}: {job['ended']}" for n, job in asked if job["ended"] != "ok"]

    @property
    def is_over(self) -> bool:
        """Whether there was time for all that was asked for."""
        return all(job["is_done"] for job in self._asked_for().values())

    def finish(self) -> None:
        """Write the results, and the table of what must be shown, which is printed."""
        lines: list[str] = []
        for ranks in sorted(self._options.ranks, reverse=True):
            end = f", {_ranks(ranks)}"
            jobs = {n: job for n, job in self.ended.items() if n.endswith(end)}
            lines += [end[2:], *gpu_findings.lines_of(jobs, ranks), ""]
        lines += self.failed or ["all parts ran"]
        if self._options.quick:
            lines.append("(quick: these numbers mean nothing)")
        self.say("\n" + "\n".join(lines))
        machine = self._facts(max(self._options.ranks)).get("machine", {})
        name = re.sub("[^a-z0-9]+", "-", machine.get("gpu", "unknown").lower())
        stem = self._options.output / f"gpu-{name.strip('-')}"
        Path(f"{stem}.txt").write_text("\n".join(lines) + "\n")
        result = {
            "machine": machine,
            "date": datetime.date.today().isoformat(),
            "quick": self._options.quick,
            "jobs": self.ended,
            "table": lines,
        }
        Path(f"{stem}.json").write_text(harness.as_text(result) + "\n")


def _end(process: subprocess.Popen[str]) -> None:
    """End a launcher, which ends its ranks if it is given the time."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue


def environment() -> dict[str, str]:
    """Return the variables of all jobs."""
    users = harness.USERS_ENVIRONMENT
    path = os.pathsep.join(filter(None, [str(ROOT), users.get("PYTHONPATH")]))
    return _CROWD | users | {"PYTHONPATH": path}


def write_digits(folder: Path) -> None:
    """Write the data of the main job: noisy copies of ten made-up pictures."""
    import digits
    import numpy as np

    random, rows = np.random.default_rng(0), 1797
    pictures = random.uniform(0, digits.BRIGHTEST, (digits.CLASSES, digits.PIXELS))
    labels = random.integers(0, digits.CLASSES, rows)
    noisy = pictures[labels] + random.normal(0, 6, (rows, digits.PIXELS))
    shifts = digits.make_parser(None).get_default("shifts")
    digits.write(folder, shifts, noisy.clip(0, digits.BRIGHTEST), labels)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder for the results")
    add("--ranks", type=int, nargs="+", default=[1, 2], help="of the jobs (1 2)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--mpirun", help="with its options, in quotes; by default the library's own")
    add("--minutes", type=float, default=60.0, help="after which no part goes on")
    add("--quick", action="store_true", help="only see that all runs")
    add("--go-on", action="store_true", help="leave out what was done before")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # So that jobs are ended, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    look = [sys.executable, "-c", _LOOK]
    looked = subprocess.run(look, env=environment(), capture_output=True, text=True)
    if looked.returncode:
        raise SystemExit(f"MPI does not start:\n{looked.stderr or looked.stdout}")
    gpus, why, mpi, mpirun = json.loads(looked.stdout.splitlines()[-1])
    if not gpus:
        raise SystemExit(f"there is no GPU here: {why}")
    beside = [Path(sys.executable).parent / "mpirun", shutil.which("mpirun")]
    launchers = [path for path in (mpirun, *beside) if path and Path(path).exists()]
    if not (options.mpirun or launchers):
        raise SystemExit(f"there is no mpirun for {mpi}: name it by --mpirun")
    mpirun = shlex.split(options.mpirun) if options.mpirun else [str(launchers[0])]
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        run = Run(options, mpirun, Path(work))
        run.say(f"{gpus} GPUs, {mpi}, {shlex.join(mpirun)}")
        if importlib.util.find_spec("sklearn") is None:
            write_digits(Path(work, "digits"))
            run.say("scikit-learn is not installed: the main job learns made-up digits")
        run.run()
        run.finish()
    if not run.is_over:
        return _TIME_IS_OVER
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
