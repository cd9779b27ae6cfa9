"""Random calls of torch.distributed over MPI against NumPy.

Each rank draws the tensors of all ranks, on groups of all ranks and of some. Calls may
be asynchronous; then each rank waits for them in an order of its own. Where one rank
passes something else, all ranks of the group raise, and later calls are exact.
"""

import functools
import random
import threading
import time
import traceback

import numpy as np
import torch
from oracle import BFLOAT16, REFUSED, random_cut, reduced

import mpidist
import mpidist.torch

dist = torch.distributed
torch.set_num_threads(1)  # ranks share the cores
DTYPES = [
    *("float32", "float64", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]
MOVED = [*DTYPES, "float8_e4m3fn", "float8_e5m2"]
SIZES = [0, 1, 2, 5, 7, 300, 20_000, 70_001]
OPS = ["SUM", "SUM", "AVG", "MIN", "MAX", "PRODUCT"]
OPS += ["BAND", "BOR", "BXOR", "PREMUL_SUM"]
BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
LOGIC = {"SUM": np.any, "MAX": np.any, "PRODUCT": np.all, "MIN": np.all}


def numbers(dtype, size, *seed):
    """Return a flat tensor of small numbers; integers are rarely large."""
    values = np.random.default_rng([*seed])
    is_large = np.random.default_rng(seed[0]).random() < 0.1
    dtype = getattr(torch, dtype)
    if dtype == torch.bool:
        return torch.from_numpy(values.random(size) < 0.5)
    made = values.integers(-4 if dtype.is_signed else 0, 5, size)
    if dtype.is_complex:
        made = made + 1j * values.integers(-4, 5, size)
    elif is_large and dtype.is_floating_point:
        made *= 99
    elif is_large:
        made = np.where(values.random(size) < 0.1, torch.iinfo(dtype).max // 2, made)
    return torch.from_numpy(np.asarray(made)).to(dtype)


def array_of(tensor):
    """Return NumPy's array of a tensor."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def total_of(op, tensors):
    """Return the reduction of the tensors of all ranks, as an array, or REFUSED."""
    parts = [array_of(t) for t in tensors]
    kind = "b" if parts[0].dtype == bool else parts[0].dtype.kind
    if op in BITWISE:
        can = kind in "biu"
        return functools.reduce(BITWISE[op], parts) if can else REFUSED
    if kind == "b":
        return LOGIC[op](parts, axis=0) if op in LOGIC else REFUSED
    if op == "PREMUL_SUM":
        return reduced("SUM", [p * p.dtype.type(2) for p in parts])
    if op != "AVG" or kind not in "iu":
        return reduced("MEAN" if op == "AVG" else op, parts)
    total = reduced("SUM", parts)
    if total is REFUSED:
        return REFUSED
    exact = [abs(n) // len(parts) * (-1 if n < 0 else 1) for n in total.tolist()]
    return np.array(exact, object).astype(total.dtype)


def op_of(name):
    if name == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(2.0)
    return getattr(dist.ReduceOp, name)


def is_same(got, want, is_mean=False):
    """Return whether a tensor has the bytes of another, or the numbers of an array."""
    if isinstance(want, torch.Tensor):
        return torch.equal(bytes_of(got), bytes_of(want))
    got, want = array_of(got.contiguous()), np.asarray(want)
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    tolerance = 2.0 ** (-5 if got.dtype.itemsize == 2 else -20) * is_mean
    wide = "c16" if got.dtype.kind == "c" or got.dtype == BFLOAT16 else got.dtype
    return np.allclose(got.astype(wide), want.astype(wide), tolerance, 0)


def bytes_of(tensor):
    # One element may have any stride, with which it is no row of bytes
    return (
        tensor.clone()
        .contiguous()
        .as_strided((tensor.numel(),), (1,))
        .view(torch.uint8)
    )


# How a tensor lies in memory, on each rank another way
LAYOUTS = [
    lambda t: t,
    lambda t: torch.stack([t, t], dim=-1)[..., 0],
    lambda t: torch.cat([t[:1], t])[1:],
]


class Call:
    """One call on a group: what is drawn for it, alike on its ranks.

    Attributes:
      group: has the size, this rank of it, and the numbers of its ranks in the world.
      failure: what the rank `victim` passes differently, or None.
    """

    def __init__(self, group, seed, failure=None, victim=0):
        self.group, self.draw = group, random.Random(seed)
        self.size, self.rank = group.size, group.rank
        self.seed, self.failure = self.draw.getrandbits(30), failure
        self.is_victim = victim % self.size == self.rank
        self.own = random.Random(f"{self.seed} {self.rank}")

    def settle(self, moves=False):
        """Draw dtype, length, root and operation; spoil one on the victim."""
        self.dtype = self.draw.choice(MOVED if moves else DTYPES)
        self.length, self.op = self.draw.choice(SIZES), self.draw.choice(OPS)
        self.start = self.draw.randrange(self.size)  # the root
        if self.dtype[:7] == "complex" and self.op == "PRODUCT":
            self.op = "SUM"  # nobody says what that is
        if self.failure is not None:
            self.dtype, self.op = "float32", "SUM"
            if self.is_victim:
                self.dtype = "int32" if self.failure == "dtype" else "float32"
                self.op = "MAX" if self.failure == "op" else "SUM"
                self.length += self.failure == "length"
                self.start = (self.start + (self.failure == "root")) % self.size
        self.root = self.group.ranks[self.start]  # of the world

    @property
    def is_root(self):
        return self.rank == self.start

    def part(self, rank, size=None, k=0):
        """Return what a rank passes."""
        size = self.length if size is None else size
        return numbers(self.dtype, size, self.seed, rank, k)

    def mine(self, size=None):
        """Return what this rank passes."""
        return self.own.choice(LAYOUTS)(self.part(self.rank, size))

    def empty(self, size=None):
        """Return a tensor to be written, of other numbers."""
        return self.own.choice(LAYOUTS)(self.part(self.rank, size, 9))

    def every(self, size=None):
        return [self.part(rank, size) for rank in range(self.size)]

    def total(self, size=None, cuts=None):
        """Return the reduction of what the ranks pass, or this rank's part of it."""
        total = total_of(self.op, self.every(size))
        is_whole = cuts is None or total is REFUSED
        return total if is_whole else np.split(total, cuts)[self.rank]

    def sizes(self):
        """Return how many elements each rank sends to each."""
        n = self.length % 1000
        return [random_cut(self.draw, n, self.size) for _ in range(self.size)]


# Each returns a function, its arguments, the outputs, and what they must be


def all_reduce(c):
    c.settle()
    mine = c.mine()
    return dist.all_reduce, [mine, op_of(c.op)], [mine], [c.total()]


def reduce(c):
    c.settle()
    mine, total = c.mine(), c.total()
    if total is not REFUSED and not c.is_root:
        total = c.part(c.rank)
    return dist.reduce, [mine, c.root, op_of(c.op)], [mine], [total]


def broadcast(c):
    c.settle(moves=True)
    mine = c.mine()
    return dist.broadcast, [mine, c.root], [mine], [c.part(c.start)]


def all_gather(c):
    c.settle(moves=True)
    sizes = [c.length + r * c.draw.randrange(2) for r in range(c.size)]
    places = [c.empty(n) for n in sizes]
    parts = [c.part(r, n) for r, n in enumerate(sizes)]
    return dist.all_gather, [places, c.mine(sizes[c.rank])], places, parts


def all_gather_into_tensor(c):
    c.settle(moves=True)
    whole = c.empty(c.length * c.size)
    every = torch.cat([bytes_of(t) for t in c.every()])
    return dist.all_gather_into_tensor, [whole, c.mine()], [whole], [every]


def reduce_scatter(c):
    c.settle()
    sizes = [c.length + r * c.draw.randrange(2) for r in range(c.size)]
    own, parts = c.empty(sizes[c.rank]), [*c.part(c.rank, sum(sizes)).split(sizes)]
    total = c.total(sum(sizes), np.cumsum(sizes)[:-1])
    return dist.reduce_scatter, [own, parts, op_of(c.op)], [own], [total]


def reduce_scatter_tensor(c):
    c.settle()
    own, n = c.empty(), c.length * c.size
    given = [own, c.mine(n), op_of(c.op)]
    return dist.reduce_scatter_tensor, given, [own], [c.total(n, c.size)]


def all_to_all(c):
    c.settle(moves=True)
    sizes, q = c.sizes(), c.rank
    parts = [c.part(r, sum(sizes[r])).split(sizes[r]) for r in range(c.size)]
    places = [c.empty(row[q]) for row in sizes]
    return dist.all_to_all, [places, [*parts[q]]], places, [p[q] for p in parts]


def all_to_all_single(c):
    c.settle(moves=True)
    is_equal, width, q = c.draw.random() < 0.3, c.draw.choice([1, 3]), c.rank
    sizes = [[c.length % 1000] * c.size] * c.size if is_equal else c.sizes()
    rows = [c.part(r, width * sum(row)) for r, row in enumerate(sizes)]
    rows = [t.reshape(-1, width) for t in rows]
    parts = [rows[r].split(sizes[r])[q] for r in range(c.size)]
    found = c.empty(width * sum(map(len, parts))).reshape(-1, width)
    every = torch.cat([bytes_of(t) for t in parts])
    splits = [] if is_equal else [[*map(len, parts)], sizes[q]]
    return dist.all_to_all_single, [found, rows[q], *splits], [found], [every]


def gather(c):
    c.settle(moves=True)
    places = [c.empty() for _ in range(c.size)] if c.is_root else []
    parts = c.every() if c.is_root else []
    return dist.gather, [c.mine(), places or None, c.root], places, parts


def scatter(c):
    c.settle(moves=True)
    parts, own = [c.part(c.start, k=r) for r in range(c.size)], c.empty()
    given = [own, parts if c.is_root else None, c.root]
    return dist.scatter, given, [own], [parts[c.rank]]


def barrier(c):
    return dist.barrier, [], [], []


OF_TENSOR = [all_reduce, broadcast, reduce]
OF_LENGTH = [*OF_TENSOR, all_gather_into_tensor, reduce_scatter_tensor, gather, scatter]
OTHERS = [all_gather, reduce_scatter, all_to_all, all_to_all_single, barrier]
CALLS = {f.__name__: f for f in (*OF_LENGTH, *OTHERS)}
# What one rank may pass differently, and in which calls that is an error
FAILURES = {
    "dtype": [*OF_LENGTH, all_gather, reduce_scatter, all_to_all, all_to_all_single],
    "length": OF_LENGTH,
    "op": [all_reduce, reduce, reduce_scatter, reduce_scatter_tensor],
    "root": [broadcast, reduce, gather, scatter],
    "sparse": OF_TENSOR,
    "call": [*CALLS.values()],
}


def draw(random):
    """Draw groups and calls."""
    keys = [random.getrandbits(30) for _ in range(random.randrange(3))]
    steps = [["group", key] for key in keys]
    kinds = ["call"] * 6 + ["wait", "chain", "messages", "objects", "fail", "threads"]
    for _ in range(random.randrange(10, 50)):
        kind, key = random.choice(kinds), random.choice([0, 0, *keys])
        step = [kind, key, random.getrandbits(30)]
        name, is_async = random.choice([*CALLS]), random.random() < 0.5
        if kind == "fail":
            failure = random.choice([*FAILURES])
            name = random.choice(FAILURES[failure]).__name__
            step += [name, is_async, failure, random.randrange(4)]
        steps.append([*step, name, is_async] if kind == "call" else step)
    return steps


class Group:
    """Ranks of the world; `of_torch` is None for all of them."""

    def __init__(self, world, key):
        draw = random.Random(key)
        size = draw.randrange(1, world.size + 1) if key else world.size
        self.ranks = sorted(draw.sample(range(world.size), size))
        self.of_torch = dist.new_group(self.ranks) if key else None
        self.size, self.is_here = len(self.ranks), world.rank in self.ranks
        self.rank = self.ranks.index(world.rank) if self.is_here else 0


# How a rank waits for a work; returns the outputs of that moment


def wait(work, outputs):
    work.wait()
    return outputs


def wait_future(work, outputs):
    work.get_future().wait()
    return outputs


def wait_all(work, outputs):
    torch.futures.wait_all([work.get_future()])
    return outputs


def poll(work, outputs):
    while not work.is_completed():
        time.sleep(0)
    work.wait()
    return outputs


def call_back(work, outputs):
    future = work.get_future()
    return future.then(
        lambda f: copies(outputs) if f.value() is not None else []
    ).wait()


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


WAYS = [wait, wait_future, wait_all, poll, call_back]


class Play:
    """The groups of a program, and works that nobody has waited for."""

    def __init__(self, world):
        self.world, self.groups, self.works = world, {0: Group(world, 0)}, []

    def group(self, key):
        self.groups[key] = Group(self.world, key)

    def require(self, found):
        """Require that nothing was found wrong, on any rank."""
        self.world.require(not found, found)

    def make(self, key, seed, name, is_async, failure=None, victim=0):
        """Make a call; return its work, outputs, and what they must be, or an error."""
        group = self.groups.get(key)
        if group is None or not group.is_here:
            return None
        c = Call(group, seed, failure, victim)
        function, arguments, outputs, wants = CALLS[name](c)
        if failure == "call" and c.is_victim:
            function, arguments = dist.barrier, []
            if name == "barrier":
                function, arguments = dist.all_reduce, [torch.ones(2)]
        if failure == "sparse" and c.is_victim:
            arguments[0] = arguments[0].to_sparse()
        text = f"{name} {vars(c)}"
        is_error = failure is not None or any(w is REFUSED for w in wants)
        is_mean = getattr(c, "op", "") == "AVG"
        work, error = None, None
        try:
            work = function(*arguments, group=group.of_torch, async_op=is_async)
        except Exception as caught:
            error = caught
        return text, work, error, outputs, None if is_error else wants, is_mean

    def finish(self, made, way=wait):
        """Return what is wrong with a call."""
        if made is None:
            return ""
        text, work, error, outputs, wants, is_mean = made
        try:
            if error is None and work is not None:
                outputs = way(work, outputs)
        except Exception as caught:
            error = caught
        if wants is None:
            return "" if error is not None else f"no error: {text}"
        if error is not None:
            return f"{text} {way}: {''.join(traceback.format_exception(error))}"
        for output, want in zip(outputs, wants, strict=True):
            if not is_same(output, want, is_mean):
                shown = f"{output!s:.400}, not {want!s:.400}"
                return f"{text} {way.__name__}: {shown}"
        return ""

    def call(self, key, seed, name, is_async):
        """Make a call on all ranks of a group."""
        made = self.make(key, seed, name, is_async)
        if is_async:
            self.works.append(made)
        else:
            self.require(self.finish(made))

    def wait(self, key, seed):
        """Wait for works: each rank in its own order, and in its own ways."""
        own, found = random.Random(f"{seed} {self.world.rank}"), ""
        own.shuffle(self.works)
        for made in self.works:
            found = self.finish(made, own.choice(WAYS)) or found
        self.works.clear()
        self.require(found)

    def fail(self, key, seed, name, is_async, failure, victim):
        """Make a call that one rank makes differently."""
        group = self.groups.get(key)
        if group is not None and (group.size > 1 or failure == "sparse"):
            made = self.make(key, seed, name, is_async, failure, victim)
            self.require(self.finish(made))

    def threads(self, key, seed):
        """Make calls in threads, on a group each, in any order between them."""
        draw, found = random.Random(seed), []
        calls = {
            key: [
                (draw.getrandbits(30), draw.choice([*CALLS]), draw.random() < 0.5)
                for _ in range(5)
            ]
            for key in self.groups
        }

        def run(key):
            for call in calls[key]:
                found.append(self.finish(self.make(key, *call)))

        keys = [*self.groups]
        random.Random(f"{seed} {self.world.rank}").shuffle(keys)
        started = [threading.Thread(target=run, args=[key]) for key in keys]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()
        self.require("\n".join(filter(None, found)))

    def chain(self, key, seed):
        """Change one tensor by works in turn, some with callbacks that communicate."""
        draw, group = random.Random(seed), self.groups.get(key)
        if group is None:
            return
        n, size = draw.choice([1, 300, 70_001]), group.size
        ops = [
            (draw.choice(["SUM", "MAX", "broadcast"]), draw.random() < 0.4)
            for _ in range(draw.randrange(1, 5))
        ]
        values = [numbers("float64", n, seed, q).numpy() for q in range(size)]
        futures, wants, group_of = [], [], group.of_torch
        mine = torch.tensor(values[group.rank])

        def again(future):
            total = future.value()[0].clone()
            dist.all_reduce(total, group=group_of)
            return total

        for op, communicates in ops if group.is_here else ():
            if op == "broadcast":
                work = dist.broadcast(mine, group.ranks[0], group_of, async_op=True)
                now = values[0]
            else:
                work = dist.all_reduce(mine, op_of(op), group_of, async_op=True)
                now = {"SUM": np.sum, "MAX": np.max}[op](values, axis=0)
            values = [now] * size
            after = again if communicates else lambda f: f.value()[0].clone()
            futures.append(work.get_future().then(after))
            wants.append(now * size if communicates else now)
        own, found = random.Random(f"{seed} {self.world.rank}"), ""
        for i in own.sample(range(len(futures)), len(futures)):
            got = futures[i].wait().numpy()
            if not np.array_equal(got, wants[i]):
                found = f"chain {ops} {n}, {i}: {got!s:.200}, not {wants[i]!s:.200}"
        self.require(found)

    def messages(self, key, seed):
        """Send and receive, in any order where tags differ."""
        draw, group = random.Random(seed), self.groups.get(key)
        if group is None or group.size == 1:
            return
        todo, found = [], ""
        for tag in range(draw.randrange(1, 9)):
            source, to = draw.sample(range(group.size), 2)
            dtype, n = draw.choice(MOVED), draw.choice(SIZES)
            tensor = numbers(dtype, n, seed, tag)
            todo.append((source, to, tag, tensor, draw.random() < 0.1))
        own = random.Random(f"{seed} {self.world.rank}")
        works = []
        for source, to, tag, tensor, is_unlike in own.sample(todo, len(todo)):
            if group.is_here and group.rank == source:
                sent = tensor.float() if is_unlike and tensor.numel() else tensor
                sent = own.choice(LAYOUTS)(sent)
                work = dist.isend(sent, group.ranks[to], group.of_torch, tag)
                works.append(["send", work, None, [], [], False])
            if group.is_here and group.rank == to:
                place = own.choice(LAYOUTS)(torch.zeros_like(tensor))
                is_other = (
                    is_unlike and tensor.numel() and tensor.dtype != torch.float32
                )
                at = group.ranks[source]
                work = dist.irecv(place, at, group.of_torch, tag)
                wants = None if is_other else [tensor]
                works.append([f"recv {tensor}", work, None, [place], wants, False])
        for made in own.sample(works, len(works)):
            found = self.finish(made, own.choice(WAYS)) or found
        self.require(found)

    def objects(self, key, seed):
        """Exchange objects, and tensors together."""
        group, draw = self.groups.get(key), random.Random(seed)
        if group is None or not group.is_here:
            self.require("")
            return
        every = [
            {"rank": r, "text": "x" * draw.randrange(90)} for r in range(group.size)
        ]
        places, one = [None] * group.size, [every[group.rank]]
        dist.all_gather_object(places, every[group.rank], group.of_torch)
        dist.broadcast_object_list(one, group.ranks[-1], group.of_torch)
        sums = [torch.full((n,), group.rank + 1.0) for n in (3, 70_001)]
        with dist._coalescing_manager(group.of_torch):
            for tensor in sums:
                dist.all_reduce(tensor, group=group.of_torch)
        total = group.size * (group.size + 1) / 2
        is_right = places == every and one == every[-1:]
        is_right &= all(bool((tensor == total).all()) for tensor in sums)
        self.require("" if is_right else f"{places} {one} {sums}, not {total}")


def play(world, steps):
    """Play a program."""
    if not dist.is_initialized():
        mpidist.torch.init_process_group()
    made = Play(world)
    for name, *arguments in [*steps, ["wait", 0, 0]]:
        getattr(made, name)(*arguments)
    for group in made.groups.values():
        if group.of_torch is not None and group.is_here:
            dist.destroy_process_group(group.of_torch)
