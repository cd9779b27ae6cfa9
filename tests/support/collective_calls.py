"""What tests of collectives share: array layouts, nests, and calls in replicas."""

import collections

import numpy as np

import mpidist


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


LAYOUTS = {
    "C": lambda array: array,
    "F": np.asfortranarray,
    "big-endian": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "strided": lambda array: np.repeat(array, 2, axis=0)[::2],
    "reversed": lambda array: array[::-1].copy()[::-1],
    "rotated": lambda array: np.moveaxis(np.moveaxis(array, 0, -1).copy(), -1, 0),
    "read-only": read_only,
}
Pair = collections.namedtuple("Pair", "left right")
Batch = type("Batch", (dict,), {})


def lay_out(array, number):
    """An equal array in another memory layout, one of LAYOUTS by number."""
    return list(LAYOUTS.values())[number % len(LAYOUTS)](array)


def in_replica(strategy, name, *args):
    """What a collective of the replica context returns on this replica."""
    result = strategy.run(lambda: getattr(mpidist.get_replica_context(), name)(*args))
    return strategy.experimental_local_results(result)[0]


def check_nest(result, expected, check):
    """Require the same structure, and `check` each leaf with the expected one."""
    assert type(result) is type(expected)
    if isinstance(expected, dict):
        assert set(result) == set(expected)
        result, expected = zip(*((result[key], expected[key]) for key in expected))
    if isinstance(expected, list | tuple):
        for one, other in zip(result, expected, strict=True):
            check_nest(one, other, check)
    else:
        check(result, expected)
