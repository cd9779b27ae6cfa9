"""Saves, writers and readers of which one call of the operating system is disturbed.

It fails, has no space, answers late or short, raises, or is the last one before a kill.
Afterwards an earlier state lies there or the new one, whole, and the new one if no rank
reported an error; what was read is right, or an error on all ranks.
"""

import errno
import functools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import failing_calls

LIBRARY = failing_calls.preload()  # before anything starts MPI

import h5py  # noqa: E402
import numpy as np  # noqa: E402
from job import World  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpidist  # noqa: E402
from mpidist.checkpoint.save import Saver  # noqa: E402

CALLS = failing_calls.FailingCalls()
ROWS, SHARD_BYTES = 300, 1 << 20
HOWS = [how for how in failing_calls.HOW if how not in ("nothing", "kills")]
OLD, NEW = 1.0, 2.0


@functools.cache
def alone() -> Any:
    """Return the strategy of the next job, which has one rank."""
    return mpidist.MirroredStrategy(["CPU:0"], communicator=MPI.COMM_SELF)


# Checkpoints


def checkpoint_of(strategy, elements, value):
    state = {name: np.full(elements, value) for name in "xy"}
    return mpidist.Checkpoint(strategy=strategy, shard_bytes=SHARD_BYTES, **state)


def manager_of(strategy, folder, elements, value, is_background=False):
    checkpoint = checkpoint_of(strategy, elements, value)
    options = {"is_background": is_background}
    return mpidist.CheckpointManager(checkpoint, folder, 1, **options)


def save(strategy, folder, value, elements, how, made=None):
    """Save by a manager, in the background or not, or by `Checkpoint.write`."""
    if how == "write":
        checkpoint_of(strategy, elements, value).write(folder / "ckpt")
        return None
    manager = made or manager_of(strategy, folder, elements, value, how == "background")
    checkpoint = manager.checkpoint
    checkpoint.x[:] = checkpoint.y[:] = value
    manager.save()
    manager.wait()
    return manager


def saved(folder, elements):
    """Yield what all checkpoints hold, and what the next job restores, or the error."""
    checkpoint = checkpoint_of(alone(), elements, 0.0)
    manager = mpidist.CheckpointManager(checkpoint, folder, None)
    paths = [p for p in sorted(folder.glob("ckpt*.h5")) if "-of-" not in p.name]
    latest = manager.restore_or_initialize
    for path in [*paths, *[latest] * (folder / "ckpt.h5" not in paths)]:
        checkpoint.x[:] = checkpoint.y[:] = 0
        try:
            checkpoint.restore(path) if path is not latest else latest()
        except mpidist.CheckpointError as error:
            # A thread that still writes may just have removed it, after the new one
            if path is latest or path.exists():
                yield f"{path}: {error}"
        else:
            yield from {*checkpoint.x.tolist(), *checkpoint.y.tolist()}


def restore(strategy, folder, value, elements, how, made=None):
    """Restore what `save` has saved of ones; what is wrong is an AssertionError."""
    if value == OLD:
        return save(strategy, folder, value, elements, how)
    manager = manager_of(strategy, folder, elements, 0.0)
    x = manager.checkpoint.x
    try:
        path = manager.restore_or_initialize()
    except mpidist.MpidistError:
        assert (x == 0).all(), x
        raise
    assert path is None or (x == OLD).all(), (path, x)
    assert path is not None, "a whole checkpoint is taken for none"
    return manager


# Data files


def write_rows(strategy, folder, value, made=None, **options):
    with mpidist.Hdf5Writer(strategy, folder / "rows.h5", **options) as writer:
        writer.append(np.full((ROWS, 3), value))


def write_dataset(strategy, folder, value, made=None):
    rows = mpidist.Dataset.range(ROWS).shuffle(seed=1).batch(64)
    options = {"order": "dataset", "overwrite": True}
    with mpidist.Hdf5Writer(strategy, folder / "rows.h5", **options) as writer:
        for batch in strategy.experimental_distribute_dataset(rows):
            writer.append(strategy.run(lambda x: x * 0 + value, args=(batch,)))


def _refuse(source, target):
    raise OSError(errno.EPERM, "no hard links")


def without_links(act):
    """Return what writes on a file system without hard links."""

    def act_there(*arguments, **options):
        with mock.patch.object(os, "link", _refuse):
            return act(*arguments, **options)

    return act_there


def written(folder):
    """Yield the values that readers of the index and of the pattern find.

    Or of files that a kill has left under other names.
    """
    for name in ("rows.h5", "rows-*-of-*.h5"):
        try:
            batches = list(
                mpidist.Dataset.from_hdf5(folder / name, "data").batch(10**6)
            )
        except mpidist.DataError:
            continue
        yield from np.unique(batches).tolist()
        if len(batches[0]) % ROWS:
            yield f"{len(batches[0])} rows"
        return
    yield from [OLD] * bool(list(folder.glob("rows.h5.*.earlier.tmp")))


def read_rows(strategy, folder, value, made=None):
    path = folder / "data.h5"
    expected = np.arange(ROWS * 3).reshape(ROWS, 3)
    if value == OLD:
        if strategy.rank == 0:
            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=expected, chunks=(32, 3), compression=4)
        strategy.barrier()
        return None
    found: list[Any] = []
    rows = mpidist.Dataset.from_hdf5(path, "x").batch(50)
    for batch in strategy.experimental_distribute_dataset(rows):
        found += strategy.gather(batch, axis=0).tolist()
    assert found == expected.tolist(), found
    return None


