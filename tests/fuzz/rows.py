"""Random pipelines of random HDF5 files, against a model of tf.data.

Pipelines are read by one process and divided over ranks, stopped and gone on with on
other ranks, while files change. What a shuffle's order is the model does not know, but
all that is read has to agree on it: see `orders`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import h5py
import numpy as np
import row_files
from job import World
from orders import (
    SHIFT,
    Batch,
    Name,
    Number,
    Orders,
    Slot,
    atoms,
    compare,
    is_known,
    shifted,
    whole,
)

import mpidist

Dataset = mpidist.Dataset
_MOST = 400  # elements of a dataset


class Job:
    """The datasets that one job makes, by nodes, and the rows that they have.

    Attributes:
      datasets: of this process, and those that a strategy has divided.
      epochs: how many times each was iterated over.
      names: of datasets.
      files: numbers of their rows, when the job began.
      fixed: whose order shuffles without a seed have.
      changed: numbers of files that have changed since.
    """

    def __init__(self, name, files):
        self.name = name
        self.files = [list(file.ids) for file in files]
        self.datasets: dict[Any, Any] = {}
        self.epochs: dict[Any, int] = {}
        self.names: dict[Any, str] = {}
        self.fixed: dict[Any, Any] = {}
        self.changed: set[int] = set()

    def dataset(self, node):
        """Return the dataset of a node, which is made once."""
        if node not in self.datasets:
            parents = map(self.dataset, node.parents)
            self.datasets[node] = node.make(*parents)
        return self.datasets[node]


class Epoch(NamedTuple):
    """One iteration over a dataset.

    Args:
      job: whose dataset.
      dataset: which; those that continue each other are one.
      path: the number of the epoch, and repetitions in it.
      worker: a rank, and their number, where each has files of its own.
      is_plain: whether shuffles do nothing.
      is_cached: whether it is the one that a cache keeps.
    """

    job: Job
    dataset: Any = "sizes"
    path: tuple[Any, ...] = (0,)
    worker: tuple[int, int] | None = None
    is_plain: bool = False
    is_cached: bool = False


@dataclasses.dataclass(eq=False)
class Node:
    """A dataset of the model.

    Args:
      make: returns the library's, given those of the parents.
      items: returns the elements of an epoch.
      parents: datasets that it is made from.
      depth: how often its rows were batched.
      spec: what its elements are.
      files: numbers of the files that it reads itself.
      has_cache: whether elements are kept.
      is_late: whether files are opened when they are read.
      is_ahead: whether elements may be read before they are needed.
      shuffle: the number of the shuffle, if it is one.
      is_divisible: whether each rank may have some of the files.
    """

    make: Callable[..., Any]
    items: Callable[[Epoch], list[Any]]
    parents: tuple[Any, ...] = ()
    depth: int = 0
    spec: Any = "row"
    files: tuple[int, ...] = ()
    has_cache: bool = False
    is_late: bool = False
    is_ahead: bool = False
    is_divisible: bool = False
    shuffle: int | None = None

    def is_shuffled(self):
        """Return whether there is a shuffle."""
        return any(part.shuffle is not None for part in self.walk())

    def walk(self):
        """Yield this and all datasets before it."""
        yield self
        for parent in self.parents:
            yield from parent.walk()


def bump(element, by):
    """Return an element with other numbers of rows; also of batches."""
    if isinstance(element, tuple):
        return tuple(bump(part, by) for part in element)
    if isinstance(element, dict):
        return {**element, "id": element["id"] + np.int64(by * SHIFT)}
    return element


def taking(function, *arguments):
    """Return a function that gets an element, a tuple as arguments."""
    return lambda *e: function(e[0] if len(e) == 1 else e, *arguments)


def key_of(element):
    """Return a number of an element that maps do not change; also of the model's."""
    if isinstance(element, tuple):
        return key_of(element[0])
    if isinstance(element, Number):
        return element.n
    number = element["id"] if isinstance(element, dict) else element
    return int(number) % SHIFT


def leaves(element):
    """Return the arrays of an element."""
    parts = element.values() if isinstance(element, dict) else element
    if isinstance(element, tuple | dict):
        return [leaf for part in parts for leaf in leaves(part)]
    return [element]


def rows_of(batch):
    """Return the elements of a batch of arrays."""

    def row(part, i):
        if isinstance(part, tuple):
            return tuple(row(p, i) for p in part)
        return (
            {k: row(v, i) for k, v in part.items()} if type(part) is dict else part[i]
        )

    lengths = {len(leaf) for leaf in leaves(batch)}
    assert len(lengths) == 1, f"arrays of a batch have {lengths} rows"
    return [row(batch, i) for i in range(lengths.pop())]


def interleaved(sources, cycle, block):
    """Return the elements of several lists as tf.data interleaves them."""
    waiting, slots, found = iter(sources), [None] * cycle, []
    while True:
        is_over = True
        for i in range(cycle):
            if slots[i] is None and (source := next(waiting, None)) is not None:
                slots[i] = iter(source)
            if slots[i] is None:
                continue
            is_over, some = False, list(itertools.islice(slots[i], block))
            found += some
            if len(some) < block:
                slots[i] = None
        if is_over:
            return found


