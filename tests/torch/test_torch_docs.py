"""Every public name of mpidist.torch has an example, which is true."""

import doctests
import numpy as np
import pytest

import mpidist

torch = pytest.importorskip("torch")
import mpidist.torch  # noqa: E402

EXAMPLES = doctests.examples(mpidist.torch, mpidist.torch.__all__)


def test_every_name_has_an_example():
    assert set(mpidist.torch.__all__) <= set(EXAMPLES)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example(comm, name, mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    globs = {"np": np, "mpidist": mpidist, "strategy": strategy, "torch": torch}
    doctests.check(EXAMPLES[name], globs, comm)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    strategy.experimental_finalize()
