"""The types that users see."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import launching
import pytest

import mpidist

FOLDER = Path(__file__).parent / "typing"
SCRIPT = FOLDER / "user_script.py"
LIBRARY = Path(mpidist.__file__).parents[1]
README = Path(__file__).parents[1] / "README.md"


def mypy(script: Path, cache: Path) -> tuple[int, str]:
    """Return the exit status and output of mypy on a script, as a user would run it.

    The library's own errors are not of interest here, nor is its configuration.
    """
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    command += ["--config-file=", "--cache-dir", str(cache)]
    done = launching.run([*command, str(script)], MYPYPATH=str(LIBRARY), PYTHONPATH="")
    return done.returncode, done.stdout + done.stderr


def pyright(script: Path, folder: Path) -> tuple[int, str]:
    """Return the exit status and output of pyright on a script."""
    settings = {"extraPaths": [str(LIBRARY)], "include": [str(script)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--project", str(folder)]
    done = launching.run([*command, "--pythonpath", sys.executable])
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def readme_script(tmp_path):
    """The README's first two blocks: its step, and what stands before it."""
    pages = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    script = tmp_path / "readme.py"
    script.write_text("\n".join(pages[:2]))
    assert "def step" in pages[1]
    return script


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy")


@pytest.fixture
def check(cache):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    return lambda script: mypy(script, cache)


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict(check):
    status, output = check(SCRIPT)
    assert status == 0, output


@pytest.mark.slow
def test_the_readmes_step_passes_mypy_strict(check, readme_script):
    status, output = check(readme_script)
    assert status == 0, output


@pytest.mark.slow
def test_mypy_knows_the_types_of_results(check):
    status, output = check(FOLDER / "results.py")
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="pyright is not installed"
)
def test_pyright_agrees(readme_script, tmp_path):
    for script in (readme_script, SCRIPT, FOLDER / "results.py"):
        status, output = pyright(script, tmp_path)
        assert status == 0, output


@pytest.mark.slow
def test_mypy_sees_the_librarys_types(check, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import mpidist\n"
        "reveal_type(mpidist.MirroredStrategy().num_replicas_in_sync)\n"
        "mpidist.Dataset.range_of_nothing()\n"
        "mpidist.CommunicationOptions(bytes_per_pack='many')\n"
        "mpidist.get_replica_context().all_reduce_of_nothing()\n"
    )
    status, output = check(wrong)
    assert status == 1, output
    assert 'Revealed type is "int"' in output
    assert "[attr-defined]" in output
    assert "[arg-type]" in output
    assert 'Item "ReplicaContext" of "ReplicaContext | Any" has no' in output


@pytest.mark.slow
def test_the_script_runs(mpirun):
    done = mpirun(2, str(SCRIPT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("replicas=2 last=0.000")
