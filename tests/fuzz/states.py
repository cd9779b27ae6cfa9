"""Random trees of what Python programs keep, saved, damaged and restored.

They are saved by some ranks, their files damaged, cut, removed or renamed, and they are
restored by other ranks: each object is equal, to the bit, or an error is raised on all
ranks and nothing has changed. The states are drawn twice, from one seed: what was
saved, and what it has to be equal to.
"""

import collections
import copy
import os
import random
import struct
import typing
from pathlib import Path

import ml_dtypes
import numpy as np
from job import World
from stateful import Stateful

import mpidist

Point = collections.namedtuple("Point", "first second")


class Named(typing.NamedTuple):
    """As programs define them."""

    x: typing.Any
    y: typing.Any = 3


KEYS = [
    *("a", "b", "", ".", "..", "x/y", "n\0l", "e\u0301", "\u00e9", "%2F", "A"),
    *("sp ace", "\ud800", "k" * 90, "0", "-1", "kind", "type", "10", "9"),
]
NUMBERS_AS_KEYS = [0, 1, -1, 10, 2, 9, 1 << 70, -5]
DTYPES = [
    *("i1", "u2", ">i4", "i8", ">u8", "f2", ">f2", "f4", ">f8", "f8", "g", "c8"),
    *(">c16", "?", "S3", "U2", ">U2", "M8[ns]", ">m8[s]", "M8[D]", "V5"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    [("a", "<i4"), ("b", ">f8"), ("v", "u1", (3,))],
    [("x", [("t", "f4"), ("q", ">i2")], (2,))],
]
SHAPES = [
    *((), (0,), (1,), (7,), (2, 3), (0, 4), (3, 1, 2), (300,), (9000,)),
    *((70001,), (1 << 17,), (5, 7003)),
]
LAYOUTS = [
    lambda x: x,
    lambda x: x,
    lambda x: x.T,
    lambda x: np.repeat(x, 2, axis=0)[::2] if x.ndim else x,
    lambda x: x[::-1] if x.ndim else x,
    np.asfortranarray,
]


def a_nan(values):
    bits = 0x7FF0000000000001 | values.getrandbits(52) | values.getrandbits(1) << 63
    return struct.unpack("d", struct.pack("Q", bits))[0]


SCALARS = [
    *(lambda v: np.float32(v.random()), lambda v: np.int8(v.randrange(-9, 9))),
    *(lambda v: np.datetime64(v.randrange(9999), "s"), lambda v: np.datetime64("NaT")),
    *(lambda v: np.timedelta64(v.choice([1, 2**40]), "ms"), lambda v: np.bool_(1)),
    *(lambda v: np.longdouble(v.random()), lambda v: np.uint64(v.getrandbits(64))),
    *(lambda v: ml_dtypes.bfloat16(v.random()), lambda v: np.float64(a_nan(v))),
    *(lambda v: np.void(v.randbytes(5)), lambda v: np.complex64(v.random())),
]
NUMBERS = [
    lambda v: v.random() < 0.5,
    lambda v: v.randrange(-99, 99),
    lambda v: v.choice([-0.0, 0.0, float("inf"), a_nan(v), v.random(), 5e-324]),
    lambda v: complex(v.random(), v.choice([-0.0, a_nan(v)])),
    lambda v: v.choice([1 << 63, -(1 << 63), (1 << 63) - 1, 1 << 64, 0, -(1 << 200)]),
]
TEXTS = [
    lambda v: v.choice(["", "t", "\u00e9\ud800", "n\0", "x" * 40000, "\0"]),
    lambda v: v.choice([b"", b"\0\0", bytes(range(256))]),
    lambda v: np.str_(v.choice(["", "q", "n\0"])),
    lambda v: np.bytes_(v.choice([b"", b"q", b"n\0"])),
    lambda v: None,
]


def array(shape, values):
    """Return an array; `shape` and `values` are generators of random numbers."""
    dtype, dims = np.dtype(shape.choice(DTYPES)), shape.choice(SHAPES)
    count = int(np.prod(dims))
    if dtype.kind == "U":
        texts = np.array([values.choice(["ab", "\u00e9", ""]) for _ in range(5)], "U2")
        return np.resize(texts, dims).astype(dtype)
    if dtype.char in "gG":
        return np.frombuffer(values.randbytes(8 * count), "i8").astype(dtype)
    raw = np.frombuffer(values.randbytes(count * dtype.itemsize), np.uint8).copy()
    if dtype.kind == "b":
        raw &= 1
    made = raw.view(dtype).reshape(dims).copy() if count else np.zeros(dims, dtype)
    return shape.choice(LAYOUTS)(made)


def numbers(shape, values):
    """Return a list of values of one type, or of several."""
    count, one = shape.choice([0, 1, 2, 3, 50]), shape.choice([*NUMBERS, *SCALARS])
    several = NUMBERS if shape.random() < 0.3 else [one]
    return [values.choice(several)(values) for _ in range(count)]


def members(keys):
    """Return a function that makes a dict with some of these keys."""

    def make(shape, values, depth):
        names = shape.sample(keys, shape.randrange(4))
        return {name: tree(shape, values, depth + 1) for name in names}

    return make


def listed(cls):
    def make(shape, values, depth):
        count = shape.randrange(4)
        return cls([tree(shape, values, depth + 1) for _ in range(count)])

    return make


def counted(shape, values, depth):
    return collections.Counter({k: values.randrange(-5, 5) for k in KEYS[:3]})


def with_default(shape, values, depth):
    factory = shape.choice([int, list, None])
    return collections.defaultdict(factory, members(KEYS)(shape, values, depth))


CONTAINERS = [
    *(listed(list), listed(tuple), listed(collections.deque)),
    *(members(KEYS), members(KEYS), members(NUMBERS_AS_KEYS), counted, with_default),
    lambda *a: collections.OrderedDict(members(KEYS)(*a)),
    lambda s, v, d: Point(tree(s, v, d + 1), tree(s, v, d + 1)),
    lambda s, v, d: Named(tree(s, v, d + 1), tree(s, v, d + 1)),
    lambda s, v, d: s.choice([list, tuple, collections.deque])(numbers(s, v)),
    lambda s, v, d: collections.deque(numbers(s, v), 60),
]


def tree(shape, values, depth=0):
    """Return a tree whose structure `shape` draws, and its values `values`."""
    if depth < 4 and shape.random() < 0.7:
        return shape.choice(CONTAINERS)(shape, values, depth)
    if shape.random() < 0.4:
        return array(shape, values)
    return shape.choice([*SCALARS, *NUMBERS, *TEXTS])(values)


def generator(shape, values):
    """Return a generator of random numbers in the middle of its sequence."""
    seed, kind = values.randrange(1 << 30), shape.randrange(4)
    if kind == 0:
        return random.Random(seed)
    if kind == 1:
        made = np.random.RandomState(seed)
        made.normal(size=values.randrange(3))
        return made
    bits = shape.choice([np.random.PCG64, np.random.MT19937, np.random.SFC64])
    made = np.random.Generator(bits(seed))
    made.integers(0, 9, values.randrange(4), np.int32)
    return made


# What an object is, given two generators of random numbers and the rank
KINDS = {
    "tree": lambda s, v, rank: tree(s, v),
    "stateful": lambda s, v, rank: Stateful(tree(s, v)),
    "generator": lambda s, v, rank: generator(s, v),
    "of each rank": lambda s, v, rank: Stateful({"rank": rank, "x": tree(s, v, 3)}),
    "per replica": lambda s, v, rank: mpidist.PerReplica(
        (np.full(3, rank + v.randrange(99)),)
    ),
}
_OF_RANKS = {"of each rank", "per replica"}


def drawn(objects, version, rank):
    """Return the objects of a version by name."""
    return {
        f"o{seed}": KINDS[kind](
            random.Random(seed), random.Random(f"{seed} {version}"), rank
        )
        for kind, seed in objects
    }


def equal(a, b):
    """Return whether two values are the same, to the bit and to the type."""
    if isinstance(a, mpidist.PerReplica):
        return equal(a.values[0], b.values[0])
    if type(a) is not type(b):
        # A file holds no classes of namedtuples
        return getattr(a, "_fields", 0) == getattr(b, "_fields", 1) and all(
            map(equal, a, b)
        )
    if isinstance(a, np.ndarray | np.generic):
        if (a.dtype.str, a.dtype, a.shape) != (b.dtype.str, b.dtype, b.shape):
            return False
        # Long doubles have padding
        same = a.dtype.char in "gG" and np.array_equal(a, b, equal_nan=True)
        return bool(same) or a.tobytes() == b.tobytes()
    if isinstance(a, float | complex):
        return np.array(a).tobytes() == np.array(b).tobytes()
    if isinstance(a, Stateful):
        return equal(a.state, b.state)
    if isinstance(a, np.random.Generator):
        return equal_states(a.bit_generator.state, b.bit_generator.state)
    if isinstance(a, np.random.RandomState):
        return equal_states(a.get_state(legacy=False), b.get_state(legacy=False))
    if isinstance(a, random.Random):
        return a.getstate() == b.getstate()
    if isinstance(a, dict):
        same = getattr(a, "default_factory", 0) == getattr(b, "default_factory", 0)
        return same and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | collections.deque):
        same = getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        return same and len(a) == len(b) and all(map(equal, a, b))
    return a == b


