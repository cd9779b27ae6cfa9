"""Random arrays, and what NumPy makes of those of all ranks."""

import collections
import functools

import ml_dtypes
import numpy as np

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
REFUSED = object()
Point = collections.namedtuple("Point", "x y")


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


def large(values, dtype, shape):
    """Return floats whose sums do not fit float16, but exact ones."""
    if dtype.kind in "iub":
        return integers(-2000, 2001)(values, dtype, shape)
    wide = np.dtype("c16" if dtype.kind == "c" else "f8")
    return 2000 * integers(-30, 31)(values, wide, shape)


SPREADS = {
    "small": integers(-20, 21),
    "wide": integers(-2000, 2001),
    "large": large,
    "edges": edges,
    "brim": integers(-20, 1),  # beside the largest integer on one rank: it fits
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
    lambda a: np.moveaxis(np.moveaxis(a, 0, -1).copy(), -1, 0) if a.ndim else a,
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
    (2, lambda a, b: collections.defaultdict(list, x=a, y=b)),
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


# Parts along an axis


def pieces(lengths):
    return np.cumsum(lengths)[:-1]


def usual(n, size):
    step = -(-n // size)
    return [max(0, min(step, n - q * step)) for q in range(size)]


def random_cut(draw, n, size):
    cuts = sorted(draw.randrange(n + 1) for _ in range(size - 1))
    return np.diff([0, *cuts, n]).tolist()
