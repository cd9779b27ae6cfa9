"""Random collective calls, nested scopes and threads, with failures on one rank.

A program is a flat list: `scope`, `buckets` and `threads` go to the next `end`. Each
rank draws the arguments of all ranks, so that NumPy knows the result. Where one rank
fails, in its own code or by an argument, all raise, and later calls are exact.
"""

import copy
import functools
import gc
import os
import random
import resource
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from interruptions import interrupted
from mpi4py import MPI
from operations import (
    CALLS,
    HOWS,
    OF_GROUP,
    OFTEN,
    RAISED,
    SHORT,
    Broken,
    Drawn,
    arrays_of,
    can_fail,
    context,
)
from oracle import (
    REFUSED,
    reduced,
    same,
)

import mpidist

# Strategies


class Group:
    """A strategy, and what is made once for it."""

    def __init__(self, comm, ops, name):
        self.comm, self.name = comm, name
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.strategy = mpidist.MirroredStrategy(["CPU:0"], ops, communicator=comm)

    @functools.cached_property
    def symmetric(self):
        like = [np.zeros(9), np.zeros(90_000, "f4"), *np.zeros((2, 9000), "f2")]
        return self.strategy.symmetric_like([*like, np.zeros(9000, "i8")])

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
        if not is_finalized:  # an unusable one would end the job with an error
            del group
            gc.collect()


# Programs

SCOPES = ["scope", "buckets", "with", "threads"]


def draw(random):
    """Draw steps; those inside others ignore their group."""
    groups = random.sample([*GROUPS], random.randrange(1, 4))
    steps, depth = [], 0
    for _ in range(random.randrange(4, 30)):
        kind = random.choices(
            ["call", *SCOPES, "raise", "end", "drop", "signal"],
            [12, 4, 2, 1, 1, *((3, 4, 0.3, 0) if depth else (0, 0, 0.3, 3))],
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
            "signal": [
                [random.choice(OFTEN) for _ in range(random.randrange(1, 4))],
                *(seed, victim, int(2 ** random.uniform(0, 10))),
            ],
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
      expected: the errors that may leave a step.
    """

    def __init__(self, group, is_replica=False, depth=0):
        self.group, self.is_replica, self.depth = group, is_replica, depth
        self.log, self.expected = [], []
        self.is_lost = self.is_thread = False

    def inner(self, is_replica):
        made = Play(self.group, is_replica, self.depth + 1)
        made.log, made.expected = self.log, self.expected
        made.is_thread, made.is_lost = self.is_thread, self.is_lost
        return made

    def block(self, nodes):
        """Play steps; what a failing rank raises leaves the block."""
        holds = False
        for (kind, _, *arguments), inside in nodes:
            if kind == "drop":  # not of a strategy in use
                continue
            if kind == "raise":
                name, victim, does_hold = arguments
                if self.depth and not self.is_lost:
                    if self.group.rank == victim % self.group.size:
                        raise self.expect(RAISED[name]())
                    self.is_lost, holds = True, does_hold
                continue
            try:
                getattr(self, STEPS[kind])(inside, *arguments)
            except Exception as error:
                if not any(error is known for known in self.expected):
                    raise Wrong(f"the model: {error!r}") from error
                if not (self.is_lost and holds):
                    raise

    def expect(self, error):
        self.expected.append(error)
        return error

    def attempt(self, must_fail, is_caught, what, call, victim=None):
        """Return what a call returns; it fails if it must.

        Args:
          must_fail: whether it must; None if it may, on all ranks alike; a function if
            that is known afterwards.
          is_caught: whether the program goes on if it does.
          what: it is.
          call: without arguments.
          victim: the rank whose error all raise, if it is that of one.
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
            raise self.expect(error)
        if error is not None and victim not in (None, self.group.rank):
            origin = getattr(error, "origin_rank", None)
            if origin != victim:
                raise Wrong(f"{what}: {error!r} says it is of rank {origin}")
        return result

    def call(self, inside, name, seed, how, victim, is_caught):
        """Make a call, which may repeat others, and in which one rank may fail."""
        for turn in range(max(0, seed % 4 - 1), 0, -1):
            self.one(name, seed, None, 0, True, turn)
        self.one(name, seed, how, victim, is_caught, 0)

    def one(self, name, seed, how, victim, is_caught, turn):
        name = "reduce" if self.is_thread and name in OF_GROUP else name
        call, size = self.drawn_call(name, seed, turn), self.group.size
        victim, is_short = victim % size, how in SHORT
        # One thread of several cannot be short of memory; see `play` for the stack
        is_alone = not self.is_thread and not (how == "stack" and self.depth)
        fails = can_fail(name, call, how, size) and (is_alone or not is_short)
        what = f"{name} {seed} {how if fails else ''} {victim}"
        is_victim = fails and victim == self.group.rank
        if is_victim:
            HOWS[how][2](call, random.Random(seed))
        # Memory may suffice after all; where all are refused, all have an error
        must_fail, origin = fails or call.want is REFUSED, None
        if fails and call.want is not REFUSED:
            must_fail = None if is_short else True
            origin = victim if HOWS[how][1] == 1 and not is_short else None
        if call.before:
            call.before()
        before = [np.array(a) for a in arrays_of(call.leaves or [])]
        make = functools.partial(self.make, call)
        if is_victim and is_short:
            make = functools.partial(SHORTAGES[how], make, random.Random(seed))
        got = self.attempt(must_fail, True, what, make, origin)
        if self.log[-1] == [what, True]:
            if not is_caught and self.depth:
                raise self.expect(Broken("an expected error"))
            return
        if fault := call.find_fault(got, before):
            raise Wrong(f"{what} on rank {self.group.rank}: {fault}")

    def drawn_call(self, name, seed, turn):
        """Return a call; an error here is the model's."""
        try:
            return CALLS[name](Drawn(seed, self.group, turn))
        except Exception as error:
            raise Wrong(f"the model of {name} {seed}: {error!r}") from error

    def make(self, call):
        """Make a call in a context where it may be made."""
        strategy = self.group.strategy
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

    def signal(self, inside, names, seed, victim, line):
        """Make calls during which one rank is interrupted, at a line of mpidist.

        Not while data move: others may wait for them inside MPI. Either all ranks have
        the right results, or all fail, there or in the next call.
        """
        if self.depth or self.is_thread:
            return
        group, is_nested = self.group, seed % 3 > 0
        play = self.inner(True) if is_nested else self
        made = [self.drawn_call(name, seed + i, 0) for i, name in enumerate(names)]
        made = [call for call in made if call.want is not REFUSED and not call.before]
        what, faults, total = f"signal {names} {seed} {victim} {line}", [], []

        def work():
            for call in made:
                before = [np.array(a) for a in arrays_of(call.leaves or [])]
                faults.append(call.find_fault(play.make(call), before))

        lock = group.strategy.extended.consensus.lock

        def make_all():
            tracing = interrupted(
                line, is_counted=lambda: not lock.holder or lock.can_fail
            )
            is_victim = group.rank == victim % group.size
            with tracing if is_victim else nullcontext():
                group.strategy.run(work) if is_nested else work()

        failed = failure(make_all)
        later = failure(lambda: total.append(group.strategy.reduce("SUM", 1.0)))
        if any(faults) or total not in ([], [group.size]):
            raise Wrong(f"{what}: {faults} {total}")
        errors = group.comm.allgather([failed, later])
        have_failed, cannot_go_on = ({bool(e) for e in part} for part in zip(*errors))
        if len(cannot_go_on) > 1 or (cannot_go_on == {False} and len(have_failed) > 1):
            raise Wrong(f"{what}: the ranks are not alike: {errors}")
        self.log.append("signal")

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
            except Exception:  # as it should be, or it would be wrong
                play.log.append("ended by an error")

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
    "signal": "signal",
}


