"""Random collective calls, what they return on each rank, and how one rank fails."""

import dataclasses
import functools
import random
import threading
import typing

import numpy as np
from oracle import (
    BFLOAT16,
    DTYPES,
    LAYOUTS,
    OTHERS,
    REFUSED,
    SHAPES,
    SPREADS,
    STRUCTURES,
    leaves_of,
    name_of,
    other_numbers,
    pieces,
    random_cut,
    reduced,
    reduced_over,
    same,
    shape_of,
    usual,
)

import mpidist

OPS = ["SUM", "SUM", "MEAN", "MIN", "MAX", "PRODUCT", "sum", mpidist.ReduceOp.MEAN]


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


class NoAttributes(Exception):
    def __getattr__(self, name):
        raise Broken("attribute")


class NoNewAttributes(Exception):
    def __setattr__(self, name, value):
        raise Broken("attribute")


class Changeling(Exception):
    def __reduce__(self):
        return str, ("no exception",)


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
    "NoAttributes": NoAttributes,
    "NoNewAttributes": NoNewAttributes,
    "Changeling": Changeling,
}


class Raises:
    """An array that cannot be converted."""

    def __init__(self, kind):
        self.kind = kind

    def __array__(self, *_, **__):
        raise RAISED[self.kind]()


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
    thing: typing.Any = None  # an object, in a list
    context: str = ""  # where it may be called: in "replica" or "cross" context
    tolerance: float = 0.0
    before: typing.Callable[[], None] | None = None

    @property
    def value(self):
        return self.nest(*self.leaves)

    def find_fault(self, got, before):
        """Return what is wrong with a result, given copies of the arguments."""
        found, own = leaves_of(got), arrays_of(self.leaves or [])
        if shape_of(got) != shape_of(self.want) or not all(
            same(a, b, self.tolerance) for a, b in zip(found, leaves_of(self.want))
        ):
            return f"{got!r:.800}\nnot {self.want!r:.800}"
        if not all(same(a, b, 0) for a, b in zip(own, before)):
            return "the arguments were changed"
        shares = any(np.may_share_memory(a, b) for a in arrays_of(found) for b in own)
        return "the result is an argument" * shares


def backwards(nest, *leaves):
    """Return a dict in another order, which may differ between ranks."""
    return dict(reversed(nest(*leaves).items()))


def arrays_of(leaves):
    return [a for a in leaves if isinstance(a, np.ndarray)]


class Drawn:
    """Random arguments: the same numbers on all ranks.

    In another turn a call is of the same kind, with other numbers, lengths and layouts.
    """

    def __init__(self, seed, group, turn=0):
        self.group, self.rng = group, random.Random(seed)
        self.seed = seed + (turn << 32)
        self.rank, self.size = group.rank, group.size
        self.own = random.Random(f"{self.seed} {self.rank}")  # this rank's

    def array(self, key, rank, dtype, shape, spread):
        values = np.random.default_rng([self.seed, key, rank])
        if spread == "brim" and dtype.kind in "iu" and rank == self.seed % self.size:
            return np.full(shape, np.iinfo(dtype).max, dtype)
        with np.errstate(all="ignore"):
            if dtype.kind in "MmSUV" and dtype != BFLOAT16:
                return other_numbers(values, dtype, shape)
            return np.asarray(SPREADS[spread](values, dtype, shape)).astype(dtype)

    def arrays(self, spreads, dtypes=DTYPES, shapes=SHAPES, vary=None, whole=None):
        """Return a function that nests arrays, and of each those of all ranks.

        `vary(shape, rank)` returns the shape on a rank; `whole`: spreads of integers.
        """
        count, nest = self.rng.choice(STRUCTURES)
        if type(nest(*range(count))) is dict and self.own.random() < 0.5:
            nest = functools.partial(backwards, nest)
        made = []
        for key in range(count):
            dtype, shape = np.dtype(self.rng.choice(dtypes)), self.rng.choice(shapes)
            spread = self.rng.choice(whole if whole and dtype.kind in "iu" else spreads)
            ranks = range(self.size)
            all_shapes = [vary(shape, q) if vary else shape for q in ranks]
            made.append(
                [self.array(key, q, dtype, s, spread) for q, s in enumerate(all_shapes)]
            )
        return nest, made

    def own_leaves(self, made):
        return [self.own.choice(LAYOUTS)(np.array(parts[self.rank])) for parts in made]

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
        chosen = ["compression"] if self.rng.random() < 0.2 else chosen
        made = {name: kinds[name]() for name in chosen}
        spreads = ["small", "wide", "large", "edges", "brim"]
        if made.get("reproducible") and "compression" not in made:
            spreads = ["normal", "edges"]
        if "compression" in made:
            spreads = ["small"]
        return mpidist.CommunicationOptions(**made), spreads


