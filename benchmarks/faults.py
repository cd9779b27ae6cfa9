"""What becomes of jobs after a fault: do they end, how soon, and what is left behind.

    python benchmarks/faults.py [--ranks 3] [--tries 5] [--json FILE] [FAULT ...]

Each fault is a real job under the mpirun of this environment. A fault is detected if
the job ends with an error (or goes on, where it should), and says what it should. Left
behind are processes, files in the temporary folder, and shared memory, of mpidist or
(counted apart) of MPI itself, which cannot clean up when it is killed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import harness

# isort: split
import launching
import virtual_nodes
from mpi4py import MPI

NODES_JOB = Path(launching.__file__).parents[1] / "jobs" / "node_faults_job.py"
OF_MPI = re.compile("mpich|sm_seg|ompi|osc")
HANG_SECONDS = 3.0
LIMIT_SECONDS = 600.0
PROLOGUE = """
import os, signal, sys, threading, time
import numpy as np
import mpidist
from mpi4py import MPI

strategy = mpidist.MirroredStrategy(["CPU:0"])
rank = strategy.extended.replica_id
for step in range(10):
    strategy.reduce("SUM", np.ones(1000))

def fault():
    print(f"fault at {time.time()}", flush=True)

def fail():
    fault()
    raise KeyError("the reason")

"""
REDUCE = 'strategy.reduce("SUM", np.ones(100_000))\n'


@dataclasses.dataclass(frozen=True)
class Fault:
    """A job that fails.

    Args:
      script: what it does.
      says: what its output must match.
      is_hang: whether nothing but the watchdog can notice it.
      interrupted: when mpirun gets a Ctrl-C: "at work", or "at the start".
      is_survived: whether the job goes on, and ends well.
      needs_ulfm: whether only Open MPI can do that, which is asked for it.
      has_full_dumps: whether the flight recorder has a folder on a full file system.
      network: what happens to one of several virtual nodes: "cut", "cut for 2 s" or
        "lose"; the script is then what `NODES_JOB` does.
    """

    script: str
    says: str
    is_hang: bool = False
    interrupted: str = ""
    is_survived: bool = False
    needs_ulfm: bool = False
    has_full_dumps: bool = False
    network: str = ""


def on_rank_1(action: str) -> str:
    return f"if rank == 1:\n    fault()\n    {action}\n{REDUCE}"


GO_ON = """
def train(strategy):
    for step in range(20):
        if step == 10 and strategy.num_replicas_in_sync == SIZE and rank == 1:
            fault()
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.reduce("SUM", np.ones(100_000))
    print(strategy.num_replicas_in_sync, "replicas at the end", flush=True)

SIZE = strategy.num_replicas_in_sync
strategy.experimental_finalize()
mpidist.run_elastic(train)
"""
NOT_COME = r"rank 1 did not arrive\. The job ends"
LOST = r"has waited .* in .*: rank 1 (did not arrive|no longer answered).*The job ends"
WELL = 'os.write(1, f"well {rank}\\n".encode())\n'
FORKING = """
import multiprocessing, warnings

warnings.simplefilter("ignore")

def child():
    try:
        strategy.reduce("SUM", np.full(1000, 1000.0))
    except mpidist.CollectiveError as error:
        print(error, flush=True)
    raise KeyError("of the child")

if rank == 1:
    fault()
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
assert (strategy.reduce("SUM", np.ones(1000)) == strategy.num_replicas_in_sync).all()
"""
INTERRUPTED = """
class TimeExpired(Exception):
    pass

def interrupt(number, frame):
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    if names & {"allreduce_packed", "require_same", "agree"}:
        fault()
        raise TimeExpired
    signal.setitimer(signal.ITIMER_REAL, 0.001)

