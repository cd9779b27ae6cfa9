"""`python -m mpidist plan`: what it says is what a job reads, and it needs no MPI."""

from __future__ import annotations

import collections
import itertools
import json
import re
import sys
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
from hdf5_files import Recipe

import mpidist
from mpidist import AutoShardPolicy, Dataset, Options
from mpidist.__main__ import main
from mpidist.hdf5 import read as hdf5
from mpidist.hdf5 import read as hdf5_parts
from mpidist.hdf5.files import RawFile
from mpidist.hdf5.index import choose_datasets, index_file
from mpidist.launch import commands
from mpidist.tools import plan as plans
from mpidist.tools.plan import Request, make_plan, to_json, to_text
from mpidist.util.available_memory import as_text
from mpidist.util.shares import BatchShare

LIBRARY = Path(mpidist.__file__).parents[1]
GZIP = Recipe((8, 2), ("shuffle", "gzip"), limits=(None, None))
LAYOUTS = {
    "contiguous": Recipe(),
    "chunks": Recipe((5, 2), limits=(None, None)),
    "gzip": GZIP,
    "lzf": Recipe((8, 2), ("lzf",), limits=(None, None)),  # by h5py
    "partly written": Recipe(
        (4, 3), fill=7, written=(slice(10, 20),), limits=(None, 3)
    ),
    "gzip, partly": Recipe((4, 3), ("gzip",), limits=(None, 3), written=(slice(9),)),
}
ORDERS = {
    "in order": {},
    "permutation": {"window_chunks": 0},
    "blocks": {"window_chunks": 3},
}


def write(path, rows, layout=GZIP, label_layout=None):
    """Write datasets x `(rows, 3)` and y `(rows,)`."""
    numbers = np.arange(rows)
    with h5py.File(path, "w") as file:
        layout.write(file, np.stack([numbers] * 3, axis=1), "x")
        (label_layout or Recipe()).write(file, numbers, "y")
    return path


def plan_of(files, batch_size, ranks, **options):
    paths = [files] if isinstance(files, str | Path) else files
    options.setdefault("datasets", ("x", "y"))
    return make_plan(Request(tuple(map(str, paths)), batch_size, ranks, **options))


def notes_of(*arguments, **options):
    return plan_of(*arguments, **options).notes


def by_rank(plan):
    """Return the group of each rank."""
    groups = [group for group in plan.groups for _ in range(group.count)]
    assert len(groups) == plan.request.ranks
    return groups


class Observed(collections.Counter):
    """Counts what this process really reads of HDF5 files, without keeping rows."""

    def __init__(self, monkeypatch):
        super().__init__()
        monkeypatch.setattr(hdf5_parts.FileMap, "bytes_to_keep", lambda *_: 0)
        monkeypatch.setattr(RawFile, "read", self.wrap_read(RawFile.read))
        monkeypatch.setattr(RawFile, "gather", self.wrap_gather(RawFile.gather))
        load = hdf5.Hdf5Rows._load_block

        def load_block(rows, key):
            self["chunks"] += 1
            return load(rows, key)

        monkeypatch.setattr(hdf5.Hdf5Rows, "_load_block", load_block)

    def wrap_read(self, real):
        def read(file, offset, size_bytes):
            self["bytes"] += size_bytes
            return real(file, offset, size_bytes)

        return read

    def wrap_gather(self, real):
        def gather(file, offsets, size_bytes, *others):
            self["bytes"] += offsets.size * size_bytes
            return real(file, offsets, size_bytes, *others)

        return gather


def keep(monkeypatch, kept_bytes):
    """Let so many bytes of decoded chunks be kept."""
    monkeypatch.setattr(hdf5_parts, "KEPT_BYTES", kept_bytes)


@pytest.fixture
def files(comm, mpi_tmp_path):
    """A function that writes files of so many rows, on the first rank."""

    def make(counts, layout):
        paths = [mpi_tmp_path / f"{i:02}.h5" for i in range(len(counts))]
        if comm.rank == 0:
            for path, count in zip(paths, counts, strict=True):
                write(path, count, layout)
        comm.Barrier()
        return paths

    return make


