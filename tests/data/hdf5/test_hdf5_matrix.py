"""Any file that h5py reads gives the same rows here: types, filters, layouts."""

import dataclasses
import os
import zlib

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t
from hdf5_files import Recipe, require_rows, require_same, rows_of, whole
from hdf5_kinds import (
    CHUNKED,
    INTEGERS,
    NAMED,
    NUMBERS,
    ODD,
    PIPELINES,
    PLACES,
    PLAIN,
    ROWS,
    WHOLE,
    require_all,
    write_pipelines,
    write_places,
    write_virtual,
)

from mpidist import DataError, Dataset
from mpidist.hdf5 import chunks as hdf5_chunks
from mpidist.hdf5.index import ReadMethod, index_file


@pytest.mark.parametrize("kind", [*PLAIN, *ODD])
def test_every_type_through_every_pipeline(tmp_path, kind):
    type_id, data = ODD[kind] if kind in ODD else (None, PLAIN[kind])
    require_all(tmp_path / "a.h5", write_pipelines(tmp_path / "a.h5", data, type_id))


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("filters", [{}, {"compression": "gzip", "shuffle": True}])
def test_types_that_h5py_has_names_for(tmp_path, kind, filters):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        options = NAMED[kind]
        shape = options.get("shape", (ROWS,))
        file.create_dataset("whole", **options)
        file.create_dataset("x", **options, chunks=(5, *shape[1:]), **filters)
        if np.dtype(options.get("dtype", "i4")).subdtype is not None:
            data = np.arange(file["x"][...].size).reshape(file["x"][...].shape)
            for name in ["whole", "x"]:
                file[name][...] = data.astype(file[name][...].dtype)
    require_all(tmp_path / "a.h5", ["whole", "x"])


@pytest.mark.parametrize("order", ["<", ">"])
def test_an_array_type_of_arrays(tmp_path, order):
    inner = h5t.array_create(h5t.py_create(np.dtype(f"{order}f8")), (6, 3))
    outer = h5t.array_create(inner, (4,))
    data = np.arange(ROWS * 2 * 4 * 6 * 3.0).reshape(ROWS, 2, 4, 6, 3)
    data = data.astype(f"{order}f8")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5s.create_simple((ROWS, 2))
        for name, chunk in [("whole", None), ("chunked", (5, 2)), ("gzip", (5, 1))]:
            properties = h5p.create(h5p.DATASET_CREATE)
            if chunk:
                properties.set_chunk(chunk)
            if name == "gzip":
                properties.set_deflate(4)
            made = h5d.create(file.id, name.encode(), outer, space, properties)
            made.write(h5s.ALL, h5s.ALL, data, mtype=outer)
    require_all(tmp_path / "a.h5", ["whole", "chunked", "gzip"])


