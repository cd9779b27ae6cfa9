"""Fixtures for tests of the commands."""

from pathlib import Path

import launching
import pytest

import mpidist


@pytest.fixture
def without_mpi(tmp_path):
    """A function that runs a command where importing mpi4py fails."""
    fake = tmp_path / "fake" / "mpi4py"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise ImportError('there is no MPI here')\n")
    folders = f"{fake.parent}:{Path(mpidist.__file__).parents[1]}"
    return lambda *words: launching.run([*map(str, words)], PYTHONPATH=folders)
