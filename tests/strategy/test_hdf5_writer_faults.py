"""Hdf5Writer where a call of the operating system fails, raises or is the last one."""

import contextlib
import errno
import functools
import io
import os

import h5py
import numpy as np
import pytest
from all_ranks import on_root
from mpi4py import MPI

import mpidist
from mpidist import Dataset, Hdf5Writer
from mpidist.util.files import AtomicFile

ROWS = 3  # of each rank
CALLS = ["link", "unlink", "rename", "replace", "open", "fsync", "close"]
CALLS += ["stat", "lstat", "fstat", "listdir"]


class Killed(BaseException):
    """Nothing has an effect any more."""


def fail(name):
    raise OSError(errno.EIO if name == "fsync" else errno.ENOSPC, "injected")


def refuse(source, target):
    raise OSError(errno.EPERM, "no hard links")


def interrupt(name):
    raise KeyboardInterrupt


def exhaust(name):
    raise MemoryError("injected")


def die(name):
    raise Killed


# What happens, whether it happens at all later calls, too, and whether after the call
FAULTS = {
    "fails": (fail, False, False),
    "fails from then on": (fail, True, False),
    "has no memory": (exhaust, False, False),
    "is interrupted": (interrupt, False, False),
    "is interrupted afterwards": (interrupt, False, True),
    "is the last": (die, True, False),
}


class Calls:
    """Counts the calls that concern a folder; the call `number` is a fault."""

    def __init__(self, folder, number, fault):
        self.names = []
        self._folder, self._number = str(folder), number
        self._happen, self._stays, self._is_after = FAULTS[fault]

    def install(self, patch):
        for name in CALLS:
            self._wrap(patch, os, name, getattr(os, name))
        for name in "__init__", "write":
            self._wrap(patch, AtomicFile, name, getattr(AtomicFile, name))
        self._wrap(patch, AtomicFile, "close", io.FileIO.close)

    def _wrap(self, patch, owner, name, real):
        def call(*arguments, **options):
            if self._concerns(arguments):
                self.names.append(name)
                late = len(self.names) - self._number
                is_now = late == 0 or (late > 0 and self._stays)
                if is_now and self._number:
                    # `close` closes, whatever it reports
                    if name == "close" or (self._is_after and name != "__init__"):
                        real(*arguments, **options)
                    self._happen(name)
            return real(*arguments, **options)

        patch.setattr(owner, name, call, raising=False)

    def _concerns(self, arguments):
        first = arguments[0] if arguments else ""
        if isinstance(first, AtomicFile):
            path = arguments[1] if "temporary" not in vars(first) else first.path
            is_open = "temporary" not in vars(first) or not first.closed
            return is_open and str(path).startswith(self._folder)
        if isinstance(first, int):
            with contextlib.suppress(OSError):
                first = os.readlink(f"/proc/self/fd/{first}")
        return str(first).startswith(self._folder)


def rows(value, size):
    return [value + 10 * rank for rank in range(size) for _ in range(ROWS)]


def write(strategy, path, value, **options):
    with Hdf5Writer(strategy, path, chunk_rows=1, **options) as writer:
        writer.append(np.full(ROWS, value + 10.0 * strategy.rank))


def write_with_fault(comm, path, calls, is_here, **options):
    """Return this rank's error."""
    strategy = mpidist.MirroredStrategy(communicator=comm)
    error = None
    with pytest.MonkeyPatch.context() as patch:
        if is_here:
            calls.install(patch)
        try:
            write(strategy, path, 2.0, **options)
        except BaseException as caught:
            error = caught
    if isinstance(error, KeyboardInterrupt | Killed):
        # The other ranks wait for this one, which has left
        strategy.extended.consensus.leave(error)
    comm.Barrier()
    strategy.experimental_finalize()
    return error


def read(files):
    """Return all rows, or None where that is an error."""
    try:
        batches = list(Dataset.from_hdf5(files, "data").batch(1000))
    except mpidist.DataError:
        return None
    return np.concatenate(batches).tolist()


def check(comm, path, fault, error, is_overwriting):
    """Require the old rows, or the new rows, or an error."""
    old, new = rows(1.0, comm.size), rows(2.0, comm.size)
    whole = [old, new] if is_overwriting else [new]
    found = [read(path), read(str(path.with_name("rows-*-of-*.h5")))]
    assert all(each is None or each in whole for each in found), found
    is_blocked = not all(file.stat().st_size for file in path.parent.glob("*.h5"))
    if path.exists() and path.stat().st_size:
        with h5py.File(path, "r", locking=False) as file:
            plain = set(file["data"][...].tolist()) - {0.0}
        assert plain <= set(old) or plain <= set(new)
    if error is None:
        assert found == [new, new]
    elif is_overwriting and fault == "fails" and not is_blocked:
        assert found == [old, old]
    elif is_overwriting and not FAULTS[fault][1] and not is_blocked:
        assert found in ([old, old], [new, new])
    if "fails" in fault:
        assert len(set(comm.allgather(error is None))) == 1


def write_again(strategy, path, overwrite):
    """The same job once more works, or says which file is in its way."""
    left = list(path.parent.glob("rows-*.h5" if overwrite else "*.h5"))
    if overwrite:  # an empty file says nothing of where it is from
        left = [file for file in left if not file.stat().st_size]
    refused = pytest.raises(mpidist.ArgumentError, match=r"already: rows.*\.h5")
    strategy.barrier()
    with refused if left else contextlib.nullcontext():
        write(strategy, path, 3.0, overwrite=overwrite)
    if not left:
        assert read(path) == rows(3.0, strategy.size)


def run_case(strategy, comm, path, number, fault, rank, is_overwriting):
    """Return the names of the calls of the rank with the fault."""
    if is_overwriting:
        write(strategy, path, 1.0)
    calls, is_here = Calls(path.parent, number, fault), comm.rank == rank
    error = write_with_fault(comm, path, calls, is_here, overwrite=is_overwriting)
    check(comm, path, fault, error, is_overwriting)
    write_again(strategy, path, is_overwriting)
    on_root(comm, lambda: [file.unlink() for file in path.parent.iterdir()])
    return comm.bcast(calls.names, rank)


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("is_overwriting", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
@pytest.mark.parametrize(
    "step", [7, pytest.param(3, marks=pytest.mark.slow)], ids=["some", "more"]
)
def test_any_call_of_a_writer(
    strategy,
    comm,
    mpi_tmp_path,
    monkeypatch,
    fault,
    rank,
    is_overwriting,
    has_links,
    step,
):
    if not has_links:
        monkeypatch.setattr(os, "link", refuse)
    case = fault, rank % comm.size, is_overwriting
    run = functools.partial(run_case, strategy, comm, mpi_tmp_path / "rows.h5")
    names = run(0, *case)  # without a fault
    assert {"__init__", "write", "fsync", "unlink" if has_links else "replace"} < {
        *names
    }
    for number in range(1 + len(names) % step, len(names) + 1, step):
        assert run(number, *case)[:number] == names[:number]


@pytest.mark.mpi(max_size=1)
@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_while_the_earlier_files_go_keeps_the_new(
    tmp_path, monkeypatch, number
):
    alone = mpidist.MirroredStrategy(communicator=MPI.COMM_SELF)
    path, real, removed = tmp_path / "rows.h5", os.unlink, []

    def unlink(target):
        real(target)
        removed.extend([target] * str(target).endswith(".earlier.tmp"))
        if len(removed) == number:
            raise KeyboardInterrupt

    write(alone, path, 1.0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "unlink", unlink)
        write(alone, path, 2.0, overwrite=True)
    assert read(path) == rows(2.0, 1)
