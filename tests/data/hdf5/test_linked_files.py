"""Files that hold rows of others: those that are missing, or are no regular files.

Opening a FIFO waits for a writer, so all of that is done in a job of its own.
"""

import os
import re
import socket

import h5py
import numpy as np
import pytest
from all_ranks import on_root
from hdf5_kinds import require_all

from mpidist import DataError, Dataset
from mpidist.hdf5.index import choose_datasets

SCRIPT = """
import sys
from mpi4py import MPI
import mpidist

strategy = mpidist.MirroredStrategy()
file, names = sys.argv[1], sys.argv[2:]
for file, name in [(file, n) for n in names] + [(n, "x") for n in names]:
    dataset = mpidist.Dataset.from_hdf5(file, name).batch(2)
    try:
        list(strategy.experimental_distribute_dataset(dataset))
    except mpidist.DataError as error:
        message = str(error)
    else:
        message = "read"
    for rank, text in enumerate(MPI.COMM_WORLD.gather((name, message)) or ()):
        print(rank, file, *text)
"""


NAMES = [
    "external link",
    "group/soft link",
    "hard link/soft link",
    "link to a link",
    "link to a group/link",
    "virtual",
    "storage",
]


def write_links(path, target):
    """Write a file of datasets whose rows, or which themselves, are in another one."""
    with h5py.File(path.with_name("between.h5"), "w") as file:
        file["link"] = h5py.ExternalLink(target, "x")
    with h5py.File(path, "w") as file:
        file["external link"] = h5py.ExternalLink(target, "x")
        file["group/soft link"] = h5py.SoftLink("/external link")
        file["hard link"] = file["group"]
        file["link to a link"] = h5py.ExternalLink("between.h5", "link")
        file["link to a group"] = h5py.ExternalLink("between.h5", "/")
        layout = h5py.VirtualLayout((4,), "i4", (None,))
        layout[:] = h5py.VirtualSource(target, "x", (4,))
        file.create_virtual_dataset("virtual", layout)
        storage = str(path.with_name(target))  # else HDF5 looks in the current folder
        file.create_dataset("storage", (4,), "i4", external=[(storage, 0, 16)])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_is_no_regular_file_is_refused_on_all_ranks(
    mpirun, comm, mpi_tmp_path, ranks
):
    folder = mpi_tmp_path

    def prepare():
        os.mkfifo(folder / "fifo")
        (folder / "to a fifo").symlink_to("fifo")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(folder / "socket"))
        (folder / "script.py").write_text(SCRIPT)
        write_links(folder / "a.h5", "fifo")

    on_root(comm, prepare)
    others = [str(folder / name) for name in ("fifo", "to a fifo", "socket")]
    arguments = [str(folder / "a.h5"), *NAMES, *others, "/dev/zero"]
    result = mpirun(ranks, str(folder / "script.py"), *arguments)
    lines = result.stdout.splitlines()
    for name in NAMES:
        found = [line for line in lines if f"a.h5 {name} " in line]
        assert len(found) == ranks, result.stdout
        assert all("is a FIFO, and must be a regular file" in line for line in found), (
            found
        )
    for name, kind in zip([*others, "/dev/zero"], ["FIFO"] * 2 + ["socket", "device"]):
        found = [line for line in lines if f" {name} x " in line]
        assert len(found) == ranks, result.stdout
        assert all(kind in line and name in line for line in found), found
    with pytest.raises(DataError, match="is a FIFO"):
        choose_datasets(folder / "fifo")


def test_what_leads_to_regular_files_is_read(tmp_path, monkeypatch):
    data = np.arange(4, dtype="i4")
    with h5py.File(tmp_path / "there.h5", "w") as file:
        file["x"] = data
    write_links(tmp_path / "a.h5", "there.h5")
    with h5py.File(tmp_path / "a.h5", "a") as file:
        file["absolute"] = h5py.ExternalLink(f"/nowhere/{tmp_path.name}/there.h5", "x")
        file["loop"] = h5py.SoftLink("loop")
        file["around"] = h5py.SoftLink("/hard link/../group/./soft link")
    for name in [*NAMES[:-1], "absolute"]:
        (rows,) = Dataset.from_hdf5(tmp_path / "a.h5", name).batch(4)
        np.testing.assert_array_equal(rows, data)
    for name in ["loop", "around", "group/nothing", "virtual/x", "link to a group/no"]:
        with pytest.raises(DataError, match=r"there is no dataset|too many links"):
            list(Dataset.from_hdf5(tmp_path / "a.h5", name))
    # Where HDF5 looks first
    (tmp_path / "first").mkdir()
    os.mkfifo(tmp_path / "first" / "there.h5")
    for variable, name in [
        ("HDF5_EXT_PREFIX", "external link"),
        ("HDF5_VDS_PREFIX", "virtual"),
    ]:
        monkeypatch.setenv(variable, f"/nowhere:{tmp_path / 'first'}")
        with pytest.raises(DataError, match=r"first/there\.h5"):
            list(Dataset.from_hdf5(tmp_path / "a.h5", name))


