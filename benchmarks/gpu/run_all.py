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
named by the GPU: a JSON file for each number of ranks, and the table of what must be
shown; and a log of all that was printed.

Where a command may take some minutes only: `--minutes 8 --go-on`, again and again, does
what the results in the output folder say is left.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_findings
import harness
import numpy as np

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
    "torch": (1, 60),
}
_QUICK_LIMIT_SECONDS = 60
# A test that hangs ends with the stacks of all threads before the job is ended
_TEST_SECONDS = 120
# Less time than that is too little to begin with a job
_LEAST_SECONDS, _QUICK_SECONDS = 45, 5
_LOOK_SECONDS = 120
_MOST_FAILURES = 5  # of one file
# Exit statuses
_TIME_IS_OVER = 3
_NO_TESTS = 5  # of pytest, where a file is skipped whole for what is not installed


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    results = HERE.parent / "results"
    add("--output", type=Path, help=f"folder for the results ({results})")
    add("--ranks", type=int, nargs="+", default=[1, 2], help="of the jobs (1 2)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--mpirun", help="with its options, in quotes; by default the library's own")
    add("--minutes", type=float, default=60.0, help="after which no part goes on")
    add("--quick", action="store_true", help="only see that all runs")
    add("--go-on", action="store_true", help="leave out what was done before")
    options = parser.parse_args(arguments)
    if options.output is None and options.quick:
        parser.error("--quick needs --output, since its numbers mean nothing")
    options.output = options.output or results
    return options


def environment() -> dict[str, str]:
    """Return the variables of all jobs."""
    users = harness.USERS_ENVIRONMENT
    paths = [str(ROOT), users.get("PYTHONPATH", "")]
    variables = {
        # More ranks than cores are no error, and ranks have threads of their own
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PYTHONUNBUFFERED": "1",
    }
    path = os.pathsep.join(filter(None, paths))
    return variables | users | {"PYTHONPATH": path}


