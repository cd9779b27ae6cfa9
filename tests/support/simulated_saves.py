"""Saves of which one call of the operating system fails, raises, or is the last one.

Started on each rank::

    simulated_saves.py LIBRARY FOLDER EVERY HOW,... KIND,...

In a directory lies a checkpoint of ones; a save of twos is disturbed at its first call,
then at its second, ... (or at every EVERY-th), on one rank after the other. After each,
a job of one rank restores what lies there: ones or twos; twos if the save reported no
error. Prints how many calls there were, and each case that is wrong.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

library, top, every, hows, kinds = sys.argv[1:]
if os.environ.get("LD_PRELOAD") != library:
    os.environ["LD_PRELOAD"] = library
    os.execv(sys.executable, [sys.executable, *sys.argv])

os.environ["MPIDIST_LOG"] = "error"

import numpy as np  # noqa: E402
from failing_calls import FailingCalls  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpidist  # noqa: E402
from mpidist.checkpoint.save import Saver  # noqa: E402

WORLD = MPI.COMM_WORLD
CALLS = FailingCalls()
ALONE = mpidist.MirroredStrategy(["CPU:0"], communicator=MPI.COMM_SELF)


def make(strategy, folder, kind):
    """Return a checkpoint with its manager, or with None for `Checkpoint.write`."""
    # As a shard has at least 1 MiB
    state = {name: np.zeros(8 if "small" in kind else 1 << 17) for name in "xy"}
    checkpoint = mpidist.Checkpoint(strategy=strategy, shard_bytes=1 << 20, **state)
    manager = None
    if "write" not in kind:
        manager = mpidist.CheckpointManager(
            checkpoint, folder, 1, is_background="background" in kind
        )
    return checkpoint, manager


def save(made, folder, value):
    checkpoint, manager = made
    checkpoint.x[:] = checkpoint.y[:] = value
    if manager is None:
        checkpoint.write(folder / "ckpt")
        return
    manager.save()
    manager.wait()


def what_is_wrong(folder, kind, want):
    """Look at all checkpoints, and at what the next job restores."""
    checkpoint, manager = make(ALONE, folder, kind)
    values = []
    paths = [p for p in sorted(folder.glob("ckpt*.h5")) if "-of-" not in p.name]
    for path in [*paths, None]:
        checkpoint.x[:] = checkpoint.y[:] = 0
        try:
            if path is not None:
                checkpoint.restore(path)
            elif manager is not None:
                manager.restore_or_initialize()
            else:
                continue
        except mpidist.CheckpointError as error:
            # A thread that still writes may just have removed it, after the new one
            if path is None or path.exists():
                values.append(f"{path}: {error}")
        else:
            values += {*checkpoint.x.tolist(), *checkpoint.y.tolist()}
    is_right = values and set(values) <= {1.0, 2.0} and want in (None, values[-1])
    return "" if is_right else f"{values}; there are {sorted(os.listdir(folder))}"


def disturb(strategy, folder, kind, rank, how, number):
    """Save with a call that is disturbed; return the calls, errors, what is wrong."""
    made = make(strategy, folder, kind)
    save(made, folder, 1.0)
    WORLD.Barrier()
    if WORLD.rank == rank:
        CALLS.arm(folder, number, how)
    error = None
    try:
        save(made, folder, 2.0)
    except (Exception, KeyboardInterrupt) as caught:
        error = caught
        if isinstance(caught, KeyboardInterrupt):  # as at the end of the program
            strategy.extended.consensus.leave(caught)
    calls = WORLD.bcast(CALLS.disarm() if WORLD.rank == rank else None, rank)
    name = error and f"{type(error).__module__}.{error!r}"
    errors = WORLD.allgather(name)
    wrong = ""
    if WORLD.rank == 0:
        wrong = what_is_wrong(folder, kind, None if any(errors) else 2.0)
        shutil.rmtree(folder, ignore_errors=True)  # a thread may still write
    if how != "interrupted" and None in errors and any(errors):
        wrong += " an error on some ranks only"
    if any(e and "mpidist" not in e and "KeyboardInterrupt" not in e for e in errors):
        wrong += " no error of mpidist"
    return calls, errors, WORLD.bcast(wrong)


def simulate(kind, rank, how):
    """Disturb one call after the other; return how many there were, what is wrong."""
    strategy, number, wrong = None, 1, []
    while True:
        # One rank alone was interrupted, so the ranks begin anew
        strategy = strategy or mpidist.MirroredStrategy(["CPU:0"])
        folder = Path(top, f"{kind} {rank} {how} {number}".replace(" ", "-"))
        calls, errors, problem = disturb(strategy, folder, kind, rank, how, number)
        at = calls[number - 1] if number <= len(calls) else "nowhere"
        wrong += [f"{at}: {problem} {errors}"] * bool(problem)
        if number > len(calls):
            return len(calls), wrong
        if "KeyboardInterrupt" in str(errors):
            strategy.extended.consensus.retire()
            Saver.busy.clear()  # it takes no part in the end of the program
            strategy = None
        number += int(every)


def copy(kind, rank):
    """Save once; look at copies of the directory before each call, as after a kill."""
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    folder, copies = Path(top, f"{kind} {rank}"), Path(top, f"{kind} {rank} copies")
    made = make(strategy, folder, kind)
    save(made, folder, 1.0)
    if WORLD.rank == 0:
        copies.mkdir()
    WORLD.Barrier()
    if WORLD.rank == rank:
        CALLS.arm(folder, int(every), "copies", copies)
    save(made, folder, 2.0)
    WORLD.Barrier()
    calls = WORLD.bcast(CALLS.disarm() if WORLD.rank == rank else None, rank)
    wrong = []
    numbers = range(int(every), len(calls) + 1, int(every))
    for number in numbers if WORLD.rank == 0 else ():
        problem = what_is_wrong(copies / str(number), kind, None)
        wrong += [f"{calls[number - 1]}: {problem}"] * bool(problem)
    return len(calls), wrong


signal.signal(signal.SIGINT, signal.default_int_handler)
for kind in kinds.split(","):
    for how in hows.split(","):
        for rank in range(WORLD.size):
            found = copy(kind, rank) if how == "copies" else simulate(kind, rank, how)
            if WORLD.rank == 0:
                print(f"{kind}, rank {rank}, {how}: {found[0]} calls", flush=True)
                print(
                    *(f"WRONG {text}\n" for text in found[1]),
                    sep="",
                    end="",
                    flush=True,
                )
WORLD.Barrier()
MPI.Finalize()
os._exit(0)