if rank == 1:
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
options = mpidist.CommunicationOptions(implementation=IMPLEMENTATION)
ranks = strategy.num_replicas_in_sync
for step in range(100_000):
    values = [np.full(100_000, float(step + r)) for r in range(ranks)]
    try:
        total = strategy.extended.collectives.reductions.all_reduce(
            "reduce", "SUM", values[rank], options
        )
    except TimeExpired:
        continue
    assert (total == sum(values)).all(), "a number of another step"
"""
NO_MEMORY = """
import resource

value = np.ones(8 << 20)
if rank == 1:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    fault()
    resource.setrlimit(resource.RLIMIT_AS, (used + value.nbytes // 4,) * 2)
strategy.reduce("SUM", value)
"""
MISALIGNED = """
value = np.ones(100_000)
if rank == 1:
    fault()
    value = np.frombuffer(b"x" + value.tobytes(), np.uint8)[1:].view(np.float64)
options = mpidist.CommunicationOptions(implementation="MPI")
reductions = strategy.extended.collectives.reductions
total = reductions.all_reduce("reduce", "SUM", value, options)
assert (total == strategy.num_replicas_in_sync).all()
"""
LATE = """
options = mpidist.CommunicationOptions(timeout_seconds=0.2)
both = mpidist.MirroredStrategy(["CPU:0"])
if rank == 0:
    try:
        strategy.extended.collectives.reductions.all_reduce(
            "reduce", "SUM", np.ones(100_000), options
        )
    except mpidist.DeadlineError:
        both.reduce("SUM", 1)
    threading.Event().wait()
else:
    both.reduce("SUM", 1)
    fault()
    strategy.reduce("SUM", np.ones(100_000))
"""
UNWRITABLE = 'os.dup2(os.open("/dev/full", os.O_WRONLY), 2)\n'
FAULTS = {
    "SIGKILL": Fault(on_rank_1("os.kill(os.getpid(), signal.SIGKILL)"), r"(?i)kill"),
    "SIGKILL, the others go on": Fault(
        GO_ON,
        r"rank 1 of \d+ died; .* replicas at the end",
        is_survived=True,
        needs_ulfm=True,
    ),
    "SIGSEGV": Fault(on_rank_1("os.kill(os.getpid(), signal.SIGSEGV)"), r"(?i)seg"),
    "SIGSTOP": Fault(on_rank_1("os.kill(os.getpid(), signal.SIGSTOP)"), NOT_COME, True),
    "exception": Fault(on_rank_1("fail()"), "KeyError: 'the reason'"),
    "exception in run": Fault(
        f"""
def step():
    if rank == 1:
        fail()
    return mpidist.get_replica_context().all_reduce("SUM", np.ones(1000))

strategy.run(step)
{REDUCE}""",
        "KeyError: 'the reason'",
    ),
    "exception, others computing": Fault(
        "if rank == 1:\n    fail()\nwhile True:\n    np.ones(1000).sum()\n",
        "KeyError: 'the reason'",
    ),
    "exception on all ranks": Fault("fail()\n", "KeyError: 'the reason'"),
    "exception in a mapped function": Fault(
        """
def bad(x):
    if rank == 1 and x > 20:
        fail()
    return x

data = mpidist.Dataset.from_tensor_slices(np.arange(60.0)).map(bad).batch(6)
for batch in strategy.experimental_distribute_dataset(data):
    strategy.reduce("SUM", batch, axis=0)
""",
        "KeyError: 'the reason'",
    ),
    "exception in a thread": Fault(
        """
done = threading.Event()
def work():
    if rank == 1:
        fail()
    done.set()
threading.Thread(target=work, daemon=True).start()
done.wait()
"""
        + REDUCE,
        NOT_COME,
        True,
    ),
    "sys.exit": Fault(on_rank_1("sys.exit(3)"), "the end of the program"),
    "a loop left early": Fault(
        "for step in range(5):\n    if rank == 1 and step == 3:\n        fault()\n"
        f"        break\n    {REDUCE}",
        "the end of the program",
    ),
    "another collective": Fault(
        on_rank_1("strategy.gather(np.ones(3), axis=0)"), "reduce at .*gather at"
    ),
    "data missing": Fault(
        """
import h5py

if rank != 1:
    with h5py.File(f"data-{rank}.h5", "w") as file:
        file["x"] = np.arange(30.0)
fault()
data = mpidist.Dataset.from_hdf5([f"data-{rank}.h5"], ["x"]).batch(6)
for batch in strategy.experimental_distribute_dataset(data):
    strategy.reduce("SUM", batch["x"], axis=0)
""",
        r"data-1\.h5",
    ),
    "never comes": Fault(on_rank_1("threading.Event().wait()"), NOT_COME, is_hang=True),
    "a rank is slow, and named": Fault(
        on_rank_1("time.sleep(7)"), "mpidist: rank 1 slow", is_survived=True
    ),
    "a fork that communicates": Fault(
        FORKING + WELL,
        "was forked from a rank.*well",
        is_survived=True,
    ),
    "an exception in a collective": Fault(
        f"IMPLEMENTATION = 'AUTO'\n{INTERRUPTED}", "rank 1 left (reduce|a collective)"
    ),
    "the same, inside MPI": Fault(
        f"IMPLEMENTATION = 'MPI'\n{INTERRUPTED}", "rank 1 left (reduce|a collective)"
    ),
    "no memory for a result": Fault(NO_MEMORY, "rank 1 of .*MemoryError"),
    "a misaligned array": Fault(MISALIGNED + WELL, "well 1", is_survived=True),
    "a strategy is not made": Fault(
        """
if rank == 1:
    fault()
    threading.Event().wait()
mpidist.MirroredStrategy(["CPU:0"])
""",
        "has waited .* in making a",
        is_hang=True,
    ),
    "never comes, stderr is full": Fault(
        UNWRITABLE + on_rank_1("threading.Event().wait()"), "", is_hang=True
    ),
    "stderr is full, all is well": Fault(
        f"fault()\n{UNWRITABLE}{REDUCE}mpidist.MirroredStrategy()\n{WELL}",
        "well 1",
        is_survived=True,
    ),
    "no room for the flight recorder": Fault(
        f"fault()\nfor step in range(500):\n    {REDUCE}{WELL}",
        "well 1",
        is_survived=True,
        has_full_dumps=True,
    ),
    "late after a deadline": Fault(LATE, "DeadlineError: .*rank 0 waited 0.2 s"),
    "buckets without gradients": Fault(
        f"""
fault()
with strategy.gradient_buckets({{}}) as buckets:
    pass
assert buckets.result == {{}}
{WELL}""",
        "well 1",
        is_survived=True,
    ),
    "MPI_Abort": Fault(on_rank_1("MPI.COMM_WORLD.Abort(7)"), r"(?i)abort"),
    "Ctrl-C at the launcher": Fault(
        f"{REDUCE}\nopen(f'at-work-{{rank}}', 'w').close()\nwhile True:\n    {REDUCE}",
        "",
        interrupted="at work",
    ),
    "Ctrl-C while ranks start": Fault(
        f"while True:\n    {REDUCE}", "", interrupted="at the start"
    ),
    "a cable cut for 2 s": Fault(
        "collective", "ends well", is_survived=True, network="cut for 2 s"
    ),
    "a cable cut": Fault("collective", LOST, is_hang=True, network="cut"),
    "a node lost": Fault("collective", LOST, is_hang=True, network="lose"),
    "a node lost in input": Fault("input", LOST, is_hang=True, network="lose"),
    "a node lost in a checkpoint": Fault(
        "checkpoint", LOST, is_hang=True, network="lose"
    ),
    "a node lost in run_elastic": Fault(
        "elastic", LOST, is_hang=True, network="lose", needs_ulfm=True
    ),
}


@dataclasses.dataclass(frozen=True)
class Try:
    """What became of one try of a fault."""

    is_detected: bool
    seconds: float
    tracebacks: int = 0
    processes_left: int = 0
    files_left: int = 0
    shared_left: int = 0
    shared_left_by_mpi: int = 0

    @classmethod
    def of(
        cls,
        fault: Fault,
        code: int | None,
        out: str,
        seconds: float,
        left: Sequence[int],
        shared: Collection[str],
    ) -> Try:
        """Judge the exit code, None if it never ended, and the output of a job.

        Args:
          fault: what happened to it.
          code: its exit code.
          out: what it printed.
          seconds: from the fault to the end.
          left: how many processes and files are left.
          shared: the names of shared memory that are left.
        """
        is_right = code is not None and (code == 0) is fault.is_survived
        is_detected = is_right and re.search(fault.says, out, re.DOTALL) is not None
        if not is_detected:
            print(f"not detected, exit code {code}:\n{out}", file=sys.stderr)
        by_mpi = sum(OF_MPI.search(name) is not None for name in shared)
        tracebacks = out.count("Traceback (most recent call last)")
        return cls(
            is_detected, seconds, tracebacks, *left, len(shared) - by_mpi, by_mpi
        )


def run(fault: Fault, ranks: int, hang_seconds: float) -> Try:
    """Run the job of a fault once."""
    before = shared_memory()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as place,
    ):
        environment = {
            **launching.clean_environment(),
            "MPIDIST_HANG_SECONDS": str(hang_seconds if fault.is_hang else 300),
            "TMPDIR": folder,
            "FAULTS_FOLDER": folder,  # tells the job's processes from others
        }
        options = ("--with-ft", "ulfm") if fault.needs_ulfm else ()
        command = [*launching.mpirun_command(ranks, *options), sys.executable]
        if fault.has_full_dumps:
            # Not where the launcher has its files
            environment["MPIDIST_DUMPS"] = place
            mount = f"mount -t tmpfs -o size=16k dumps {place}"
            in_shell = f'{mount} && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", in_shell, "sh", *command]
        job = subprocess.Popen(
            [*command, "-c", PROLOGUE + fault.script],
            env=environment,
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        begun = time.time()
        if fault.interrupted:
            if fault.interrupted == "at work":
                wait_until(lambda: len(list(Path(place).glob("at-work-*"))) == ranks)
            else:
                wait_until(lambda: len(processes_of(folder)) > ranks)  # and mpirun
                time.sleep(random.uniform(0.0, 1.5))
            begun = time.time()
            os.killpg(job.pid, signal.SIGINT)
        try:
            out, _ = job.communicate(timeout=LIMIT_SECONDS)
            code = job.returncode
        except subprocess.TimeoutExpired:
            code = None
            for pid in [job.pid, *processes_of(folder)]:
                os.kill(pid, signal.SIGKILL)
            out, _ = job.communicate()
        ended = time.time()
        times = [float(t) for t in re.findall(r"fault at ([\d.]+)", out)]
        first = min([begun, *times] if fault.interrupted else times or [begun])
        wait_until(lambda: not processes_of(folder), 60.0)
        files = sum(path.is_file() for path in Path(folder).rglob("*"))
        left = (len(processes_of(folder)), files)
        shared = shared_memory() - before
        return Try.of(fault, code, out, ended - first, left, shared)


def run_on_nodes(fault: Fault, count: int, hang_seconds: float) -> Try:
    """Run the job of a fault once over `count` virtual nodes, of one rank each."""
    with (
        tempfile.TemporaryDirectory() as folder,
        virtual_nodes.VirtualNodes(count) as nodes,
    ):
        limit = {"MPIDIST_HANG_SECONDS": str(hang_seconds if fault.is_hang else 300)}
        options = ("--with-ft", "ulfm") if fault.needs_ulfm else ()
        command = [sys.executable, str(NODES_JOB), fault.script, folder]
        job = nodes.start(1, command, options, **limit)
        try:
            job.wait_for("a step", 3)
            begun = time.time()
            break_network(nodes, fault.network)
            if fault.is_survived:
                job.wait_for("a step", job.output.count("a step") + 3)
                Path(folder, "enough").touch()
            ended = job.wait(LIMIT_SECONDS)
        except AssertionError as error:
            print(f"not detected: {error}", file=sys.stderr)
            return Try(False, LIMIT_SECONDS)
        seconds, running = time.time() - begun, nodes.running
        wait_until(lambda: not any(node.processes for node in running))
        left = (
            sum(len(node.processes) for node in running),
            sum(len(node.temporary_files) for node in running),
        )
        shared = [name for node in running for name in node.shared_memory]
        return Try.of(fault, ended.returncode, ended.stdout, seconds, left, shared)


def break_network(nodes: virtual_nodes.VirtualNodes, how: str) -> None:
    """Do to node 1 what a fault says."""
    if how == "lose":
        nodes.lose(1)
    else:
        nodes.cut(1)
    if how == "cut for 2 s":
        time.sleep(2.0)
        nodes.mend(1)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def processes_of(mark: str) -> list[int]:
    """Return the processes of a job, by a variable of their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"FAULTS_FOLDER={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until(is_so: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
    """Return when something is so, or after a while."""
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.05)


def measure(name: str, ranks: int, tries: int, hang_seconds: float) -> dict[str, Any]:
    """Run the job of one fault several times; return what became of all tries."""
    fault = FAULTS[name]
    run_once = run_on_nodes if fault.network else run
    done = [run_once(fault, ranks, hang_seconds) for _ in range(tries)]
    seconds = [t.seconds for t in done]
    left = ("processes_left", "files_left", "shared_left", "shared_left_by_mpi")
    return {
        "fault": name,
        "tries": tries,
        "detected": sum(t.is_detected for t in done),
        "median_seconds": statistics.median(seconds),
        "longest_seconds": max(seconds),
        "tracebacks": max(t.tracebacks for t in done),
        **{kind: sum(getattr(t, kind) for t in done) for kind in left},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    has_nodes = virtual_nodes.what_is_missing() is None
    known = [
        name
        for name, fault in FAULTS.items()
        if (launching.is_open_mpi() or not fault.needs_ulfm)
        and (os.geteuid() == 0 or not fault.has_full_dumps)
        and (has_nodes or not fault.network)
    ]
    parser.add_argument("faults", nargs="*", metavar="FAULT", default=known)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument(
        "--hang-seconds",
        type=float,
        default=HANG_SECONDS,
        help="how long ranks wait for one that never comes, the start included",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)

    library = " ".join(map(str, MPI.get_vendor()))
    print(
        f"{library}, {options.ranks} ranks, Python {platform.python_version()}; "
        f"hangs end after {options.hang_seconds:g} s"
    )
    print(
        f"{'fault':31} tries detected  median    max  tracebacks  left: processes "
        "files memory (MPI's)"
    )
    outcomes = []
    for fault in options.faults:
        o = measure(fault, options.ranks, options.tries, options.hang_seconds)
        outcomes.append(o)
        print(
            "{fault:31} {tries:5} {detected:8} {median_seconds:6.2f}s "
            "{longest_seconds:5.2f}s {tracebacks:11} {processes_left:16} "
            "{files_left:5} {shared_left:6} ({shared_left_by_mpi})".format(**o),
            flush=True,
        )
    if options.json is not None:
        facts = {"ranks": options.ranks, "hang_seconds": options.hang_seconds}
        harness.save(options.json, **facts, outcomes=outcomes)
    if any(o["detected"] < o["tries"] or o["processes_left"] for o in outcomes):
        sys.exit("a fault was not detected, or processes were left behind")


if __name__ == "__main__":
    main()
