"""What checkers of types see of results: for `assert_type`, not to be run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import mpidist

if TYPE_CHECKING:
    from typing_extensions import assert_type

Array = npt.NDArray[np.float64]
Each = mpidist.PerReplica


def array(x: Array) -> Array:
    return x


def number() -> float:
    return 1.0


def nothing() -> None: ...


def pair(x: Array) -> tuple[Array, float]:
    return x, 1.0


def unknown() -> Any:
    return 1.0


def of_strategy(strategy: mpidist.Strategy, x: Array, each: Each[Array]) -> None:
    # A plain result with one replica: what works there alone is seen before the job
    assert_type(strategy.run(array, (x,)), Array | Each[Array])
    assert_type(strategy.run(number), float | Each[float])
    assert_type(strategy.run(lambda: np.float64(1)), np.float64 | Each[np.float64])
    assert_type(strategy.run(pair, (x,)), Any)
    assert_type(strategy.run(unknown), Any)
    strategy.run(nothing)

    assert_type(strategy.reduce("SUM", strategy.run(array, (x,))), Array)
    assert_type(strategy.reduce("SUM", each), Array)
    assert_type(strategy.reduce("SUM", x), Array)
    assert_type(strategy.reduce("SUM", 1.5), float)
    assert_type(strategy.reduce("MEAN", each, axis=0), Any)
    assert_type(strategy.reduce("SUM", (x, 1.5)), Any)
    assert_type(strategy.reduce("SUM", {"x": each}), Any)

    assert_type(strategy.gather(each, axis=0), Array)
    assert_type(strategy.gather([x], axis=0), Any)
    assert_type(strategy.experimental_local_results(each), tuple[Array, ...])


def of_replica_context(x: Array) -> Array:
    context = mpidist.ReplicaContext(mpidist.get_strategy(), 0)
    assert_type(context.all_gather(x, axis=0), Array)
    assert_type(context.all_reduce("SUM", 1.5), float)
    assert_type(context.all_reduce("SUM", {"x": x, "rows": 1.5}), Any)
    return context.all_reduce("SUM", x)