def equal_states(a, b):
    return repr(a) == repr(b)


DAMAGES = {
    "flip": lambda data, at, v: data[:at] + bytes([data[at] ^ v]) + data[at + 1 :],
    "zero": lambda data, at, v: data[:at] + bytes(v) + data[at + v :],
    "cut": lambda data, at, v: data[:at],
    "grow": lambda data, at, v: data + bytes(v),
    "insert": lambda data, at, v: data[:at] + bytes(v) + data[at:],
    "swap": lambda data, at, v: data[at:] + data[:at],
    "empty": lambda data, at, v: b"",
}


def draw(random):
    """Draw some objects, and what is done with them."""
    steps = [
        ["object", random.choices([*KINDS], [6, 3, 1, 2, 1])[0], random.getrandbits(30)]
        for _ in range(random.randrange(1, 6))
    ]
    for _ in range(random.randrange(2, 10)):
        how = random.choice(["manager", "manager background", "write", "write"])
        size = random.choice([1, 1 << 20, 1 << 28])
        damage = random.choice([*DAMAGES]), random.random(), random.random()
        drawn_steps = [
            *[["save", how, size, random.randrange(4)]] * 2,
            *[["restore", random.randrange(4)]] * 2,
            ["damage", *damage, random.randrange(1, 255)],
            *(["remove", random.random()], ["rename"], ["mend"]),
        ]
        steps.append(random.choice(drawn_steps))
    return [*steps, ["restore", random.randrange(4)]]


