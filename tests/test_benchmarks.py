"""Benchmarks run; what they measure is not judged here."""

import importlib.util
import json
import math
import os
import re
import shlex
import sys
from pathlib import Path

import launching
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import check_model
import cost_model
import digits_by_hand
import harness
import system_calls

import mpidist
from mpidist.device.binding import gpu_count

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def has(module):
    return importlib.util.find_spec(module) is not None


def comparisons_in(result):
    for part in [result, *result.get("layouts", [])]:
        yield from part.get("comparisons", [])


def test_results_are_small_and_hold_medians():
    paths = list((BENCHMARKS / "results").iterdir())
    assert {path.suffix for path in paths} == {".json"}
    assert sum(path.stat().st_size for path in paths) < 300_000
    for path in paths:
        for found in comparisons_in(json.loads(path.read_text())):
            lowest, highest = found["ratios"]
            assert lowest <= found["ratio"] <= highest, path
            assert found["ours"] == float(found["ours"]), path


def test_what_the_harness_compares_and_writes():
    times = {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 2.0, 2.0]}
    (time,) = harness.beside("a", times, {"theirs": 0.5})
    (rate,) = harness.beside("a", times, {"theirs": 0.5}, unit="rows/s", amount=6.0)
    assert (time.ratio, time.is_reached, rate.ratio, rate.is_reached) == (1, 0, 1, 1)
    row = rate.as_dict()
    assert (row["ours"], row["theirs"], row["ratios"]) == (3.0, 3.0, [0.5, 2.0])
    value = {"a": [1 / 3, None, {"b": "c"}], "d": [{"e": n} for n in range(100)]}
    text = harness.as_text(value)
    assert json.loads(text) == value | {"a": [0.333333, None, {"b": "c"}]}
    assert max(map(len, text.splitlines())) < 100


@pytest.mark.slow
def test_faults_are_detected():
    script = [sys.executable, str(BENCHMARKS / "faults.py")]
    script += ["--tries=1", "--ranks=2", "--hang-seconds=30"]
    ended = launching.run([*script, "SIGKILL", "SIGSTOP", "sys.exit"])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def require_finite(result):
    for found in result.get("comparisons", []):
        assert math.isfinite(found["ratio"])
        assert found["ratio"] > 0
        assert not any(isinstance(found[side], list) for side in ("ours", "theirs"))


def count_of(result):
    """Return how many comparisons there are, with the one that needs more cores."""
    skipped = [r for r in result.get("skipped", []) if r.startswith("overlap")]
    return len(result["comparisons"]) + len(skipped)


@pytest.mark.slow
def test_jobs_that_are_killed_at_random_end_with_the_same_bits(comm):
    if comm.size > 1:
        pytest.skip("it starts jobs of 1, 2 and 3 ranks itself")
    command = [sys.executable, str(BENCHMARKS / "resume.py"), "--kills=3"]
    ended = launching.run([*command, "--epochs=6"])
    assert ended.returncode == 0, ended.stderr
    assert "largest_difference" in ended.stdout


@pytest.mark.slow
def test_a_rank_of_many_has_no_more_to_do_than_one_of_fewer(comm, tmp_path):
    if comm.size != 2:
        pytest.skip("it starts jobs of its own, and takes long: once is enough")
    if launching.is_open_mpi():
        pytest.skip("its ranks keep the cores that they share: it would take minutes")
    if comm.rank:
        return
    output = tmp_path / "many.json"
    command = [sys.executable, str(BENCHMARKS / "bench_many_ranks.py")]
    # More than 16 nodes: up to so many send each other parts of large arrays
    sizes = ["--ranks-per-node", "1", "--ranks", "18", "24", "36"]
    sizes += [f"--output={output}"]
    ended = launching.run([*command, *sizes])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # What it returns, and the size of each rank's part; how far a thread has read
    # ahead, and how many digits the description of a file has
    limits = {("all_gather, 128 bytes", "bytes"): (128 + 8) * 18}
    limits |= {("dataset", "Python functions"): 3 * 18, ("dataset", "bytes"): 8}
    for row in json.loads(output.read_text())["rows"]:
        stage, kind, (fewest, _, most) = row["stage"], row["count"], row["numbers"]
        assert most - fewest <= limits.get((stage, kind), 0), (stage, kind)


