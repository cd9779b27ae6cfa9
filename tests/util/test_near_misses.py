"""AttributeErrors of names that users of other libraries type say what is meant."""

import copy
import inspect
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist.util import near_misses

ROWS = mpidist.Dataset.range(4)
CONTEXT = mpidist.get_replica_context()
STRATEGY = mpidist.get_strategy()
DIVIDED = STRATEGY.experimental_distribute_dataset(ROWS.batch(2))
OWNERS = [
    (DIVIDED, near_misses.INSTEAD["distributed"]),
    (STRATEGY, near_misses.INSTEAD["strategy"]),
    (CONTEXT, near_misses.INSTEAD["context"]),
    (ROWS, near_misses.INSTEAD["dataset"]),
    (mpidist.Dataset, near_misses.INSTEAD["dataset"]),
    (mpidist, near_misses.INSTEAD["module"]),
]
CASES = [
    (owner, name)
    for owner, meant in OWNERS
    for name in meant
    if not (name == "jax" and "mpidist.jax" in sys.modules)  # imported by its tests
]


@pytest.mark.parametrize(("owner", "name"), CASES)
def test_a_near_miss_says_what_is_meant(owner, name):
    with pytest.raises(AttributeError, match="; instead: ") as caught:
        getattr(owner, name)
    assert caught.value.name == name
    assert caught.value.obj is owner
    assert not hasattr(owner, name)


@pytest.mark.parametrize(
    ("owner", "name", "meant"),
    [
        (STRATEGY, "all_reduce", r"strategy\.reduce"),
        (STRATEGY, "get_rank", r"strategy\.rank"),
        (STRATEGY, "world_size", r"strategy\.size"),
        (STRATEGY, "bcast", r"strategy\.broadcast"),
        (mpidist, "bcast", r"strategy\.broadcast"),
        (mpidist, "get_rank", r"strategy\.rank"),
        (mpidist.Dataset, "from_dataset", r"mpidist\.torch\.from_dataset"),
        (mpidist.Dataset, "from_hdf", r"Dataset\.from_hdf5"),
        (mpidist.Dataset, "from_h5", r"Dataset\.from_hdf5"),
        (CONTEXT, "rank", "replica_id_in_sync_group"),
        (mpidist, "init", "MirroredStrategy"),
        (mpidist, "DistributedDataParallel", r"mpidist\.torch\.DistributedDataParall"),
        (mpidist, "value_and_grad", r"mpidist\.jax\.value_and_grad"),
        (DIVIDED, "map", r"dataset\.map, before"),
    ],
)
def test_the_name_that_is_meant(owner, name, meant):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; .*{meant}"):
        getattr(owner, name)


EXTRAS = ("torch", "jax")  # may not be installed, so that they cannot be imported


def test_what_is_named_exists():
    owners = {"strategy": STRATEGY, "Dataset": mpidist.Dataset, "mpidist": mpidist}
    for _, meant in OWNERS:
        for text in meant.values():
            for owner, name in re.findall(r"\b(strategy|Dataset|mpidist)\.(\w+)", text):
                assert name in EXTRAS or hasattr(owners[owner], name), text
            for extra, name in re.findall(r"\bmpidist\.(torch|jax)\.(\w+)", text):
                source = Path(mpidist.__file__).parent / extra / "__init__.py"
                assert f'    "{name}",\n' in source.read_text(), text
            for name in re.findall(r"\b(?<!\.)(\w+)\(", text):
                owner = mpidist.Dataset, mpidist, mpidist.DistributedIterator
                is_known = any(hasattr(some, name) for some in owner)
                assert is_known or name in ("iter", "len"), text


@pytest.mark.parametrize(("owner", "meant"), OWNERS)
def test_other_names_get_python_s_message(owner, meant):
    with pytest.raises(AttributeError, match=r"no attribute 'xyz'$"):
        owner.xyz  # noqa: B018
    assert not hasattr(owner, "__array__")
    assert getattr(owner, "xyz", 3) == 3


def test_a_power_of_a_per_replica_value_names_run():
    value = mpidist.PerReplica((np.ones(2),), (0,))
    for use in (lambda: value**2, lambda: value + 1, lambda: value.sum):
        with pytest.raises((ValueError, AttributeError), match=r"strategy\.run\("):
            use()


def test_datasets_and_contexts_are_copied_and_pickled_as_before():
    for rows in (
        copy.copy(ROWS),
        copy.deepcopy(ROWS),
        pickle.loads(pickle.dumps(ROWS)),
    ):
        assert list(rows) == [0, 1, 2, 3]
    assert pickle.loads(pickle.dumps(mpidist.Dataset)) is mpidist.Dataset
    assert copy.copy(CONTEXT).strategy is STRATEGY


def test_an_object_without_its_attributes_does_not_recurse():
    for cls in (mpidist.MirroredStrategy, mpidist.ReplicaContext, mpidist.Dataset):
        bare = object.__new__(cls)
        with pytest.raises(AttributeError, match=r"_extended|_strategy|_pipeline"):
            bare._extended, bare._strategy, bare._pipeline  # noqa: B018


class Odd(mpidist.Dataset):
    @property
    def broken(self):
        return None.missing


def test_errors_in_properties_are_not_hidden():
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'mis"):
        Odd(ROWS.pipeline).broken  # noqa: B018


def test_classes_look_as_before():
    assert inspect.isclass(mpidist.Dataset)
    assert "map" in dir(ROWS)
    assert "from_hdf5" in dir(mpidist.Dataset)
    assert "from_hdf" not in dir(mpidist.Dataset)
