"""Every public name of mpidist.statistics has an example, which is true."""

import doctests
import numpy as np
import pytest

import mpidist
import mpidist.statistics

EXAMPLES = doctests.examples(mpidist.statistics, mpidist.statistics.__all__)


def test_every_name_has_an_example():
    assert set(mpidist.statistics.__all__) <= set(EXAMPLES)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example(strategy, comm, name):
    globs = {"np": np, "mpidist": mpidist, "strategy": strategy}
    doctests.check(EXAMPLES[name], globs, comm)
