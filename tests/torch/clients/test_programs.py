"""Programs that were written for PyTorch's DistributedDataParallel, run by mpirun.

The port of each is made here, line by line: at any number of ranks it gives the loss
that the program itself gives in one process.
"""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
PROGRAMS = Path(__file__).parent / "programs"
MOST_LINES = 8
BACKEND = [
    ("import torch\n", "import mpidist.torch\nimport torch\n"),
    ('dist.init_process_group("gloo")', 'dist.init_process_group("mpidist")'),
]
PORTS = {
    "char_transformer.py": [
        *BACKEND,
        ('is_distributed = "RANK" in os.environ', "is_distributed = True"),
        (
            'int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])',
            "dist.get_rank(), dist.get_world_size()",
        ),
        ("import os\n", ""),
    ],
    "image_classes.py": [
        *BACKEND,
        ('is_distributed = "RANK" in os.environ', "is_distributed = True"),
        ("import os\n", ""),
        (
            "        model = DistributedDataParallel(model)",
            "        model = mpidist.torch.convert_sync_batchnorm(model)\n"
            "        model = DistributedDataParallel(model)",
        ),
    ],
}


def port(name):
    """Return a program's text for mpirun, and how many lines are new or others."""
    before = after = (PROGRAMS / name).read_text()
    for old, new in PORTS[name]:
        assert after.count(old) == 1, old
        after = after.replace(old, new)
    changes = difflib.ndiff(before.splitlines(), after.splitlines())
    return after, sum(line.startswith("+ ") for line in changes)


def losses(text):
    return [float(loss) for loss in re.findall(r"loss=([0-9.]+)", text)]


@pytest.mark.parametrize("name", sorted(PORTS))
def test_a_ported_program_gives_the_loss_of_one_process(name, mpirun, tmp_path):
    program, changed = port(name)
    assert changed <= MOST_LINES
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    plain = subprocess.run(
        [sys.executable, str(PROGRAMS / name)],
        env={**os.environ, **one, "MASTER_PORT": "0", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert plain.returncode == 0, plain.stderr
    expected = losses(plain.stdout)
    assert expected
    script = tmp_path / name
    script.write_text(program)
    for ranks in (1, 2, 3):
        done = mpirun(ranks, str(script), OMP_NUM_THREADS="1")
        assert losses(done.stdout) == pytest.approx(expected, rel=2e-5)
