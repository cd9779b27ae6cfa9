"""A linear fit, fully typed: what a user writes, for mypy --strict."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import mpidist

Array = npt.NDArray[np.float64]


def make_data(seed: int) -> mpidist.Dataset:
    x: Array = np.random.default_rng(seed).normal(size=(64, 3))
    y: Array = x @ np.array([1.0, 2.0, 3.0])
    return (
        mpidist.Dataset.from_tensor_slices((x, y))
        .shuffle(seed=seed)
        .batch(16)
        .repeat(10)
    )


def make_variable(strategy: mpidist.Strategy) -> mpidist.Variable:
    with strategy.scope() as current:
        assert current is strategy
        return mpidist.Variable(
            np.zeros(3), name="w", aggregation=mpidist.VariableAggregation.MEAN
        )


def train(
    strategy: mpidist.Strategy, data: mpidist.Dataset, w: mpidist.Variable
) -> list[float]:
    options = mpidist.CommunicationOptions(timeout_seconds=60.0)
    distributed: mpidist.DistributedDataset = strategy.experimental_distribute_dataset(
        data, mpidist.InputOptions(experimental_per_replica_buffer_size=2)
    )

    def step(x: Array, y: Array) -> Array:
        context = mpidist.get_replica_context()
        error: Array = x @ w - y
        total: dict[str, Array] = context.all_reduce(
            mpidist.ReduceOp.SUM,
            {"gradient": x.T @ error, "rows": np.array(float(len(x)))},
            options,
        )
        updated: mpidist.Variable = w.assign_sub(
            0.5 * total["gradient"] / total["rows"]
        )
        assert updated is w
        return error**2

    losses: list[float] = []
    iterator: mpidist.DistributedIterator = iter(distributed)
    state: dict[str, int] = iterator.get_state()
    iterator.set_state(state)
    for batch in iterator:
        errors = strategy.run(step, args=batch)
        losses.append(float(strategy.reduce("MEAN", errors, axis=0)))
    return losses


def scores(strategy: mpidist.Strategy, w: mpidist.Variable) -> Array:
    scaled: Array = 2.0 * w.numpy() + np.asarray(w)
    shape: tuple[int, ...] = w.shape
    assert scaled.shape == shape
    per_replica = strategy.experimental_distribute_values_from_function(
        lambda context: np.full(1, float(context.replica_id_in_sync_group))
    )
    gathered: Array = strategy.gather(per_replica, axis=0)
    (local,) = strategy.experimental_local_results(per_replica)
    assert local in gathered
    return gathered


def main() -> None:
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    try:
        w = make_variable(strategy)
        losses = train(strategy, make_data(seed=0), w)
        replicas: int = len(scores(strategy, w))
        if strategy.extended.replica_id == 0:
            print(f"replicas={replicas} last={losses[-1]:.3f} best={min(losses):.3f}")
    except mpidist.MpidistError as error:
        raise SystemExit(str(error)) from error
    strategy.experimental_finalize()


if __name__ == "__main__":
    main()