def failure(call):
    """Return what a call raises, as text."""
    try:
        call()
    except Exception as error:
        return repr(error)
    return ""


def components(nest):
    """Return a nest of this rank's components."""
    if isinstance(nest, mpidist.PerReplica | mpidist.Mirrored):
        return components(nest.values[0])
    if isinstance(nest, dict):
        made = copy.copy(nest)
        made.update((key, components(part)) for key, part in nest.items())
        return made
    if hasattr(nest, "_fields"):
        return type(nest)(*map(components, nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map(components, nest))
    return nest


def short_of_memory(call, draw):
    """Make a call while this process can take no more memory, or little."""
    former = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGESIZE") + draw.choice([0, 0, 100_000, 1 << 20])
    resource.setrlimit(resource.RLIMIT_AS, (most, former[1]))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)


def short_of_stack(call, draw):
    """Make a call with few frames left."""
    left, frame = sys.getrecursionlimit() - draw.randrange(15, 90), sys._getframe()
    while frame is not None:
        left, frame = left - 1, frame.f_back

    def deeper(n):
        return deeper(n - 1) if n > 0 else call()

    return deeper(left)


SHORTAGES = {"memory": short_of_memory, "stack": short_of_stack}


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
            broken = group.strategy.extended.consensus.broken or ""
            # While data move, such an error makes the strategy unusable
            is_allowed = " stack " in f"{log}" or "signal" in log
            wrong = wrong or broken * (not is_allowed)
        world.require(not wrong, wrong)
        if any(world.comm.allgather(bool(group and broken))):
            group = made = None
            groups.drop(name, False)
    for name in [*groups.made]:
        groups.drop(name, True)
