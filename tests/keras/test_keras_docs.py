"""Every public name of mpidist.keras has an example, which is true."""

import doctests
import numpy as np
import pytest

import mpidist

keras = pytest.importorskip("keras")
import mpidist.keras  # noqa: E402

EXAMPLES = doctests.examples(mpidist.keras, mpidist.keras.__all__)


def test_every_name_has_an_example():
    assert set(mpidist.keras.__all__) <= set(EXAMPLES)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example(comm, name, mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    globs = {"np": np, "mpidist": mpidist, "strategy": strategy, "keras": keras}
    doctests.check(EXAMPLES[name], globs, comm)
    strategy.experimental_finalize()
