"""Benchmarks of the network run; what they measure is not judged here."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import launching
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_the_network_benchmark_compares_all_cases(network, tmp_path):
    output = tmp_path / "network.json"
    command = [sys.executable, str(BENCHMARKS / "bench_network.py"), "--tiny"]
    command += ["--nodes", "2", "--ranks-per-node", "1", "2", f"--output={output}"]
    ended = launching.run(command)
    assert ended.returncode == 0, ended
    layouts = json.loads(output.read_text())["layouts"]
    assert [found["ranks_per_node"] for found in layouts] == [1, 2]
    for found in layouts:
        # By others and by the wire; gathers, broadcasts, bfloat16 and gradients
        has_torch = importlib.util.find_spec("torch") is not None
        assert len(found["comparisons"]) == 3 * (1 + has_torch) + 1 + 4 + 1 + 3
        assert all(math.isfinite(c["ratio"]) for c in found["comparisons"])
        assert all(s["bytes_per_second"] > 0 for s in found["sockets"])


@pytest.mark.slow
def test_a_fault_of_the_network_is_among_the_faults(network):
    script = str(BENCHMARKS / "faults.py")
    command = [sys.executable, script, "--tries=1", "--ranks=2", "a cable cut for 2 s"]
    ended = launching.run(command)
    assert ended.returncode == 0, ended
