"""Random collective calls, nested scopes and threads, with failures on one rank.

A program is a flat list: `scope`, `buckets` and `threads` go to the next `end`. Each
rank draws the arguments of all ranks, so that NumPy knows the result. Where one rank
fails, in its own code or by an argument, all raise, and later calls are exact.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import random
import resource
import threading
import time
import traceback
import typing
from pathlib import Path

import ml_dtypes
import numpy as np
from mpi4py import MPI

import mpidist

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [
    *("f8", "f8", "f4", "f2", "g", "i4", "i8", "i1", "i2", "u1", "u2", "u4", "u8"),
    *("c8", "c16", "G", "?", BFLOAT16),
]
# May be moved, not added
OTHERS = ["M8[s]", "m8[ns]", "S3", "U2", "V5", [("a", "<i4"), ("b", "<f8", (2,))]]
SHAPES = [
    *((), (0,), (1,), (7,), (2, 3), (0, 4), (3, 1, 2), (2, 3, 4), (300,)),
    *((9000,), (70_001,)),
]
OPS = ["SUM", "SUM", "MEAN", "MIN", "MAX", "PRODUCT", "sum", mpidist.ReduceOp.MEAN]
REFUSED = object()
Point = collections.namedtuple("Point", "x y")


class Broken(Exception):
    """What programs raise."""


class TwoArguments(Exception):
    """It can be neither pickled nor made from its text."""

    def __init__(self, first, second):
        super().__init__(first)
        self.lock = threading.Lock()


class NoText(Exception):
    def __str__(self):
        raise Broken("text")

    __repr__ = __str__


class NoReduce(Exception):
    def __reduce__(self):
        raise Broken("reduce")


RAISED = {
    "Broken": lambda: Broken("user"),
    "ZeroDivisionError": lambda: ZeroDivisionError("user"),
    "MemoryError": lambda: MemoryError("user"),
    "KeyError": lambda: KeyError("user"),
    "RecursionError": lambda: RecursionError("user"),
    "OSError": lambda: OSError(5, "user"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf8", b"\xff", 0, 1, "user"),
    "StopIteration": lambda: StopIteration("user"),
    "TwoArguments": lambda: TwoArguments("a", 2),
    "NoText": NoText,
    "NoReduce": NoReduce,
}


class Raises:
    """An array that cannot be converted."""

    def __init__(self, kind):
        self.kind = kind

    def __array__(self, *_, **__):
        raise RAISED[self.kind]()


# The numbers of one array, given a generator, the dtype and the shape


def integers(least, most):
    def make(values, dtype, shape):
        low = max(least, 0) if dtype.kind in "ub" else least
        made = values.integers(low, most, shape)
        if dtype.kind == "c":
            made = made + 1j * values.integers(low, most, shape)
        return np.asarray(made).astype(dtype)

    return make


def edges(values, dtype, shape):
    """Return small numbers, and some at the limits, or infinite, or none."""
    made = integers(-20, 21)(values, dtype, shape)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        rare = [limits.max, limits.min, limits.max // 2, 0]
    else:
        rare = [np.nan, np.inf, -np.inf, -0.0]
    where = values.random(shape) < values.choice([0.01, 0.3])
    return np.where(where, values.choice(np.array(rare, dtype), shape), made)


SPREADS = {
    "small": integers(-20, 21),
    "wide": integers(-2000, 2001),
    "large": lambda v, dtype, shape: integers(-30, 31)(v, dtype, shape) * 2000,
    "edges": edges,
    "tiny": integers(-1, 3),
    "normal": lambda v, dtype, shape: np.asarray(v.normal(size=shape)).astype(dtype),
}


def other_numbers(values, dtype, shape):
    """Return an array of a dtype that cannot be added."""
    if dtype.kind == "U":
        return values.choice(np.array(["ab", "\u00e9", ""], dtype), shape)
    raw = values.integers(0, 100, (*shape, dtype.itemsize), dtype="u1")
    return raw.view(dtype)[..., 0].copy()


# How an array lies in memory; these may differ between ranks
def unaligned(a):
    raw = np.zeros(a.nbytes + 1, "u1")
    raw[1:] = np.frombuffer(a.tobytes(), "u1")
    return np.ndarray(a.shape, a.dtype, raw.data, 1)


def swapped(a):
    can_swap = a.dtype.kind in "iufcM" and a.dtype != BFLOAT16
    return a.astype(a.dtype.newbyteorder()) if can_swap else a


def read_only(a):
    a.flags.writeable = False
    return a


def plain(a):
    return a.item() if a.shape == () and a.dtype.char in "dlD" else a


LAYOUTS = [
    *(lambda a: a, lambda a: a, lambda a: a, swapped, unaligned),
    lambda a: np.asfortranarray(a) if a.ndim else a,
    lambda a: np.repeat(a, 2, axis=0)[::2] if a.ndim else a,
    lambda a: a[::-1].copy()[::-1] if a.ndim else a,
    lambda a: np.ascontiguousarray(a.T).T if a.ndim else a,
    *(read_only, plain, lambda a: a[()]),
]

# How arrays are nested: their number, the nest, and the same in another order
STRUCTURES = [
    (1, lambda a: a),
    (1, lambda a: a),
    (1, lambda a: [a]),
    (2, lambda a, b: {"x": a, "y": b}),
    (2, lambda a, b: {"y": b, "x": a}),
    (2, lambda a, b: (a, b)),
    (2, Point),
    (2, lambda a, b: collections.OrderedDict(q=a, p=b)),
    (3, lambda a, b, c: {"p": (a, [b]), "q": {"r": c}}),
    (9, lambda *leaves: list(leaves)),
]


def leaves_of(nest):
    """Return the arrays of a nest, by keys."""
    if isinstance(nest, dict):
        return [leaf for key in sorted(nest) for leaf in leaves_of(nest[key])]
    if isinstance(nest, list | tuple):
        return [leaf for part in nest for leaf in leaves_of(part)]
    return [] if nest is None else [nest]


def shape_of(nest):
    """Return the structure of a nest."""
    if isinstance(nest, dict):
        return type(nest), [(key, shape_of(part)) for key, part in nest.items()]
    if isinstance(nest, list | tuple):
        return type(nest), list(map(shape_of, nest))
    return nest is None


def same(got, want, tolerance):
    """Return whether two arrays are equal, dtypes included."""
    got, want = np.asarray(got), np.asarray(want)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    if tolerance:
        return np.allclose(got, want, tolerance, tolerance, equal_nan=True)
    return bool(((got == want) | ((got != got) & (want != want))).all())


# Reductions by NumPy: of the arrays of all ranks, in the order of the ranks

UFUNCS = {
    "SUM": np.add,
    "MEAN": np.add,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "PRODUCT": np.multiply,
}
FLOAT16 = np.dtype("f2"), BFLOAT16


def name_of(op):
    return op.name if isinstance(op, mpidist.ReduceOp) else op.upper()


def can_reduce(op, dtype):
    if dtype == BFLOAT16:
        return True
    has_order = dtype.kind in "iuf"
    return has_order or (dtype.kind == "c" and op not in ("MIN", "MAX"))


def fitting(exact, dtype):
    """Return integers in a dtype; REFUSED if they do not fit."""
    exact, limits = np.asarray(exact, object), np.iinfo(dtype)
    if any(not limits.min <= n <= limits.max for n in exact.ravel().tolist()):
        return REFUSED
    return exact.astype(dtype)


def reduced(op, parts):
    """Return the elementwise reduction."""
    dtype, combine = parts[0].dtype, UFUNCS[op]
    if not can_reduce(op, dtype):
        return REFUSED
    if dtype.kind in "iu" and op in ("SUM", "PRODUCT"):
        return fitting(
            functools.reduce(combine, [a.astype(object) for a in parts]), dtype
        )
    is_mean_of_integers = dtype.kind in "iu" and op == "MEAN"
    wide = np.dtype("f4") if dtype in FLOAT16 else dtype
    wide = np.dtype("f8") if is_mean_of_integers else wide
    total = np.asarray(functools.reduce(combine, [a.astype(wide) for a in parts]))
    if op == "MEAN":
        total = total / wide.type(len(parts))
    return np.asarray(total).astype(wide if is_mean_of_integers else dtype)


def reduced_over(op, parts, axes):
    """Return the reduction over axes, whose lengths may differ."""
    dtype, combine = parts[0].dtype, UFUNCS[op]
    if not can_reduce(op, dtype):
        return REFUSED
    is_exact = dtype.kind in "iu" and op in ("SUM", "PRODUCT")
    wide = (
        dtype if dtype.itemsize > 8 else np.dtype("c16" if dtype.kind == "c" else "f8")
    )
    if dtype.kind in "iu" and op in ("MIN", "MAX"):
        wide = dtype
    wide = np.dtype(object) if is_exact else wide
    # Each part as rows of the reduced elements
    rest = [n for i, n in enumerate(parts[0].shape) if i not in axes]
    rows = [
        np.moveaxis(a, axes, range(len(axes))).reshape(
            int(np.prod([a.shape[i] for i in axes])), *rest
        )
        for a in parts
    ]
    rows = np.concatenate(rows).astype(wide)
    if op in ("MIN", "MAX") and not len(rows):
        return REFUSED if np.prod(rest) else np.zeros(rest, dtype)
    total = np.asarray(combine.reduce(rows, axis=0))
    if is_exact:
        return fitting(total, dtype)
    if op == "MEAN":
        is_integer = dtype.kind in "iu"
        total = np.asarray(total / np.float64(len(rows)))
        return total.astype("f8" if is_integer else dtype)
    return total.astype(dtype)


# Calls


@dataclasses.dataclass
class Call:
    """One call of all ranks: the arguments of this one, and the result here.

    Arguments that are None cannot be spoiled.
    """

    make: typing.Callable[["Call"], typing.Any]
    want: typing.Any = REFUSED
    leaves: list | None = None
    nest: typing.Any = None  # of leaves
    op: typing.Any = None
    axis: typing.Any = None
    options: typing.Any = None
    lengths: typing.Any = None
    root: typing.Any = None
    thing: typing.Any = None  # an object
    context: str = ""  # where it may be called: in "replica" or "cross" context
    tolerance: float = 0.0
    before: typing.Callable[[], None] | None = None

    @property
    def value(self):
        return self.nest(*self.leaves)


class Drawn:
    """Random arguments: the same numbers on all ranks."""

    def __init__(self, seed, group):
        self.seed, self.group, self.rng = seed, group, random.Random(seed)
        self.rank, self.size = group.rank, group.size
        self.own = random.Random(f"{seed} {self.rank}")  # this rank's

    def array(self, key, rank, dtype, shape, spread):
        values = np.random.default_rng([self.seed, key, rank])
        with np.errstate(all="ignore"):
            if dtype.kind in "MmSUV" and dtype != BFLOAT16:
                return other_numbers(values, dtype, shape)
            return np.asarray(SPREADS[spread](values, dtype, shape)).astype(dtype)

    def arrays(self, spreads, dtypes=DTYPES, shapes=SHAPES, vary=None):
        """Return a function that nests arrays, and of each those of all ranks.

        `vary(shape, rank)` returns the shape on a rank.
        """
        count, nest = self.rng.choice(STRUCTURES)
        made = []
        for key in range(count):
            dtype, shape = np.dtype(self.rng.choice(dtypes)), self.rng.choice(shapes)
            spread = self.rng.choice(spreads)
            all_shapes = [vary(shape, q) if vary else shape for q in range(self.size)]
            made.append(
                [self.array(key, q, dtype, s, spread) for q, s in enumerate(all_shapes)]
            )
        return nest, made

    def own_leaves(self, made):
        return [self.own.choice(LAYOUTS)(parts[self.rank].copy()) for parts in made]

    def options(self):
        """Return options, and the spreads of numbers whose sums are exact then."""
        kinds = {
            "bytes_per_pack": lambda: self.rng.choice([0, 1, 100, 100_000]),
            "timeout_seconds": lambda: 100.0,
            "implementation": lambda: self.rng.choice(["MPI", "AUTO"]),
            "reproducible": lambda: self.rng.random() < 0.6,
            "compression": lambda: self.rng.choice(["bfloat16", "float16"]),
        }
        chosen = self.rng.sample([*kinds], self.rng.choice([0, 1, 1, 2]))
        made = {name: kinds[name]() for name in chosen}
        spreads = ["small", "wide", "large", "edges"]
        if made.get("reproducible") and "compression" not in made:
            spreads = ["normal", "edges"]
        if "compression" in made:
            spreads = ["small"]
        return mpidist.CommunicationOptions(**made), spreads

    def context(self):
        return mpidist.get_replica_context()

    def cut(self, shape, axis):
        """Return lengths of parts along an axis, or None for the usual ones."""
        n = shape[axis]
        usual = [
            max(0, min(-(-n // self.size), n - q * -(-n // self.size)))
            for q in range(self.size)
        ]
        return usual


def all_or_refused(nest, leaves):
    """Return the nest, or REFUSED if a leaf is."""
    return REFUSED if any(a is REFUSED for a in leaves) else nest(*leaves)


REDUCE = [
    ("cross", lambda s, c: s.reduce(c.op, c.value)),
    ("replica", lambda s, c: context().all_reduce(c.op, c.value, c.options)),
    ("replica", lambda s, c: context().all_reduce(c.op, c.value, c.options)),
]


def context():
    return mpidist.get_replica_context()


def reduce(d):
    options, spreads = d.options()
    op = d.rng.choice(OPS)
    name = name_of(op)
    where, make = d.rng.choice(REDUCE)
    if where == "cross":
        options, spreads = None, ["small", "wide", "large", "edges"]
    spreads = {"PRODUCT": ["tiny", "tiny", "edges"]}.get(name, spreads)
    nest, made = d.arrays(spreads)
    if name == "MEAN":
        # The order of additions matters for large integers in float64
        made = [
            [np.clip(a, 0, 1000) if a.dtype.kind in "iu" else a for a in parts]
            for parts in made
        ]
    with np.errstate(all="ignore"):
        want = all_or_refused(nest, [reduced(name, parts) for parts in made])
    compression = options is not None and options.compression
    if compression and d.group.name == "one device" and name in ("SUM", "MEAN"):
        want = REFUSED
    is_rounded = compression and name == "MEAN"
    return Call(
        make,
        want,
        d.own_leaves(made),
        nest,
        op,
        options=options,
        context=where,
        tolerance=1e-6 if is_rounded else 0.0,
    )


def reduce_to(d):
    call = reduce(d)
    call.context = "cross"
    if d.rng.random() < 0.5:
        call.make = lambda s, c: s.extended.reduce_to(c.op, c.value, "CPU:0", c.options)
    else:

        def make(s, c):
            pairs = [(leaf, "CPU:0") for leaf in leaves_of(c.value)]
            return s.extended.batch_reduce_to(c.op, pairs, c.options)

        call.make = make
        want = call.want
        call.want = REFUSED if want is REFUSED else leaves_of(want)
    return call


def reduce_axis(d):
    op = d.rng.choice(OPS)
    name = name_of(op)
    count = d.rng.choice([1, 1, 2])
    axis = (
        tuple(d.rng.sample(range(-2, 2), count))
        if count > 1
        else d.rng.choice([0, -1, 1, (0,)])
    )
    shapes = [(3, 2), (0, 4), (7, 300), (2, 3, 1), (5, 1)]

    def vary(shape, rank):
        n = len(shape)
        axes = {a % n for a in (axis if isinstance(axis, tuple) else (axis,))}
        draw = random.Random(f"{d.seed} {rank} {shape}")
        return tuple(
            draw.choice([0, 1, n]) if i in axes else m for i, m in enumerate(shape)
        )

    spreads = ["tiny"] if name == "PRODUCT" else ["small", "small", "edges", "large"]
    nest, made = d.arrays(spreads, shapes=shapes, vary=vary)
    if name == "MEAN":
        made = [
            [np.clip(a, 0, 1000) if a.dtype.kind in "iu" else a for a in parts]
            for parts in made
        ]
    want = []
    for parts in made:
        n = parts[0].ndim
        axes = [a % n for a in (axis if isinstance(axis, tuple) else (axis,))]
        twice = len(set(axes)) < len(axes)
        with np.errstate(all="ignore"):
            want.append(REFUSED if twice else reduced_over(name, parts, sorted(axes)))

    def make(s, c):
        return s.reduce(c.op, c.value, c.axis)

    return Call(
        make,
        all_or_refused(nest, want),
        d.own_leaves(made),
        nest,
        op,
        axis,
        context="cross",
    )


GATHER = [
    ("cross", lambda s, c: s.gather(c.value, c.axis)),
    ("replica", lambda s, c: context().all_gather(c.value, c.axis, c.options)),
]


def along(d, axis):
    """Return a function that varies the length along an axis."""

    def vary(shape, rank):
        i, draw = axis % len(shape), random.Random(f"{d.seed} {rank} {shape}")
        n = draw.choice([0, 1, 2, shape[i], shape[i]])
        return (*shape[:i], n, *shape[i + 1 :])

    return vary


LONG = [(4,), (3, 2), (2, 3, 4), (0, 4), (300, 2), (20_000, 2), (70_000, 1)]


def gather(d):
    axis = d.rng.choice([0, 0, -1])
    nest, made = d.arrays(["small", "edges"], [*DTYPES, *OTHERS], LONG, along(d, axis))
    want = nest(*[np.concatenate(parts, axis) for parts in made])
    where, make = d.rng.choice(GATHER)
    options = d.options()[0] if where == "replica" else None
    return Call(
        make, want, d.own_leaves(made), nest, axis=axis, options=options, context=where
    )


def pieces(lengths):
    return np.cumsum(lengths)[:-1]


def usual(n, size):
    step = -(-n // size)
    return [max(0, min(step, n - q * step)) for q in range(size)]


def random_cut(draw, n, size):
    cuts = sorted(draw.randrange(n + 1) for _ in range(size - 1))
    return np.diff([0, *cuts, n]).tolist()


def reduce_scatter(d):
    op, axis = d.rng.choice(OPS), d.rng.choice([0, 0, -1])
    name = name_of(op)
    spreads = ["tiny"] if name == "PRODUCT" else ["small", "wide", "edges", "normal"]
    shape = d.rng.choice(LONG)
    nest, made = d.arrays(spreads, shapes=[shape])
    if name == "MEAN":
        made = [
            [np.clip(a, 0, 1000) if a.dtype.kind in "iu" else a for a in parts]
            for parts in made
        ]
    n = shape[axis]
    lengths = d.rng.choice([None, random_cut(d.rng, n, d.size)])
    cut = pieces(lengths or usual(n, d.size))
    with np.errstate(all="ignore"):
        whole = [reduced(name, parts) for parts in made]
    want = [a if a is REFUSED else np.split(a, cut, axis)[d.rank] for a in whole]

    def make(s, c):
        return context().reduce_scatter(c.op, c.value, c.axis, c.lengths)

    return Call(
        make,
        all_or_refused(nest, want),
        d.own_leaves(made),
        nest,
        op,
        axis,
        lengths=lengths,
        context="replica",
    )


def all_to_all(d):
    axis = d.rng.choice([0, 0, -1])
    shape = d.rng.choice(LONG)
    vary = along(d, axis)
    nest, made = d.arrays(["small", "edges"], [*DTYPES, *OTHERS], [shape], vary)
    own_lengths = d.rng.random() < 0.5
    cuts = []
    for q in range(d.size):
        n = vary(shape, q)[axis]
        drawn = random_cut(random.Random(f"{d.seed} cut {q}"), n, d.size)
        cuts.append(drawn if own_lengths else usual(n, d.size))
    want = [
        np.concatenate(
            [np.split(a, pieces(cuts[q]), axis)[d.rank] for q, a in enumerate(parts)],
            axis,
        )
        for parts in made
    ]

    def make(s, c):
        return context().all_to_all(c.value, c.axis, c.lengths)

    return Call(
        make,
        nest(*want),
        d.own_leaves(made),
        nest,
        axis=axis,
        lengths=cuts[d.rank] if own_lengths else None,
        context="replica",
    )


def things(d, rank):
    """Return an object of a rank."""
    draw = random.Random(f"{d.seed} thing {rank}")
    array = d.array(
        rank, rank, np.dtype(draw.choice(DTYPES)), draw.choice(SHAPES), "small"
    )
    return draw.choice(
        [
            None,
            {"a": array, "b": [rank, "t\u00e9", True, None, 0.5]},
            [array, (rank, {"c": b"\0x"})],
            array,
            "text" * rank,
            float("inf"),
            -(1 << 63),
        ]
    )


def broadcast(d):
    root = d.rng.randrange(d.size)
    call = Call(lambda s, c: s.broadcast(c.thing, c.root), things(d, root))
    call.thing, call.root = things(d, d.rank), root
    return call


def gather_objects(d):
    want = [things(d, q) for q in range(d.size)]
    return Call(lambda s, c: s.gather_objects(c.thing), want, thing=want[d.rank])


def barrier(d):
    return Call(lambda s, c: s.barrier(), None)


def slices(d):
    """Reduce rows, whose number may differ."""
    op, rest = d.rng.choice(["SUM", "MEAN"]), d.rng.choice([(), (2,), (3, 0)])
    dtype = np.dtype(d.rng.choice(["f8", "f4", "i4", "c8", "f2"]))
    counts = [random.Random(f"{d.seed} {q}").randrange(4) for q in range(d.size)]
    rows = [d.array(0, q, dtype, (n, *rest), "small") for q, n in enumerate(counts)]
    indices = [
        d.array(1, q, np.dtype("i8"), (n,), "small") for q, n in enumerate(counts)
    ]
    values = np.concatenate(rows)
    want = [values, np.concatenate(indices)]
    if op == "MEAN":
        wide = {"i4": "f8", "f2": "f4"}.get(dtype.str[1:], dtype)
        divided = values.astype(wide) / np.dtype(wide).type(d.size)
        want[0] = divided.astype("f8" if dtype.kind == "i" else dtype)

    def make(s, c):
        made = mpidist.IndexedSlices(c.leaves[0], c.leaves[1])
        got = context().all_reduce(c.op, made)
        return [got.values, got.indices]

    own = [rows[d.rank], indices[d.rank]]
    return Call(make, want, own, None, op, context="replica")


def symmetric(d):
    """Reduce arrays in shared memory."""
    where, make = d.rng.choice([REDUCE[0], REDUCE[1]])
    op, cut = d.rng.choice(["SUM", "MEAN", "MAX"]), d.rng.randrange(5)
    shared = d.group.symmetric
    sizes = [a.size - cut for a in shared]
    parts = [
        [d.array(i, q, a.dtype, (n,), "small") for q in range(d.size)]
        for i, (a, n) in enumerate(zip(shared, sizes))
    ]
    own = [a[:n] for a, n in zip(shared, sizes)]

    def fill():
        for view, values in zip(own, parts):
            view[...] = values[d.rank]

    want = [reduced(op, each) for each in parts]
    return Call(make, want, own, lambda *a: list(a), op, context=where, before=fill)


def buckets(d):
    """Put gradients in an order of this rank."""
    made = d.group.buckets
    parts = [
        [d.array(i, q, a.dtype, a.shape, "small") for q in range(d.size)]
        for i, a in enumerate(made.like)
    ]
    order = d.own.sample(range(len(parts)), len(parts))

    def make(s, c):
        with made.buckets:
            for i in order:
                made.buckets.put(i, c.leaves[i])
        return made.buckets.result

    want = [reduced(made.op, each) for each in parts]
    own = [each[d.rank] for each in parts]
    return Call(make, want, own, None, context="replica")


def update(d):
    """Change a variable by reduced values."""
    parts = [d.array(0, q, np.dtype("f8"), (4,), "small") for q in range(d.size)]
    variable = d.group.variable

    def make(s, c):
        total = s.reduce("SUM", c.leaves[0])
        s.extended.update(variable, lambda v, t: v.assign(t), args=(total,))
        return variable.value()

    return Call(make, sum(parts), [parts[d.rank]], None, context="cross")


CALLS = {
    made.__name__: made
    for made in (reduce, reduce_to, reduce_axis, gather, reduce_scatter, all_to_all)
}
CALLS |= {
    made.__name__: made
    for made in (broadcast, gather_objects, barrier, slices, symmetric, buckets, update)
}
OFTEN = ["reduce", "reduce", "reduce_axis", "gather", *CALLS]


# How one rank fails, given its call and the generator of that choice. Each needs an
# argument, and some need other ranks.


def on_leaf(change):
    def spoil(call, draw):
        i = draw.randrange(len(call.leaves))
        call.leaves[i] = change(call.leaves[i])

    return spoil


def setting(name, value):
    return lambda call, draw: setattr(call, name, value)


def other_structure(call, draw):
    call.nest = lambda *leaves: {"other": list(leaves)}


def other_dtype(a):
    return np.zeros(
        np.shape(a), "i2" if np.asarray(a).dtype != np.dtype("i2") else "f8"
    )


def another(call, draw):
    call.make = lambda s, c: s.barrier()
    call.context, call.before = "", None


HOWS = {
    "shape": ("leaves", 2, on_leaf(lambda a: np.zeros((*np.shape(a), 2)))),
    "dtype": ("leaves", 2, on_leaf(other_dtype)),
    "structure": ("nest", 2, other_structure),
    "object": ("leaves", 1, on_leaf(lambda a: np.full(np.shape(a), None))),
    "text": ("leaves", 1, on_leaf(lambda a: "text")),
    "masked": ("leaves", 1, on_leaf(lambda a: np.ma.masked_array(np.asarray(a)))),
    "op": ("op", 2, setting("op", "MIN")),
    "no op": ("op", 1, setting("op", "MEDIAN")),
    "axis": ("axis", 1, setting("axis", 7)),
    "axis type": ("axis", 1, setting("axis", "x")),
    "options": ("options", 2, setting("options", mpidist.CommunicationOptions(77))),
    "options type": ("options", 1, setting("options", 3)),
    "lengths": ("lengths", 1, setting("lengths", [99])),
    "root": ("root", 2, setting("root", -1)),
    "thing": ("thing", 1, setting("thing", {1, 2})),
    "another": ("make", 2, another),
}
HOWS |= {
    f"convert {kind}": (
        "leaves",
        1,
        on_leaf(functools.partial(lambda kind, a: Raises(kind), kind)),
    )
    for kind in RAISED
}
HOWS["memory"] = ("leaves", 1, lambda call, draw: None)
# What a rank alone may pass, or what only some look at
UNLIKELY = {
    ("broadcast", "thing"),
    ("slices", "structure"),
    ("update", "structure"),
    ("reduce", "op"),
}


def can_fail(name, call, how, size):
    field, ranks, _ = HOWS[how]
    if (how, name_of(call.op or "SUM")) == ("op", "MIN"):
        return False
    return (
        size >= ranks
        and getattr(call, field) is not None
        and (name, how) not in UNLIKELY
    )


# Strategies


class Group:
    """A strategy, and what is made once for it."""

    def __init__(self, comm, ops, name):
        self.comm, self.name = comm, name
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.strategy = mpidist.MirroredStrategy(["CPU:0"], ops, communicator=comm)

    @functools.cached_property
    def symmetric(self):
        return self.strategy.symmetric_like([np.zeros(9), np.zeros(90_000, "f4")])

    @functools.cached_property
    def variable(self):
        with self.strategy.scope():
            return mpidist.Variable(np.zeros(4), name="v")

    @functools.cached_property
    def buckets(self):
        return Buckets(self.strategy)

    @functools.cached_property
    def spare_buckets(self):
        """Return one for each depth: they cannot be nested."""
        return [Buckets(self.strategy) for _ in range(DEEPEST)]

    def prepare(self):
        """Make them, before threads do. Collective."""
        return self.symmetric, self.variable, self.buckets, self.spare_buckets


class Buckets:
    def __init__(self, strategy, op="SUM"):
        self.op = op
        self.like = [np.zeros(7), np.zeros(70_000), np.zeros((2, 2), "f4")]
        self.buckets = strategy.gradient_buckets(self.like, op)


def halves(comm):
    return comm.Split(comm.rank % 2, comm.rank)


def reverse(comm):
    return comm.Split(0, -comm.rank)


def but_last(comm):
    is_in = comm.rank < max(1, comm.size - 1)
    return comm.Split(0 if is_in else MPI.UNDEFINED, comm.rank)


class Own(mpidist.CrossDeviceOps):
    """As programs write them."""

    def reduce_implementation(self, *arguments):
        return super().reduce_implementation(*arguments)


GROUPS = {
    "all": (MPI.Comm.Dup, lambda size: None),
    "second": (MPI.Comm.Dup, lambda size: None),
    "hierarchical": (MPI.Comm.Dup, lambda size: mpidist.HierarchicalCopyAllReduce(2)),
    "one device": (MPI.Comm.Dup, lambda size: mpidist.ReductionToOneDevice(size - 1)),
    "own": (MPI.Comm.Dup, lambda size: Own()),
    "reverse": (reverse, lambda size: None),
    "but last": (but_last, lambda size: None),
    "halves": (halves, lambda size: None),
}
DEEPEST = 5


class Groups:
    """The strategies of a program."""

    def __init__(self, world):
        self.world, self.made = world, {}

    def get(self, name):
        """Return one; None on ranks that are not in it. Collective."""
        if name not in self.made:
            split, ops = GROUPS[name]
            comm = split(self.world.comm)
            is_in = comm != MPI.COMM_NULL
            self.made[name] = Group(comm, ops(comm.size), name) if is_in else None
            if is_in:
                self.made[name].prepare()
        return self.made[name]

    def drop(self, name, is_finalized):
        group = self.made.pop(name, None)
        if group is not None and is_finalized:
            group.strategy.experimental_finalize()


# Programs

SCOPES = ["scope", "buckets", "threads", "with"]


def draw(random):
    """Draw steps; those inside others ignore their group."""
    groups = random.sample([*GROUPS], random.randrange(1, 4))
    steps, depth = [], 0
    for _ in range(random.randrange(4, 30)):
        kind = random.choices(
            ["call", "scope", "buckets", "with", "threads", "raise", "end", "drop"],
            [12, 4, 2, 1, 1, 3 if depth else 0, 4 if depth else 0, 0.3],
        )[0]
        if kind in SCOPES and depth >= DEEPEST:
            continue
        depth += (kind in SCOPES) - (kind == "end")
        how = random.choice([*HOWS]) if random.random() < 0.3 else None
        victim, seed = random.randrange(4), random.getrandbits(30)
        is_caught, holds = random.random() < 0.5, random.random() < 0.3
        arguments = {
            "call": [random.choice(OFTEN), seed, how, victim, is_caught],
            "raise": [random.choice([*RAISED]), victim, holds],
            "drop": [is_caught],
            "end": [],
        }
        step = arguments.get(kind, [is_caught, seed])
        steps.append([kind, random.choice(groups), *step])
    return steps


def tree(steps):
    """Return pairs of a step, and those inside it."""
    open_lists = [[]]
    for step in steps:
        if step[0] == "end":
            del open_lists[1:][-1:], open_lists[max(1, len(open_lists) - 1) :]
            continue
        inside = []
        open_lists[-1].append((step, inside))
        if step[0] in SCOPES:
            open_lists.append(inside)
    return open_lists[0]


class Wrong(BaseException):
    """The library is wrong: it ends the program."""


class Play:
    """The state of one scope of one thread.

    Attributes:
      is_replica: whether the context is a replica's.
      is_lost: whether another rank has left this scope by an error.
      log: what happened, the same on all ranks.
    """

    def __init__(self, group, is_replica=False, depth=0, log=None):
        self.group, self.is_replica, self.depth = group, is_replica, depth
        self.log = [] if log is None else log
        self.is_lost = self.is_thread = False

    def inner(self, is_replica):
        made = Play(self.group, is_replica, self.depth + 1, self.log)
        made.is_thread, made.is_lost = self.is_thread, self.is_lost
        return made

    def block(self, nodes):
        """Play steps; what a failing rank raises leaves the block."""
        holds = False
        for (kind, _, *arguments), inside in nodes:
            if kind == "raise":
                name, victim, does_hold = arguments
                if self.depth and not self.is_lost:
                    if self.group.rank == victim % self.group.size:
                        raise RAISED[name]()
                    self.is_lost, holds = True, does_hold
                continue
            try:
                getattr(self, STEPS[kind])(inside, *arguments)
            except Exception:
                if not (self.is_lost and holds):
                    raise

    def attempt(self, must_fail, is_caught, what, call):
        """Return what a call returns; it fails if it must.

        Args:
          must_fail: whether it must; None if it may, on all ranks alike; a function if
            that is known afterwards.
          is_caught: whether the program goes on if it does.
          what: it is.
          call: without arguments.
        """
        result, error = None, None
        try:
            result = call()
        except Exception as caught:
            error = caught
        must = must_fail() if callable(must_fail) else must_fail
        must = True if self.is_lost else must
        if not self.is_lost:
            self.log.append([what, error is not None])
        if must is not None and must != (error is not None):
            text = (
                "no error"
                if error is None
                else "".join(traceback.format_exception(error))
            )
            raise Wrong(f"{what}, rank {self.group.rank} of {self.group.name}: {text}")
        if error is not None and (self.is_lost or not is_caught):
            raise error
        return result

    def call(self, inside, name, seed, how, victim, is_caught):
        """Make a call, in which one rank may fail."""
        drawn = Drawn(seed, self.group)
        call = CALLS[name](drawn)
        victim %= self.group.size
        fails = how is not None and can_fail(name, call, how, self.group.size)
        fails = fails and not (how == "memory" and self.is_thread)
        want, what = call.want, f"{name} {seed} {how if fails else ''} {victim}"
        is_victim = fails and victim == self.group.rank
        if is_victim:
            HOWS[how][2](call, random.Random(seed))
        must_fail = fails or want is REFUSED
        if fails and how == "memory":
            must_fail = None if want is not REFUSED else True
        is_short = is_victim and how == "memory"
        with short_of_memory() if is_short else contextlib.nullcontext():
            got = self.attempt(must_fail, True, what, lambda: self.make(call))
        if self.log[-1] == [what, True]:
            if not is_caught and self.depth:
                raise Broken("an expected error")
            return
        if self.is_lost:
            return
        is_right = shape_of(got) == shape_of(want) and all(
            same(a, b, call.tolerance) for a, b in zip(leaves_of(got), leaves_of(want))
        )
        if not is_right:
            raise Wrong(
                f"{what} on rank {self.group.rank}: {got!r:.800}\nnot {want!r:.800}"
            )

    def make(self, call):
        """Make a call in a context where it may be made."""
        strategy = self.group.strategy
        if call.before:
            call.before()
        if call.context == "replica" and not self.is_replica:
            result = strategy.run(lambda: [call.make(strategy, call)])[0]
            return components(result)
        if call.context == "cross" and self.is_replica:
            result = context().merge_call(lambda s: [call.make(strategy, call)])[0]
            return components(result)
        return components(call.make(strategy, call))

    def scope(self, inside, is_caught, seed):
        """Play steps in the other context."""
        inner = self.inner(not self.is_replica)
        failed = []

        def body(*_):
            try:
                inner.block(inside)
            except Exception:
                failed.append(True)
                raise

        if self.is_replica:
            call = functools.partial(context().merge_call, body)
        else:
            call = functools.partial(self.group.strategy.run, body)
        self.attempt(lambda: bool(failed) or inner.is_lost, is_caught, "scope", call)

    def step_of_buckets(self, inside, is_caught, seed):
        """Play steps between the gradients of a step."""
        if not self.is_replica or self.is_thread:
            return self.scope(inside, is_caught, seed)
        inner, group = self.inner(True), self.group
        made, failed, drawn = (
            group.spare_buckets[self.depth - 1],
            [],
            Drawn(seed, group),
        )
        parts = [
            [drawn.array(i, q, a.dtype, a.shape, "small") for q in range(group.size)]
            for i, a in enumerate(made.like)
        ]

        def call():
            with made.buckets:
                try:
                    made.buckets.put(0, parts[0][group.rank])
                    inner.block(inside)
                    for i in drawn.own.sample([1, 2], 2):
                        made.buckets.put(i, parts[i][group.rank])
                except Exception:
                    failed.append(True)
                    raise
            return made.buckets.result

        def must_fail():
            return bool(failed) or inner.is_lost

        got = self.attempt(must_fail, is_caught, "buckets", call)
        if got is not None and not all(
            same(a, reduced("SUM", b), 0) for a, b in zip(got, parts)
        ):
            raise Wrong(f"buckets {seed} on rank {group.rank}: {got!r:.800}")

    def with_scope(self, inside, is_caught, seed):
        """Play steps in the strategy's scope."""
        if self.is_replica:
            return self.block(inside)
        with self.group.strategy.scope():
            if self.depth:
                return self.block(inside)
            for node in inside:  # a failure here is the program's own
                self.block([node])

    def threads(self, inside, is_caught, seed):
        """Play each of the steps in a thread."""
        if self.depth or self.is_thread:
            return self.block(inside)
        plays = [Play(self.group) for _ in inside]
        wrong = []

        def work(play, node):
            play.is_thread = True
            time.sleep(own.random() * 0.002)
            try:
                play.block([node])
            except Wrong as error:
                wrong.append(error)

        own = random.Random(f"{seed} {self.group.rank}")
        made = [
            threading.Thread(target=work, args=pair, name=f"t{i}")
            for i, pair in enumerate(zip(plays, inside))
        ]
        for thread in own.sample(made, len(made)):
            thread.start()
        for thread in made:
            thread.join()
        for play in plays:
            self.log += play.log
        if wrong:
            raise wrong[0]


