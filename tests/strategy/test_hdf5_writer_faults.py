"""Hdf5Writer where a call of the operating system fails, raises or is the last one."""

import collections
import contextlib
import errno
import io
import os

import h5py
import numpy as np
import pytest

import mpidist
from mpidist import Dataset, Hdf5Writer
from mpidist.util.files import AtomicFile

ROWS = 3  # of each rank
CALLS = "link unlink rename replace open fsync stat lstat fstat listdir close".split()


class Killed(BaseException):
    """Nothing has an effect any more."""


def fail(name):
    raise OSError(errno.EIO if name == "fsync" else errno.ENOSPC, "injected")


def interrupt(name):
    raise KeyboardInterrupt


def die(name):
    raise Killed


# What happens, and whether it happens at all later calls, too
FAULTS = {
    "fails": (fail, False),
    "fails from then on": (fail, True),
    "is interrupted": (interrupt, False),
    "is the last": (die, True),
}


class Calls:
    """Counts the calls that concern a folder; the call `number` is a fault."""

    def __init__(self, folder, number, fault):
        self.names = []
        self._folder, self._number = str(folder), number
        self._happen, self._stays = FAULTS[fault]

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
                if late == 0 or (late > 0 and self._stays):
                    if name == "close":  # closes, whatever it reports
                        real(*arguments)
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
    """Return the error of this rank, and whether the strategy was left alone by it."""
    strategy = mpidist.MirroredStrategy(communicator=comm)
    with pytest.MonkeyPatch.context() as patch:
        if is_here:
            calls.install(patch)
        error = None
        try:
            write(strategy, path, 2.0, **options)
        except BaseException as caught:
            error = caught
    if isinstance(error, KeyboardInterrupt | Killed) and comm.size > 1:
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


def check(comm, path, error, fault, is_overwriting):
    """Require the old rows, or the new rows, or an error."""
    old, new = rows(1.0, comm.size), rows(2.0, comm.size)
    whole = [old, new] if is_overwriting else [new]
    found = [read(path), read(str(path.with_name("rows-*-of-*.h5")))]
    assert all(each is None or each in whole for each in found), found
    if path.exists():
        with h5py.File(path, "r", locking=False) as file:
            plain = set(file["data"][...].tolist()) - {0.0}
        assert plain <= set(old) or plain <= set(new)
    if error is None:
        assert found == [new, new]
    elif is_overwriting and fault == "fails":
        assert found == [old, old]


def run_case(comm, path, number, fault, rank, is_overwriting):
    """Return the names of the calls of the rank with the fault."""
    strategy = mpidist.MirroredStrategy(communicator=comm)
    if is_overwriting:
        write(strategy, path, 1.0)
    calls = Calls(path.parent, number, fault)
    options = {"overwrite": is_overwriting}
    error = write_with_fault(comm, path, calls, comm.rank == rank, **options)
    comm.Barrier()
    check(comm, path, error, fault, is_overwriting)
    comm.Barrier()
    # Again, with the same arguments
    try:
        write(strategy, path, 3.0, **options)
        assert read(path) == rows(3.0, comm.size)
    except mpidist.ArgumentError as again:
        assert not is_overwriting
        assert "rows" in str(again).split("exist already: ")[1]
    comm.Barrier()
    if comm.rank == 0:
        for file in path.parent.iterdir():
            file.unlink()
    comm.Barrier()
    strategy.experimental_finalize()
    return comm.bcast(calls.names, rank)


@pytest.mark.mpi(max_size=2)
@pytest.mark.parametrize("is_overwriting", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_any_call(comm, mpi_tmp_path, fault, rank, is_overwriting):
    if rank >= comm.size:
        pytest.skip("there is no such rank")
    path = mpi_tmp_path / "rows.h5"
    number, names = 0, ["none yet"]
    while number <= len(names):
        number += 1
        names = run_case(comm, path, number, fault, rank, is_overwriting)