@pytest.mark.parametrize("chunks", [None, (4,)])
def test_rows_of_variable_length(tmp_path, chunks):
    """As rows, as fields, as items; some rows were never written."""
    text = h5py.string_dtype()
    kinds = {
        "arrays": (h5py.vlen_dtype("f4"), lambda i: np.arange(i, dtype="f4")),
        "fields": (
            [("a", text), ("b", h5py.vlen_dtype("i2")), ("c", ">f4")],
            lambda i: (f"row {i}", np.arange(i), i),
        ),
        "items": (np.dtype((text, (2,))), lambda i: [f"{i}", f"row {i}"]),
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, (dtype, row) in kinds.items():
            dataset = file.create_dataset(name, (ROWS,), dtype, chunks=chunks)
            for i in range(3, 15):
                dataset[i] = row(i)
    require_all(tmp_path / "a.h5", list(kinds))


def test_references_can_be_followed(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for i in range(4):
            file[f"group/{i}"] = np.arange(i, i + 5)
        refs = file.create_dataset("object", (5,), h5py.ref_dtype, chunks=(2,))
        regions = file.create_dataset("region", (5,), h5py.regionref_dtype)
        for i in range(4):
            refs[i] = file[f"group/{i}"].ref
            regions[i] = file[f"group/{i}"].regionref[1:3]
    rows = [3, 0, 4, 0]
    found, parts = rows_of(Dataset.from_hdf5(path, ["object", "region"]), rows)
    with h5py.File(path, "r") as file:
        for i, ref, region in zip(rows, found, parts, strict=True):
            assert bool(ref) == bool(region) == (i < 4)
            if ref:
                assert file[ref].name == file[region].name == f"/group/{i}"
                assert file[region][region].tolist() == [i + 1, i + 2]


def test_a_type_that_has_a_name_in_the_file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["kind"] = np.dtype([("a", ">i4"), ("b", "f8")])
        data = np.ones(ROWS, file["kind"].dtype)
        file.create_dataset("x", data=data, dtype=file["kind"], chunks=(4,))
    require_all(tmp_path / "a.h5", ["x"])


VERSIONS = {
    "earliest": {"libver": "earliest"},
    "v108": {"libver": ("v108", "v108")},
    "v110": {"libver": ("v110", "v110")},
    "latest": {"libver": "latest"},
    "earliest after a user block": {"libver": "earliest", "userblock_size": 512},
    "latest after a user block": {"libver": "latest", "userblock_size": 1024},
}


@pytest.mark.parametrize("layout", CHUNKED)
def test_every_layout_of_chunks(tmp_path, layout):
    """In every version of the format, so with every kind of chunk index."""
    for version, options in VERSIONS.items():
        names = []
        print(version)
        with h5py.File(tmp_path / f"{version}.h5", "w", **options) as file:
            for filters in [(), ("gzip",), ("shuffle", "gzip", "fletcher32")]:
                data = NUMBERS.astype(">f4") if filters == ("gzip",) else INTEGERS
                names.append("+".join(filters) or "plain")
                recipe = dataclasses.replace(CHUNKED[layout], filters=filters)
                recipe.write(file, data, names[-1])
        require_all(tmp_path / f"{version}.h5", names)


@pytest.mark.parametrize("layout", WHOLE)
def test_every_layout_without_chunks(tmp_path, layout):
    for version, options in VERSIONS.items():
        names = ["<i4", ">f8", ">c8"]
        print(version)
        with h5py.File(tmp_path / f"{version}.h5", "w", **options) as file:
            for dtype in names:
                WHOLE[layout].write(file, NUMBERS.astype(dtype), dtype)
        require_all(tmp_path / f"{version}.h5", names)


@pytest.mark.parametrize("dimensions", range(1, 7))
def test_rows_of_any_dimensions(tmp_path, dimensions):
    shape = (7, 3, 2, 5, 2, 3)[:dimensions]
    data = np.arange(np.prod(shape), dtype="u2").reshape(shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        Recipe((2,) * dimensions, ("shuffle", "gzip")).write(file, data, "gzip")
        Recipe((3, 2, 1, 2, 1, 2)[:dimensions]).write(file, data, "chunks")
    for name in ["gzip", "chunks"]:
        require_rows(Dataset.from_hdf5(tmp_path / "a.h5", name), data)


# Each kind of index beyond its first block, by the version and maxshape it comes from
INDEXES = {
    "B-tree": ("earliest", (None,), None),
    "B-tree of fixed shape": ("earliest", None, None),
    "implicit": ("latest", None, "early"),
    "fixed array": ("latest", None, None),
    "extensible array": ("latest", (None,), None),
    "second B-tree": ("latest", (None, None), None),
}


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("filters", [(), ("shuffle", "gzip")])
def test_thousands_of_chunks_written_in_any_order(tmp_path, index, filters):
    libver, limits, allocate = INDEXES[index]
    data = np.random.default_rng(0).integers(0, 1 << 30, 2400)
    data = data.reshape(-1, 2) if limits == (None, None) else data
    chunks = (1,) * data.ndim
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        recipe = Recipe(chunks, filters, limits, allocate=allocate, written=(), fill=3)
        dataset = recipe.write(file, data)
        order = np.random.default_rng(1).permutation(len(data))
        for i in order[: len(data) - 100].tolist():
            dataset[i] = data[i]
    require_rows(Dataset.from_hdf5(tmp_path / "a.h5", "x"), whole(tmp_path / "a.h5"))


def test_datasets_are_found_wherever_a_name_leads(tmp_path):
    names = [*PLACES.values(), "contiguous elsewhere"]
    require_all(write_places(tmp_path), names)
    inside = Dataset.from_hdf5(tmp_path / "here.h5", "elsewhere")
    require_rows(inside, INTEGERS)


@pytest.mark.parametrize("absolute", [True, False])
def test_rows_in_external_storage(tmp_path, monkeypatch, absolute):
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path) + "/" if absolute else ""
    storage = {
        "one": [(f"{folder}one.bin", 0, h5py.h5f.UNLIMITED)],
        "parts": [(f"{folder}{i}.bin", 3 + i, 200) for i in range(4)],
        "missing": [(f"{folder}missing.bin", 0, h5py.h5f.UNLIMITED)],
    }
    with h5py.File("a.h5", "w") as file:
        for name, parts in storage.items():
            file.create_dataset(name, INTEGERS.shape, ">i4", external=parts)
            if name != "missing":
                file[name][...] = INTEGERS
    require_all(tmp_path / "a.h5", list(storage)[:2])


def test_virtual_datasets(tmp_path):
    names = ["files", "columns"]
    names += [f"{name} without fill value" for name in names]
    path = write_virtual(tmp_path)
    assert (whole(path, "files")[18:] == -5).all()
    require_all(path, names)


def test_a_virtual_dataset_of_a_file_that_is_gone(tmp_path):
    """HDF5 would give fill values in place of its rows."""
    path = write_virtual(tmp_path)
    (tmp_path / "source1.h5").unlink()
    assert (whole(path, "files")[6:12] == -5).all()
    for _ in range(2):
        with pytest.raises(DataError, match=r"virtual\.h5: .*: source1\.h5 does"):
            len(Dataset.from_hdf5(path, "files"))
    require_all(path, ["columns"])


def test_a_virtual_dataset_of_sources_that_grow(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        source = file.create_dataset(
            "d", (4, 2), "i4", maxshape=(None, 2), chunks=(3, 2)
        )
        layout = h5py.VirtualLayout((4, 2), "i4", maxshape=(None, 2))
        every = (slice(0, h5s.UNLIMITED), slice(None))
        layout[every] = h5py.VirtualSource(source)[every]
        file.create_virtual_dataset("x", layout)
        source.resize((9, 2))
        source[...] = np.arange(18).reshape(9, 2)
    assert len(whole(tmp_path / "a.h5")) == 9
    require_all(tmp_path / "a.h5", ["x"])


FILE_OPTIONS = {
    "user block": {"userblock_size": 512},
    "long user block": {"userblock_size": 4096, "libver": "latest"},
    "core driver": {"driver": "core"},
    "stdio driver": {"driver": "stdio"},
    "order of creation": {"track_order": True},
    "pages": {"fs_strategy": "page", "fs_page_size": 4096},
    "persistent free space": {"fs_strategy": "fsm", "fs_persist": True},
    "aligned": {"alignment_threshold": 1, "alignment_interval": 4096},
    "metadata blocks": {"meta_block_size": 1 << 16},
    "v112": {"libver": ("v112", "v112")},
    "v114": {"libver": ("v114", "v114")},
}


@pytest.mark.parametrize("option", FILE_OPTIONS)
def test_every_kind_of_file(tmp_path, option):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", **FILE_OPTIONS[option]) as file:
        file["removed"] = NUMBERS  # leaves a hole
        Recipe("compact").write(file, INTEGERS, "compact")
        Recipe((4, 2, 2)).write(file, INTEGERS, "chunks")
        del file["removed"]
        Recipe((4, 2, 2), ("shuffle", "gzip")).write(file, NUMBERS, "gzip")
        Recipe().write(file, INTEGERS, "contiguous")
    if "user block" in option:
        with open(path, "r+b") as file:
            file.write(b"#!/bin/sh what users put before a HDF5 file")
    require_all(path, ["compact", "chunks", "gzip", "contiguous"])


def test_chunks_after_a_user_block_are_left_to_a_hdf5_that_does_not_locate_them(
    tmp_path, monkeypatch
):
    """As HDF5 1.14.0 to 1.14.3, with which the test above shows the rows."""
    for name, size in [("block.h5", 512), ("plain.h5", 0)]:
        with h5py.File(tmp_path / name, "w", userblock_size=size) as file:
            Recipe((4, 2, 2)).write(file, INTEGERS, "chunks")
            Recipe().write(file, INTEGERS, "contiguous")
    found = hdf5_chunks._offsets_include_user_block()
    with h5py.File(tmp_path / "block.h5") as file:
        offset = file["chunks"].id.get_chunk_info(0).byte_offset
    data = (tmp_path / "block.h5").read_bytes()[offset:]
    assert data.startswith(INTEGERS[:4, :2, :2].tobytes()) is found

    for is_included in (True, False):
        monkeypatch.setattr(
            hdf5_chunks,
            "_offsets_include_user_block",
            lambda answer=is_included: answer,
        )
        for name in ("block.h5", "plain.h5"):
            index = index_file(tmp_path / name, ["chunks", "contiguous"])
            is_left = name == "block.h5" and not is_included
            methods = [
                ReadMethod.H5PY_CHUNKS if is_left else ReadMethod.BYTES,
                ReadMethod.BYTES,
            ]
            assert [dataset.method for dataset in index.datasets] == methods
            assert ("after a user block" in index.datasets[0].why) is is_left
    require_all(tmp_path / "block.h5", ["chunks", "contiguous"])


def test_paths_of_any_characters_and_links_to_files(tmp_path):
    path = tmp_path / "a \N{GREEK SMALL LETTER MU} (1) [1] #%.h5"
    with h5py.File(path, "w") as file:
        Recipe((4, 2, 2), ("gzip",)).write(file, INTEGERS)
        file["y"] = NUMBERS
    (tmp_path / "link.h5").symlink_to(path.name)
    os.link(path, tmp_path / "hard.h5")
    for one in [path, str(path), tmp_path / "link.h5", tmp_path / "hard.h5"]:
        require_all(one, ["x", "y"])


@pytest.mark.parametrize("where", ["relative", "other folder"])
def test_relative_paths_stay_what_they_were(tmp_path, monkeypatch, where):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        Recipe((4, 2, 2), ("gzip",)).write(file, INTEGERS)
        file["y"] = INTEGERS
    monkeypatch.chdir(tmp_path)
    dataset = Dataset.from_hdf5("a.h5", ["x", "y"])
    if where == "other folder":
        assert len(dataset) == ROWS
        monkeypatch.chdir("/")
    x, y = rows_of(dataset, range(ROWS))
    require_same(x, INTEGERS)
    require_same(y, INTEGERS)


@pytest.mark.parametrize("filters", [("shuffle", "gzip"), ("fletcher32",), ()])
def test_chunks_that_stick_out_may_be_stored_unfiltered(tmp_path, filters):
    """The chunk index does not tell; only the dataset's properties do."""
    recipe = Recipe((4, 2, 2), filters, edges_as_they_are=True)
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        try:
            recipe.write(file, INTEGERS)
        except LookupError as error:
            pytest.skip(str(error))
        grows = dataclasses.replace(recipe, limits=(None, 3, 2), shapes=((40, 3, 2),))
        grows.write(file, INTEGERS, "grown")
        even = dataclasses.replace(recipe, layout=(ROWS, 3, 1))
        even.write(file, INTEGERS, "even")
    for name in ["x", "grown", "even"]:
        require_all(tmp_path / "a.h5", [name])


def raw_chunks(data, pipeline, chunk_rows):
    """Return the bytes that chunks of whole rows have after a pipeline."""
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        chunks = (chunk_rows, *data.shape[1:])
        dataset = Recipe(chunks, pipeline).write(file, data)
        file.flush()
        starts = range(0, len(data), chunk_rows)
        at = [(start, *[0] * (data.ndim - 1)) for start in starts]
        return {i: dataset.id.read_direct_chunk(i)[1] for i in at}


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_chunks_may_have_skipped_any_of_the_filters(tmp_path, libver):
    """As HDF5 does with what a filter cannot make smaller."""
    pipeline = ("shuffle", "gzip", "fletcher32")
    data = np.arange(8 * 5, dtype=">u4").reshape(40, 1) * 1001
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        dataset = Recipe((5, 1), pipeline, written=()).write(file, data)
        for mask in range(8):
            kept = [name for i, name in enumerate(pipeline) if not mask >> i & 1]
            chunk = raw_chunks(data, tuple(kept), 5)[mask * 5, 0]
            dataset.id.write_direct_chunk((mask * 5, 0), chunk, filter_mask=mask)
    np.testing.assert_array_equal(whole(tmp_path / "a.h5"), data)
    require_all(tmp_path / "a.h5", ["x"])


@pytest.mark.parametrize("pipeline", [p for p in PIPELINES if p], ids="+".join)
def test_chunks_that_do_not_become_smaller(tmp_path, pipeline):
    data = np.random.default_rng(0).integers(0, 256, (ROWS, 1001), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        Recipe((4, 1001), pipeline).write(file, data)
        Recipe((4, 100), pipeline).write(file, data, "narrow")
    require_all(tmp_path / "a.h5", ["x", "narrow"])


def checksum_of_hdf5_1_6(chunk):
    """Swap the bytes of a checksum as HDF5 1.6.2 did, which is still accepted."""
    a, b, c, d = chunk[-4:]
    return chunk[:-4] + bytes([b, a, d, c])


# What other programs may have written in place of a chunk that h5py has filtered
CHUNKS_OF_OTHERS = {
    "the best compression": ("gzip", lambda raw: zlib.compress(raw, 9)),
    "no compression": ("gzip", lambda raw: zlib.compress(raw, 0)),
    "more after the stream": ("gzip", lambda raw: zlib.compress(raw) + b"more"),
    "a stream of more than a chunk": ("gzip", lambda raw: zlib.compress(raw + b"more")),
    "an old checksum": ("fletcher32", None),
}


@pytest.mark.parametrize("kind", CHUNKS_OF_OTHERS)
def test_chunks_that_other_programs_wrote(tmp_path, kind):
    name, compress = CHUNKS_OF_OTHERS[kind]
    data = np.random.default_rng(0).integers(0, 99, (20, 7), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = Recipe((5, 7), (name,)).write(file, data)
        for at, chunk in raw_chunks(data, (name,), 5).items():
            raw = data[at[0] : at[0] + 5].tobytes()
            chunk = checksum_of_hdf5_1_6(chunk) if compress is None else compress(raw)
            dataset.id.write_direct_chunk(at, chunk)
    np.testing.assert_array_equal(whole(tmp_path / "a.h5"), data)
    require_all(tmp_path / "a.h5", ["x"])


def test_checksums_of_every_length_of_chunk(tmp_path):
    """Sums of more than 720 bytes are folded, an odd last byte counts as high."""
    widths = [1, 2, 3, 359, 360, 361, 719, 720, 721, 1441, 5000]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for width in widths:
            random = np.random.default_rng(width)
            data = random.integers(250, 256, (5, width), np.uint8)
            Recipe((1, width), ("fletcher32",)).write(file, data, str(width))
            Recipe((1, width), ("fletcher32",)).write(file, data * 0, f"{width} zeros")
    for width in widths:
        require_all(tmp_path / "a.h5", [str(width), f"{width} zeros"])


def test_addresses_beyond_4_gib(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        sparse = Recipe(allocate="early", is_filled=False, written=(np.s_[-1:],))
        hole = np.broadcast_to(np.uint8(9), (5 << 30,))
        sparse.write(file, hole, "hole")
        Recipe().write(file, INTEGERS, "contiguous")
        Recipe((4, 2, 2)).write(file, INTEGERS, "chunks")
        Recipe((4, 2, 2), ("gzip",)).write(file, INTEGERS, "gzip")
        names = ["contiguous", "chunks", "gzip"]
        assert all(file[name].id.get_storage_size() for name in names)
    require_all(tmp_path / "a.h5", names)
    rows = [len(hole) - 1, 0, 1 << 32, len(hole) - 2]
    found = rows_of(Dataset.from_hdf5(tmp_path / "a.h5", "hole"), rows)
    assert found.tolist() == [9, 0, 0, 0]


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_few_written_rows_of_very_many(tmp_path, libver):
    """No table may be as long as the dataset, or have an entry for each chunk."""
    rows, limits = (1 << 40, None) if libver == "earliest" else (1 << 40, (None,))
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        dataset = file.create_dataset(
            "x", (rows,), "i4", chunks=(1024,), maxshape=limits, fillvalue=-1
        )
        for start in [0, 1 << 20, rows - 2 if libver == "earliest" else 1 << 21]:
            dataset[start : start + 2] = [start % 1000, 7]
    wanted = [1 << 20, rows - 1, 1, 1 << 30, rows - 2, (1 << 20) + 2, 0, 1 << 21, 2]
    with h5py.File(tmp_path / "a.h5", "r") as file:
        expected = [int(file["x"][i]) for i in wanted]
    dataset = Dataset.from_hdf5(tmp_path / "a.h5", "x")
    assert len(dataset) == rows
    assert rows_of(dataset, wanted).tolist() == expected
