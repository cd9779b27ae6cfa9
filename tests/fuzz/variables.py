"""Random changes and reads of variables against tf.distribute's rules in NumPy.

Variables of all dtypes, aggregations and synchronizations are changed in all contexts,
whole, in part, and by rows. A change that is refused, also on one rank, is refused on
all, and nothing has changed. Each rank draws the values of all ranks.
"""

import dataclasses
import math
import random
import typing

import numpy as np
from operations import Raises
from oracle import BFLOAT16, REFUSED, fitting, reduced, swapped

import mpidist

AGGREGATIONS = ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
DTYPES = ["f8", "f4", "f2", "i4", "i8", "i1", "u1", "u4", "u8", "c8", "c16", BFLOAT16]
SHAPES = [(), (3,), (1,), (2, 3), (4, 1, 2), (0, 2), (5000,)]
# How exact a result is, where it depends on the order of additions, or is divided
TOLERANCES = {2: 2e-2, 4: 1e-5, 8: 1e-5, 16: 1e-12}


def is_float(dtype):
    return dtype.kind in "fc" or dtype == BFLOAT16


def numbers(seed, rank, dtype, shape):
    """Return numbers that all dtypes hold exactly; large integers are rare."""
    values = np.random.default_rng([seed, rank])
    if dtype.kind in "iu":
        made = values.integers(0 if dtype.kind == "u" else -4, 5, shape).astype(dtype)
        is_large = np.random.default_rng(seed).random() < 0.15
        large = np.iinfo(dtype).max // 2 - 1
        return (
            np.where(values.random(shape) < 0.5, made, large).astype(dtype)
            if is_large
            else made
        )
    made = values.integers(-8, 9, shape) / 2.0
    if dtype.kind == "c":
        made = made + 1j * values.integers(-4, 5, shape)
    return np.asarray(made).astype(dtype)


class Model:
    """A variable, and what its copies on all ranks are."""

    def __init__(self, world, seed):
        draw, self.world = random.Random(seed), world
        self.strategy, self.size, self.rank = world.strategy(), world.size, world.rank
        self.dtype = np.dtype(draw.choice(DTYPES))
        self.shape = draw.choice(SHAPES)
        self.aggregation, self.on_read = draw.choice(AGGREGATIONS), draw.random() < 0.35
        self.is_whole = self.dtype.kind in "iu"
        synchronization = (
            "ON_READ" if self.on_read else draw.choice(["ON_WRITE", "AUTO"])
        )
        first = numbers(seed, 0, self.dtype, self.shape)
        with self.strategy.scope():
            self.variable = mpidist.Variable(
                numbers(seed, self.rank, self.dtype, self.shape),
                name=f"v{seed}",
                aggregation=mpidist.VariableAggregation[self.aggregation],
                synchronization=mpidist.VariableSynchronization[synchronization],
            )
        self.copies = [first.copy() for _ in range(self.size)]

    def __str__(self):
        how = "ON_READ" if self.on_read else "ON_WRITE"
        return f"{self.dtype.name}{self.shape} {self.aggregation} {how}"

    @property
    def can_combine(self):
        is_mean = self.aggregation == "MEAN"
        return self.aggregation != "NONE" and (is_float(self.dtype) or not is_mean)

    def exact(self, array):
        """Return integers that do not overflow."""
        return array.astype(object) if array.dtype.kind in "iu" else array

    def combined(self, values):
        """Return values of all ranks combined by the aggregation."""
        if self.aggregation == "ONLY_FIRST_REPLICA":
            return values[0]
        return reduced(self.aggregation, values)

    def fitting(self, new):
        """Return a new copy in the dtype; REFUSED if integers do not fit."""
        if new is REFUSED or not self.is_whole:
            return new
        return fitting(new, self.dtype)

    def shares(self, value):
        """Return what each rank gets of a total."""
        if not self.is_whole:
            return [
                np.asarray(value / self.dtype.type(self.size)).astype(self.dtype)
            ] * self.size
        exact = self.exact(value)
        quotient, rest = exact // self.size, exact % self.size
        return [np.asarray(quotient + (q < rest), object) for q in range(self.size)]


