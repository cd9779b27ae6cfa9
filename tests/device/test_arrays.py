"""Arrays of all kinds: recognised without a copy, and given back as what they were."""

import array
import sys
import types

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist.device import arrays, binding

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VALUES = np.arange(6, dtype="f4").reshape(2, 3)


class Exchanged:
    """An array of a library that speaks DLPack, and nothing else."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **kwargs):
        return self.values.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()

    def reshape(self, shape):
        return type(self)(self.values.reshape(shape))


class Converted:
    def __array__(self, dtype=None, copy=None):
        return VALUES


class Described:
    __array_interface__ = VALUES.__array_interface__


def read_only(values):
    values = values.copy()
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    "value",
    [
        VALUES,
        np.asfortranarray(VALUES),
        VALUES[:, ::2],
        VALUES[::-1],
        read_only(VALUES),
        np.zeros((0, 3)),
        np.array(1.5),
    ],
)
def test_arrays_are_taken_as_they_are(value):
    assert arrays.to_array(value) is value


@pytest.mark.parametrize(
    "value",
    [
        Exchanged(VALUES),
        Converted(),
        Described(),
        memoryview(VALUES),
        mpidist.Mirrored((VALUES,)),
        mpidist.PerReplica((VALUES,)),
        mpidist.PerReplica((mpidist.Mirrored((VALUES,)),)),
    ],
)
def test_other_arrays_are_taken_without_a_copy(value):
    result = arrays.to_array(value)
    assert type(result) is np.ndarray
    assert np.shares_memory(result, VALUES)
    assert np.array_equal(result, VALUES)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (array.array("d", [1, 2]), np.array([1.0, 2.0])),
        (bytearray(b"ab"), np.array([97, 98], "u1")),
        (3, np.array(3)),
        (2.5, np.array(2.5)),
        (1 + 2j, np.array(1 + 2j)),
        (True, np.array(True)),
        (np.float16(2), np.array(2, "f2")),
        (np.bool_(False), np.array(False)),
    ],
)
def test_buffers_and_numbers_are_arrays(value, expected):
    result = arrays.to_array(value)
    assert (type(result), result.dtype) == (np.ndarray, expected.dtype)
    assert np.array_equal(result, expected)


@pytest.mark.parametrize("value", [None, "text", b"bytes", [1, 2], {1}, object(), int])
def test_what_is_no_array_is_refused_by_name_and_type(value):
    with pytest.raises(mpidist.ArgumentTypeError) as info:
        arrays.to_array(value, "batch['x']")
    start, kind = f"batch['x'] must be an array or a number, not {value!r}", type(value)
    assert str(info.value) == f"{start} (builtins.{kind.__name__})"


def test_integers_of_more_than_64_bits_are_refused():
    with pytest.raises(mpidist.DTypeError, match=f"loss is {2**70}: more than 64 bits"):
        arrays.to_array(2**70, "loss")


def test_an_array_that_cannot_be_exchanged_says_why():
    value = Exchanged(np.array(["text"]))
    with pytest.raises(mpidist.ArgumentTypeError, match="Exchanged, cannot be taken"):
        arrays.to_array(value)


@pytest.mark.parametrize(
    "original", [VALUES, memoryview(VALUES), Converted(), np.array(1)]
)
def test_arrays_come_back_as_the_result_itself(original):
    result = np.array([1, 2])
    assert arrays.like(result, original) is result


@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_arrays_of_another_library_come_back_as_its_own(monkeypatch, shape):
    library = types.ModuleType("exchange")
    library.from_dlpack = lambda values: Exchanged(np.from_dlpack(values))
    monkeypatch.setitem(sys.modules, "exchange", library)
    monkeypatch.setattr(Exchanged, "__module__", "exchange.arrays")
    result = np.ones(shape)
    back = arrays.like(result, Exchanged(VALUES))
    assert type(back) is Exchanged
    assert np.shares_memory(back.values, result) or result.size == 0
    assert back.values.shape == shape


def test_on_the_cpu_nothing_moves():
    assert arrays.namespace(VALUES) is np
    assert arrays.to_host(VALUES) is VALUES
    assert arrays.to_device(VALUES, "CPU:0") is VALUES
    assert arrays.to_device_like(VALUES, np.ones(1)) is VALUES
    assert not arrays.is_device_array(VALUES)


def test_a_gpu_that_is_not_there_is_an_error_by_name():
    count = binding.gpu_count()
    with pytest.raises(
        mpidist.LaunchError, match=f"GPU:{count} cannot be used: CuPy sees"
    ):
        binding.use_gpu(count)


def layouts(values):
    """The same elements in other memory layouts."""
    return [
        np.asfortranarray(values),
        np.repeat(values, 2, axis=-1)[..., ::2],
        values[::-1].copy()[::-1],
        read_only(values),
    ]


@pytest.mark.parametrize("dtype", ["f8", "i2", "U3", "M8[s]", "f4,i2", "g", BFLOAT16])
def test_a_checksum_covers_every_element_in_any_layout(dtype, monkeypatch):
    monkeypatch.setattr(arrays, "_SUMMED_BYTES", 64)
    values = np.arange(60).reshape(12, 5).astype("i8").astype(dtype)
    expected = arrays.checksum(values)
    assert [arrays.checksum(other) for other in layouts(values)] == [expected] * 4
    sums = {expected}
    for index in np.ndindex(values.shape):
        changed = values.copy()
        changed[index] = values[index[0] - 1, index[1]]
        sums.add(arrays.checksum(changed))
    assert len(sums) == 61
    assert arrays.checksum(values[:0]) == arrays.checksum(values[:, :0])
