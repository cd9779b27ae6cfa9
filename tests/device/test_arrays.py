"""Arrays of all kinds: recognised without a copy, and given back as what they were."""

import array
import sys
import types

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.device import arrays, binding
from mpidist.util import dtypes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
VALUES = np.arange(6, dtype="f4").reshape(2, 3)
PURE = settings(derandomize=True, deadline=None)


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


@pytest.mark.parametrize("dtype", [">f8", ">i2", ">c8", ">U2", [("x", ">i4")]])
def test_big_endian_arrays_become_native(dtype):
    value = np.arange(3).astype(dtype)
    result = arrays.to_array(value)
    assert result.dtype.isnative
    assert result.dtype == value.dtype.newbyteorder("=")
    assert np.array_equal(result, value)


@pytest.mark.parametrize("value", [None, "text", b"bytes", [1, 2], {1}, object(), int])
def test_what_is_no_array_is_refused_by_name_and_type(value):
    with pytest.raises(mpidist.ArgumentTypeError) as info:
        arrays.to_array(value, "batch['x']")
    start, kind = f"batch['x'] must be an array or a number, not {value!r}", type(value)
    assert str(info.value) == f"{start} (builtins.{kind.__name__})"


@pytest.mark.parametrize("value", [np.array([None]), np.array([{}])])
def test_arrays_of_objects_are_refused(value):
    with pytest.raises(mpidist.DTypeError, match="loss has dtype object"):
        arrays.to_array(value, "loss")


def test_integers_of_more_than_64_bits_are_refused():
    with pytest.raises(mpidist.DTypeError, match=f"loss is {2**70}: more than 64 bits"):
        arrays.to_array(2**70, "loss")


def test_an_array_that_cannot_be_exchanged_says_why():
    value = Exchanged(np.array(["text"]))
    with pytest.raises(mpidist.ArgumentTypeError, match="Exchanged, cannot be taken"):
        arrays.to_array(value)


@PURE
@given(
    st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.booleans()
)
def test_python_numbers_come_back_as_they_went_in(number):
    result = arrays.like(arrays.to_array(number), number)
    assert (type(result), result) == (type(number), number)


SCALARS = [np.float16(1), np.float32(1), np.int8(1), np.uint64(1), np.complex64(1)]
SCALARS += [np.bool_(True), np.longdouble(1), BFLOAT16.type(1)]
SCALARS += [np.float64(1), np.complex128(1)]


@pytest.mark.parametrize("scalar", SCALARS)
def test_array_scalars_come_back_as_array_scalars(scalar):
    result = arrays.like(arrays.to_array(scalar), scalar)
    assert (type(result), result) == (type(scalar), scalar)


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


FLOATS = ["f2", BFLOAT16, "f4", "f8", "g", "c8", "c16"]
INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]


@pytest.mark.parametrize("dtype", [np.dtype(x) for x in FLOATS + INTEGERS], ids=str)
def test_dtypes_of_sums_and_means(dtype):
    is_half, is_float = dtype in ("f2", BFLOAT16), dtype.char not in "bhilqBHILQ"
    assert dtypes.is_float16(dtype) is is_half
    assert dtypes.is_floating(dtype) is is_float
    assert dtypes.accumulator_dtype(dtype) == ("f4" if is_half else dtype)
    assert dtypes.mean_dtype(dtype) == (dtype if is_float else "f8")


@pytest.mark.parametrize(
    "dtype", ["?", "U3", "S3", "M8[s]", "m8[s]", "V4", [("x", "f4")]]
)
@pytest.mark.parametrize("fn", [dtypes.accumulator_dtype, dtypes.mean_dtype])
def test_dtypes_that_cannot_be_added_are_refused_by_name(fn, dtype):
    dtype = np.dtype(dtype)
    with pytest.raises(mpidist.DTypeError) as info:
        fn(dtype, "loss")
    assert str(info.value).startswith(f"loss has dtype {dtype}, which cannot be")
    assert not dtypes.is_floating(dtype)


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
