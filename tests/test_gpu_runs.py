"""How what is measured on a GPU is cut into pieces: without a GPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "gpu"))
import gpu_findings

FOLDER = Path(gpu_findings.__file__).parent


def load_run_all():
    """Import run_all.py of this folder: there is another one."""
    spec = importlib.util.spec_from_file_location("gpu_run_all", FOLDER / "run_all.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


class Runs:
    """Runs of parts that are no more than a few lines of Python."""

    def __init__(self, folder):
        self.run_all = load_run_all()
        self.folder = folder
        self.code = {"tune": "pass", "limit": "pass"}
        self.arguments = []

    def start(self, minutes, *options):
        """Do what is left, and return the run, and the parts that ran."""
        runs, ran = self, []

        class Run(self.run_all.Run):
            def jobs(self, part, ranks):
                script = f"path = {str(self._records)!r}\n{runs.code[part]}"
                command = ["import sys; del sys.argv[0]; exec(sys.argv[0])", script]
                yield runs.run_all.Job(
                    part, ranks, "", ["-c", *command, *runs.arguments]
                )

            def say(self, line):
                if line.startswith("\n== "):
                    ran.append(line.split()[1].strip(","))

        arguments = ["--ranks", "2", f"--minutes={minutes}", f"--output={self.folder}"]
        given = [*arguments, "--parts", *self.code, *options]
        # In place of mpirun, which is given the number of ranks: "-n 2"
        ignore = ["bash", "-c", 'exec "${@:3}"', "bash"]
        run = Run(self.run_all.parse(given), ignore, self.folder)
        run.run()
        run.finish()
        self.result = json.loads((self.folder / "gpu-unknown.json").read_text())
        return run, ran

    @property
    def table(self):
        """The lines of what must be shown."""
        return "\n".join(self.result["table"])


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


FOUND = {"kind": "check", "name": "a", "word": "pass", "seen": "b"}
WRITE = f"open(path, 'a').write({json.dumps(FOUND)!r} + chr(10))"


def test_what_is_left_is_done_by_the_next_call(runs):
    runs.code["tune"] = WRITE
    run, ran = runs.start(0.01)
    assert (run.is_over, ran) == (False, [])
    assert run.failed == [
        f"{part}, 2 ranks: was not run: no time was left" for part in ("tune", "limit")
    ]
    run, ran = runs.start(5, "--go-on", "--parts", "tune")  # the other is asked later
    assert (run.is_over, run.failed, ran) == (True, [], ["tune"])
    run, ran = runs.start(5, "--go-on")
    assert (run.is_over, run.failed, ran) == (True, [], ["limit"])
    for _ in range(2):
        run, ran = runs.start(5, "--go-on")
        assert (run.is_over, run.failed, ran) == (True, [], [])
        assert runs.table.count(f"{'a':26} pass  b") == 1
    run, ran = runs.start(5)
    assert ran == ["tune", "limit"]


def test_what_failed_is_not_tried_again(runs):
    runs.code["tune"] = "raise SystemExit(7)"
    for expected in (["tune", "limit"], []):
        run, ran = runs.start(5, "--go-on")
        assert (run.is_over, ran) == (True, expected)
        assert run.failed == ["tune, 2 ranks: failed with status 7"]


@pytest.mark.slow
def test_what_was_stopped_for_want_of_time_is_done_again(runs, monkeypatch):
    """And what it had found until then is forgotten."""
    monkeypatch.setattr(runs.run_all, "_LEAST_SECONDS", 0)
    runs.code = {"tune": f"{WRITE}\nimport threading; threading.Event().wait()"}
    run, ran = runs.start(0.03, "--go-on")
    assert (run.is_over, ran) == (False, ["tune"])
    assert "was stopped after" in run.failed[0]
    assert "pass  b" not in runs.table
    runs.code = {"tune": WRITE}
    run, ran = runs.start(5, "--go-on")
    assert (run.is_over, run.failed, ran) == (True, [], ["tune"])
    assert runs.table.count("pass  b") == 1


def test_a_test_that_fails_does_not_hide_the_next_one(runs):
    """On several ranks it ends the job, which is then run without it."""
    script = """
import sys
bad = [f"test_x.py::test_{name}" for name in "abc"]
left = [test for test in bad if f"--deselect={test}" not in sys.argv]
if left:
    print(f"rank 1 of 2: {left[0]} failed in call")
    sys.exit(1)