@pytest.mark.parametrize("kept_bytes", [400, 1 << 26])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["DATA", "FILE", "OFF"])
def test_a_job_reads_what_the_plan_says(
    strategy, comm, files, monkeypatch, policy, layout, order, kept_bytes
):
    keep(monkeypatch, kept_bytes)
    paths = files([23, 40, 0, 17, 9], LAYOUTS[layout])
    shuffled = {"shuffle": order != "in order", **ORDERS[order]}
    if shuffled["shuffle"]:
        shuffled["seed"] = 5
    options = {"policy": policy.lower(), **shuffled}
    plan = plan_of(paths, 10, comm.size, **options)

    observed = Observed(monkeypatch)
    dataset = Dataset.from_hdf5(paths, ("x", "y"))
    if order != "in order":
        dataset = dataset.shuffle(seed=5, **ORDERS[order])
    dataset = dataset.batch(10).with_options(Options(AutoShardPolicy[policy]))
    divided = strategy.experimental_distribute_dataset(dataset)
    sizes = [len(strategy.experimental_local_results(y)[0]) for _, y in divided]

    assert plan.counted_ranks == comm.size
    assert len(sizes) == plan.steps
    mine = by_rank(plan)[comm.rank]
    assert mine.rows == sum(sizes)
    assert mine.rows_in_last_step == sizes[-1]
    assert mine.empty_steps == sizes.count(0)
    assert mine.rows_per_step == sizes[0]
    everyone = comm.allgather((sum(sizes), observed["bytes"], observed["chunks"]))
    rows, read_bytes, chunks = zip(*everyone)
    assert plan.mean_rows == np.mean(rows)
    assert plan.imbalance == pytest.approx(max(rows) / np.mean(rows) - 1)
    assert plan.decoded_chunks == sum(chunks)
    if layout != "lzf":  # what HDF5 itself reads is not observed
        assert plan.read_bytes == sum(read_bytes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 4096])
@pytest.mark.parametrize("policy", ["DATA", "OFF"])
@pytest.mark.parametrize("batch_size", [1, 7, 250, 4096, 10_000])
def test_rows_of_many_ranks(tmp_path, ranks, policy, batch_size):
    path = write(tmp_path / "a.h5", 1000)
    plan = plan_of(path, batch_size, ranks, policy=policy.lower())
    groups = by_rank(plan)
    every = 1000 * (ranks if policy == "OFF" else 1)
    assert sum(group.rows for group in groups) == every
    assert plan.mean_rows == every / ranks
    if policy == "DATA":
        for rank in {0, ranks // 2, ranks - 1}:
            parts = [
                BatchShare(ranks, rank).of(min(batch_size, 1000 - i))
                for i in range(0, 1000, batch_size)
            ]
            sizes = [part.stop - part.start for part in parts]
            assert groups[rank].rows == sum(sizes)
            assert groups[rank].empty_steps == sizes.count(0)
            assert groups[rank].rows_in_last_step == sizes[-1]
    assert len(plan.groups) <= 5
    assert len(to_text(plan).splitlines()) < 40


def test_many_unlike_ranks_share_lines(tmp_path):
    paths = [write(tmp_path / f"{i:02}.h5", 20 + i) for i in range(32)]
    plan = plan_of(paths, 64, 32, policy="file")
    assert len(plan.groups) == 32
    assert plan.imbalance == pytest.approx(51 / 35.5 - 1)
    text = to_text(plan)
    assert len(text.splitlines()) < 30
    assert re.search(r"^0-3 +20\.\.23 +2 ", text, re.MULTILINE)
    assert "the files have 20 to 51 rows: one rank has 43.7% more rows" in text


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"policy": "off"}], ids=str)
def test_ten_milliard_rows_and_4096_ranks(tmp_path, monkeypatch, options):
    monkeypatch.setattr(plans, "_COUNTING_SECONDS", -1)
    layout = {"chunks": (10**5, 4), "compression": "gzip"} if options else {}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (10**10, 4), "f4", **layout)
    plan = plan_of(tmp_path / "a.h5", 1 << 17, 4096, datasets=("x",), **options)
    assert plan.memory_bytes == 16 * 10**10
    assert plan.counted_ranks == 0
    assert plan.read_bytes is plan.decoded_chunks is None
    assert "reads: not estimated, as the epoch is too long" in to_text(plan)
    assert json.loads(to_json(plan))["read_bytes"] is None
    if "policy" not in options:
        assert sum(group.rows * group.count for group in plan.groups) == 10**10