@dataclasses.dataclass
class Change:
    """One change: the call of this rank, and what it does to a copy.

    `apply(old, value)` returns the new copy, or REFUSED. `values` are those of all
    ranks, as arrays of the variable's dtype; REFUSED where they cannot be cast.
    """

    call: typing.Callable[[], typing.Any]
    apply: typing.Callable[[typing.Any, typing.Any], typing.Any]
    values: list
    is_assign: bool = False
    is_number: bool = False
    is_sparse: bool = False
    is_sum: bool = True  # of rows


# Where a change is made: the call in that context, and what it does to all copies


def per_rank(model, change, values):
    """Return the new copies if each rank changes its own."""
    return [
        REFUSED if value is REFUSED else model.fitting(change.apply(old, value))
        for old, value in zip(model.copies, values)
    ]


def in_replica(model, change):
    if change.is_sparse:
        return scattered(model, change)
    if model.on_read:
        return per_rank(model, change, change.values)
    is_number_of_sum = change.is_number and model.aggregation == "SUM"
    refuses = not model.can_combine or is_number_of_sum
    if refuses or any(v is REFUSED for v in change.values):
        return [REFUSED] * model.size
    total = change.values[0] if change.is_number else model.combined(change.values)
    return per_rank(model, change, [total] * model.size)


def scattered(model, change):
    """Return the new copies for rows of all ranks."""
    refuses = model.on_read or not (
        change.is_sum or model.aggregation in ("NONE", "ONLY_FIRST_REPLICA")
    )
    if refuses or not model.can_combine or any(v is REFUSED for v in change.values):
        return [REFUSED] * model.size
    values = change.values
    if model.aggregation == "ONLY_FIRST_REPLICA":
        values = values[:1]
    if model.aggregation == "MEAN":
        values = [(i, (rows / model.size).astype(rows.dtype)) for i, rows in values]
    new = []
    for old in model.copies:
        for value in values:
            old = REFUSED if old is REFUSED else change.apply(old, value)
        new.append(model.fitting(old))
    return new


def in_cross(model, change):
    value = change.values[0]
    if change.is_sparse and (
        model.on_read
        or not (change.is_sum or model.aggregation in ("NONE", "ONLY_FIRST_REPLICA"))
    ):
        return [REFUSED] * model.size
    if any(v is REFUSED for v in change.values):
        return [REFUSED] * model.size
    values = [value] * model.size
    if model.on_read and model.aggregation == "SUM":
        if not change.is_assign:
            return [REFUSED] * model.size
        values = model.shares(value)
    return per_rank(model, change, values)


def in_update(model, change):
    return per_rank(model, change, change.values)


def nothing(call):
    """Return a function that returns None: variables are no results of all ranks."""
    return lambda *_: (call(), None)[1]


def merged(strategy, call):
    return strategy.run(lambda: mpidist.get_replica_context().merge_call(nothing(call)))


def updated(model, call):
    return model.strategy.extended.update(model.variable, nothing(call))


def scoped(model, call):
    with model.strategy.scope():
        return call()


@dataclasses.dataclass
class Place:
    """A context: how a call is made there, its rule, and how it fails.

    Attributes:
      is_alone: a failure is one of this rank alone.
      is_local: where one rank fails, copies of others may have changed.
      may_differ: whether ranks may pass unlike values.
    """

    make: typing.Callable[[Model, typing.Any], typing.Any]
    rule: typing.Callable[[Model, Change], list]
    is_alone: bool = False
    is_local: bool = False
    may_differ: bool = False


PLACES = {
    "replica": Place(
        lambda m, call: m.strategy.run(nothing(call)), in_replica, may_differ=True
    ),
    "default": Place(lambda m, call: call(), in_cross),
    "scope": Place(scoped, in_cross),
    "merge": Place(lambda m, call: merged(m.strategy, call), in_cross),
    "update": Place(updated, in_update, is_alone=True, is_local=True),
    "merged update": Place(
        lambda m, call: merged(m.strategy, lambda: updated(m, call)),
        in_update,
        is_local=True,
    ),
}

# Changes of a whole variable

DENSE = {
    "assign": lambda old, new: new if new.shape == old.shape else REFUSED,
    "assign_add": lambda old, new: broadcast(np.add, old, new),
    "assign_sub": lambda old, new: broadcast(np.subtract, old, new),
}


def broadcast(ufunc, old, new):
    try:
        made = np.asarray(ufunc(old, new))
    except ValueError:
        return REFUSED
    return made if made.shape == old.shape else REFUSED