STEPS = {
    "call": "call",
    "scope": "scope",
    "buckets": "step_of_buckets",
    "with": "with_scope",
    "threads": "threads",
}


def components(nest):
    """Return a nest of this rank's components."""
    if isinstance(nest, mpidist.PerReplica | mpidist.Mirrored):
        return components(nest.values[0])
    if isinstance(nest, dict):
        pairs = [(key, components(part)) for key, part in nest.items()]
        return type(nest)(pairs)
    if hasattr(nest, "_fields"):
        return type(nest)(*map(components, nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map(components, nest))
    return nest


@contextlib.contextmanager
def short_of_memory():
    """Let this process take no more memory."""
    former = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE"), former[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)


def play(world, steps):
    """Play a program."""
    groups = Groups(world)
    for node in tree(steps):
        (kind, name, *arguments), _ = node
        if kind == "drop":
            groups.drop(name, *arguments)
            continue
        group, wrong, log = groups.get(name), "", []
        if group is not None:
            made = Play(group)
            try:
                made.block([node])
            except Wrong as error:
                wrong = str(error)
            except Exception:
                log.append("ended by an error")
            log += made.log
        world.require(not wrong, wrong)
        if group is not None:
            logs = group.comm.allgather(log)
            wrong = "" if logs.count(logs[0]) == len(logs) else f"unlike: {logs}"
            wrong = wrong or group.strategy.extended.consensus.broken or ""
        world.require(not wrong, wrong)
    for name in [*groups.made]:
        groups.drop(name, True)
