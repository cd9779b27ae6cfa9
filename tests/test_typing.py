"""The types that users see."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import launching
import pytest

import mpidist

FOLDER = Path(__file__).parent / "typing"
SCRIPT = FOLDER / "user_script.py"
LIBRARY = Path(mpidist.__file__).parents[1]
ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# What other libraries lack: packages that are not installed, or have no types
OF_OTHERS = ("--disable-error-code=import-not-found", "--untyped-calls-exclude=torch")
OF_OTHERS += ("--disable-error-code=import-untyped",)


def mypy(scripts: Path, cache: Path, *options: str) -> tuple[int, str]:
    """Return the exit status and output of mypy on a script, as a user would run it.

    `scripts` may be a folder of them. The library's own errors are not of interest
    here, nor is its configuration.
    """
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    command += ["--config-file=", "--cache-dir", str(cache), *options]
    done = launching.run([*command, str(scripts)], MYPYPATH=str(LIBRARY), PYTHONPATH="")
    return done.returncode, done.stdout + done.stderr


def pyright(folder: Path, mode: str) -> tuple[int, str]:
    """Return the exit status and output of pyright on a folder of scripts."""
    settings = {"extraPaths": [str(LIBRARY)], "typeCheckingMode": mode}
    settings |= {"reportMissingImports": mode == "strict"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--project", str(folder)]
    done = launching.run([*command, "--pythonpath", sys.executable])
    return done.returncode, done.stdout + done.stderr


def blocks_of(page: Path) -> list[str]:
    """Return a page's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.fixture
def readme_script(tmp_path):
    """The README's first two blocks: its step, and what stands before it."""
    blocks = blocks_of(README)
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks[:2]))
    assert "def step" in blocks[1]
    return script


@pytest.fixture
def programs(tmp_path):
    """A folder with the blocks of the README and of pages, and the example jobs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    pages = sorted((ROOT / "docs/tutorials").glob("*.md"))
    for page in (README, ROOT / "docs/getting_started.md", *pages):
        (folder / f"{page.stem}_page.py").write_text("\n".join(blocks_of(page)))
    for job in sorted((ROOT / "jobs").glob("*.py")):
        shutil.copy(job, folder)
    assert len(list(folder.iterdir())) > 6
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy")


@pytest.fixture
def check(cache):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    return lambda scripts, *options: mypy(scripts, cache, *options)


PROGRAMS = {
    "a user's script": lambda readme, programs: [SCRIPT],
    "the README's step": lambda readme, programs: [readme],
    "types of results": lambda readme, programs: [FOLDER / "results.py"],
    "pages and jobs": lambda readme, programs: [programs, *OF_OTHERS],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_pass_mypy_strict(check, readme_script, programs, name):
    status, output = check(*PROGRAMS[name](readme_script, programs))
    assert status == 0, output


def test_pages_and_jobs_silence_no_checker(programs):
    for program in programs.iterdir():
        assert "type: ignore" not in program.read_text(), program.name


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="pyright is not installed"
)
def test_pyright_agrees(readme_script, programs, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    for script in (readme_script, SCRIPT, FOLDER / "results.py"):
        shutil.copy(script, own)
    status, output = pyright(own, "strict")
    assert status == 0, output
    # In strict mode, every use of a library without types is an error
    status, output = pyright(programs, "basic")
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
    assert done.stdout.startswith("replicas=2 last=0.000")
