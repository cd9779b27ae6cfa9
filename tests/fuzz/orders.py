"""A model of datasets in which shuffles have an order, but nobody knows which.

Elements are numbers of rows, tuples of elements and batches of them. After a shuffle
they are slots: what is read fills them. One slot holds one element wherever it is read,
the slots of a shuffle hold its elements, each once, and two shuffles differ.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

SHIFT = 10**8  # between the numbers of a row after successive maps
_MANY = 14  # so many elements come in two equal orders in one of 10**11 programs


@dataclasses.dataclass(frozen=True)
class Number:
    """An element that is no row: of `range`, or the place of another one."""

    n: int


class Batch(tuple):
    """Elements that were stacked."""

    __slots__ = ()

    def __repr__(self):
        return f"[{', '.join(map(repr, self))}]"


@dataclasses.dataclass(frozen=True)
class Slot:
    """Element `i` of a shuffle, after maps that have changed the numbers of rows."""

    order: Order
    i: int
    shift: int = 0

    def __repr__(self):
        return f"?{self.i}+{self.shift}"

    def fill(self, seen):
        """Note what was read; return what is wrong."""
        value = shifted(seen, -self.shift)
        before = self.order.filled.setdefault(self.i, value)
        return before != value and f"{value} is where {before} was read before"


def each(item, change):
    """Return an element with its atoms changed: numbers of rows, Numbers and slots."""
    if isinstance(item, tuple):
        return type(item)(each(part, change) for part in item)
    return change(item)


def atoms(items):
    """Return the atoms of some elements."""
    found = []
    for item in items:
        found += atoms(item) if isinstance(item, tuple) else [item]
    return found


def shifted(item, by):
    """Return an element as a map returns it."""
    return each(item, lambda atom: _shifted(atom, by)) if by else item


def _shifted(atom, by):
    if isinstance(atom, Slot):
        return dataclasses.replace(atom, shift=atom.shift + by)
    return atom if isinstance(atom, Number) else atom + by * SHIFT


def is_known(items):
    """Return whether there are no slots."""
    return not any(isinstance(atom, Slot) for atom in atoms(items))


class UnknownOrder(Exception):
    """What a program reads next is not known, after its files have changed."""


def whole(items):
    """Return known elements that some slots hold in any order; None if not known."""
    known, slots = [], collections.defaultdict(set)
    for item in items:
        if isinstance(item, Slot):
            slots[item.order, item.shift].add(item.i)
        elif is_known([item]):
            known.append(item)
        else:
            return None
    if len(known) + sum(map(len, slots.values())) < len(items):
        return None  # some of them are there twice
    for (order, shift), numbers in slots.items():
        content = whole(order.content)
        if content is None or len(numbers) < len(content):
            return None
        known += [shifted(item, shift) for item in content]
    return known


def compare(seen, item):
    """Return what is wrong with an element that was read."""
    if isinstance(item, Slot):
        return item.fill(seen)
    if not isinstance(item, tuple):
        return seen != item and f"{seen}, not {item}"
    if type(seen) is not type(item) or len(seen) != len(item):
        return f"{seen}, not {item}"
    return next(filter(None, map(compare, seen, item)), None)


class Order:
    """The elements of a shuffle.

    Args:
      content: the elements.
      is_random: whether many of them come in an order that no other shuffle has.
    """

    def __init__(self, content, is_random):
        self.content, self.is_random = content, is_random
        self.filled: dict[int, Any] = {}
        # Of slots that were shuffled again: all of these hold all, or some, of those
        self.groups: list[tuple[frozenset[int], collections.Counter]] = []
        self.slots = [Slot(self, i) for i in range(len(content))]

    def sequence(self):
        """Return all elements, if all were read."""
        is_whole = len(self.filled) == len(self.content)
        return tuple(map(self.filled.get, range(len(self.content)))) if is_whole else ()

    def possible(self):
        """Return the atoms that its elements may have."""
        found, slots = collections.Counter(), collections.defaultdict(list)
        for atom in atoms(self.content):
            if isinstance(atom, Slot):
                slots[atom.order, atom.shift].append(atom.i)
            else:
                found[atom] += 1
        for (order, shift), numbers in slots.items():
            # Slots of a dataset beside itself are there more than once
            times = max(collections.Counter(numbers).values())
            for atom, number in order.possible().items():
                found[shifted(atom, shift)] += number * times
        return found

    def check(self):
        """Return what is wrong; tell the shuffles before this one what was read."""
        read, seen = collections.Counter(), set()
        for slots, values in sorted(self.groups, key=lambda group: -len(group[0])):
            filled = {i: self.filled[i] for i in slots & self.filled.keys()}
            inside = collections.Counter(filled.values())
            if values.total() == len(slots) and inside - values:
                return f"{inside - values} are not among {values}"
            if not slots & seen:
                read, seen = read + values, seen | slots
        rest = [value for i, value in self.filled.items() if i not in seen]
        read += collections.Counter(rest)
        self._tell(read)
        if is_known(self.content):
            extra = read - collections.Counter(self.content)
        else:
            extra = collections.Counter(atoms(read.elements())) - self.possible()
        return extra and f"{extra} are there more often than among the elements"

    def _tell(self, read):
        """Tell the one shuffle before this one which of its elements were read."""
        before = atoms(self.content)
        if len({(a.order, a.shift) if isinstance(a, Slot) else a for a in before}) > 1:
            return
        if (
            not before
            or not isinstance(before[0], Slot)
            or len({*before}) < len(before)
        ):
            return
        order, shift = before[0].order, before[0].shift
        if not any(isinstance(item, tuple) for item in order.content):
            values = [shifted(atom, -shift) for atom in atoms(read.elements())]
            slots = frozenset(atom.i for atom in before)
            order.groups.append((slots, collections.Counter(values)))


class Name(NamedTuple):
    """Which order it is that a shuffle has.

    Args:
      shuffle: which one.
      dataset: whose order it is, or which job's.
      path: the epoch, and the repetitions in it: pairs of a `repeat` and a number.
    """

    shuffle: int
    dataset: Any
    path: tuple[Any, ...]

    def is_of_job(self):
        """Return whether the order is that of a job, or else of a dataset."""
        dataset = self.dataset
        while isinstance(dataset, tuple):
            dataset = dataset[0]
        return f"{dataset}".startswith("job")

    def may_not_equal(self, other):
        """Return whether another order has to be another one."""
        # What a job keeps is the first epoch of the dataset that used it first
        is_kept = [name.is_of_job() for name in (self, other)]
        if self.shuffle == other.shuffle and len({*is_kept}) == 2:
            return self.path != other.path
        # How the repetitions of an epoch are counted is not known
        repeats = [[pair[0] for pair in name.path[1:]] for name in (self, other)]
        return self.shuffle != other.shuffle or repeats[0] == repeats[1]


class Orders:
    """All shuffles of a program, by names."""

    def __init__(self):
        self._orders: dict[tuple[Name, Any], Order] = {}

    def slots(self, name, content, is_random=True):
        """Return the slots of the shuffle of a name."""
        key = name, tuple(content)
        if key not in self._orders:
            self._orders[key] = Order(content, is_random)
        return self._orders[key].slots

    def check(self):
        """Return what is wrong with all that was read so far."""
        for order in self._orders.values():
            order.groups.clear()
        # Later shuffles first, which tell those before them
        for (name, _), order in reversed(self._orders.items()):
            if wrong := order.check():
                return f"{name}: {wrong}"
        return self._alike()

    def _alike(self):
        """Return which shuffles have not shuffled, or alike."""
        before = collections.defaultdict(list)
        for (name, content), order in self._orders.items():
            sequence = order.sequence() if order.is_random else ()
            if len({*content}) < _MANY or not sequence:
                continue
            if sequence == content:
                return f"{name} has not shuffled {content}"
            for other in before[content, sequence]:
                if name.may_not_equal(other):
                    return f"{name} and {other} have one order: {sequence}"
            before[content, sequence].append(name)
        return None
