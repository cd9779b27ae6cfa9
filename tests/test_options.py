"""Enumerations and option objects: names, defaults, and what they refuse."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist import (
    CommunicationImplementation,
    CommunicationOptions,
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    VariableAggregation,
)

PURE = settings(derandomize=True, deadline=None)


@PURE
@given(st.sampled_from(ReduceOp), st.lists(st.booleans(), min_size=7, max_size=7))
def test_a_reduce_op_is_named_in_any_case(op, upper):
    name = "".join(c.upper() if up else c.lower() for c, up in zip(op.value, upper))
    assert ReduceOp.parse(name) is op
    assert ReduceOp.parse(op) is op


@PURE
@given(st.text().filter(lambda text: text.upper() not in ReduceOp.__members__))
def test_other_names_of_reduce_ops_are_refused(name):
    with pytest.raises(mpidist.ArgumentError) as info:
        ReduceOp.parse(name)
    known = "SUM, MEAN, MIN, MAX, PRODUCT"
    assert str(info.value) == f"reduce_op must be one of {known}, not {name!r}"


@pytest.mark.parametrize("op", [None, 0, b"SUM", ["SUM"], VariableAggregation.SUM])
def test_a_reduce_op_of_another_type_is_a_type_error(op):
    with pytest.raises(mpidist.ArgumentTypeError) as info:
        ReduceOp.parse(op)
    assert isinstance(info.value, TypeError)
    assert f"not {op!r} ({type(op).__name__})" in str(info.value)


@pytest.mark.parametrize("name", ["SUM", "MEAN"])
def test_the_reduce_op_of_an_aggregation(name):
    op = ReduceOp.from_variable_aggregation(VariableAggregation[name])
    assert op is ReduceOp[name]


def test_the_defaults_are_tensorflows():
    assert dataclasses.asdict(CommunicationOptions()) == {
        "bytes_per_pack": 0,
        "timeout_seconds": None,
        "implementation": CommunicationImplementation.AUTO,
        # TensorFlow has not these
        "reproducible": False,
        "compression": None,
    }
    assert dataclasses.asdict(InputOptions()) == {
        "experimental_fetch_to_device": True,
        "experimental_replication_mode": InputReplicationMode.PER_WORKER,
        "experimental_place_dataset_on_device": False,
        "experimental_per_replica_buffer_size": 1,
        "balance_batches": False,  # TensorFlow has it not
    }


@pytest.mark.parametrize(
    "options", [CommunicationOptions(), InputOptions(), RunOptions()]
)
def test_options_are_frozen_values(options):
    for field in dataclasses.fields(options):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, field.name, 1)
    assert options == type(options)()
    assert hash(options) == hash(type(options)())


@pytest.mark.parametrize("implementation", list(CommunicationImplementation))
def test_an_implementation_is_named_in_any_case(implementation):
    for name in (implementation, implementation.name, implementation.name.lower()):
        options = CommunicationOptions(implementation=name)
        assert options.implementation is implementation


@pytest.mark.parametrize("implementation", ["SMOKE", "", "SIGNALS", None, 1])
def test_an_unknown_implementation_is_refused(implementation):
    match = f"must be one of AUTO, MPI.*, not {implementation!r}$"
    with pytest.raises(mpidist.ArgumentError, match=match):
        CommunicationOptions(implementation=implementation)


@pytest.mark.parametrize("size", [-1, -(10**9)])
def test_negative_packs_are_refused(size):
    with pytest.raises(mpidist.ArgumentError, match=f"bytes_per_pack .* not {size}"):
        CommunicationOptions(bytes_per_pack=size)


def test_input_options_that_cannot_be_are_refused():
    with pytest.raises(mpidist.ArgumentError, match="must be >= 0, not -1"):
        InputOptions(experimental_per_replica_buffer_size=-1)
    with pytest.raises(mpidist.ArgumentError, match="place_dataset_on_device=True"):
        InputOptions(experimental_place_dataset_on_device=True)
    off = InputOptions(experimental_per_replica_buffer_size=0)
    assert off.experimental_per_replica_buffer_size == 0
