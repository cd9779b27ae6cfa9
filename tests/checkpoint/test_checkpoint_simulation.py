"""Saves whose calls of the operating system fail, raise, or are the last ones."""

import re
from pathlib import Path

import failing_calls
import pytest

SCRIPT = str(Path(failing_calls.__file__).with_name("simulated_saves.py"))
LARGE = "manager,manager background,write"
SMALL = "manager small,manager background small,write small"


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    found = failing_calls.build(tmp_path_factory.mktemp("library"))
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def simulate(mpirun, library, folder, ranks, every, how, kinds):
    """Return how many calls there were, by kind, rank and how they were disturbed."""
    arguments = library, str(folder), str(every), how, kinds
    ended = mpirun(ranks, SCRIPT, *arguments)
    lines = ended.stdout.splitlines()
    assert not [line for line in lines if "calls" not in line], ended.stdout[:5000]
    return {line.partition(":")[0]: int(re.findall(r"\d+", line)[-1]) for line in lines}


def test_no_call_is_left_out(library):
    assert not failing_calls.names_left_out(library)


@pytest.mark.parametrize("how", ["fails", "interrupted", "copies"])
def test_a_disturbed_save_leaves_the_old_or_the_new_state(
    mpirun, library, tmp_path, how
):
    """A selection of the calls; how many there are differs by a few from run to run."""
    calls = simulate(mpirun, library, tmp_path, 2, 19, how, LARGE)
    assert len(calls) == 6
    assert min(n for case, n in calls.items() if "rank 0" in case) > 20


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("how", ["fails", "late", "interrupted", "copies"])
def test_many_calls_of_a_save(mpirun, library, tmp_path, how, ranks):
    """Each of them: simulated_saves.py with EVERY = 1, which takes minutes."""
    kinds = f"{LARGE},{SMALL}"
    calls = simulate(mpirun, library, tmp_path, ranks, 7, how, kinds)
    assert len(calls) == 6 * ranks