def cast(model, value, is_number=False):
    """Return a value in the variable's dtype, as an in-place operator casts it."""
    if value is REFUSED:
        return REFUSED
    if not is_number and not np.can_cast(value.dtype, model.dtype, "same_kind"):
        return REFUSED
    if model.is_whole:
        return model.fitting(value)
    return value.astype(model.dtype)


LAYOUTS = [
    *(lambda a: a, lambda a: a, lambda a: a.T.copy().T, swapped),
    lambda a: np.repeat(a, 2, axis=0)[::2] if a.ndim else a,
    lambda a: a.tolist() if a.ndim and a.size and a.dtype.char == "d" else a,
    lambda a: mpidist.Mirrored((a,)),
]


def dense(model, draw, seed, how, place):
    """Return a change of the whole."""
    shape, dtype = model.shape, model.dtype
    if how != "assign" and shape and draw.random() < 0.2:
        shape = shape[1:]  # which broadcasts
    if draw.random() < 0.05:
        shape = (*shape, 2)
    if draw.random() < 0.2:
        dtype = np.dtype(draw.choice(DTYPES))
    is_number = (
        not shape and draw.random() < 0.3 and dtype.kind in "fi" and dtype.itemsize == 8
    )
    differ = place.may_differ and not is_number
    values = [
        numbers(seed, q if differ else 0, dtype, shape) for q in range(model.size)
    ]
    mine = values[model.rank]
    own = random.Random(f"{seed} {model.rank}")
    given = mine.item() if is_number else own.choice(LAYOUTS)(mine.copy())
    is_exact = is_number and (dtype.kind == "i" or not model.is_whole)
    if not is_number and draw.random() < 0.1:
        given, values = of_another(model, place, values[0], seed)

    def apply(old, value):
        return DENSE[how](model.exact(old), model.exact(value))

    return given, lambda value: Change(
        lambda: getattr(model.variable, how)(value),
        apply,
        [cast(model, v, is_exact) for v in values],
        is_assign=how == "assign",
        is_number=is_number,
    )


def of_another(model, place, first, seed):
    """Return a variable whose value is assigned, and that value on all ranks."""
    with model.strategy.scope():
        other = mpidist.Variable(
            first,
            name=f"other{seed}",
            aggregation=mpidist.VariableAggregation.SUM,
            synchronization=mpidist.VariableSynchronization.ON_READ,
        )
    total = reduced("SUM", [first] * model.size)
    is_own = place.is_local or place.may_differ
    return other, [first if is_own else total] * model.size


# Changes of rows, or elements

SPARSE = {
    "scatter_add": np.add,
    "scatter_sub": np.subtract,
    "scatter_min": np.minimum,
    "scatter_max": np.maximum,
    "scatter_mul": np.multiply,
    "scatter_div": np.true_divide,
    "scatter_update": None,
    "scatter_nd_add": np.add,
    "scatter_nd_sub": np.subtract,
    "scatter_nd_update": None,
    "batch_scatter_update": None,
}