def shape_of(item):
    """Return the numbers of rows of a batch, of batches or not."""
    is_batch = isinstance(item, Batch)
    return (len(item), *map(shape_of, item)) if is_batch else ()


def narrow(x):
    """Return text in the least width."""
    return (
        np.array(x.tolist()).astype("S").reshape(x.shape) if x.dtype.kind == "S" else x
    )


def batched(items, size, drop):
    """Return batches of elements."""
    cut = [Batch(items[i : i + size]) for i in range(0, len(items), size)]
    return cut[:-1] if drop and cut and len(cut[-1]) < size else cut


class Play:
    """A program in the middle: its files, the datasets at hand, and what was read."""

    def __init__(self, world: World, dtype, shape):
        self.world, self.orders = world, Orders()
        self.dtype, self.shape = row_files.TYPES[dtype], tuple(shape)
        self.files: list[Any] = []
        self.values: dict[int, Any] = {}  # by row
        self.stack: list[Node] = []
        self.finals: dict[Any, Node] = {}  # in batches
        self.numbers = itertools.count()
        self.start_job()

    def start_job(self):
        self.job = Job(f"job {next(self.numbers)}", self.files)

    # Files

    def file(self, layout, rows, seed):
        """Write one more file."""
        number = len(self.files)
        path = self.world.folder / f"f{number}.h5"
        self.files.append(row_files.RowFile(path, number, self.dtype, self.shape))
        self.job.files.append([])
        self.change(number, layout, rows, seed, "replace", 0, False)
        self.job.changed.discard(number)
        self.job.files[number] = self.files[number].ids

    def change(self, number, layout, rows, seed, how, kept, only_sources):
        """Write another version of a file, or only of what it refers to."""
        if not self.files:
            return
        file = self.files[number % len(self.files)]
        if file.is_written:
            return
        if only_sources:  # it goes on to show the same parts of them
            (layout, seed), rows, kept = file.how, len(file.ids), 0
        old, found = [self.values[row] for row in file.ids[: min(kept, rows)]], None
        if self.world.rank == 0:
            parts, *found = file.write(layout, rows, seed, old)
            if only_sources and len(parts) > 1:
                parts.pop(file.path.name)
            row_files.put(self.world.folder, parts, how)
        file.ids, x = self.world.comm.bcast(found)
        file.version, file.how = file.version + 1, (layout, seed)
        self.values |= zip(file.ids, x)
        self.job.changed.add(file.number)

    # Sources

    def push(self, make, items, *parents, **about):
        """Make a dataset the one at hand, unless it has too many elements."""
        about.setdefault("has_cache", any(parent.has_cache for parent in parents))
        node = Node(make, items, parents, **about)
        if len(items(Epoch(self.job, is_plain=True))) <= _MOST:
            self.stack.append(node)

    def hdf5(self, *numbers):
        """Read some files, one after the other."""
        if not self.files:
            return
        files = [self.files[n % len(self.files)] for n in numbers]
        # What a writer wrote is refused if it is there twice
        files = [
            f for i, f in enumerate(files) if not (f.is_written and f in files[:i])
        ]

        def items(epoch):
            first, step = epoch.worker or (0, 1)
            some = files[first::step]
            return [row for file in some for row in epoch.job.files[file.number]]

        self.push(
            lambda: Dataset.from_hdf5(
                [path for file in files for path in file.paths()],
                {"id": "id", "x": "x"},
            ),
            items,
            files=tuple(file.number for file in files),
            is_divisible=True,
        )

    def _see(self, files):
        """Start another job if files of a new dataset have changed in this one."""
        if self.job.changed.intersection(file.number for file in files):
            self.start_job()

    def _rows(self, number):
        """Return rows of a file as they are now, and their numbers."""
        ids = list(self.files[number % len(self.files)].ids) if self.files else []
        return [{"id": np.int64(i), "x": self.values[i]} for i in ids], ids

    def arrays(self, number):
        rows, ids = self._rows(number)
        if not rows:
            return
        x = np.array(
            [row["x"] for row in rows], row_files.native(np.empty(0, self.dtype)).dtype
        )
        columns = {"id": np.array(ids), "x": x}
        self.push(lambda: Dataset.from_tensor_slices(columns), lambda e: ids)

    def generator(self, number):
        rows, ids = self._rows(number)
        self.push(lambda: Dataset.from_generator(lambda: iter(rows)), lambda e: ids)

    def range(self, count):
        items = [Number(i) for i in range(count)]
        self.push(lambda: Dataset.range(count), lambda e: items, spec="number")

    def interleaved_files(self, cycle, block, threads, *numbers):
        """Read some files at a time."""
        if not self.files:
            return
        files = [self.files[n % len(self.files)] for n in numbers]
        self._see(files)

        def open_file(i):
            return Dataset.from_hdf5(files[int(i)].path, {"id": "id", "x": "x"})

        self.push(
            lambda: Dataset.range(len(files)).interleave(
                open_file, cycle, block, num_parallel_calls=threads
            ),
            lambda e: interleaved([e.job.files[f.number] for f in files], cycle, block),
            files=tuple(file.number for file in files),
            is_late=True,
        )

    # Transformations of the dataset at hand

    def derive(self, make, change, **about):
        """Replace the dataset at hand by one that is made from it alone."""
        parent = self.stack.pop()
        about = {"depth": parent.depth, "spec": parent.spec, **about}
        count = len(self.stack)
        self.push(make, lambda e: change(parent.items(e)), parent, **about)
        if len(self.stack) == count:
            self.stack.append(parent)

    def items(self):
        """Return elements of the dataset at hand, to know what is possible."""
        return self.stack[-1].items(Epoch(self.job))

    def map(self, by, threads):
        self.derive(
            lambda d: d.map(taking(bump, by), num_parallel_calls=threads),
            lambda items: [shifted(item, by) for item in items],
            is_ahead=threads is not None,
        )

    def filter(self, by):
        """Keep some elements, whose order is not known if they are shuffled."""
        parent, number = self.stack[-1], next(self.numbers)
        if parent.depth or whole(self.items()) is None:
            return

        def items(epoch):
            before = parent.items(epoch)
            kept = [item for item in whole(before) if key_of(item) % by]
            if is_known(before):
                return kept
            name = Name(number, (epoch.dataset, before[0].order), epoch.path)
            return self.orders.slots(name, kept, is_random=False)

        self.stack.pop()
        make = taking(lambda e: key_of(e) % by != 0)
        self.push(lambda d: d.filter(make), items, parent, spec=parent.spec)

    def repeat(self, count):
        self._repeat(lambda d: d.repeat(count), count, _MOST * 2)

    def repeat_and_take(self, most):
        self._repeat(lambda d: d.repeat().take(most), most, most)

    def _repeat(self, make, count, most):
        parent, number = self.stack.pop(), next(self.numbers)

        def items(epoch):
            found = []
            for i in range(count):
                again = epoch._replace(path=(*epoch.path, (number, i)))
                found += parent.items(again)
                if len(found) >= most or not found:
                    break
            return found[:most]

        about = {"depth": parent.depth, "spec": parent.spec}
        self.stack.append(parent)
        if len(items(Epoch(self.job, is_plain=True))) <= _MOST:
            self.stack.pop()
            self.push(make, items, parent, **about)

    def cache(self):
        parent = self.stack.pop()
        about = {"depth": parent.depth, "spec": parent.spec, "has_cache": True}

        def items(epoch):
            return parent.items(epoch._replace(path=(0,), is_cached=True))

        self.push(lambda d: d.cache(), items, parent, **about)

    def prefetch(self, count):
        self.derive(lambda d: d.prefetch(count), lambda items: items, is_ahead=True)

    def take(self, count):
        stop = None if count == -1 else count
        self.derive(lambda d: d.take(count), lambda items: items[:stop])

    def skip(self, count):
        self.derive(lambda d: d.skip(count), lambda items: items[count:])

    def shard(self, count, i):
        self.derive(lambda d: d.shard(count, i), lambda items: items[i::count])

    def enumerate(self, start):
        if self.stack[-1].depth:
            return
        self.derive(
            lambda d: d.enumerate(start),
            lambda items: [(Number(start + i), item) for i, item in enumerate(items)],
            spec=("number", self.stack[-1].spec),
        )

    def batch(self, size, drop):
        """Make batches, also of batches that are alike."""
        items = self.items() if self.stack[-1].depth else []
        if any(type(i) is Slot for i in items) or len({*map(shape_of, items)}) > 1:
            return
        self.derive(
            lambda d: d.batch(size, drop_remainder=drop),
            lambda items: batched(items, size, drop),
            depth=self.stack[-1].depth + 1,
        )

    def unbatch(self):
        if not self.stack[-1].depth or any(type(i) is Slot for i in self.items()):
            return
        self.derive(
            lambda d: d.unbatch(),
            lambda items: [item for batch in items for item in batch],
            depth=self.stack[-1].depth - 1,
        )

    def shuffle(self, seed, again, size, window):
        parent, number = self.stack.pop(), next(self.numbers)
        is_random = size >= 60

        def items(epoch):
            before = parent.items(epoch)
            if epoch.is_plain:
                return before
            dataset, path = epoch.dataset, epoch.path
            if not again or epoch.is_cached:
                dataset = epoch.job.fixed.get(number, epoch.job.name)
                path = path if again else ("fixed",)
            if seed is not None:
                dataset = "any"
            return self.orders.slots(Name(number, dataset, path), before, is_random)

        def make(dataset):
            return dataset.shuffle(size, seed, again, window_chunks=window)

        about = {"depth": parent.depth, "spec": parent.spec}
        self.push(make, items, parent, shuffle=number, **about)

    def interleave(self, cycle, block, count, threads):
        """Interleave datasets of some copies of each element."""
        if self.stack[-1].depth:
            return

        def copies(element):
            numbers = Dataset.range(count)
            return numbers.map(lambda i: bump(element, int(i)))

        def change(items):
            sources = [[shifted(item, i) for i in range(count)] for item in items]
            return interleaved(sources, cycle, block)

        self.derive(
            lambda d: d.interleave(
                taking(copies), cycle, block, num_parallel_calls=threads
            ),
            change,
        )

    def fork(self):
        self.stack.append(self.stack[-1])

    def swap(self):
        self.stack[-2:] = self.stack[:-3:-1]

    def zip(self):
        """Put the elements of two datasets side by side."""
        nodes = self.stack[-2:]
        if len(nodes) < 2 or nodes[0].depth or nodes[1].depth:
            return
        del self.stack[-2:]
        self.push(
            lambda *datasets: Dataset.zip(*datasets),
            lambda e: list(zip(*(node.items(e) for node in nodes))),
            *nodes,
            spec=tuple(node.spec for node in nodes),
        )

    def concatenate(self):
        nodes = self.stack[-2:]
        kinds = {(node.depth, node.spec) for node in nodes}
        if len(nodes) < 2 or len(kinds) > 1:
            return
        del self.stack[-2:]
        self.push(
            lambda first, second: first.concatenate(second),
            lambda e: [item for node in nodes for item in node.items(e)],
            *nodes,
            depth=nodes[0].depth,
            spec=nodes[0].spec,
        )

    # Reading

    def attempt(self, ranks, call):
        """Return what a call returns on the first ranks, and its error or None.

        Collective: all of these ranks raise an error of the library, or none.
        """
        value, error, other = None, None, ""
        if self.world.rank < ranks:
            try:
                value = call()
            except mpidist.MpidistError as caught:
                error = f"{type(caught).__name__}: {caught}"
            except Exception:
                other = traceback.format_exc()
        self.world.require(not other, other)
        values, errors = zip(*self.world.comm.allgather((value, error))[:ranks])
        same = len({error is None for error in errors}) == 1
        self.world.require(same, f"some raise: {errors}")
        return values, errors[0]

    def decode(self, element, depth):
        """Return an element of the library as one of the model."""
        if depth:
            return Batch(self.decode(row, depth - 1) for row in rows_of(element))
        if isinstance(element, tuple):
            return tuple(self.decode(part, 0) for part in element)
        if not isinstance(element, dict):
            assert np.asarray(element).dtype == np.int64, element
            return Number(int(element))
        number, x = int(element["id"]), np.asarray(element["x"])
        want = np.asarray(self.values[number % SHIFT])
        assert (x.dtype, x.shape) == (want.dtype, want.shape), (x.dtype, x.shape)
        if x.ndim:  # scalars of NumPy have no members
            enums = [h5py.check_enum_dtype(dtype) for dtype in (x.dtype, want.dtype)]
            assert enums[0] == enums[1], enums
        assert x.tobytes() == want.tobytes(), f"row {number}: {x}, not {want}"
        return number

    def batched(self, size, drop):
        """Return the dataset at hand, in batches; None if there is none."""
        if not self.stack:
            return None
        node = self.stack[-1]
        if node.depth or not size:
            return node
        if (node, size, drop) not in self.finals:
            self.stack.append(node)
            self.batch(size, drop)
            self.finals[node, size, drop] = self.stack.pop()
        return self.finals[node, size, drop]

    def read(self, ranks, size, drop, options, epochs):
        """Read the dataset at hand in some epochs."""
        if node := self.batched(size, drop):
            reader = Reader(self, [node], ranks, *options)
            for _ in range(epochs):
                reader.read_epoch()
        self.conclude()

    def each_its_own(self, ranks, size, drop, options, epochs):
        """Let each rank read a shard of the dataset at hand."""
        ranks = ranks % self.world.size + 1
        if self.stack and not self.stack[-1].depth:
            nodes, whole_node = [], self.stack[-1]
            for i in range(ranks):
                self.shard(ranks, i)
                nodes.append(self.batched(size, drop))
                self.stack[-1] = whole_node
            reader = Reader(self, nodes, ranks, *options, has_own=True)
            for _ in range(epochs):
                reader.read_epoch()
        self.conclude()

    def change_while(self, ranks, size, drop, options, before, most, *change):
        """Write another version of a file in the middle of an epoch."""
        if self.files and (node := self.batched(size, drop)):
            self._see(self.files)
            reader = Reader(self, [node], ranks, *options)
            for _ in range(before):
                reader.read_epoch()
            if reader.start() and reader.read(most):
                self.change(*change)
                reader.read() and reader.read_epoch()
        self.conclude()

    def stop(self, ranks, others, size, drop, options, how, *arguments):
        """Stop in the middle of an epoch, and go on on other ranks."""
        if node := self.batched(size or 1, drop):
            reader = Reader(self, [node], ranks, *options)
            self._stop(reader, node, others, options, how, *arguments)
        self.conclude()

    def _stop(self, reader, node, others, options, how, before, most, is_new, goes_on):
        for _ in range(before):
            reader.read_epoch()
        if not (reader.start() and reader.read(most)):
            return
        state = reader.save(how)
        if goes_on:
            reader.read() and reader.read_epoch()
        if is_new:
            job = self.job
            self.start_job()
            # The order of shuffles without a seed comes with the state
            for shuffle in {part.shuffle for part in node.walk()} - {None}:
                self.job.fixed[shuffle] = job.fixed.get(shuffle, job.name)
        other = Reader(self, [node], others, *options[:2], is_kept=False)
        if other.start() and other.restore(how, state, reader):
            other.read() and other.read_epoch()

    # Writing

    def _storage(self, r):
        """Return arguments of a writer."""
        compression = r.choice([None, "gzip"])
        return {
            "chunk_rows": r.choice([None, 1, 3, 50]),
            "compression": compression,
            "compression_level": compression and r.choice([None, 0, 9]),
            "shuffle": r.random() < 0.5,
        }

    def write(self, ranks, which, seed, most, overwrite, failing):
        """Let ranks write rows, in the order of the ranks."""
        ranks, r = ranks % self.world.size + 1, random.Random(seed)
        path = self.world.folder / f"w{which}.h5"
        file = next((file for file in self.files if file.path == path), None)
        number = len(self.files) if file is None else file.number
        version = 0 if file is None else file.version + 1
        counts = [r.choice([0, r.randrange(most + 1)]) for _ in range(3 * ranks)]
        rows, first = sum(counts), row_files.first_id(number, version)
        ids, x = np.arange(first, first + rows), np.zeros((rows, *self.shape))
        x = row_files.values(self.dtype, x.shape, [seed, number]).copy()
        if self.dtype.kind == "S":
            x[:1] = b"xyz"  # text becomes as wide as in other files
        cuts, storage = np.cumsum([0, *counts]), self._storage(r)
        strategy = self.world.strategy(ranks)

        def write():
            rank = self.world.rank
            with mpidist.Hdf5Writer(
                strategy, path, overwrite=overwrite, **storage
            ) as writer:
                for a, b in itertools.pairwise(cuts[3 * rank : 3 * rank + 4]):
                    writer.append({"id": ids[a:b], "x": narrow(x[a:b])})
                if rank == failing:
                    raise mpidist.DataError("as planned")

        before = self._stored(path)
        _, error = self.attempt(ranks, write)
        may_fail = failing < ranks or (file is not None and not overwrite)
        self.world.require(bool(error) == may_fail, error or "no error")
        after = self._stored(path)
        if error:
            self.world.require(before == after, f"{before} became {after}")
            return
        names = {f"w{which}.h5"} | {
            f"w{which}-{i:05}-of-{ranks:05}.h5"
            for i in range(ranks)
            if sum(counts[3 * i : 3 * i + 3])
        }
        wrong = after != (names, ids.tolist()) and f"{after}, not {names}, {ids}"
        self.world.require(not wrong, wrong)
        if file is None:
            file = row_files.RowFile(path, number, self.dtype, self.shape)
            self.files.append(file)
            self.job.files.append([])
        file.is_written, file.version, file.ids = True, version, ids.tolist()
        self.values |= zip(file.ids, row_files.native(x))
        if version:
            self.job.changed.add(number)
        else:
            self.job.files[number] = file.ids

    def _stored(self, path):
        """Return the names of a writer's files, and the rows that h5py reads."""
        found = None
        if self.world.rank == 0:
            names = {file.name for file in path.parent.glob(f"*{path.stem}*")}
            found = names, row_files.read(path, "id").tolist() if path.exists() else []
        return self.world.comm.bcast(found)

    def predict(self, ranks, size, drop, options, order, seed):
        """Write the rows of the dataset at hand, in the order of the dataset or not."""
        node, r = self.batched(size or 1, drop), random.Random(seed)
        if node is None or node.spec != "row" or node.depth != 1:
            return
        reader = Reader(self, [node], ranks % self.world.size + 1, *options)
        path = self.world.folder / f"p{next(self.numbers)}.h5"
        storage, appended = self._storage(r), []

        def write():
            with mpidist.Hdf5Writer(
                reader.strategy, path, order=order, **storage
            ) as writer:
                for batch in map(on_this_rank, reader.iterator):
                    writer.append(batch)
                    appended.extend(batch["id"].tolist())

        if not reader.start():
            return
        _, error = self.attempt(reader.ranks, write)
        by_rank = self.world.comm.allgather(appended)
        all_rows = [row for rows in by_rank for row in rows]
        stored = self._stored(path)[1]
        plain = reader.epoch._replace(is_plain=True)
        rows = [row for batch in node.items(plain) for row in batch]
        if order == "rank":
            rows = all_rows
        is_cut = sorted(all_rows) != sorted(rows)
        wrong = stored != rows and f"{stored}, not {rows}"
        if error:
            may = [r"no rank appended"] * (not rows)
            may += [r"order='dataset' does not know"] * node.is_shuffled()
            may += [r"was not appended"] * (is_cut or drop or node.is_shuffled())
            may += [r"was appended more than once"] * is_cut
            changed = [r"^DataError"] * bool(reader.touched())
            is_right = any(re.search(text, error) for text in REFUSALS + may + changed)
            wrong = not is_right and error
        elif is_cut:
            wrong = sorted(stored) != sorted(all_rows) and stored
        self.world.require(not wrong, wrong)
        self.conclude()

    def conclude(self):
        """Require that all orders that were read go together."""
        wrong = self.orders.check()
        self.world.require(not wrong, wrong)
        if self.job.changed:
            self.start_job()