print("7 passed, 3 deselected in 1.0s")
"""
    runs.code, runs.arguments = {"contract": script}, ["pytest"]
    run, ran = runs.start(5)
    assert (run.is_over, ran) == (True, 4 * ["contract"])
    assert run.failed == ["contract, 2 ranks: failed with status 1"]
    assert "\n".join(f"test_x.py::test_{name}" for name in "abc") in runs.table
    assert "MISSED: 7 passed, 3 failed; contract, 2 ranks failed" in runs.table


def test_tests_without_their_library_are_no_failure(runs):
    """Of a file that is skipped whole, pytest says that it has no tests."""
    script = 'print("1 skipped in 0.1s"); raise SystemExit(5)'
    runs.code, runs.arguments = {"contract": script}, ["pytest"]
    run, _ = runs.start(5)
    assert (run.is_over, run.failed) == (True, [])
    tests = runs.result["jobs"]["contract, 2 ranks"]["tests"]
    assert (tests["passed"], tests["skipped"]) == (0, 1)


def test_the_tests_of_gpus_are_found(tmp_path):
    run_all = load_run_all()
    names = {path.stem for path in run_all.tests_of_gpus()}
    known = {"test_gpu", "test_transports", "test_host_to_device", "test_elastic"}
    assert known <= names
    run = run_all.Run(run_all.parse([f"--output={tmp_path}"]), ["mpirun"], tmp_path)
    run.ended["facts, 2 ranks"] = {"records": [{"is_aware": True}]}
    jobs = list(run.jobs("contract", 2))
    assert {job.label for job in jobs} == names
    assert all(job.variables["MPIDIST_CUDA_AWARE"] == "1" for job in jobs)


def test_what_came_of_tests_is_told():
    failed = (
        "rank 1 of 2: tests/test_gpu.py::test_a[b c] failed in call\n"
        "FAILED tests/test_gpu.py::test_d - AssertionError\n1 failed, 2 passed in 3.0s"
    )
    assert gpu_findings.contract_of(failed) == {
        "passed": 2,
        "failed": 2,
        "skipped": 0,
        "failures": ["tests/test_gpu.py::test_a[b c]", "tests/test_gpu.py::test_d"],
    }
    found = gpu_findings.contract_of("..s\n3 passed, 1 skipped in 2.00s")
    assert (found["passed"], found["skipped"], found["failures"]) == (3, 1, [])
    stopped = gpu_findings.contract_of("..s [  5%]\n.s. [ 10%]")
    assert (stopped["passed"], stopped["skipped"]) == (4, 2)


def test_what_gpus_show_is_judged():
    ratios = {
        ("all_reduce, 8 bytes", "raw CUDA-aware MPI"): (0.75, "reached"),
        ("all_reduce, large, the best way", "pageable staging"): (15, "reached"),
        ("ipc, bytes it moves", "copies within GPU memory"): (0.625, "reached"),
        ("ipc, bytes of arrays", "copies within GPU memory"): (0.375, "MISSED"),
        ("gradients of ResNet-50", "raw CUDA-aware MPI"): (2, "MISSED"),
        ("step of torch's DDP by NCCL", "as torchrun starts it"): (1.03, "MISSED"),
    }
    records = [
        {"kind": "comparison", "case": case, "against": against, "ratio": ratio}
        for (case, against), (ratio, _) in ratios.items()
    ]
    end = "loss=0.1, accuracy=1]loss=0.085341 accuracy=0.9861 samples_per_s=10 ranks=2"
    jobs = {
        "limit": {"records": records},
        "contract": {
            "tests": gpu_findings.contract_of("3 passed in 1s"),
            "ended": "ok",
        },
        "job GPU": {"label": "GPU", "learned": gpu_findings.job_of(end)},
        "job CPU": {
            "label": "CPU",
            "learned": gpu_findings.job_of(end.replace("341", "343")),
        },
    }
    lines = gpu_findings.lines_of(jobs, 2)
    words = {line[:50].strip(): line.split()[-1] for line in lines}
    for (case, _), (_, word) in ratios.items():
        assert words[case] == word, case
    assert words["HDF5 rows to GPU, contiguous"] == "measured"  # not measured
    assert lines[-2].endswith("reached: 3 passed, 0 failed, 0 skipped")
    assert lines[-1].endswith("reached")
    lines = gpu_findings.lines_of({}, 2)
    assert sum(line.endswith("not measured") for line in lines) == len(lines) - 1
    assert len(gpu_findings.lines_of({}, 1)) < len(lines)


def test_what_ipc_moves():
    """Of two ranks, both read what both have; of more, each adds up a part."""
    assert gpu_findings.bytes_of_ipc(1000, 2) == 5000
    assert gpu_findings.bytes_of_ipc(1000, 4) == 2000 + 1250 + 500 + 1500


# Stands for Python: tells how it was called, and ends run_all.py with the next status
PYTHON = """#!/bin/bash
[[ $1 == */run_all.py ]] || exit 0
echo "run_all.py ${*:2}"
status=$(head -n 1 {folder}/statuses)
sed -i 1d {folder}/statuses
exit "$status"
"""


@pytest.fixture
def one_machine(tmp_path):
    """A function that runs one_machine.sh; returns its status and its calls."""
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PYTHON.replace("{folder}", str(tmp_path)))
    python.chmod(0o755)

    def run(statuses, *options):
        (tmp_path / "statuses").write_text("\n".join(map(str, statuses)) + "\n")
        ended = subprocess.run(
            ["bash", FOLDER / "one_machine.sh", "--output", tmp_path, *options],
            env={"PATH": f"{python.parent}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        lines = ended.stdout.splitlines()
        calls = [line.split() for line in lines if line.startswith("run_all.py")]
        return ended, calls

    return run


def test_one_command_goes_through_all_runs(one_machine):
    ended, calls = one_machine([0, 0, 0], "--minutes", "8")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    start, tests, table = calls
    assert "--quick" in start
    assert {"--go-on", "contract", "checks"} <= set(tests)
    assert {"--go-on", "sizes", "limit"} <= set(table)
    assert "nothing is left; no run failed" in ended.stdout


def test_one_command_says_that_something_is_left(one_machine):
    ended, calls = one_machine([1, 3])
    assert ended.returncode == 3
    assert len(calls) == 2
    assert "something is left: call this again" in ended.stdout
    ended, calls = one_machine([0, 1, 0])
    assert ended.returncode == 1
    assert len(calls) == 3
    assert "nothing is left; tests failed" in ended.stdout


def test_one_run_may_be_chosen(one_machine):
    ended, calls = one_machine([0], "--run", "table")
    assert ended.returncode == 0
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "all"], "there is no run all"),
        (["--minutes", "8.5"], "--minutes 8.5 is no number"),
        (["--wheels", "/not/there"], "there is no folder /not/there"),
    ],
)
def test_wrong_options_are_refused(one_machine, options, message):
    ended, calls = one_machine([], *options)
    assert (ended.returncode, calls) == (2, [])
    assert ended.stderr.strip() == message