def sparse(model, draw, seed, how, place):
    """Return a change of some rows; None if the variable has none."""
    ufunc, shape = SPARSE[how], model.shape
    # Complex numbers have no order; a quotient of integers is none
    if model.dtype.kind == "c" and how in ("scatter_min", "scatter_max"):
        return None
    if how == "scatter_div" and model.is_whole:
        return None
    if not shape or 0 in shape:
        return None
    is_batch = how == "batch_scatter_update"
    if is_batch and len(shape) < 2:
        return None
    k = draw.randrange(1, len(shape) + 1) if "_nd_" in how else 2 if is_batch else 1
    is_outside = draw.random() < 0.07

    def rows_of(rank):
        values = np.random.default_rng([seed, rank, 3])
        if is_batch:
            n = min(2, shape[1])
            index = np.stack(
                [values.permutation(shape[1])[:n] for _ in range(shape[0])]
            )
            batch = np.broadcast_to(np.arange(shape[0])[:, None], index.shape)
            index, lead = np.stack([batch, index], -1), index.shape
        else:
            total = math.prod(shape[:k])
            n = int(values.integers(0, 4))
            # TensorFlow leaves the order of repeated updates open
            flat = (
                values.permutation(total)[:n]
                if ufunc is None
                else values.integers(0, total, n)
            )
            index = np.stack(np.unravel_index(flat, shape[:k]), axis=-1).reshape(
                len(flat), k
            )
            lead = (len(flat),)
        if is_outside and index.size:
            index[(0,) * (index.ndim - 1)][-1] = values.choice(
                [-1, shape[k - 1], 1 << 40]
            )
        rows = numbers(seed + 1, rank, model.dtype, (*lead, *shape[k:]))
        if how == "scatter_div":
            rows = np.asarray(values.choice([-2.0, 0.5, 2.0], rows.shape)).astype(
                model.dtype
            )
        return index, rows

    given = [rows_of(q if place.may_differ else 0) for q in range(model.size)]
    index, rows = given[model.rank]
    shown = index if "_nd_" in how else index[..., -1]
    if not is_outside:
        shown = shown.astype(draw.choice(["i8", "i4", "u2"]))

    def apply(old, value):
        new = model.exact(old).copy()
        index, rows = value
        index, rows = index.reshape(-1, k), model.exact(rows).reshape(-1, *shape[k:])
        for at, row in zip(index.tolist(), rows):
            if not all(0 <= i < n for i, n in zip(at, shape)):
                return REFUSED
            part = np.asarray(new[tuple(at)], new.dtype)  # or integers become int64
            new[tuple(at)] = row if ufunc is None else ufunc(part, row)
        return new

    def make(rows):
        slices = (
            (shown, rows) if "_nd_" in how else (mpidist.IndexedSlices(rows, shown),)
        )
        outside = [apply(model.copies[0], v) is REFUSED for v in given]
        return Change(
            lambda: getattr(model.variable, how)(*slices),
            apply,
            [REFUSED if bad else v for bad, v in zip(outside, given)],
            is_sparse=True,
            is_sum=ufunc in (np.add, np.subtract),
        )

    return rows, make


def part(model, draw, seed, how, place):
    """Return a change of a part, by integers and slices; None if there is none."""
    shape = model.shape
    is_number = model.dtype == BFLOAT16 and len(shape) == 1
    if not shape or 0 in shape or is_number:
        return None
    keys = []
    for n in shape[: draw.randrange(1, len(shape) + 1)]:
        i = draw.randrange(n)
        slices = slice(None), slice(i, None), slice(None, None, -1), slice(0, n, 2)
        keys.append(draw.choice([i, i - n, *slices]))
    is_number = len(shape) == len(keys) and all(isinstance(k, int) for k in keys)
    if is_number and model.dtype == BFLOAT16:
        return None
    key = tuple(keys) if len(keys) > 1 or draw.random() < 0.5 else keys[0]
    part_shape = np.empty(shape)[key].shape
    values = [
        numbers(seed, q if place.may_differ else 0, model.dtype, part_shape)
        for q in range(model.size)
    ]

    def apply(old, value):
        new = model.exact(old).copy()
        new[key] = model.exact(value)
        return new

    def make(value):
        # A part of a value that cannot be read does not exist
        is_own = place.is_local or place.may_differ
        is_read = model.on_read and not is_own
        total = (
            model.combined(model.copies)
            if is_read and model.aggregation != "NONE"
            else None
        )
        refuses = is_read and (model.aggregation == "NONE" or total is REFUSED)
        return Change(
            lambda: model.variable[key].assign(value),
            apply,
            [REFUSED if refuses else v for v in values],
            is_assign=True,
        )

    return values[model.rank], make


CHANGES = dict.fromkeys(DENSE, dense) | dict.fromkeys(SPARSE, sparse)
CHANGES["part"] = part

# How one rank fails: what it passes instead; `True` where it may only if others do
FAILURES = {
    "shape": (lambda value: np.zeros((*np.shape(value), 2, 2)), False),
    "text": (lambda value: "text", False),
    "object": (lambda value: np.full(np.shape(value), None), False),
    "masked": (lambda value: np.ma.masked_array(np.asarray(value)), False),
    "convert": (lambda value: Raises("Broken"), False),
    "another value": (
        lambda value: (np.asarray(value) == 0).astype(np.asarray(value).dtype),
        True,
    ),
}


def draw(random):
    """Draw variables, and what is done with them."""
    keys = [random.getrandbits(30) for _ in range(random.randrange(1, 6))]
    steps = [["variable", key] for key in keys]
    for _ in range(random.randrange(5, 60)):
        seed, key = random.getrandbits(30), random.choice(keys)
        how = random.choice([*DENSE, *DENSE, *CHANGES, "part", "part"])
        failure = random.choice([*FAILURES]) if random.random() < 0.15 else None
        place = random.choice([*PLACES, "replica"])
        change = ["change", key, how, place, seed, failure, random.randrange(4)]
        read = ["read", key, random.choice(["default", "replica", "update", "scope"])]
        steps.append(random.choices([change, read], [5, 1])[0])
    return steps