LONG_ROWS = 40_000


@pytest.fixture(scope="module")
def long_file(tmp_path_factory):
    """Rows in 200 chunks, and their labels in 100, of which few can be kept."""
    path = tmp_path_factory.mktemp("long") / "a.h5"
    return write(
        path,
        LONG_ROWS,
        Recipe((200, 3), ("gzip",)),
        Recipe((400,), ("gzip",)),
    )


@pytest.mark.parametrize(
    ("order", "batch_size"),
    [
        *[("in order", n) for n in (64, 250, 2048)],
        *[("permutation", n) for n in (64, 250, 2048)],
        *[("blocks", n) for n in (64, 250)],
    ],
)
def test_a_sample_of_ranks_gives_an_estimate(monkeypatch, long_file, batch_size, order):
    """With more time: no estimate, then one from some ranks, then exact counts."""
    keep(monkeypatch, 1 << 16)
    options = {"shuffle": order != "in order", **ORDERS[order]}
    found = []
    while not found or found[-1].counted_ranks < 9:
        # Each look at the clock takes a second
        clock = types.SimpleNamespace(monotonic=itertools.count().__next__)
        monkeypatch.setattr(plans, "time", clock)
        monkeypatch.setattr(plans, "_COUNTING_SECONDS", 2 ** len(found) - 1)
        found.append(plan_of(long_file, batch_size, 9, ranks_per_node=3, **options))
    first, last, exact = found[0], found[-2], found[-1]
    counted = [plan.counted_ranks for plan in found]
    assert counted == sorted(counted)
    assert counted[0] == 0
    assert 0 < counted[-2] < 9
    assert first.read_bytes is first.groups[0].read_bytes is None
    text = " ".join(to_text(first).split())
    assert (
        f"not estimated, as the epoch is too long to count them; {exact.chunks}" in text
    )
    assert first.notes == [n for n in exact.notes if "decoded" not in n]
    text = " ".join(to_text(last).split())
    assert f"estimated from {counted[-2]} of 9 ranks" in text
    assert "~" in text
    assert last.read_bytes == pytest.approx(exact.read_bytes, rel=0.1)
    assert last.decoded_chunks == pytest.approx(exact.decoded_chunks, rel=0.1)
    assert all(plan.steps == exact.steps for plan in found)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_are_exact_where_reads_are_not_estimated(tmp_path, monkeypatch, order):
    paths = [write(tmp_path / f"{i}.h5", n) for i, n in enumerate([700, 0, 3, 90])]
    monkeypatch.setattr(plans, "_COUNTING_SECONDS", -1)
    options = {"shuffle": order != "in order", **ORDERS[order]}
    options["policy"] = "file"
    for drop_remainder in (False, True):
        plan = plan_of(paths, 16, 4, drop_remainder=drop_remainder, **options)
        exact = [700, 0, 0 if drop_remainder else 3, 88 if drop_remainder else 90]
        assert [group.rows for group in by_rank(plan)] == exact
        assert {group.read_bytes for group in plan.groups} == {None}
        assert "the files have 0 to 700 rows: one rank" in " ".join(plan.notes)
    with h5py.File(tmp_path / "none.h5", "w") as file:
        file["x"] = np.zeros((0, 3))
    plan = plan_of(tmp_path / "none.h5", 4, 3, datasets=("x",))
    assert plan.steps == plan.read_bytes == plan.imbalance == 0
    assert "there is no step: there are no rows" in plan.notes
    assert "0 steps per epoch" in to_text(plan)


