"""Random pipelines of random HDF5 files, against a model of tf.data.

Pipelines are read by one process and divided over ranks, stopped and gone on with on
other ranks, while files change. What a shuffle's order is the model does not know, but
all that is read has to agree on it: see `orders`.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import traceback
from typing import Any

import h5py
import numpy as np
import row_files
from orders import SHIFT, Batch, Number, UnknownOrder, atoms, compare
from pipelines import Epoch, Job, Pipelines, rows_of

import mpidist


def narrow(x):
    """Return text in the least width."""
    return (
        np.array(x.tolist()).astype("S").reshape(x.shape)
        if x.dtype.kind == "S" and x.size
        else x
    )


class Play(Pipelines):
    """A program in the middle: what was read so far."""

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
        if nodes := self._shards(ranks, size, drop):
            reader = Reader(self, nodes, ranks, *options, has_own=True)
            for _ in range(epochs):
                reader.read_epoch()
        self.conclude()

    def _shards(self, count, size, drop):
        """Return the shards of the dataset at hand, in batches; none if it has some."""
        if not self.stack or self.stack[-1].depth:
            return []
        nodes, whole_node = [], self.stack[-1]
        for i in range(count):
            self.shard(count, i)
            nodes.append(self.batched(size, drop))
            self.stack[-1] = whole_node
        return nodes

    def by_policy(self, policy, ranks, size, drop, options, epochs):
        """Let each rank read whole files, or everything."""
        ranks = ranks % self.world.size + 1
        parts = [*self.stack[-1].walk()] if self.stack else []
        sources = [part for part in parts if not part.parents]
        is_possible = len(sources) == 1 and not any(part.depth for part in parts)
        if policy == "FILE" and is_possible:
            is_possible = sources[0].is_divisible and len(sources[0].files) >= ranks
        if is_possible:
            node = self.batched(size, drop)
            share = self.batched(-(-size // ranks), drop)
            nodes, policy = [share] * ranks, mpidist.AutoShardPolicy[policy]
            reader = Reader(self, nodes, ranks, *options, True, (policy, node))
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
            self._stop(reader, others, options, how, *arguments)
        self.conclude()

    def stop_own(self, ranks, others, size, drop, options, how, *arguments):
        """Stop where each rank reads a shard, and go on on the same ranks."""
        ranks = ranks % self.world.size + 1
        if nodes := self._shards(ranks, size or 1, drop):
            reader = Reader(self, nodes, ranks, *options, has_own=True)
            self._stop(reader, ranks, options, how, *arguments)
        self.conclude()

    def _stop(
        self,
        reader,
        others,
        options,
        how,
        before,
        most,
        is_new,
        goes_on,
        is_same=False,
    ):
        for _ in range(before):
            reader.read_epoch()
        if not (reader.start() and reader.read(most)):
            return
        state = reader.save(how)
        if goes_on:
            reader.read() and reader.read_epoch()
        if is_same and not reader.touched():  # back, with an iterator in use
            reader.restore(how, state, reader)
            reader.read() and reader.read_epoch()
            return
        nodes, has_own = reader.nodes, reader.has_own
        if is_new:
            job = self.job
            self.start_job()
            # The order of shuffles without a seed comes with the state
            parts = [part for node in nodes for part in node.walk()]
            for shuffle in {part.shuffle for part in parts} - {None}:
                self.job.fixed[shuffle] = job.fixed.get(shuffle, job.name)
        other = Reader(self, nodes, others, *options[:2], False, has_own)
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
            self.job.files[number], self.job.versions[number] = file.ids, 0

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
            is_part = is_cut or node.is_shuffled()
            is_part |= any(part.drops for part in node.walk())
            may += [r"was not appended"] * is_part
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
    # Text of a single row is as wide as it is long: no fixed size
    r"cache\(\) of a distributed dataset needs rows of one .* are \|S\d+ \(\), but",
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
      policy: how the library divides a dataset of another batch size, and that.
    """

    def __init__(
        self,
        play,
        nodes,
        ranks,
        buffer,
        is_balanced,
        is_kept=True,
        has_own=False,
        policy=(None, None),
    ):
        self.policy, self.whole = policy
        self.play, self.nodes, self.job, self.has_own = play, nodes, play.job, has_own
        ranks = ranks if has_own else ranks % (play.world.size + 1)
        self.divided, self.ranks = ranks > 0, max(ranks, 1)
        self.is_balanced, self.is_ahead, self.step = is_balanced, buffer > 0, 0
        self.options = mpidist.InputOptions(
            experimental_per_replica_buffer_size=buffer, balance_batches=is_balanced
        )
        self.strategy = play.world.strategy(self.ranks)
        key = *nodes, ranks, self.policy
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
        if self.policy is not None:
            options = mpidist.Options(self.policy)
            dataset = job.dataset(self.whole).with_options(options)
            return strategy.experimental_distribute_dataset(dataset, self.options)
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
        workers = [None] * len(self.nodes)
        if self.policy is mpidist.AutoShardPolicy.FILE:
            workers = [(i, self.ranks) for i in range(self.ranks)]
        epochs = [epoch._replace(worker=worker) for worker in workers]
        wanted = [node.items(e) for node, e in zip(self.nodes, epochs)]
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
        if any(part.is_late or part.is_copy for part in nodes):
            return None, None
        if old and new:
            return f"rows of before and after a change: {rows}", None
        is_after = touched <= self.opened_after
        # Without random access, files are opened when they are read
        if (
            not is_after
            and not old
            and (not self.divided or any(part.is_iterable for part in nodes))
        ):
            return None, None
        if new and not is_after:
            return f"rows of after a change: {new}", None
        if any(part.has_cache for part in nodes):
            return None, None
        if is_after:
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
        """Go on where another one was saved; return whether its files are as then."""

        def go_on():
            if how == "state":
                return self.iterator.set_state(state)
            place = self.iterator
            mpidist.Checkpoint(strategy=self.strategy, place=place).restore(state)

        _, error = self.play.attempt(self.ranks, go_on)
        if error and saved.touched() and "the state is of another dataset" in error:
            return False
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
    "opened": lambda r: [r.choice([0, 1, 3, 50]), *some_numbers(r)],
    "generator": lambda r: [r.randrange(4), r.random() < 0.5],
    "range": lambda r: [r.choice([0, 1, 5, 30])],
    "interleaved_files": lambda r: [
        *(r.randrange(1, 4), r.randrange(1, 4), r.choice([None, 2])),
        *(r.randrange(4) for _ in range(r.choice([1, 3, 4]))),
    ],
}
TRANSFORMATIONS = {
    "map": lambda r: [
        *(r.randrange(1, 4), r.choice([None, None, 2]), r.random() < 0.5)
    ],
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
    "by_policy": lambda r: [
        *(r.choice(["OFF", "FILE"]), r.randrange(4), *some_batches(r)),
        *(some_options(r), r.randrange(1, 3)),
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
        *(r.random() < 0.5, r.random() < 0.3, r.random() < 0.3),
    ],
}
READS["stop_own"] = READS["stop"]