class Kind(NamedTuple):
    """What is disturbed.

    Args:
      act: does it, for the value OLD first, undisturbed, then for NEW.
      find: yields the values that lie in a folder afterwards, the last one last.
      has_old: whether something of OLD lies there before.
      makes_new: whether something of NEW lies there afterwards.
    """

    act: Callable[..., Any]
    find: Callable[[Path], Any]
    has_old: bool = True
    makes_new: bool = True


def _saves(how: str, elements: int, act: Any = save) -> Kind:
    find = functools.partial(saved, elements=elements)
    makes_new = act is save
    act = functools.partial(act, elements=elements, how=how)
    return Kind(act, find, makes_new=makes_new)


def _new_only(strategy, folder, value, made=None):
    if value == NEW:
        write_rows(strategy, folder, value)


LARGE, SMALL = SHARD_BYTES // 8, 8
_overwrite = functools.partial(write_rows, overwrite=True)
KINDS = {
    **{how: _saves(how, LARGE) for how in ("manager", "background", "write")},
    **{
        f"{how} small": _saves(how, SMALL) for how in ("manager", "background", "write")
    },
    "writer": Kind(_new_only, written, has_old=False),
    "writer overwrites": Kind(_overwrite, written),
    "writer by dataset": Kind(write_dataset, written),
    "writer without links": Kind(without_links(_new_only), written, has_old=False),
    "overwriter without links": Kind(without_links(_overwrite), written),
    "restore": _saves("manager", LARGE, restore),
    "rows": Kind(read_rows, lambda folder: (), has_old=False, makes_new=False),
}


def draw(random):
    """Draw disturbances of one call each; without the last number, it is each call."""
    choice, kinds = random.choice, [*KINDS]
    return [
        [choice(kinds), random.randrange(4), choice(HOWS), random.random()]
        for _ in range(3)
    ]


class Disturbed:
    """One disturbed call: of some kind, on a rank, in a folder of its own."""

    def __init__(self, world: World, kind: str, rank: int, number: int):
        self.world, self.kind = world, KINDS[kind]
        self.rank = rank % world.size
        self.folder = world.folder / f"{kind} {rank} {number}".replace(" ", "-")

    def run(self, how: str, number: int, copies: Any = "/") -> tuple[list[str], Any]:
        """Return the calls, and each rank's error."""
        world, strategy = self.world, self.world.strategy()
        if world.rank == 0:
            self.folder.mkdir()
        world.comm.Barrier()
        made = self.kind.act(strategy, self.folder, OLD)
        world.comm.Barrier()
        if world.rank == self.rank:
            CALLS.arm(self.folder, number, how, copies)
        error = None
        try:
            self.kind.act(strategy, self.folder, NEW, made=made)
        except (Exception, KeyboardInterrupt) as caught:
            error = caught
            if isinstance(caught, KeyboardInterrupt):  # as at the end of the program
                strategy.extended.consensus.mark_broken(caught)
        calls = CALLS.disarm() if world.rank == self.rank else None
        calls = world.comm.bcast(calls, self.rank)
        name = error and f"{type(error).__module__}.{error!r}"
        errors = world.comm.allgather(name)
        if any("KeyboardInterrupt" in str(error) for error in errors):
            # One rank alone was interrupted, so the ranks begin anew
            strategy.extended.consensus.retire()
            Saver.busy.clear()  # it takes no part in the end of the program
            world.forget()
        return calls, errors

    def wrong(self, folder: Path, errors: list[Any]) -> str:
        """Return what is wrong with what lies in a folder. On rank 0."""
        kind, values = self.kind, list(self.kind.find(folder))
        allowed = {*[OLD] * kind.has_old, *[NEW] * kind.makes_new}
        is_right = set(values) <= allowed and (bool(values) or not kind.has_old)
        if kind.makes_new and not any(errors):
            is_right &= values[-1:] == [NEW]
        return "" if is_right else f"{values}; there are {sorted(os.listdir(folder))}"


@functools.cache
def count_of(world: World, kind: str, rank: int) -> int:
    """Return how many calls there are without a disturbance. Collective."""
    return len(Disturbed(world, kind, rank, -1).run("nothing", 0)[0])


def disturb(world: World, kind: str, rank: int, how: str, number: int) -> None:
    """Disturb one call; raise if anything is wrong afterwards. Collective."""
    case = Disturbed(world, kind, rank, number)
    copies = world.folder / "copies"
    if world.rank == 0:
        copies.mkdir()
    calls, errors = case.run(how, number, copies)
    wrong = []
    if world.rank == 0:
        wrong += [case.wrong(folder, [True]) for folder in copies.iterdir()]
        wrong += [case.wrong(case.folder, errors)]
        for folder in (copies, case.folder):
            shutil.rmtree(folder, ignore_errors=True)  # a thread may still write
    if how != "interrupted" and None in errors and any(errors):
        wrong.append("an error on some ranks only")
    if any(e and "mpidist" not in e and "KeyboardInterrupt" not in e for e in errors):
        wrong.append("no error of mpidist")
    at = calls[number - 1] if number <= len(calls) else "nowhere"
    texts = [text for text in wrong if text]
    world.require(not texts, f"{kind}, {how} at {at}: {texts} {errors}")


def play(world, steps):
    """Play a program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for kind, rank, how, *where in steps:
        count = 1 + count_of(world, kind, rank)
        for number in [int(x * count) for x in where] or range(count):
            disturb(world, kind, rank, how, number + 1)