def clipped(made):
    """Return arrays whose means have no order of additions: integers are small."""
    return [
        [np.clip(a, 0, 1000) if a.dtype.kind in "iu" else a for a in parts]
        for parts in made
    ]


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
    op = d.rng.choice(["SUM", "MEAN"] if options.compression else OPS)
    name = name_of(op)
    where, make = d.rng.choice(REDUCE)
    if where == "cross":
        options, spreads = None, ["small", "wide", "large", "edges", "brim"]
    spreads = {"PRODUCT": ["tiny", "tiny", "edges"]}.get(name, spreads)
    compression = options is not None and options.compression
    # Only large arrays are compressed, and of them only floats, and means
    shapes = [(3,), (9000,), (70_001,)] if compression else SHAPES
    whole = (
        None if name == "MEAN" or spreads != ["small"] else ["small", "edges", "brim"]
    )
    nest, made = d.arrays(spreads, shapes=shapes, whole=whole)
    if name == "MEAN":
        made = clipped(made)
    with np.errstate(all="ignore"):
        want = all_or_refused(nest, [reduced(name, parts) for parts in made])
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
        else d.rng.choice([0, -1, 1, (0,), [0, -2]])
    )
    shapes = [(3, 2), (0, 4), (7, 300), (2, 3, 1), (5, 1), (2, 3, 4, 5)]

    def vary(shape, rank):
        n = len(shape)
        axes = {a % n for a in np.atleast_1d(axis).tolist()}
        draw = random.Random(f"{d.seed} {rank} {shape}")
        return tuple(
            draw.choice([0, 1, n]) if i in axes else m for i, m in enumerate(shape)
        )

    spreads = ["tiny"] if name == "PRODUCT" else ["small", "small", "edges", "large"]
    nest, made = d.arrays(spreads, shapes=shapes, vary=vary)
    if name == "MEAN":
        made = clipped(made)
    want = []
    for parts in made:
        n = parts[0].ndim
        axes = [a % n for a in np.atleast_1d(axis).tolist()]
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
LONG += [(60, 47, 41)]


def gather(d):
    axis = d.rng.choice([0, 0, -1, 1])
    shapes = [shape for shape in LONG if axis < len(shape)]
    dtypes = [*DTYPES, *OTHERS]
    nest, made = d.arrays(["small", "edges"], dtypes, shapes, along(d, axis))
    want = nest(*[np.concatenate(parts, axis) for parts in made])
    where, make = d.rng.choice(GATHER)
    options = d.options()[0] if where == "replica" else None
    return Call(
        make, want, d.own_leaves(made), nest, axis=axis, options=options, context=where
    )


def reduce_scatter(d):
    op, axis = d.rng.choice(OPS), d.rng.choice([0, 0, -1])
    name = name_of(op)
    spreads = ["tiny"] if name == "PRODUCT" else ["small", "wide", "edges", "normal"]
    shape = d.rng.choice(LONG)
    nest, made = d.arrays(spreads, shapes=[shape])
    if name == "MEAN":
        made = clipped(made)
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
    call = Call(lambda s, c: s.broadcast(*c.thing, c.root), things(d, root))
    call.thing, call.root = [things(d, d.rank)], root
    return call


def gather_objects(d):
    want = [things(d, q) for q in range(d.size)]
    return Call(lambda s, c: s.gather_objects(*c.thing), want, thing=[want[d.rank]])


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
        for a, n, values in zip(shared, sizes, parts):
            a[:n] = values[d.rank]

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
# They use what a group has once, so that threads would disturb each other
OF_GROUP = {"symmetric", "buckets", "update"}
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
    call.nest = lambda *leaves: {"other": [*leaves, leaves[0]]}


def other_root(call, draw):
    call.root = 0 if call.root else 1


def other_axis(call, draw):
    axis = tuple(call.axis) if isinstance(call.axis, list) else call.axis
    call.axis = {0: 1, (0,): 1, 1: 0, -1: -2}.get(axis, 0)


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
    "other axis": ("axis", 2, other_axis),
    "axis type": ("axis", 1, setting("axis", "x")),
    "options": ("options", 2, setting("options", mpidist.CommunicationOptions(77))),
    "options type": ("options", 1, setting("options", 3)),
    "lengths": ("lengths", 1, setting("lengths", [99])),
    "root": ("root", 1, setting("root", -1)),
    "other root": ("root", 2, other_root),
    "thing": ("thing", 1, setting("thing", [{1, 2}])),
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
# Something is short when the call is made; it may suffice
SHORT = ["memory", "stack"]
HOWS |= dict.fromkeys(SHORT, ("make", 1, lambda call, draw: None))
# What a rank alone may pass, or what only some look at
UNLIKELY = {
    ("broadcast", "thing"),
    ("barrier", "another"),
    # CPython waits for ever for a thread that lacks memory to begin
    ("buckets", "memory"),
    ("buckets", "stack"),
}


def can_fail(name, call, how, size):
    """Return whether a call fails this way; alike on all ranks."""
    if how is None:
        return False
    field, ranks, _ = HOWS[how]
    if (how, name_of(call.op or "SUM")) == ("op", "MIN"):
        return False
    return (
        size >= ranks
        and getattr(call, field) is not None
        and (name, how) not in UNLIKELY
    )