def test_advice_on_batch_sizes(tmp_path):
    path = write(tmp_path / "a.h5", 1000)
    expected = "batch 250 gives 3 ranks 84, 84, 82 rows; use 249 or 252"
    assert expected in notes_of(path, 250, 3)
    assert notes_of(path, 252, 3) == []
    few = notes_of(path, 2, 4)
    assert "batch 2 gives 4 ranks 1, 1, 0, 0 rows; use 4" in few
    assert "there are no rows at all for 2 ranks" in few
    many = notes_of(path, 100, 64)
    assert "batch 100 gives 64 ranks 0..2 rows; use 64 or 128" in many
    own = notes_of(path, 250, 3, policy="off")
    assert own == ["batch 250 gives each rank 84 rows, 252 in total; use 249 or 252"]
    nothing = notes_of(path, 1001, 7, drop_remainder=True)
    assert nothing == ["there is no step: 1,000 rows make no batch of 1,001"]
    last = notes_of(path, 900, 300)
    assert any("the last step's 100 rows leave none for 200 ranks" in n for n in last)


@pytest.mark.slow
def test_advice_on_chunks(tmp_path, monkeypatch, long_file):
    keep(monkeypatch, 1 << 14)
    (note,) = notes_of(long_file, 64, 4)
    assert note.startswith(
        "chunks are decoded 4.0 times each per epoch, as a rank's 16"
    )
    assert "--shuffle" in note
    (note,) = notes_of(long_file, 64, 4, shuffle=True, window_chunks=64)
    assert "ranks share stripes, runs of 32 rows; a batch of 128 or 256 rows" in note
    (note,) = notes_of(long_file, 320, 5, shuffle=True, window_chunks=64)
    assert note.endswith("as ranks share stripes, runs of 32 rows")
    assert notes_of(long_file, 256, 4, shuffle=True, window_chunks=64) == []
    exact = plan_of(long_file, 64, 4, shuffle=True, window_chunks=0)
    assert "omit --window-chunks 0" in exact.notes[0]
    with h5py.File(tmp_path / "huge.h5", "w") as file:
        file.create_dataset(
            "x", (30_000, 128), "f8", chunks=(20_000, 128), compression=1
        )
        file.create_dataset("y", (30_000,), "f8", chunks=(4,), compression=1)[...] = 1
    huge, tiny = notes_of(tmp_path / "huge.h5", 64, 1)
    assert huge.startswith("x: reading one row decodes 20,000 rows (19.53 MiB)")
    assert tiny.startswith("y: 7,500 chunks have only 32 bytes each")


def virtual(file):
    layout = h5py.VirtualLayout((4,), "i8")
    layout[:] = h5py.VirtualSource(file["plain"])
    file.create_virtual_dataset("x", layout)