class Play:
    """The variables of a program, by their keys."""

    def __init__(self, world):
        self.world, self.models = world, {}

    def variable(self, key):
        self.models[key] = Model(self.world, key)

    def change(self, key, how, where, seed, failure, victim):
        """Make one change; check all copies."""
        model, place = self.models.get(key), PLACES[where]
        if model is None:
            return
        made = CHANGES[how](model, random.Random(seed), seed, how, place)
        if made is None:
            return
        given, make = made
        victim %= model.size
        spoil, is_other = FAILURES.get(failure, (None, False))
        # Looking at a variable may be a collective
        can_fail = spoil is not None and not isinstance(given, mpidist.Variable)
        is_same = place.may_differ or place.is_local or model.size == 1
        fails = can_fail and not (is_other and (is_same or not np.size(given)))
        if fails and model.rank == victim:
            given = spoil(
                given.values[0] if isinstance(given, mpidist.Mirrored) else given
            )
        change = make(given)
        if fails:
            change.values[victim] = REFUSED
        with np.errstate(all="ignore"):
            new = place.rule(model, change)
        self.check(
            model,
            place,
            f"{how} in {where} of {model} {failure if fails else ''}",
            change,
            new,
        )

    def check(self, model, place, what, change, new):
        refused = [copy is REFUSED for copy in new]
        is_local = place.is_local or (place.may_differ and model.on_read)
        must_fail = refused[model.rank] if place.is_alone else any(refused)
        error, wrong = None, ""
        try:
            place.make(model, change.call)
        except Exception as caught:
            error = caught
        if must_fail != (error is not None):
            wrong = (
                f"{what}: {type(error).__name__}: {error}"
                if error
                else f"{what}: no error"
            )
        old, got = model.copies[model.rank], model.variable.local
        allowed = [new[model.rank]]
        if any(refused):
            allowed = [old, new[model.rank]] if is_local else [old]
        if not any(a is not REFUSED and close(got, a, model, change) for a in allowed):
            wrong = (
                wrong
                or f"{what}: is {got!r:.300}, not {[*allowed]!r:.300}; was {old!r:.300}"
            )
        self.world.require(not wrong, wrong)
        model.copies = self.world.comm.allgather(got)
        same = all(copy.tobytes() == model.copies[0].tobytes() for copy in model.copies)
        is_equal = same or model.on_read or place.is_alone or place.is_local
        self.world.require(is_equal, f"{what}: copies differ")
        if not model.on_read and not same:
            # Functions in `update` must do the same on all ranks: begin again
            self.variable(int(model.variable.name[1:]))

    def read(self, key, where):
        """Read in a context; in a cross-replica one that combines the copies."""
        model = self.models.get(key)
        if model is None:
            return
        got, error, own = None, None, []
        place, is_cross = PLACES[where], where in ("default", "scope")
        try:
            place.make(model, lambda: own.append(model.variable.numpy()))
            got = own[0]
        except Exception as caught:
            error = caught
        want = model.copies[model.rank]
        if model.on_read and is_cross:
            with np.errstate(all="ignore"):
                want = (
                    REFUSED
                    if model.aggregation == "NONE"
                    else model.combined(model.copies)
                )
        is_right = (
            error is not None
            if want is REFUSED
            else got is not None and close(got, want, model)
        )
        found = f"{error!r:.300} {got!r:.300}"
        text = f"read in {where} of {model}: {found}, not {want!r:.300}"
        self.world.require(is_right, text)


def close(got, want, model, change=None):
    """Return whether a copy is as it should be: exact, if nothing was divided."""
    got, want = np.asarray(got), np.asarray(want)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    is_exact = got.dtype.kind in "iu" or not (
        change and (change.is_sparse or model.on_read)
    )
    if is_exact:
        return bool(((got == want) | ((got != got) & (want != want))).all())
    tolerance = TOLERANCES[got.dtype.itemsize]
    return np.allclose(
        got.astype("c16"), want.astype("c16"), tolerance, tolerance, equal_nan=True
    )


def play(world, steps):
    """Play a program."""
    made = Play(world)
    for name, *arguments in steps:
        getattr(made, name)(*arguments)
