"""Pipelines of the library, and the same ones in plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import threading
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
    UnknownOrder,
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
      files, versions: numbers of their rows, and of themselves, when the job began.
      fixed: whose order shuffles without a seed have.
      changed: numbers of files that have changed since.
    """

    def __init__(self, name, files):
        self.name = name
        self.files = [list(file.ids) for file in files]
        self.versions = {file.number: file.version for file in files}
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
      is_iterable: whether it may have no random access.
      is_late: whether files are opened when they are read.
      is_ahead: whether elements may be read before they are needed.
      shuffle: the number of the shuffle, if it is one.
      is_divisible: whether each rank may have some of the files.
      drops: whether it leaves out the rows of a short batch.
      is_copy: whether it has rows of a file as they were when it was made.
    """

    make: Callable[..., Any]
    items: Callable[[Epoch], list[Any]]
    parents: tuple[Any, ...] = ()
    depth: int = 0
    spec: Any = "row"
    files: tuple[int, ...] = ()
    has_cache: bool = False
    is_iterable: bool = False
    is_late: bool = False
    is_ahead: bool = False
    is_divisible: bool = False
    drops: bool = False
    is_copy: bool = False
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


def reused(element, kept, place=()):
    """Return an element in memory that is used again for the next one like it."""
    if isinstance(element, tuple):
        return tuple(reused(e, kept, (*place, i)) for i, e in enumerate(element))
    if isinstance(element, dict):
        return {name: reused(e, kept, (*place, name)) for name, e in element.items()}
    array = np.asarray(element)
    memory = kept.setdefault((place, array.shape, array.dtype), np.empty_like(array))
    memory[...] = array
    return memory


def reusing(function):
    """Return a function that returns its results in the same memory, if alike."""
    local = threading.local()
    return lambda *e: reused(function(*e), vars(local))


def taking(function, *arguments):
    """Return a function that gets an element, a tuple as arguments."""
    return lambda *e: function(e[0] if len(e) == 1 else e, *arguments)


def key_of(element):
    """Return a number of an element that maps do not change; also of the model's."""
    if isinstance(element, tuple):
        return key_of(element[0])
    if isinstance(element, Number):
        return element.n % SHIFT
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


class Pipelines:
    """Files, the job that reads them, and a stack of datasets: the last is at hand."""

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
        self.job.versions[number] = 0

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
        file.ids, x, layout = self.world.comm.bcast(found)
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
            is_divisible=not any(file.is_written for file in files),
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
        self.push(
            lambda: Dataset.from_tensor_slices(columns), lambda e: ids, is_copy=True
        )

    def opened(self, chunk_rows, *numbers):
        """Read copies of some files, as they are now, by a function that opens them."""
        copies = [self._rows(number) for number in numbers]
        if not self.files or not any(ids for _, ids in copies):
            return
        dtype = row_files.native(np.empty(0, self.dtype)).dtype
        paths = [self.world.folder / f"o{next(self.numbers)}.h5" for _ in copies]
        for path, (rows, ids) in zip(paths, copies) if self.world.rank == 0 else ():
            x = np.array([row["x"] for row in rows], dtype)
            columns = {"id": np.array(ids, "i8"), "x": x.reshape(len(ids), *self.shape)}
            with h5py.File(path, "w") as file:
                for name, array in columns.items():
                    inner, is_chunked = array.shape[1:], chunk_rows and array.size
                    file.create_dataset(
                        name,
                        data=array,
                        chunks=(chunk_rows, *inner) if is_chunked else None,
                        maxshape=(None, *inner) if is_chunked else None,
                    )
        self.world.comm.Barrier()

        def open_file(path):
            file = h5py.File(path, locking=False)
            return {"id": file["id"], "x": file["x"]}

        def items(epoch):
            first, step = epoch.worker or (0, 1)
            return [i for _, ids in copies[first::step] for i in ids]

        self.push(
            lambda: Dataset.from_files(paths, open_file),
            items,
            files=tuple(range(-len(paths), 0)),  # numbers of no file that changes
            is_divisible=True,
            is_copy=True,
        )

    def generator(self, number, reuses=False):
        rows, ids = self._rows(number)

        def generate():
            kept = {}
            return (reused(row, kept) if reuses else row for row in rows)

        self.push(lambda: Dataset.from_generator(generate), lambda e: ids, is_copy=True)

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

    def map(self, by, threads, reuses=False):
        change = reusing(taking(bump, by)) if reuses else taking(bump, by)
        self.derive(
            lambda d: d.map(change, num_parallel_calls=threads),
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
            if (known := whole(before)) is None:
                raise UnknownOrder
            kept = [item for item in known if key_of(item) % by]
            if is_known(before):
                return kept
            order = next(item.order for item in before if isinstance(item, Slot))
            name = Name(number, (epoch.dataset, order), epoch.path)
            return self.orders.slots(name, kept, is_random=False)

        self.stack.pop()
        make = taking(lambda e: key_of(e) % by != 0)
        about = {"spec": parent.spec, "is_iterable": True}
        self.push(lambda d: d.filter(make), items, parent, **about)

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
            drops=drop,
        )

    def unbatch(self):
        if not self.stack[-1].depth or any(type(i) is Slot for i in self.items()):
            return
        self.derive(
            lambda d: d.unbatch(),
            lambda items: [item for batch in items for item in batch],
            depth=self.stack[-1].depth - 1,
            is_iterable=True,
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
            if window is not None:  # chunks are shuffled, of the files as they were
                read = {n for part in parent.walk() for n in part.files}
                dataset = dataset, *((n, epoch.job.versions.get(n)) for n in read)
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
            is_iterable=True,
            is_ahead=True,
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