# Errors that the manual says
REFUSALS = [
    r"cache\(\) of a generator's dataset cannot be divided",
    r"the generator yields no element",
    r"zip: batch \d+ has",
    # What has no random access does not know that it had batches of batches
    r"needs a dataset of batches",
]


def on_this_rank(element):
    """Return an element of a distributed dataset without its PerReplicas."""
    if isinstance(element, tuple):
        return tuple(map(on_this_rank, element))
    if isinstance(element, dict):
        return {name: on_this_rank(part) for name, part in element.items()}
    return element.values[0] if isinstance(element, mpidist.PerReplica) else element


class Reader:
    """Reads a dataset, divided over some ranks or, with 0, on one of them.

    Args:
      play: the program.
      nodes: of batches, if divided; of each rank, or of all.
      ranks: their number, modulo that of all and one.
      buffer, is_balanced: as in InputOptions.
      is_kept: whether to go on with the dataset that was divided before.
      has_own: whether each rank reads a dataset of its own.
    """

    def __init__(
        self, play, nodes, ranks, buffer, is_balanced, is_kept=True, has_own=False
    ):
        self.play, self.nodes, self.job, self.has_own = play, nodes, play.job, has_own
        ranks = ranks if has_own else ranks % (play.world.size + 1)
        self.divided, self.ranks = ranks > 0, max(ranks, 1)
        self.is_balanced, self.is_ahead, self.step = is_balanced, buffer > 0, 0
        self.options = mpidist.InputOptions(
            experimental_per_replica_buffer_size=buffer, balance_batches=is_balanced
        )
        self.strategy = play.world.strategy(self.ranks)
        key = *nodes, ranks
        if ranks:
            key += buffer, is_balanced, is_kept or next(play.numbers)
        self.key = key
        self.dataset = self.job.names.setdefault(key, f"dataset {next(play.numbers)}")
        self.iterator: Any = None
        self.epoch = Epoch(self.job)

    def _make(self):
        """Return the dataset of the library."""
        job, strategy, nodes = self.job, self.strategy, self.nodes
        if not self.divided:
            return job.dataset(nodes[0])
        if self.has_own:
            return strategy.distribute_datasets_from_function(
                lambda context: job.dataset(nodes[context.input_pipeline_id]),
                self.options,
            )
        whole_dataset = job.dataset(nodes[0])
        made = strategy.experimental_distribute_dataset(whole_dataset, self.options)
        return mpidist.as_arrays(made) if self.is_balanced else made

    def start(self):
        """Start the next epoch; return whether that is possible."""

        def begin():
            if self.key not in self.job.datasets:
                self.job.datasets[self.key] = self._make()
            self.iterator = iter(self.job.datasets[self.key])

        self.opened_after = set(self.job.changed)
        _, error = self.play.attempt(self.ranks, begin)
        if error:
            self._require_refusal(error)
            return False
        number = self.job.epochs.get(self.key, 0)
        self.job.epochs[self.key] = number + 1
        self.epoch, self.step = Epoch(self.job, self.dataset, (number,)), 0
        return True

    def read_epoch(self):
        """Read an epoch, if that is possible."""
        return self.start() and self.read()

    def read(self, most=None):
        """Read some elements; return whether there was no error."""
        read, depth, play = [], self.nodes[0].depth, self.play

        def some():
            read.extend(itertools.islice(self.iterator, most))

        _, error = play.attempt(self.ranks, some)
        if error:
            self._require_refusal(error)
        pieces = [play.decode(on_this_rank(element), depth) for element in read]
        pieces = play.world.comm.allgather(pieces)[: self.ranks]
        is_end = not error and (most is None or len(pieces[0]) < most)
        wrong = self._wrong(pieces, is_end)
        play.world.require(not wrong, f"{wrong} (step {self.step} of {self.epoch[1:]})")
        self.step += len(pieces[0])
        return not error

    def touched(self):
        """Return which files of the dataset have changed."""
        parts = [part for node in self.nodes for part in node.walk()]
        return {n for part in parts for n in part.files} & self.job.changed

    def _require_refusal(self, error):
        """Require that an error has a reason."""
        has_changed = self.touched() and error.startswith("DataError")
        is_right = has_changed or any(re.search(text, error) for text in REFUSALS)
        self.play.world.require(is_right, error)

    def _wrong(self, pieces, is_end):
        """Return what is wrong with elements that were read on each rank."""
        if len({*map(len, pieces)}) > 1:
            return f"ranks have {[*map(len, pieces)]} elements"
        epoch = self.epoch
        if touched := self.touched():
            wrong, epoch = self._contents(pieces, touched)
            if wrong or epoch is None:
                return wrong
        wanted = [node.items(epoch) for node in self.nodes]
        if self.divided and not self.has_own:
            wrong = [self._wrong_division(batch) for batch in zip(*pieces)]
            pieces = [[sum(map(tuple, batch), ()) for batch in zip(*pieces)]]
            pieces = [[*map(Batch, pieces[0])]]
            if any(wrong):
                return next(filter(None, wrong))
        most = max(map(len, wanted))
        for seen, items in zip(pieces, wanted):
            items = items + [Batch()] * (most - len(items))
            end = self.step + len(seen)
            if end > most or (is_end and end < most):
                return f"there are {end} elements, not {most}"
            different = map(compare, seen, items[self.step : end])
            if wrong := next(filter(None, different), None):
                return wrong
        return None

    def _wrong_division(self, batch):
        """Return what is wrong with the numbers of rows that ranks have of a batch."""
        found = [*map(len, batch)]
        rows, ranks = sum(found), self.ranks
        share = -(-rows // ranks)
        wanted = [min(share, max(0, rows - i * share)) for i in range(ranks)]
        if self.is_balanced:
            wanted = [rows // ranks + (i < rows % ranks) for i in range(ranks)]
        return found != wanted and f"ranks have {found} rows, not {wanted}"

    def _contents(self, pieces, touched):
        """Return what is wrong with rows of files that have changed.

        Also the epoch whose rows they have to be; None if that is not known.
        """
        rows = {a % SHIFT for a in atoms(map(tuple, pieces)) if type(a) is int}
        rows = {row for row in rows if row_files.file_of(row) in touched}
        old = rows - {row for file in self.play.files for row in file.ids}
        new = rows - {row for ids in self.job.files for row in ids}
        nodes = [part for node in self.nodes for part in node.walk()]
        if any(part.is_late for part in nodes):
            return None, None
        if old and new:
            return f"rows of before and after a change: {rows}", None
        if new and not touched <= self.opened_after:
            return f"rows of after a change: {new}", None
        if any(part.has_cache for part in nodes):
            return None, None
        if touched <= self.opened_after:
            # Those that were there before and after tell nothing
            now = self.epoch._replace(job=Job(self.job.name, self.play.files))
            return old and f"rows of before a change: {old}", now if new else None
        is_ahead = self.is_ahead or any(part.is_ahead for part in nodes)
        wrong = rows and not is_ahead and f"rows of before a change: {rows}"
        return wrong, self.epoch

    def save(self, how):
        """Return the place of the iterator, the same on all ranks."""

        def state():
            if how == "state":
                return json.loads(json.dumps(self.iterator.get_state()))
            saved = mpidist.Checkpoint(strategy=self.strategy, place=self.iterator)
            return str(saved.write(self.play.world.folder / "place"))

        self.place = self.epoch, self.step
        states, error = self.play.attempt(self.ranks, state)
        wrong = error or any(other != states[0] for other in states)
        self.play.world.require(not wrong, error or states)
        return states[0]

    def restore(self, how, state, saved):
        """Go on where another one was saved; return True."""

        def go_on():
            if how == "state":
                return self.iterator.set_state(state)
            place = self.iterator
            mpidist.Checkpoint(strategy=self.strategy, place=place).restore(state)

        _, error = self.play.attempt(self.ranks, go_on)
        self.play.world.require(not error, error)
        self.dataset = self.job.names[self.key] = saved.dataset
        number = saved.place[0].path[0]
        self.epoch = Epoch(self.job, self.dataset, (number,))
        self.step, self.job.epochs[self.key] = saved.place[1], number + 1
        return True


# Drawing


def some_options(r):
    return [r.choice([0, 1, 1, 3]), r.random() < 0.3, r.random() < 0.5]


def some_file(r):
    layout, seed = r.choice([*row_files.LAYOUTS]), r.randrange(10**6)
    return [layout, r.choice([0, 1, 2, 3, 7, 20, 41, 60]), seed]


def some_change(r):
    kept = r.choice([0, 0, 2, 50])
    how = r.choice([*row_files.PUTS])
    return [r.randrange(4), *some_file(r), how, kept, r.random() < 0.2]


def some_seed(r):
    return r.choice([None, r.getrandbits(40) - 2**39])


def some_batches(r):
    return r.choice([1, 2, 3, 4, 5, 7, 16, 300]), r.random() < 0.25


def some_numbers(r, most=4):
    return [r.randrange(most) for _ in range(r.choice([1, 1, 2, 3]))]


FILES = {
    "file": some_file,
    "change": some_change,
    "write": lambda r: [
        *(r.randrange(4), r.randrange(2), r.randrange(10**6), r.choice([3, 12])),
        *(r.random() < 0.6, r.choice([9, 9, 9, 0, 1])),
    ],
}
SOURCES = {
    "hdf5": some_numbers,
    "arrays": lambda r: [r.randrange(4)],
    "generator": lambda r: [r.randrange(4)],
    "range": lambda r: [r.choice([0, 1, 5, 30])],
    "interleaved_files": lambda r: [
        *(r.randrange(1, 4), r.randrange(1, 4), r.choice([None, 2])),
        *some_numbers(r),
    ],
}
TRANSFORMATIONS = {
    "map": lambda r: [r.randrange(1, 4), r.choice([None, None, 2])],
    "filter": lambda r: [r.randrange(2, 4)],
    "repeat": lambda r: [r.randrange(4)],
    "repeat_and_take": lambda r: [r.randrange(40)],
    "cache": lambda r: [],
    "prefetch": lambda r: [r.choice([0, 1, 2])],
    "take": lambda r: [r.choice([-1, 0, 1, 5, 17, 500])],
    "skip": lambda r: [r.choice([0, 1, 5, 17])],
    "shard": lambda r: [*r.choice([(1, 0), (2, 0), (2, 1), (3, 2)])],
    "enumerate": lambda r: [r.randrange(-2, 3)],
    "batch": lambda r: [r.randrange(1, 6), r.random() < 0.3],
    "unbatch": lambda r: [],
    "shuffle": lambda r: [
        *(some_seed(r), r.random() < 0.5, r.choice([1, 5, 100])),
        r.choice([None, None, 0, 1, 2, 5]),
    ],
    "interleave": lambda r: [
        *(r.randrange(1, 4), r.randrange(1, 3), r.randrange(3), r.choice([None, 2]))
    ],
    "fork": lambda r: [],
    "swap": lambda r: [],
    "zip": lambda r: [],
    "concatenate": lambda r: [],
}
READS = {
    "read": lambda r: [
        *(r.randrange(5), *some_batches(r), some_options(r), r.randrange(1, 3))
    ],
    "each_its_own": lambda r: [
        *(r.randrange(4), *some_batches(r), some_options(r), r.randrange(1, 3))
    ],
    "predict": lambda r: [
        *(r.randrange(4), *some_batches(r), some_options(r)),
        *(r.choice(["dataset", "dataset", "rank"]), r.randrange(10**6)),
    ],
    "change_while": lambda r: [
        *(r.randrange(5), *some_batches(r), some_options(r)),
        *(r.randrange(2), r.randrange(4), *some_change(r)),
    ],
    "stop": lambda r: [
        *(r.randrange(5), r.randrange(5), *some_batches(r), some_options(r)),
        *(r.choice(["state", "state", "checkpoint"]), r.randrange(2), r.randrange(9)),
        *(r.random() < 0.5, r.random() < 0.3),
    ],
}


def some_steps(r, table, weights, count):
    names = r.choices([*table], weights, k=count)
    return [[name, *table[name](r)] for name in names]


def some_transformations(r, most):
    weights = [4 if name in LIKELY else 2 for name in TRANSFORMATIONS]
    return some_steps(r, TRANSFORMATIONS, weights, r.randrange(most))


def some_reads(r):
    return some_steps(r, READS, [3, 1, 1, 1, 2], r.choice([1, 1, 2]))


def some_pipeline(r):
    """Draw a pipeline, which is read here and there."""
    steps = some_steps(r, SOURCES, [5, 1, 1, 1, 1], r.choice([1, 1, 2]))
    for _ in range(r.choice([1, 2, 2])):
        steps += some_transformations(r, 6) + some_reads(r)
    return steps


def some_parts(r):
    """Draw a dataset that is shuffled, and two parts of it."""
    again, window = r.random() < 0.3, r.choice([None, None, 0, 1, 5])
    count = r.choice([1, 5, 17])
    parts = [["take", count], ["skip", count]]
    if r.random() < 0.3:
        parts = [["shard", 2, 0], ["shard", 2, 1]]
    return [
        *some_steps(r, SOURCES, [5, 1, 1, 1, 1], 1),
        *some_transformations(r, 2),
        ["shuffle", some_seed(r), again, 100, window],
        ["cache"] * (r.random() < 0.2) or ["prefetch", 0],
        *(["fork"], parts[0], *some_transformations(r, 3), *some_reads(r)),
        *(["swap"], parts[1], *some_transformations(r, 3), *some_reads(r)),
        *r.choice([[["zip"]], [["concatenate"]], []]),
        *some_reads(r),
    ]


def draw(r):
    """Draw a type of rows, files, and pipelines that are read in some ways."""
    steps = [["type", r.choice([*row_files.TYPES]), r.choice(row_files.SHAPES)]]
    steps += some_steps(r, {"file": some_file}, None, r.randrange(1, 4))
    for _ in range(r.choice([1, 2, 2, 3])):
        steps += r.choice([some_pipeline, some_pipeline, some_parts])(r)
        steps += some_steps(r, FILES, [1, 3, 2], r.choice([0, 1, 2]))
    return steps


LIKELY = {"shuffle", "batch", "unbatch", "fork"}


def play(world, steps):
    """Play a program."""
    kinds = [step[1:] for step in steps if step[0] == "type"]
    made = Play(world, *(kinds[0] if kinds else ("i8", ())))
    for i, (name, *arguments) in enumerate(steps):
        if name == "type" or (name in TRANSFORMATIONS and not made.stack):
            continue
        try:
            getattr(made, name)(*arguments)
        except BaseException:
            print(f"rank {world.rank}: step {i}: {steps[i]}")
            raise