def some_steps(r, table, weights, count):
    names = r.choices([*table], weights, k=count)
    return [[name, *table[name](r)] for name in names]


def some_transformations(r, most):
    weights = [4 if name in LIKELY else 2 for name in TRANSFORMATIONS]
    return some_steps(r, TRANSFORMATIONS, weights, r.randrange(most))


def some_reads(r):
    return some_steps(r, READS, [6, 2, 1, 2, 2, 4, 1], r.choice([1, 1, 2]))


def some_pipeline(r):
    """Draw a pipeline, which is read here and there."""
    steps = some_steps(r, SOURCES, [5, 1, 2, 1, 1, 1], r.choice([1, 1, 2]))
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
        *some_steps(r, SOURCES, [5, 1, 2, 1, 1, 1], 1),
        *some_transformations(r, 2),
        ["shuffle", some_seed(r), again, 100, window],
        ["cache"] * (r.random() < 0.2) or ["prefetch", 0],
        *(["fork"], parts[0], *some_transformations(r, 3), *some_reads(r)),
        *(["swap"], parts[1], *some_transformations(r, 3), *some_reads(r)),
        *r.choice([[["zip"]], [["concatenate"]], []]),
        *some_reads(r),
    ]


def some_pairs(r):
    """Draw a dataset beside itself, in other orders or in the same."""
    shuffle = ["shuffle", None, r.random() < 0.5, 100, r.choice([None, 0, 5])]
    orders = r.choice([[shuffle, ["fork"]], [["fork"], shuffle, ["swap"], shuffle]])
    return [
        *(*some_steps(r, SOURCES, [5, 1, 2, 1, 1, 1], 1), *orders),
        *(["swap"], *some_transformations(r, 2), ["zip"]),
        *(*some_transformations(r, 3), *some_reads(r)),
    ]


def draw(r):
    """Draw a type of rows, files, and pipelines that are read in some ways."""
    steps = [["type", r.choice([*row_files.TYPES]), r.choice(row_files.SHAPES)]]
    steps += some_steps(r, {"file": some_file}, None, r.randrange(1, 4))
    for _ in range(r.choice([1, 2, 2, 3])):
        pipelines = [*[some_pipeline] * 4, some_parts, some_parts, some_pairs]
        steps += r.choice(pipelines)(r)
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
        except UnknownOrder:
            made.conclude()
        except BaseException:
            print(f"rank {world.rank}: step {i}: {steps[i]}")
            raise