REASONS = {
    "virtual": virtual,
    "compact": lambda file: Recipe("compact").write(file, np.arange(4)),
    "lzf": lambda file: Recipe((2,), ("shuffle", "lzf")).write(file, np.arange(4)),
    "external storage": lambda file: file.create_dataset(
        "x", data=np.arange(4), external=[(file.filename + ".raw", 0, 32)]
    ),
    "type": lambda file: file.create_dataset("x", (4,), h5py.string_dtype()),
    "never written": lambda file: Recipe((2,), fill=..., written=()).write(
        file, np.arange(4, dtype="i4")
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_h5py_reads_a_dataset(tmp_path, reason):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["plain"] = np.arange(4)
        REASONS[reason](file)
    plain, odd = index_file(tmp_path / "a.h5", ["plain", "x"]).datasets
    assert not plain.why
    assert reason in odd.why
    text = to_text(plan_of(tmp_path / "a.h5", 2, 2, datasets=("plain", "x")))
    assert "plain: int64 (), 32 bytes, contiguous: each row's bytes\n" in text
    assert re.search(r"  x: .*by h5py \(", text.replace("\n    ", " "))


def test_datasets_with_equally_many_rows_are_taken(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group/x"] = np.zeros((50, 3), "f4")
        file["y"] = np.zeros(50)
        file["names"] = np.zeros(1000, "u1")
        file["scalar"] = 3
        file["link"] = h5py.SoftLink("/y")
        file["other/test"] = np.zeros(10)
    taken, others = choose_datasets(tmp_path / "a.h5")
    assert (taken, others) == (["group/x", "y"], ["names", "other/test", "scalar"])
    plan = plan_of(tmp_path / "a.h5", 10, 2, datasets=())
    assert [dataset.name for dataset in plan.datasets] == taken
    assert plan.notes == [
        "not read, because --datasets does not name them: names, other/test, scalar"
    ]


def test_what_a_node_does(tmp_path):
    path = write(tmp_path / "a.h5", 100)
    plan = plan_of(path, 12, 6, ranks_per_node=4)
    assert plan.kept_bytes == 100 * 24
    text = " ".join(to_text(plan).split())
    reads, kept = as_text(plan.read_bytes / 6 * 4), as_text(4 * plan.kept_bytes)
    assert f"nodes: 2 of 4 ranks; each reads {reads} per epoch, and keeps" in text
    assert f"keeps up to {kept} of chunks; cache() would keep" in text
    assert "nodes:" not in to_text(plan_of(path, 12, 6))


def run(*arguments):
    """Return the exit status of a command of this process."""
    try:
        return main(["plan", *map(str, arguments)])
    except SystemExit as error:
        return error.code


def test_the_command_prints_a_plan(tmp_path, capsys):
    path = write(tmp_path / "a.h5", 100)
    write(tmp_path / "b.h5", 30)
    assert run(path, "--batch", 8, "--ranks", 2, "--datasets", "x", "y") == 0
    assert capsys.readouterr().out == to_text(plan_of(path, 8, 2)) + "\n"
    pattern = tmp_path / "*.h5"
    options = ["--policy", "file", "--shuffle", "--seed", 3, "--window-chunks", 2]
    assert run(pattern, "--batch", 8, "--ranks", 2, *options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == 2
    assert found["rows"] == 130
    assert found["request"] == {
        "files": [str(pattern)],
        "batch": 8,
        "ranks": 2,
        "datasets": [],
        "policy": "file",
        "drop_remainder": False,
        "shuffle": True,
        "seed": 3,
        "window_chunks": 2,
        "ranks_per_node": None,
    }


def test_data_that_cannot_be_read_are_errors_without_a_traceback(tmp_path, capsys):
    path = write(tmp_path / "a.h5", 20)
    with h5py.File(tmp_path / "unequal.h5", "w") as file:
        file["x"], file["y"] = np.zeros(5), np.zeros(6)
    with h5py.File(tmp_path / "unlike.h5", "w") as file:
        file["x"], file["y"] = np.zeros((5, 7)), np.zeros(5)
    (tmp_path / "text.h5").write_text("no HDF5")
    with h5py.File(tmp_path / "empty.h5", "w"):
        pass
    names = ["--datasets", "x", "y"]
    for arguments, *expected in [
        ([tmp_path / "missing.h5"], "missing.h5", "No such file"),
        ([tmp_path / "missing.h5", *names], "missing.h5", "No such file"),
        ([tmp_path / "none-*.h5"], "none-*.h5", "no file matches"),
        ([tmp_path / "text.h5"], "text.h5", "cannot be opened as HDF5"),
        ([tmp_path / "empty.h5"], "empty.h5", "no dataset with rows"),
        ([tmp_path], str(tmp_path), "Is a directory"),
        ([path, "--datasets", "x", "z"], "a.h5", "no dataset 'z'"),
        ([tmp_path / "unequal.h5", *names], "unequal.h5", "'x' has 5, 'y' has 6"),
        (
            [path, tmp_path / "unlike.h5", *names],
            "unlike.h5",
            "rows of dataset 'x' are",
        ),
    ]:
        assert run(*arguments, "--batch", 4, "--ranks", 2) == 1, arguments
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("python -m mpidist plan: error: ")
        assert err.count("\n") == 1
        for part in expected:
            assert part in err


def test_arguments_that_cannot_be_used_are_usage_errors(tmp_path, capsys):
    path = write(tmp_path / "a.h5", 20)
    good = [path, "--batch", 4, "--ranks", 2]
    for arguments, expected in [
        ([path], "--batch, --ranks"),
        ([*good, "--batch", 0], "must be >= 1, not 0"),
        ([*good, "--ranks", "two"], "two"),
        ([*good, "--seed", 3], "need --shuffle"),
        ([*good, "--window-chunks", 0], "need --shuffle"),
        ([*good, "--shuffle", "--window-chunks", -1], "must be >= 0, not -1"),
        ([*good, "--policy", "auto"], "invalid choice"),
        ([*good, "--policy", "file"], "at least as many files as workers, not 1"),
    ]:
        assert run(*arguments) == 2, arguments
        out, err = capsys.readouterr()
        assert out == ""
        assert expected in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ["-mmpidist"],
        ["-bm", "mpidist"],
        ["-W", "error", "-X", "faulthandler", "-m", "mpidist"],
        ["-m", "mpidist.__main__"],
    ],
)
def test_the_command_needs_no_mpi(tmp_path, without_mpi, how):
    path = write(tmp_path / "a.h5", 100)
    arguments = ["plan", path, "--batch", 8, "--ranks", 512, "--datasets", "x", "y"]
    done = without_mpi(sys.executable, *how, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == to_text(plan_of(path, 8, 512)) + "\n"


def test_other_programs_get_the_whole_package_or_an_error(tmp_path, without_mpi):
    """Also those that look like the command."""
    script = tmp_path / "script.py"
    script.write_text("import mpidist\n")
    for arguments in [
        ["-c", "import mpidist"],
        ["-c", "import mpidist", "-m", "mpidist"],
        [script, "-m", "mpidist", "plan"],
        ["-m", "mpidist.tools.plan"],
    ]:
        done = without_mpi(sys.executable, *arguments)
        assert done.returncode == 1
        assert "there is no MPI here" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "own", "expected"),
    [
        ("python -m mpidist plan -m other", 3, True),
        ("python -Im mpidist plan", 1, True),
        ("python -m mpidists", 0, False),
        ("python -m my.mpidist", 0, False),
        ("python -m pytest -m mpidist", 2, False),
    ],
)
def test_which_processes_are_commands(monkeypatch, arguments, own, expected):
    words = arguments.split()
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", ["-m", *words[len(words) - own :]])
    assert commands.is_command() is expected


def test_the_example_of_the_manual(tmp_path, monkeypatch, capsys):
    """But for sizes of compressed bytes, which depend on the library."""
    page = (LIBRARY / "docs/tools.md").read_text()
    command, _, expected = re.search(
        r"```\n\$ python -m mpidist (plan [^\n]*)(\n)(.*?)```", page, re.DOTALL
    ).groups()
    images = np.random.default_rng(0).integers(0, 4, (20_000, 28, 28), np.uint8)
    with h5py.File(tmp_path / "train.h5", "w") as file:
        file.create_dataset("x", data=images, chunks=(64, 28, 28), compression=1)
        file["y"] = np.zeros(20_000, "i8")
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert _without_sizes(capsys.readouterr().out) == _without_sizes(expected)


def _without_sizes(text):
    return re.sub(r"[\d.]+ (bytes|KiB|MiB)", "SIZE", " ".join(text.split()))