def look(variables: dict[str, str]) -> dict[str, Any]:
    """Return what `print_facts` finds, in a process of its own.

    It loads MPI, and a process in MPI starts no MPI jobs.

    Raises:
      SystemExit: MPI does not start, or there is no GPU.
    """
    command = [sys.executable, __file__, "--look"]
    ended = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=_LOOK_SECONDS
    )
    if ended.returncode:
        raise SystemExit(f"MPI does not start:\n{ended.stderr or ended.stdout}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    if not found["gpus"]:
        raise SystemExit(f"there is no GPU here: {found['why']}")
    return found


def print_facts() -> None:
    """Print, as JSON, what there is: GPUs, or why not, the MPI library, its mpirun."""
    from mpi4py import MPI

    from mpidist.device import probe
    from mpidist.device.binding import gpu_count

    library, on_path = probe.library_path(), shutil.which("mpirun")
    # The one that belongs to the MPI library first
    folders = [] if library is None else [path / "bin" for path in library.parents[1:3]]
    launchers = [
        folder / "mpirun" for folder in [*folders, Path(sys.executable).parent]
    ]
    launchers += [Path(on_path)] if on_path else []
    mpirun = next((str(path) for path in launchers if path.exists()), None)
    count, name = gpu_count(), MPI.Get_library_version().partition("\n")[0]
    why = "" if count else _why_no_gpu()
    found = {"gpus": count, "why": why, "mpi": name.rstrip("\0 "), "mpirun": mpirun}
    print(json.dumps(found))


def _why_no_gpu() -> str:
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    try:
        return f"CuPy {cupy.__version__} sees {cupy.cuda.runtime.getDeviceCount()}"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy {cupy.__version__} says: {error}"


def write_digits(folder: Path) -> None:
    """Write the data of the main job: noisy copies of ten made-up pictures."""
    import digits

    random = np.random.default_rng(0)
    rows, shape = 1797, (digits.CLASSES, digits.PIXELS)
    pictures = random.uniform(0, digits.BRIGHTEST, shape)
    labels = random.integers(0, digits.CLASSES, rows)
    noisy = pictures[labels] + random.normal(0, 6, (rows, digits.PIXELS))
    shifts = digits.make_parser(None).get_default("shifts")
    digits.write(folder, shifts, noisy.clip(0, digits.BRIGHTEST), labels)


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
    """

    part: str
    ranks: int
    label: str
    command: list[str]
    variables: dict[str, str]
    seconds: float


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
    """

    mpirun: Sequence[str]
    work: Path
    is_quick: bool

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
            seconds = min(seconds, _QUICK_LIMIT_SECONDS)
        make = {"contract": self._contract, "tune": self._tune, "job": self._job}
        if part in make:
            yield from make[part](ranks, seconds, is_aware)
            return
        script = [str(HERE / "bench_gpu.py"), part, f"--seconds={0.7 * seconds}"]
        script += ["--records", str(self.records(ranks))]
        script += ["--quick"] if self.is_quick else []
        yield self._make(part, ranks, script, seconds, {})

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
        script += [f"--largest-bytes={size}", f"--repetitions={times}", "--force"]
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


def tests_of_gpus() -> list[Path]:
    """Return the files with tests that need a GPU, but for that of benchmarks."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        path
        for path in files
        if "mark.gpu" in path.read_text() and path.stem != "test_benchmarks"
    ]


def start(
    job: Job, environment: Mapping[str, str], seconds: float, log: TextIO
) -> Ended:
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
        is_ok = code == 0 or (code == _NO_TESTS and "pytest" in job.command)
        how = "ok" if is_ok else f"failed with status {code}"
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


class Run:
    """All parts on all numbers of ranks, and what they find."""

    def __init__(
        self,
        options: argparse.Namespace,
        plan: Plan,
        variables: dict[str, str],
        log: TextIO,
    ):
        self._options = options
        self._plan = plan
        self._variables = variables
        self._log = log
        self._ends = time.monotonic() + 60 * options.minutes
        self._parts: dict[int, dict[str, Any]] = {n: {} for n in options.ranks}
        self._contract: dict[int, dict[str, Any]] = {n: {} for n in options.ranks}
        self._job: dict[int, dict[str, Any]] = {n: {} for n in options.ranks}
        if options.go_on:
            for ranks in options.ranks:
                self._restore(ranks)

    def say(self, line: str) -> None:
        """Print a line, and log it."""
        print(line, flush=True)
        self._log.write(line + "\n")
        self._log.flush()

    def run(self) -> None:
        """Run all parts; keep what was found after each."""
        for part in self._options.parts:
            for ranks in sorted(self._options.ranks, reverse=True):
                self._run_part(part, ranks)
                self.save(ranks)

    def _restore(self, ranks: int) -> None:
        """Take for found what was found before, and kept in the output folder."""
        paths = self._options.output.glob(
            f"gpu-*-{_ranks(ranks).replace(' ', '')}.json"
        )
        last = max(paths, key=lambda path: path.stat().st_mtime, default=None)
        before = {} if last is None else json.loads(last.read_text())
        if before.get("quick") != self._options.quick:
            return
        self._parts[ranks] = before["parts"]
        self._contract[ranks] = before["contract"]
        self._job[ranks] = before["job"]
        lines = (json.dumps(record) + "\n" for record in before["records"])
        self._plan.records(ranks).write_text("".join(lines))
        if before["tune"] is not None:
            self._plan.table(ranks).write_text(json.dumps(before["tune"]))

    def _run_part(self, part: str, ranks: int) -> None:
        is_aware = self._fact(ranks).get("is_aware", False)
        jobs = {
            f"{part}{job.label and ' ' + job.label}, {_ranks(ranks)}": job
            for job in self._plan.jobs(part, ranks, is_aware)
        }
        known = self._parts[ranks]
        left = [name for name in jobs if not known.get(name, {}).get("is_done")]
        if left and part != "contract":  # each of whose jobs stands for itself
            left = list(jobs)
        outputs = {jobs[name].label: self._run_job(name, jobs[name]) for name in left}
        if part == "job" and left:
            self._job[ranks] = gpu_findings.job_of(outputs)

    def _run_job(self, name: str, job: Job) -> str:
        """Run a job, keep how it ended, and return what it printed."""
        left = self._ends - time.monotonic()
        records = self._plan.records(job.ranks)
        before = records.read_text() if records.exists() else ""
        if left < (_QUICK_SECONDS if self._options.quick else _LEAST_SECONDS):
            ended = Ended("was not run: no time was left", 0.0, "", True)
        else:
            self.say(f"\n== {name}\n$ {shlex.join(job.command)}")
            ended = self._run_again_past_failures(job)
        self.say(f"== {name}: {ended.how}, {ended.seconds:.1f} s")
        is_done = not ended.is_stopped or left >= job.seconds
        if not is_done:  # it is run again, and finds it all again
            records.write_text(before)
        part = {"ended": ended.how, "seconds": ended.seconds, "is_done": is_done}
        self._parts[job.ranks][name] = part
        if "pytest" in job.command and is_done:
            found = gpu_findings.contract_of(ended.output, ended.how)
            found["failed"] = max(found["failed"], len(found["failures"]))
            self._contract[job.ranks][f"{job.part} {job.label}"] = found
        return ended.output

    def _run_again_past_failures(self, job: Job) -> Ended:
        """Run a job; one of tests again and again without those that have failed.

        Of several ranks, the first test that fails ends the job.
        """
        failures: list[str] = []
        how, seconds, outputs = "ok", 0.0, []
        for _ in range(_MOST_FAILURES):
            command = [*job.command, *(f"--deselect={test}" for test in failures)]
            left = self._ends - time.monotonic()
            again = dataclasses.replace(job, command=command)
            ended = start(again, self._variables, left, self._log)
            how, seconds = how if failures else ended.how, seconds + ended.seconds
            outputs.append(ended.output)
            tests = gpu_findings.contract_of(ended.output, ended.how)["failures"]
            if ended.is_stopped or job.ranks == 1 or not tests:
                break
            failures += tests
            self.say(f"== again without {', '.join(tests)}")
        return Ended(how, seconds, "".join(outputs), ended.is_stopped)

    @property
    def _asked_for(self) -> dict[str, dict[str, Any]]:
        """How the parts of this call have ended, for all numbers of ranks."""
        return {
            name: part
            for parts in self._parts.values()
            for name, part in parts.items()
            if re.split("[ ,]", name)[0] in self._options.parts
        }

    @property
    def failed(self) -> list[str]:
        """What did not end well, of all that was asked for."""
        asked = self._asked_for.items()
        return [f"{n}: {part['ended']}" for n, part in asked if part["ended"] != "ok"]

    @property
    def is_over(self) -> bool:
        """Whether there was time for all that was asked for."""
        return all(part["is_done"] for part in self._asked_for.values())

    def _records(self, ranks: int) -> list[dict[str, Any]]:
        return gpu_findings.read_records(self._plan.records(ranks))

    def _fact(self, ranks: int) -> dict[str, Any]:
        facts = [r for r in self._records(ranks) if r["kind"] == "facts"]
        return facts[-1] if facts else {}

    def _stem(self, ranks: int) -> str:
        facts = self._fact(ranks)
        name = facts["machine"]["gpu"] if facts else "unknown"
        return f"gpu-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}"

    def save(self, ranks: int) -> dict[str, Any]:
        """Write the JSON file of a number of ranks; return what it holds."""
        records, job = self._records(ranks), self._job[ranks]
        comparisons = gpu_findings.judge(records, job)
        contract = gpu_findings.all_of(self._contract[ranks])
        tuned = self._plan.table(ranks)
        result = {
            "machine": self._fact(ranks).get("machine", {}),
            "date": datetime.date.today().isoformat(),
            "ranks": ranks,
            "quick": self._options.quick,
            "parts": self._parts[ranks],
            "contract": self._contract[ranks],
            "job": job,
            "tune": json.loads(tuned.read_text()) if tuned.exists() else None,
            "table": gpu_findings.table(comparisons, contract, job, ranks),
            "checks": gpu_findings.checks_of(records),
            "failures": contract.get("failures", []),
            "comparisons": [c.as_dict() for c in comparisons],
            "records": records,
        }
        name = f"{self._stem(ranks)}-{_ranks(ranks).replace(' ', '')}.json"
        (self._options.output / name).write_text(harness.as_text(result) + "\n")
        return result

    def finish(self) -> None:
        """Write the table of what must be shown, and print it."""
        lines = []
        for ranks in sorted(self._options.ranks, reverse=True):
            result = self.save(ranks)
            lines += ["", _ranks(ranks), *result["table"]]
            for title in ("checks", "failures"):
                if result[title]:
                    lines += ["", f"{title}, {_ranks(ranks)}", *result[title]]
        lines += ["", *(self.failed or ["all parts ran"])]
        if self._options.quick:
            lines.append("(quick: these numbers mean nothing)")
        for line in lines:
            self.say(line)
        stem = self._stem(max(self._options.ranks))
        (self._options.output / f"{stem}.txt").write_text("\n".join(lines[1:]) + "\n")


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    # So that jobs are ended, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    variables = environment()
    found = look(variables)
    mpirun = shlex.split(options.mpirun) if options.mpirun else [found["mpirun"]]
    if mpirun == [None]:
        raise SystemExit(f"there is no mpirun for {found['mpi']}: name it by --mpirun")
    options.output.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as work,
        open(options.output / "gpu-run.log", "a" if options.go_on else "w") as log,
    ):
        plan = Plan(mpirun, Path(work), options.quick)
        run = Run(options, plan, variables, log)
        if importlib.util.find_spec("sklearn") is None:
            write_digits(plan.digits)
            run.say("scikit-learn is not installed: the main job learns made-up digits")
        run.say(f"{found['gpus']} GPUs, {found['mpi']}, {shlex.join(mpirun)}")
        run.run()
        run.finish()
    if not run.is_over:
        return _TIME_IS_OVER
    return 1 if run.failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--look"]:
        print_facts()
    else:
        sys.exit(main())
