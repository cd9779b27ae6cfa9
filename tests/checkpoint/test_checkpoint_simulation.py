"""Saves whose calls of the operating system fail, raise, or are the last ones."""

import itertools
import json
from pathlib import Path

import failing_calls
import pytest

SUPPORT = Path(failing_calls.__file__).parent
JOB = str(SUPPORT.with_name("fuzz") / "job.py")
SAVES = ["manager", "background", "write"]


@pytest.mark.parametrize(
    "where", [[0.3, 0.8], pytest.param([0.1, 0.5, 0.9], marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("how", ["disk full", "interrupted", "copies"])
def test_a_disturbed_save_leaves_the_old_or_the_new_state(mpirun, tmp_path, how, where):
    """Some of the calls: tests/fuzz/run draws others."""
    program = tmp_path / "program.json"
    places = itertools.product(SAVES, [0, 1], [how], where)
    program.write_text(json.dumps(list(places)))
    mpirun(2, JOB, "files", "--program", str(program), PYTHONPATH=str(SUPPORT))


def test_no_call_is_left_out(tmp_path):
    library = failing_calls.build(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler")
    assert not failing_calls.names_left_out(library)