def of_rows(file, name, length, source, rows=None):
    """Make a virtual dataset of rows of "d" in another file."""
    rows = slice(0, length) if rows is None else rows
    layout = h5py.VirtualLayout((rows.stop - rows.start, 2), "i4")
    layout[...] = h5py.VirtualSource(source, "d", (length, 2))[rows]
    file.create_virtual_dataset(name, layout, fillvalue=-5)


# What is wrong with the source of a virtual dataset, and what is said
SOURCES = {
    "'d' of b.h5 does not exist": lambda file: file.create_group("other"),
    "'d' of b.h5 is no dataset": lambda file: file.create_group("d"),
    "'d' of b.h5 has shape (5, 2), not (6, 2) at least": lambda file: (
        file.create_dataset("d", data=np.arange(10).reshape(5, 2))
    ),
    "c.h5 does not exist": lambda file: of_rows(file, "d", 6, "c.h5"),
    "b.h5 cannot be opened as HDF5": None,
}


@pytest.mark.parametrize("message", SOURCES)
def test_rows_that_hdf5_would_give_as_fill_values(tmp_path, message):
    if make := SOURCES[message]:
        with h5py.File(tmp_path / "b.h5", "w") as file:
            make(file)
    else:
        (tmp_path / "b.h5").write_text("text")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        of_rows(file, "x", 6, "b.h5", slice(2, 6))
    for _ in range(2):
        with pytest.raises(DataError, match=re.escape(message)) as error:
            len(Dataset.from_hdf5(tmp_path / "a.h5", "x"))
        assert str(tmp_path / "a.h5") in str(error.value)


def test_virtual_datasets_of_each_other(tmp_path):
    for name, other in ["ab", "ba"]:
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["d"] = np.arange(12).reshape(6, 2)
            of_rows(file, "x", 6, f"{other}.h5")
    with h5py.File(tmp_path / "c.h5", "w") as file:
        for name, source in [("x", "y"), ("y", "x")]:
            layout = h5py.VirtualLayout((6, 2), "i4")
            layout[...] = h5py.VirtualSource("c.h5", source, (6, 2))
            file.create_virtual_dataset(name, layout)
    require_all(tmp_path / "a.h5", ["x", "d"])
    assert len(Dataset.from_hdf5(tmp_path / "c.h5", "x")) == 6  # is found, once


def test_names_of_sources_with_percent_signs(tmp_path):
    """HDF5 doubles them; a single one is followed by b, the number of a block."""
    with h5py.File(tmp_path / "100%b.h5", "w") as file:
        file["d%b%%"] = np.arange(12).reshape(6, 2)
    layout = h5py.VirtualLayout((6, 2), "i4")
    layout[...] = h5py.VirtualSource("100%%b.h5", "d%%b%%%%", (6, 2))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("x", layout, fillvalue=-5)
    require_all(tmp_path / "a.h5", ["x"])
    with h5py.File(tmp_path / "100%b.h5", "a") as file:
        del file["d%b%%"]
    with pytest.raises(DataError, match=r"'d%b%%' of 100%b\.h5 does not exist"):
        len(Dataset.from_hdf5(tmp_path / "a.h5", "x"))


def test_sources_are_found_by_a_prefix(tmp_path, monkeypatch):
    (tmp_path / "sources").mkdir()
    with h5py.File(tmp_path / "sources" / "b.h5", "w") as file:
        file["d"] = np.arange(12).reshape(6, 2)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        of_rows(file, "x", 6, "b.h5")
    monkeypatch.setenv("HDF5_VDS_PREFIX", "${ORIGIN}/sources")
    require_all(tmp_path / "a.h5", ["x"])
    monkeypatch.setenv("HDF5_VDS_PREFIX", "${ORIGIN}/elsewhere")
    with pytest.raises(DataError, match=r"b\.h5 does not exist"):
        len(Dataset.from_hdf5(tmp_path / "a.h5", "x"))