@pytest.mark.slow
def test_the_life_of_a_job_has_all_stages_and_leaves_no_process(comm, tmp_path):
    if comm.size > 1:
        pytest.skip("it starts jobs of its own; once is enough")
    output = tmp_path / "life.json"
    command = [sys.executable, str(BENCHMARKS / "bench_life.py"), "--tiny"]
    ended = launching.run([*command, f"--output={output}"])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    jobs = json.loads(output.read_text())["jobs"]
    stages = {
        name: [row["stage"] for row in job.get("stages", [])]
        for name, job in jobs.items()
    }
    assert stages["the job"] == stages["resumed"]
    wanted = {"strategy", "variables", "restore", "step, again", "save", "end"}
    assert wanted <= set(stages["the job"])
    assert jobs["a rank is killed"]["code"] != 0


@pytest.mark.slow
def test_all_benchmarks_run_by_one_command(comm, tmp_path):
    """Under the mpirun that belongs to this Python."""
    if comm.size != 2:
        pytest.skip("it starts jobs of its own, and takes long: once is enough")
    if comm.rank:
        return
    mpirun = shlex.join(launching.mpirun_command(1)[:-2])
    command = [sys.executable, str(BENCHMARKS / "run_all.py"), "--tiny"]
    command += [f"--mpirun={mpirun}", "--name=x", f"--folder={tmp_path}"]
    ended = launching.run(command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    runs = [("collectives", (2, 4)), ("input", (1, 2))]
    names = {f"{n}-x-{r}rank{'s' * (r > 1)}" for n, ranks in runs for r in ranks}
    names |= {f"{n}-x" for n in ("model", "scaling", "large", "checkpoint", "step")}
    names |= {"frameworks-x"} if has("torch") else set()
    assert found.keys() == names
    others = 1 + has("torch")
    counts = {
        "collectives-x-2ranks": 8 * (1 + others) + 2 + 2 * 3 + 2 * 5 + 1,
        "input-x-2ranks": 6 + 2 * has("torch") + 2 + 1,
        "step-x": 4,
        "checkpoint-x": 3,
    }
    for name, result in found.items():
        require_finite(result)
        assert name not in counts or count_of(result) == counts[name], name
    assert [row["right"] for row in found["large-x"]["rows"]] == [True] * 6


def test_the_digits_job_by_hand_does_the_same(comm, strategy):
    job = launching.load_job("train_digits")
    options = job.digits.make_parser(None).parse_args(["--hidden=16"])
    with strategy.scope():
        network = job.Network(options)
    by_hand = digits_by_hand.Network(options)
    for step in range(3):
        draw = np.random.default_rng([comm.rank, step]).integers
        rows = 5 + comm.rank
        batch = draw(17, size=(rows, 64), dtype=np.uint8), draw(10, size=rows)
        ours = [mpidist.PerReplica((a,), (comm.rank,)) for a in batch]
        np.testing.assert_allclose(
            network.step(strategy, ours), by_hand.step(comm, batch), rtol=1e-9
        )
    for name, weights in by_hand.weights.items():
        np.testing.assert_allclose(network.weights[name], weights, rtol=1e-9)


@pytest.mark.gpu
def test_all_gpu_benchmarks_run_by_one_command(comm, tmp_path):
    """It starts jobs of its own; they share the GPU."""
    if comm.size > 1:
        pytest.skip("once is enough")
    if not gpu_count():
        pytest.skip("needs a GPU and CuPy")
    script = str(BENCHMARKS / "gpu" / "run_all.py")
    command = [sys.executable, script, "--quick", f"--output={tmp_path}"]
    ended = launching.run(command)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    jobs = json.loads((tmp_path / "gpu-quick.json").read_text())
    assert {job["ended"] for job in jobs.values()} == {"ok"}
    records = [r for job in jobs.values() for r in job.get("records", ())]
    found = [r for r in records if r["kind"] == "comparison"]
    assert len({r["case"] for r in found if r["target"] is not None}) >= 4
    assert all(math.isfinite(r["ratio"]) for r in found)
    (path,) = tmp_path.glob("gpu-*.txt")
    text = path.read_text()
    assert re.search(r"contract tests .* reached: [1-9]", text)
    assert re.search(r"train_digits.* reached$", text, re.M)
    assert "all parts ran" in text


def test_the_gpu_benchmark_says_that_there_is_no_gpu(tmp_path):
    """CUDA finds none where none is visible."""
    script = str(BENCHMARKS / "gpu" / "run_all.py")
    command = [sys.executable, script, "--quick", f"--output={tmp_path}"]
    ended = launching.run(command, CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1, ended
    assert ended.stderr.startswith("there is no GPU here: CuPy "), ended.stderr
    assert not list(tmp_path.iterdir())


def test_the_cost_model_finds_what_it_was_made_of():
    node = cost_model.Level(5e-6, 2e9)
    sizes = [1 << n for n in range(20, 27)]
    found = cost_model.fit({size: node.seconds(size) for size in [0, *sizes]})
    assert math.isclose(found.latency, node.latency, rel_tol=1e-6)
    assert math.isclose(found.bandwidth, node.bandwidth, rel_tol=1e-6)


def test_the_cost_model_between_nodes():
    """Small messages take rounds, large ones the slower level's bandwidth."""
    node, network = cost_model.Level(1e-6, 1e9), cost_model.Level(1e-3, 1e8)
    seconds = cost_model.all_reduce_seconds
    assert seconds(1000, 1, 8, node, network) == 0
    assert seconds(1000, 8, 8, node, network) == node.seconds(1000)
    # Of 6 rounds, 3 are in the node: once for the comparison, and for the array
    small = seconds(8, 64, 8, node, network)
    assert math.isclose(small, 6e-3, rel_tol=0.05)
    large = seconds(1 << 28, 64, 8, node, network)
    rounds = 2e-3 * (1 << 28) / cost_model.BLOCK_BYTES
    assert math.isclose(large, 2 * 7 / 8 * (1 << 28) / 1e8 + rounds, rel_tol=0.01)
    times = [seconds(1 << 20, n, 8, node, network) for n in cost_model.RANKS]
    assert times == sorted(times)
    # Where ranks share cores, it is messages that count
    cores = cost_model.Cores(2, 1.0)
    assert seconds(8, 16, 1, node, network, cores) == 16 * 4 / 2
    assert seconds(8, 2, 1, node, network, cores) < 1


@pytest.mark.parametrize(
    ("size", "nodes", "per_node", "rounds", "messages", "moved"),
    [
        (8, 16, 1, 4, 4, 15 * 288),  # it travels with the comparison
        (1024, 16, 1, 8, 8, 15 * 288 + 4 * 1024),
        (1 << 16, 16, 1, 12, 12, 15 * 288 + 2 * 15 / 16 * (1 << 16)),
        # Each rank adds a part
        (1 << 18, 16, 1, 6, 34, 15 * 288 + 2 * 15 / 16 * (1 << 18)),
        (1 << 16, 8, 2, 5, 34, 2 * 14 * 288 + 2 * 7 / 8 * (1 << 16)),
        (8, 32, 1, 10, 10, 5 * 48 + 5 * 8),  # compared by a reduction
        # Four of twelve ranks give everything to a partner first
        (1 << 16, 12, 1, 12, 11, 11 * 288 + 2.75 * (1 << 16)),
    ],
)
def test_what_nodes_send_in_the_cost_model(
    size, nodes, per_node, rounds, messages, moved
):
    traffic = cost_model.all_reduce_traffic(size, nodes, per_node)
    assert traffic.rounds == rounds
    assert traffic.messages == messages
    assert math.isclose(traffic.size, moved)


def test_what_the_cost_model_says_that_nodes_send_was_counted():
    """In the results, by the model of today; packets that were lost count twice."""
    result = json.loads((BENCHMARKS / "results" / "model-16-nodes.json").read_text())
    for layout in result["layouts"]:
        for row in layout["rows"]:
            nodes, per_node = layout["nodes"], layout["ranks_per_node"]
            traffic = cost_model.all_reduce_traffic(row["bytes"], nodes, per_node)
            sent = traffic.size + cost_model.HEADER_BYTES * traffic.messages
            assert math.isclose(sent, row["model_sent"], rel_tol=1e-5)
            assert sent * 0.99 < row["sent"] < sent * 1.1, (nodes, row)


@pytest.mark.slow
def test_the_cost_model_says_what_nodes_send(network):
    """`network` only says whether there can be nodes."""
    result = check_model.measure(3, 1, (), 0, [8, 1 << 10, 8 << 10])
    for row in result["rows"]:
        assert row["model_sent"] * 0.99 < row["sent"] < row["model_sent"] * 1.1


def test_what_breaks_first():
    """By counts of jobs that grow by 1 MiB with each rank."""
    row = {"factors": [10.0, 1.0, 100.0]}
    stages = [("strategy", "calls of MPI"), ("strategy", "bytes"), ("dataset", "bytes")]
    counts = {
        "rows": [row | {"stage": stage, "count": kind} for stage, kind in stages],
        "jobs": [{"ranks": n, "MiB": 24.5 + n} for n in (10, 20, 40)],
    }
    node, network = cost_model.Level(1e-6, 1e9), cost_model.Level(2e-5, 3e9)
    rows = cost_model.what_breaks(counts, 8, node, network)
    passed = [row["ranks"] for row in rows if row["ranks"]]
    assert passed == sorted(passed)
    by_name = {row["what"]: row for row in rows}
    memory = by_name["memory of a rank"]
    assert memory["ranks"] == 1000
    assert math.isclose(memory["at"]["1024"], 1048.5 / 1024)


def skip_without_strace(comm):
    reason = comm.bcast(system_calls.why_not() if comm.rank == 0 else None)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.slow
def test_the_metadata_benchmark_counts_calls_of_both_readers(comm, mpirun, tmp_path):
    skip_without_strace(comm)
    output = comm.bcast(tmp_path) / "result.json"
    mpirun(1, str(BENCHMARKS / "bench_metadata.py"), "--tiny", f"--output={output}")
    summaries = json.loads(output.read_text())["summaries"]
    assert {summary["reader"] for summary in summaries} == {"mpidist", "h5py"}
    for summary in summaries:
        assert summary["metadata_depends_on"] == []
        assert summary["bytes_per_row"] > 0
    # The page on input says of what they are: of two files, one is inspected
    ours = [s["usual_rank"]["metadata"] for s in summaries if s["reader"] == "mpidist"]
    assert ours == [7 + 2 * 5 + 12] * 2


def test_the_metadata_benchmark_says_that_strace_is_missing():
    script = str(BENCHMARKS / "bench_metadata.py")
    ended = launching.run([sys.executable, script, "--tiny"], PATH="/nowhere")
    assert ended.returncode == 1, ended
    assert "strace is not installed" in ended.stderr


SOME_CALLS = """
import fcntl, mmap, os, sys
folder = sys.argv[1]
path = os.path.join(folder, "data")
file = os.open(path, os.O_RDONLY)
assert len(os.pread(file, 100, 0)) == 100
assert len(os.pread(file, 100, 950)) == 50
os.fstat(file)
os.stat(path)
os.lseek(file, 10, os.SEEK_SET)
os.lseek(file, 0, os.SEEK_END)
fcntl.flock(file, fcntl.LOCK_SH)
mmap.mmap(file, 1000, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE).close()
os.close(file)
os.stat(folder + "-other")
"""


def test_system_calls_on_a_folder_are_counted_by_kind(comm, tmp_path):
    skip_without_strace(comm)
    folder, logs = tmp_path / "files", tmp_path / "logs"
    for path in (folder, logs, tmp_path / "files-other"):
        path.mkdir()
    (folder / "data").write_bytes(os.urandom(1000))
    command = [sys.executable, "-c", SOME_CALLS, str(folder)]
    ended = launching.run(system_calls.trace_command(logs / "calls", command))
    assert ended.returncode == 0, ended.stderr
    counts = system_calls.count(logs.iterdir(), folder)
    found = {kind: counts.calls[kind] for kind in ("open", "close", "lock", "read")}
    assert found == {"open": 1, "close": 1 + 1, "lock": 1, "read": 2}
    assert (counts.read_bytes, counts.mapped_bytes) == (150, 1000)
    # mmap looks at the size, too, and works with a copy of the descriptor
    assert counts.calls["stat"] == 1 + 1 + 1 + 1
    assert counts.calls["map"] == 1