class Play:
    """The state of a program: what was saved last, and what was done to it."""

    def __init__(self, world: World, objects):
        self.world, self.objects = world, objects
        self.path, self.version, self.ranks = None, 0, 0
        self.kept: dict[Path, bytes] = {}  # by path: what damaged files were
        self.is_damaged = False

    def save(self, how, shard_bytes, ranks):
        world, self.ranks = self.world, ranks % self.world.size + 1
        self.version += 1
        strategy, path = world.strategy(self.ranks), None
        self.mend()
        if strategy and world.rank < self.ranks:
            state = drawn(self.objects, self.version, world.rank)
            checkpoint = mpidist.Checkpoint(
                strategy=strategy, shard_bytes=shard_bytes, **state
            )
            if how == "write":
                path = checkpoint.write(world.folder / "written")
            else:
                folder, is_background = world.folder / how, "background" in how
                manager = mpidist.CheckpointManager(
                    checkpoint, folder, 2, is_background=is_background
                )
                path = manager.save(self.version)
                manager.wait()
                checkpoint.saver.wait()
        self.path = Path(world.comm.bcast(path))
        self.is_damaged = False

    def files(self):
        """Return the files of the checkpoint, the index last."""
        stem = self.path.stem
        files = self.path.parent.glob(f"{stem}*.h5")
        return sorted(files, key=lambda path: (-len(path.name), path.name))

    def damage(self, kind, which, where, value):
        self._change(which, lambda data: _damaged(data, kind, where, value))

    def remove(self, which):
        self._change(which, None)

    def _change(self, which, change):
        if self.path is None:
            return
        if self.world.rank == 0 and self.files():
            files = self.files()
            path = files[int(which * len(files))]
            data = path.read_bytes()
            self.kept.setdefault(path, data)
            if change is None:
                path.unlink()
            else:
                path.write_bytes(change(data))
        self.is_damaged = True
        self.world.comm.Barrier()

    def mend(self):
        for path, data in self.kept.items():
            path.write_bytes(data)
        self.kept.clear()
        self.is_damaged = False
        self.world.comm.Barrier()

    def rename(self):
        """Give the index another name: its shards stay where they are."""
        if self.path is None or self.is_damaged:
            return
        renamed = self.path.with_name(f"best{self.version}.h5")
        if self.world.rank == 0 and self.path.exists():
            os.rename(self.path, renamed)
        self.world.comm.Barrier()
        self.path = renamed

    def restore(self, ranks):
        if self.path is None:
            return
        world, ranks = self.world, ranks % self.world.size + 1
        strategy, wrong, result = world.strategy(ranks), "", None
        if strategy and world.rank < ranks:
            # One rank saves one state for all
            saver = world.rank if self.ranks > 1 else 0
            want = drawn(self.objects, self.version, saver)
            other = drawn(self.objects, self.version + 1000, world.rank)
            before = copy.deepcopy(other)
            checkpoint = mpidist.Checkpoint(strategy=strategy, **other)
            try:
                checkpoint.restore(self.path)
            except mpidist.MpidistError as error:
                result = "error"
                wrong = "" if self._may_fail(ranks) else f"{error}"
                wrong += changed(before, checkpoint.objects)
            else:
                result = "restored"
                wrong = changed(want, checkpoint.objects)
        results = set(world.comm.allgather(result)) - {None}
        wrong += "some raise, some do not" * (len(results) > 1)
        world.require(not wrong, wrong)

    def _may_fail(self, ranks):
        """Return whether restoring may be refused: a state of each of other ranks."""
        of_ranks = any(kind in _OF_RANKS for kind, _ in self.objects)
        return self.is_damaged or (of_ranks and ranks != self.ranks)


def _damaged(data, kind, where, value):
    return DAMAGES[kind](data, int(where * (len(data) - 1)), value) if data else data


def changed(want, found):
    """Describe the objects that are not equal."""
    names = [name for name in want if not equal(want[name], found[name])]
    return " ".join(f"{n}: {found[n]!r:.300} for {want[n]!r:.300}" for n in names)


def play(world, steps):
    """Play a program."""
    objects = [step[1:] for step in steps if step[0] == "object"]
    made = Play(world, objects)
    for name, *arguments in steps:
        if name != "object":
            getattr(made, name)(*arguments)
