"""Keras' models, whose `fit`, `evaluate` and `predict` use the rows of all ranks.

Methods of the user's model, optimizers and batch normalisations are replaced by ones
that are given the former and its arguments. So Keras sees gradients of the mean over
all rows, and takes results of metrics' states that are summed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import callbacks as kinds
from keras import ops, tree

from mpidist.comm.consensus.signatures import name_ranks
from mpidist.context import get_strategy, has_strategy
from mpidist.device.arrays import checksum
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    MismatchError,
)
from mpidist.keras import checks, compat
from mpidist.keras.compat import ranks
from mpidist.keras.data import Batches, one_row, read, rows_of, unpack
from mpidist.keras.resume import Resume
from mpidist.strategy.strategy import Strategy
from mpidist.util import validation

_CALL = "mpidist.keras.distribute"
_REPLACED = (
    "fit evaluate predict train_on_batch test_on_batch predict_on_batch train_step "
    "test_step predict_step get_metrics_result _compute_loss _symbolic_build"
)
_WRITERS = "ModelCheckpoint CSVLogger TensorBoard RemoteMonitor OrbaxCheckpoint"
_SEED = 1_000_003  # by what seeds of one rank and the next differ


def distribute(model: Any, strategy: Strategy | None = None) -> Any:
    """Let all ranks train, evaluate and apply a model; return it. Collective.

    `fit`, `evaluate`, `predict` and their like for one batch are then collective, and
    give what they give in one process: weights, history, logs, predictions of all rows.
    Sizes of batches are of global batches, which are divided over the ranks; some may
    get fewer rows, or none. Data are arrays, equal on all ranks, or a `mpidist.Dataset`
    of global batches.

    The first call copies the weights of rank 0. Callbacks run on all ranks, with the
    same logs; those of Keras that write, and the progress bar, on rank 0. Dropout and
    augmentation draw other numbers on each rank. Compile before or after this call.

    Args:
      model: a `keras.Model`, which is changed.
      strategy: by default the current one.

    Raises, on all ranks:
      ArgumentTypeError: not a model, or not a strategy.
      ArgumentError: the model has another strategy.
    Raises, on all ranks, when the model is used:
      UnsupportedError: what would give other numbers than one process: a loss that is
        no mean over rows; a metric whose state is no sum (one of yours says that it is
        by `additive = True`); BackupAndRestore.
      MismatchError: arrays, or weights, differ between ranks.

    Example:
      >>> model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="zeros")])
      >>> model.compile(keras.optimizers.SGD(0.5), "mse")
      >>> model = mpidist.keras.distribute(model, strategy)
      >>> x, y = np.ones((3, 1)), np.array([[1.0], [1.0], [4.0]])
      >>> model.fit(x, y, batch_size=3, verbose=0).history
      {'loss': [6.0]}
      >>> model.predict(x[:1], verbose=0)
      array([[4.]], dtype=float32)
    """
    if strategy is None and has_strategy():
        strategy = get_strategy()
    strategy = validation.instance("strategy", strategy, Strategy)

    def check() -> DistributedModel | None:
        if not isinstance(model, keras.Model):
            raise ArgumentTypeError(
                f"{_CALL}: model must be a keras.Model, not {validation.shown(model)}"
            )
        checks.require_no_distribution()
        made: DistributedModel | None = getattr(model, "_mpidist", None)
        if made is not None and made.strategy is not strategy:
            raise ArgumentError(f"{_CALL}: {model.name} has another strategy")
        return made

    if strategy.extended.consensus.run(_CALL, check) is None:
        model._mpidist = DistributedModel(model, strategy)
    return model


def _replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    theirs = getattr(owner, name)
    setattr(owner, name, functools.wraps(theirs)(functools.partial(ours, theirs)))


class DistributedModel:
    """What a model calls in place of Keras' methods, each given as `theirs`.

    Args:
      model: the user's.
      strategy: of the ranks.
    """

    training: DistributedModel | None = None  # whose step runs

    def __init__(self, model: Any, strategy: Strategy):
        self.model, self.strategy = model, strategy
        self.data: Any = None  # of `fit`, while that runs
        self._consensus = strategy.extended.consensus
        self._example: Any = None
        self._unit = 0  # so many rows weigh 1: a constant, as JAX compiles it
        self._fits = 0
        self._has_begun = False
        # In a step: this rank's rows; the optimizers that have weighed the loss by
        # them; states of metrics before it, if there are no rows; logs of all rows
        self.rows: int | None = None
        self._weighed: set[int] = set()
        self._before: Any = None
        self._logs: Any = None
        self._result = model.get_metrics_result
        for name in _REPLACED.split():
            _replace(model, name, getattr(self, name.lstrip("_")))

    # What users call

    def fit(self, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train. Collective."""

        def run(given: dict[str, Any]) -> Any:
            arrays = [given.pop(name) for name in ("x", "y", "sample_weight")]
            size, rows = given.pop("batch_size"), given.pop("validation_batch_size")
            share, held_out = given.pop("validation_split"), given["validation_data"]
            if share and held_out is None:
                arrays, held_out = compat.split(arrays, share)
            if held_out is not None:
                sizes = {"batch_size": rows or size, "steps": given["validation_steps"]}
                given["validation_data"] = self._read(unpack(held_out), **sizes)
            seed = None
            if given.pop("shuffle"):  # of rank 0, as users give ranks unlike seeds
                find = compat.seed_of_shuffles
                seed = self._consensus.root_only("the order of rows", find) + self._fits
            self._fits += 1
            options = {"batch_size": size, "steps": given["steps_per_epoch"]}
            options["class_weight"] = given.pop("class_weight")
            data = self._read(arrays, seed=seed, **options)
            given["callbacks"] = [_Comparing(self), *given["callbacks"]]
            with warnings.catch_warnings():
                if any(isinstance(one, Resume) for one in given["callbacks"]):
                    # It has fewer batches in an epoch that goes on
                    warnings.filterwarnings("ignore", "Your input ran out of data")
                    data.unknown = sys.maxsize
                self.data = data
                return theirs(data, shuffle=False, **given)

        try:
            return self._together("fit", theirs, run, args, kwargs)
        finally:
            self.data = None

    def evaluate(self, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. Collective."""
        if "_use_cached_eval_dataset" in kwargs:  # in `fit`
            return theirs(*args, **kwargs)

        def run(given: dict[str, Any]) -> Any:
            arrays = [given.pop(name) for name in ("x", "y", "sample_weight")]
            sizes = {"batch_size": given.pop("batch_size"), "steps": given["steps"]}
            return theirs(self._read(arrays, **sizes), **given)

        return self._together("evaluate", theirs, run, args, kwargs)

    def predict(self, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for all rows, in their order. Collective."""

        def run(given: dict[str, Any]) -> Any:
            arrays, steps = (given.pop("x"), None, None), given["steps"]
            sizes = {"batch_size": given.pop("batch_size"), "steps": steps}
            data = self._read(arrays, **sizes)
            self._build(data)
            return self._in_order(theirs(data, **given), data.rows[:steps])

        return self._together("predict", theirs, run, args, kwargs)

    def on_batch(self, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        """Train, evaluate or predict by one batch, equal on all ranks. Collective."""

        def run(given: dict[str, Any]) -> Any:
            arrays = [given.pop(name, None) for name in ("x", "y", "sample_weight")]
            weight, size = given.pop("class_weight", None), rows_of((arrays[0],))
            data = self._read(arrays, class_weight=weight, batch_size=size)
            x, y, weight = unpack(next(data.read()))
            if theirs.__name__ == "predict_on_batch":
                self._build(data)
                return self._in_order(theirs(x), data.rows)
            return theirs(x, y, sample_weight=weight, **given)

        return self._together(theirs.__name__, theirs, run, args, kwargs)

    train_on_batch = test_on_batch = predict_on_batch = on_batch

    def _together(
        self, name: str, theirs: Any, run: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Return `run` of the arguments of `theirs`; all raise. Collective."""

        def work() -> Any:
            checks.require_no_distribution()
            if name[:7] != "predict" and not self.model.compiled:
                raise ContextError(f"compile {self.model.name} before {name}")
            bound = inspect.signature(theirs).bind(*args, **kwargs)
            bound.apply_defaults()
            given = {n: v for n, v in bound.arguments.items() if n != "kwargs"}
            if "callbacks" in given:
                given["callbacks"] = self._listeners(given["callbacks"])
                given["verbose"] = given["verbose"] if self.strategy.is_first else 0
            try:
                return ranks.run(lambda: run(given))
            finally:
                for one in given.get("callbacks", ()):
                    if isinstance(one, Resume):
                        one.close()

        return self._consensus.run(f"{self.model.name}.{name}", work)

    def _read(self, arrays: Any, **options: Any) -> Batches:
        data = read(self.strategy, arrays, **options)
        self._example, self._unit = data.example, self._unit or data.batch_rows
        return data

    def _listeners(self, callbacks: Any) -> list[Any]:
        """Return the callbacks that this rank calls."""
        given = tree.flatten(callbacks) if callbacks else []
        if any(isinstance(one, kinds.CallbackList) for one in given):
            checks.refuse("pass callbacks as a list of them, not as a CallbackList")
        if any(isinstance(one, kinds.BackupAndRestore) for one in given):
            checks.refuse(
                "BackupAndRestore keeps no place in the input, and would write on each "
                "rank; use mpidist.keras.Resume(directory)"
            )
        if self.strategy.is_first:
            return list(given)
        found = (getattr(kinds, name, None) for name in _WRITERS.split())
        writers = tuple(kind for kind in found if kind is not None)
        return [c for c in given if not isinstance(c, (*writers, kinds.ProgbarLogger))]

    def _in_order(self, found: Any, rows: Sequence[int]) -> Any:
        """Return the predictions of all ranks in the order of rows. Collective."""
        gather = self.strategy.extended.collectives.all_gather
        leaves = [np.asarray(leaf) for leaf in tree.flatten(found)]
        counts, *leaves = gather("predict", [np.array([rows], np.int64), *leaves], 0)
        # Each rank's rows are in order of batches. Of a batch, those of earlier ranks
        # come first
        batches = np.tile(np.arange(len(rows)), len(counts))
        order = np.argsort(np.repeat(batches, np.ravel(counts)), kind="stable")
        return tree.pack_sequence_as(found, [np.asarray(a)[order] for a in leaves])

    # Before the first step

    def symbolic_build(self, theirs: Any, *args: Any, **kwargs: Any) -> None:
        """Build by an example, even if this rank has no rows, and check. Collective."""
        theirs(None, self._example)
        if self.data is not None and self.data.rows:  # `evaluate` in `fit`
            return
        checks.require_supported(self.model, self._example)
        for optimizer in checks.optimizers_of(self.model):
            owner = getattr(optimizer, "_mpidist", None)
            if owner not in (None, self):
                raise ArgumentError(f"{optimizer.name} is another model's optimizer")
            if owner is None:
                optimizer._mpidist = self
                for name, ours in (
                    (ranks.APPLY, self.apply),
                    ("scale_loss", self.scale),
                ):
                    _replace(optimizer, name, functools.partial(ours, optimizer))
        for layer in checks.batch_norms_of(self.model):
            if not hasattr(layer._moments, "func"):
                _replace(layer, "_moments", functools.partial(_moments, layer))
        self._begin()

    def _build(self, data: Batches) -> None:
        if not all(layer.built for layer in compat.layers_of(self.model)):
            self.model(unpack(data.example)[0])
        if self.data is None:
            self._begin()

    def _begin(self) -> None:
        """Copy rank 0's variables, once; later they must be equal. Collective."""
        if self._has_begun:
            self.require_equal("the weights")
            return
        variables = self.variables()
        values = self.values(variables)
        values = self.strategy.extended.collectives.broadcast(_CALL, values, 0)
        self._has_begun = True
        self.load(variables, values)
        ranks.seed(self.strategy.rank)

    def variables(self) -> list[Any]:
        """Return the variables of the model and of its optimizers."""
        optimizers = checks.optimizers_of(self.model)
        found = [*self.model.variables, *(v for o in optimizers for v in o.variables)]
        return list({id(variable): variable for variable in found}.values())

    def values(self, variables: Sequence[Any]) -> list[Any]:
        """Return variables as arrays, which are equal on all ranks."""
        arrays = (np.array(ops.convert_to_numpy(v.value)) for v in variables)
        return [self._shifted(v, a, -1) for v, a in zip(variables, arrays)]

    def load(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Assign what `values` returned on any rank."""
        for variable, value in zip(variables, values):
            variable.assign(self._shifted(variable, np.array(value), 1))

    def _shifted(self, variable: Any, value: Any, sign: int) -> Any:
        """Return a value; of seeds, what this rank has in place of all ranks'."""
        if self._has_begun and variable.path.endswith("seed_generator_state"):
            shift = np.array([self.strategy.rank * _SEED, 0], value.dtype)
            return value + shift if sign > 0 else value - shift
        return value

    def require_equal(self, what: str) -> None:
        """Raise a MismatchError on all ranks if weights differ. Collective."""
        variables = self.model.variables
        if any(ranks.is_lost(variable.value) for variable in variables):
            raise ContextError(
                f"mpidist.keras: the weights of {self.model.name} were lost in a step "
                "that failed, as JAX had given it their memory; make the model again"
            )
        sums = self._consensus.gather_objects(
            what, lambda: [checksum(value) for value in self.values(variables)]
        )
        for variable, numbers in zip(variables, zip(*sums)):
            unlike = [rank for rank, n in enumerate(numbers) if n != numbers[0]]
            if unlike:
                with self._consensus.collective_errors():
                    raise MismatchError(
                        f"{what}: {variable.path} differs from rank 0's on "
                        f"{name_ranks(unlike)}: a layer keeps a state of its own rows, "
                        "a train_step changes weights without an optimizer of the "
                        "model, or one rank alone has assigned them"
                    )

    # Steps

    def step(self, theirs: Any, *args: Any) -> Any:
        """Return what a step on this rank's rows returns, with logs of all rows.

        A rank without rows takes one of weight 0, to take part in what ranks exchange.
        """
        *state, data = args
        self.rows, self._weighed, self._logs = rows_of(data), set(), None
        outer, DistributedModel.training = DistributedModel.training, self
        if not self.rows:
            data = tree.map_structure(one_row, data)
            self._before = state[0][-1] if state else ranks.copies(self._states())
        try:
            result = theirs(*state, data)
            logs, after = result if state else (result, [])
            if self._before is not None and state:
                after = (*after[:-1], self._before)
            elif self._before is not None:
                for variable, value in zip(self._metric_variables(), self._before):
                    variable.assign(value)
            logs = self._of_all_rows(logs, after[-1] if state else self._states())
            return (logs, after) if state else logs
        finally:
            self.rows = self._before = self._logs = None
            DistributedModel.training = outer

    train_step = test_step = step

    def predict_step(self, theirs: Any, *args: Any) -> Any:
        """Return predictions for this rank's rows, which may be none."""
        *state, data = args
        if rows_of(data):
            return theirs(*args)
        result = theirs(*state, tree.map_structure(one_row, data))
        outputs, *more = result if state else (result,)
        nothing = tree.map_structure(lambda leaf: leaf[:0], outputs)
        return (nothing, *more) if state else nothing

    def scale(self, optimizer: Any, theirs: Any, loss: Any) -> Any:
        """Weigh this rank's mean loss by its rows."""
        if self.rows is None:
            return theirs(loss)
        self._weighed.add(id(optimizer))
        share: Any = self.rows / self._unit
        if checks.scales_losses(optimizer):  # what is too large for 16 bits counts
            rows = ops.convert_to_tensor(float(self.rows), loss.dtype)
            call = f"the rows of {self.model.name}"
            share = rows / ranks.all_sum(self.strategy, call, [rows])[0]
        return theirs(loss) * share

    def apply(self, optimizer: Any, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply the gradients of the mean loss over all rows. Collective."""
        if self.rows is None:
            raise ContextError(
                f"mpidist.keras: {optimizer.name} was applied outside of a train_step, "
                "where the number of rows is unknown; use fit or train_on_batch"
            )
        given = list(args)
        grads, weight = list(given[ranks.GRADIENTS]), self.rows / self._unit
        own = [g for g in grads if g is not None]
        if not weight:  # whatever they are: they may be nan
            own = [ops.zeros_like(g) for g in own]
        elif id(optimizer) not in self._weighed:
            for layer in checks.batch_norms_of(self.model):
                checks.refuse(
                    f"call {optimizer.name}.scale_loss(loss) in train_step: the "
                    f"derivatives of {layer.name} are of the rows of all ranks"
                )
            own = [g * weight for g in own]
        rows = ops.convert_to_tensor(weight, keras.config.floatx())
        call = f"the gradients of {self.model.name}"
        *sums, total = ranks.all_sum(self.strategy, call, [*own, rows])
        if not (id(optimizer) in self._weighed and checks.scales_losses(optimizer)):
            sums = ranks.divided(sums, total)
        means = iter(sums)
        given[ranks.GRADIENTS] = [None if g is None else next(means) for g in grads]
        return theirs(*given, **kwargs)

    def get_metrics_result(self, theirs: Any) -> Any:
        """Return the metrics of the rows of all ranks. Collective."""
        if compat.in_symbolic_scope() or not self._metric_variables():
            return theirs()
        with self._summed(self._states() if self._before is None else self._before):
            self._logs = _numbers(theirs())
        return self._logs

    def _metric_variables(self) -> list[Any]:
        return list(self.model.metrics_variables)

    def _states(self) -> list[Any]:
        return [variable.value for variable in self._metric_variables()]

    @contextlib.contextmanager
    def _summed(self, states: Sequence[Any]) -> Iterator[None]:
        """Let metrics have the sums of the ranks' states. Collective."""
        call = f"the metrics of {self.model.name}"
        totals = ranks.all_sum(self.strategy, call, states)
        with keras.StatelessScope(list(zip(self._metric_variables(), totals))):
            yield

    def _of_all_rows(self, logs: Any, states: Sequence[Any]) -> Any:
        """Return logs of all rows, also where a step of the user makes its own."""
        if logs is self._logs:
            return logs
        with self._summed(states):
            results = {m.name: m.result() for m in self.model.metrics}
            results.update(self._result())
            for name in logs:
                if name not in results:
                    checks.refuse(
                        f"a step of {self.model.name} returns {name!r}, which is no "
                        "metric of the model, and of one rank's rows; add a metric"
                    )
            return _numbers({name: results[name] for name in logs})

    def compute_loss(self, theirs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of this rank's rows; refuse one that a mask thins out."""
        if compat.is_masked(kwargs.get("y_pred", args[2] if len(args) > 2 else None)):
            checks.refuse(
                f"the outputs of {self.model.name} have a mask, so that its loss is a "
                "mean over what the mask leaves, not over rows"
            )
        return theirs(*args, **kwargs)


def _moments(layer: Any, theirs: Any, inputs: Any, mask: Any) -> Any:
    """Return mean and variance of the rows of all ranks. Collective.

    For a batch normalisation, which may be a layer of several models.
    """
    model = DistributedModel.training
    if model is None:
        return theirs(inputs, mask)
    if mask is not None:
        checks.refuse(f"{layer.name} normalises rows with a mask")
    axes = compat.reduction_axes(layer)
    mean, variance = ops.moments(inputs, axes=axes)
    count = float(np.prod([inputs.shape[i] for i in axes])) if model.rows else 0.0
    own = ops.concatenate([ops.full((1,), count, mean.dtype), mean, variance])
    every = ranks.stack(model.strategy, layer.name, own)
    counts, means, variances = ops.split(every, [1, 1 + mean.shape[0]], axis=1)
    shares = counts / ops.sum(counts)
    mean = ops.sum(shares * means, axis=0)
    # The mean of the ranks' variances, and the variance of their means
    return mean, ops.sum(shares * (variances + (means - mean) ** 2), axis=0)


def _numbers(results: dict[str, Any]) -> dict[str, Any]:
    """Return results of metrics, some of which are variables, as they are now."""
    is_variable = keras.Variable
    return {n: v.value if isinstance(v, is_variable) else v for n, v in results.items()}


class _Comparing(kinds.Callback):
    """Compares the ranks' weights after each epoch."""

    def __init__(self, distributed: DistributedModel):
        super().__init__()
        self._distributed = distributed

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._distributed.require_equal(f"after epoch {epoch}")
