"""Batches on their way to a device: what arrives, whose memory it is, and what is left.

All but a few tests run on a device of threads too; see `thread_streams`.
"""

import collections
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from thread_streams import DeviceArray, ThreadCopyStream

from mpidist.device import binding, streams
from mpidist.device.host_to_device import Uploads, page_locked, take
from mpidist.util.buffers import Buffers

Pair = collections.namedtuple("Pair", "x y")

SPIN = """
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


class Threads:
    """A device of threads."""

    def __init__(self, late, late_here):
        self.stream = ThreadCopyStream(late, late_here)

    def make(self, values):
        """An array on the device, which the current stream has yet to fill."""
        array = np.full_like(values, 1)
        self.stream.here.do(np.copyto, array, values)
        return array.view(DeviceArray)

    def add_one(self, array):
        """`array + 1`, which the current stream has yet to compute."""
        result = np.full_like(array, 1, subok=False)
        self.stream.here.do(np.add, array, 1, result)
        return result.view(DeviceArray)

    def read(self, array):
        assert isinstance(array, DeviceArray)
        self.stream.here.synchronize()
        return array.view(np.ndarray)

    def delay(self):
        """Let the current stream be behind."""

    def end(self):
        self.stream.end()


class Cuda:
    """The first GPU."""

    def __init__(self):
        self._cupy = pytest.importorskip("cupy")
        if not binding.gpu_count():
            pytest.skip("there is no GPU")
        binding.use_gpu(0)
        self.stream = streams.copy_stream("GPU:0")
        self._spin = self._cupy.RawKernel(SPIN, "spin")

    def make(self, values):
        self.delay()
        return self._cupy.asarray(values)

    def add_one(self, array):
        self.delay()
        return array + array.dtype.type(1)

    def read(self, array):
        assert isinstance(array, self._cupy.ndarray)
        return array.get()

    def delay(self):
        self._spin((1,), (1,), (10_000_000,))

    def end(self):
        self._cupy.cuda.Device(0).synchronize()


KINDS = [
    pytest.param(lambda: Threads(False, False), id="prompt"),
    pytest.param(lambda: Threads(True, False), id="late"),
    pytest.param(lambda: Threads(False, True), id="late-here"),
    pytest.param(lambda: Threads(True, True), id="late-both"),
]
CUDA = pytest.param(Cuda, id="cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=[*KINDS, CUDA])
def device(request):
    device = request.param()
    yield device
    device.end()


@pytest.fixture(params=KINDS)
def threads(request):
    threads = request.param()
    yield threads
    threads.end()


@pytest.fixture
def uploads(device):
    uploads = Uploads(device.stream)
    yield uploads
    uploads.close()


def rows(step, n):
    return np.arange(n) + 1000 * step


def go_on(ahead, *, steps, uploads, size=lambda step: 300):
    """Yield step after step what was uploaded, with `ahead` more on their way."""
    under_way = collections.deque()
    for step in range(steps + ahead):
        if step < steps:
            batch = rows(step, size(step))
            under_way.append(uploads.upload(batch))
            batch[:] = -1
        if step >= ahead:
            yield step - ahead, take(under_way.popleft())


TEXT = np.array(["one", "two"])
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
DTYPES += ["c8", "c16", ">f8", ">i2", ">c8"]


SHAPES = [(), (1,), (5, 3), (0, 4), (2, 0, 3), (997,), (60, 50)]
LAYOUTS = [
    *(lambda a: a, lambda a: a[()], lambda a: a.T),
    lambda a: a[::-1] if a.ndim else a,
    lambda a: np.broadcast_to(a, (3, *a.shape)),
]
LARGE = 50_000  # numbers: more than it is worth to pack
PARTS = [
    *(lambda a: a, lambda a: a[:5], lambda a: a[len(a) // 2 :].view("f8")),
    lambda a: a.reshape(10, -1).T,
    lambda a: a.reshape(10, -1)[:, ::2],
    lambda a: a.view(">i8"),
]


def read(buffers, step, n=LARGE):
    """What a reader would have read into memory that is used again."""
    array = buffers.empty((n,), np.dtype(np.int64))
    array[:] = rows(step, n)
    return array


def draw_leaf(device, buffers, draw, step):
    """Return an array that lies somewhere, and its values."""
    where = draw.choice(["host", "host", "page-locked", "device"])
    if where == "device":
        values = rows(step, draw.randrange(400))
        return device.make(values), values
    if where == "page-locked":
        array = read(buffers, step, draw.choice([10, LARGE, 4 * LARGE]))
        array = draw.choice(PARTS)(array)
        return array, np.array(array)
    shape = draw.choice(SHAPES)
    values = rows(step % 9, math.prod(shape)).reshape(shape)
    values = values.astype(draw.choice(DTYPES))
    array = draw.choice(LAYOUTS)(values)
    return array, np.array(array)


def draw_batch(*arguments):
    """Return a nest of arrays, and of their values."""
    leaves = [draw_leaf(*arguments) for _ in range(5)]
    nests = [
        {"b": [b, (c,)], "a": Pair(d, e), "text": TEXT, "z": a}
        for a, b, c, d, e in zip(*leaves)
    ]
    return nests if arguments[2].random() < 0.5 else leaves[0]


def require_equal(device, found, expected):
    """Compare the arrays of a nest, which are contiguous by now."""
    if expected is TEXT:
        assert found is TEXT
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(device.read(found), expected)
        assert found.flags.c_contiguous
    else:
        assert type(found) is type(expected)
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            require_equal(device, found[key], expected[key])


@pytest.mark.parametrize("seed", range(8))
def test_what_is_uploaded_arrives(device, seed):
    """By two iterations, side by side and one after the other, kept or forgotten."""
    draw, buffers = random.Random(seed), Buffers()
    buffers.allocate_by(page_locked(device.stream))
    iterations = [(Uploads(device.stream), collections.deque()) for _ in range(2)]
    kept, results = [], []
    for step in range(80):
        number = draw.randrange(2)
        uploads, under_way = iterations[number]
        if draw.random() < 0.5 or not under_way:
            batch, expected = draw_batch(device, buffers, draw, step)
            under_way.append((uploads.upload(batch), expected))
            del batch  # what it was made of may have its memory
            number = rows(step, 300)
            under_way.append((uploads.upload(number), number.copy()))
            number[:] = -1
        elif draw.random() < 0.1:
            uploads.close()
            taken = [(take(upload), expected) for upload, expected in under_way]
            kept += taken
            iterations[number] = Uploads(device.stream), collections.deque()
        else:
            upload, expected = under_way.popleft()
            found = take(upload)
            if getattr(expected, "dtype", None) == np.int64 and draw.random() < 0.7:
                results.append((device.add_one(found), expected + 1))
            else:
                kept.append((found, expected))
            del upload, found
        for found, expected in draw.sample(kept, min(1, len(kept))):
            require_equal(device, found, expected)
    for found, expected in kept + results:
        require_equal(device, found, expected)
    for uploads, _ in iterations:
        uploads.close()


@pytest.mark.parametrize(
    "values",
    [
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([0], "M8[s]"),
        np.array([0], "m8[s]"),
        np.zeros(2, [("x", "f4")]),
        np.zeros(2, "g"),
    ],
)
def test_what_a_device_cannot_hold_stays_where_it_is(uploads, values):
    batch = {"values": values}
    assert take(uploads.upload(batch)) is batch


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_slots_are_used_again(threads, ahead):
    uploads = Uploads(threads.stream)
    for _ in go_on(ahead, steps=30, uploads=uploads):
        pass
    assert len(threads.stream.host.blocks) == ahead + 1
    assert len(threads.stream.device.blocks) == ahead + 1
    uploads.close()


def test_slots_grow_with_the_batches_and_no_more_memory_is_held(threads):
    uploads, stream = Uploads(threads.stream), threads.stream
    sizes = [1000, 5000, 3000, 5000, 6000, 20000]
    for step, _ in go_on(1, steps=6, uploads=uploads, size=sizes.__getitem__):
        for pool in (stream.host, stream.device):
            held = pool.size - sum(block.size for block in pool.free)
            largest = 8 * max(sizes[: step + 2])
            assert held <= 2 * (largest + largest // 4 + 256)
    uploads.close()


def test_memory_that_a_slot_gives_up_is_not_written_before_it_was_read(threads):
    uploads = Uploads(threads.stream)
    first = take(uploads.upload(rows(0, 100)))
    larger = uploads.upload(rows(1, 5000))
    other = uploads.upload(rows(2, 100))
    other.slot.sent.synchronize()
    np.testing.assert_array_equal(threads.read(first), rows(0, 100))
    np.testing.assert_array_equal(threads.read(take(larger)), rows(1, 5000))
    uploads.close()


def test_a_batch_is_taken_once(uploads):
    upload = uploads.upload(np.arange(3))
    take(upload)
    with pytest.raises(AssertionError, match="taken twice"):
        take(upload)


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_gives_all_memory_back(threads, taken):
    stream, uploads = threads.stream, Uploads(threads.stream)
    under_way = [uploads.upload(rows(step, 50)) for step in range(3)]
    kept = [take(upload) for upload in under_way[:taken]]
    del under_way
    uploads.close()
    uploads.close()
    assert stream.host.is_all_free
    assert stream.device.is_all_free
    # What others do with that memory now changes nothing
    other = Uploads(stream)
    for _ in go_on(2, steps=5, uploads=other, size=lambda step: 60):
        pass
    for block in stream.host.free:
        block[:] = 0xEE
    for step, array in enumerate(kept):
        np.testing.assert_array_equal(threads.read(array), rows(step, 50))
    other.close()


def test_what_is_uploaded_after_closing_is_waited_for_at_once(threads):
    uploads = Uploads(threads.stream)
    uploads.close()
    upload = uploads.upload(rows(1, 50))
    assert threads.stream.copies.is_idle
    np.testing.assert_array_equal(threads.read(take(upload)), rows(1, 50))


@pytest.mark.parametrize("ahead", [1, 4])
def test_several_threads_upload(device, uploads, ahead):
    sizes = [step * 7919 % 3000 for step in range(60)]
    results = []
    with ThreadPoolExecutor(4) as pool:
        under_way = collections.deque()
        for step in range(60 + ahead):
            if step < 60:
                batch = {"x": rows(step, sizes[step]), "step": np.array(step)}
                under_way.append(pool.submit(uploads.upload, batch))
            if step >= ahead:
                batch = take(under_way.popleft().result())
                results.append((device.add_one(batch["x"]), batch["step"]))
    for step, (x, number) in enumerate(results):
        np.testing.assert_array_equal(device.read(x), rows(step, sizes[step]) + 1)
        assert device.read(number) == step


def test_closing_while_other_threads_upload(threads):
    for _ in range(20):
        uploads, start = Uploads(threads.stream), threading.Barrier(3)

        def upload(uploads=uploads, start=start):
            start.wait(600)
            for step in range(5):
                uploads.upload(rows(step, 100))

        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(upload) for _ in range(2)]
            start.wait(600)
            uploads.close()
            for future in both:
                future.result()
        uploads.close()
        del uploads, upload, both, future
    assert threads.stream.host.is_all_free
    assert threads.stream.device.is_all_free


def test_page_locked_memory_is_sent_as_it_lies_and_used_again(threads):
    stream, buffers = threads.stream, Buffers()
    buffers.allocate_by(page_locked(stream))
    uploads = Uploads(stream)
    for step in range(30):
        take(uploads.upload(read(buffers, step)))
    assert stream.sent == [8 * LARGE] * 30
    # One is under way, another is filled meanwhile
    assert len(stream.host.blocks) == 2
    for step in range(3):
        take(uploads.upload((read(buffers, step), np.arange(9), np.arange(3))))
        assert stream.sent[-2:] == [2 * 256, 8 * LARGE]
    uploads.close()
    buffers.clear()
    assert stream.host.is_all_free
    assert stream.device.is_all_free


def test_page_locked_memory_is_not_written_before_it_was_sent(threads):
    stream, buffers = threads.stream, Buffers()
    buffers.allocate_by(page_locked(stream))
    uploads = Uploads(stream)
    under_way = [uploads.upload(read(buffers, step)) for step in range(12)]
    buffers.clear()  # as at the end of an epoch
    uploads.close()
    for _ in range(12):
        block = stream.pin(8 * LARGE)
        block[:] = 0xEE
    for step, upload in enumerate(under_way):
        np.testing.assert_array_equal(threads.read(take(upload)), rows(step, LARGE))


def test_small_memory_is_not_page_locked(threads):
    buffers, uploads = Buffers(), Uploads(threads.stream)
    buffers.allocate_by(page_locked(threads.stream))
    batch = read(buffers, 1, 100)
    assert not threads.stream.host.blocks
    np.testing.assert_array_equal(threads.read(take(uploads.upload(batch))), batch)
    uploads.close()


def test_too_little_memory_is_an_error_and_smaller_batches_go_on(threads):
    uploads = Uploads(threads.stream)
    array = take(uploads.upload(rows(0, 100)))
    for pool in (threads.stream.host, threads.stream.device):
        pool.limit = 10_000
        with pytest.raises(MemoryError):
            uploads.upload(rows(1, 5000))
        pool.limit = float("inf")
    np.testing.assert_array_equal(threads.read(array), rows(0, 100))
    again = take(uploads.upload(rows(2, 100)))
    np.testing.assert_array_equal(threads.read(again), rows(2, 100))
    uploads.close()
    assert threads.stream.host.is_all_free


def test_a_cpu_needs_no_copies():
    assert streams.copy_stream("CPU:0") is None
    values = np.arange(3)
    assert take(values) is values


# On a GPU


@pytest.fixture
def cuda():
    cuda = Cuda()
    yield cuda
    cuda.end()


@pytest.mark.gpu
def test_page_locked_memory_comes_in_few_sizes(cuda):
    """All of what is there is given out: CuPy's pool has powers of two."""
    allocate, sizes = page_locked(cuda.stream), set()
    for size in range(1 << 20, 1 << 21, 100_001):
        memory = allocate(size)
        assert size <= memory.size <= 2 * size
        sizes.add(memory.size)
    assert len(sizes) <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("kwargs", [{}, {"non_blocking": True}, {"ptds": True}])
def test_batches_belong_to_the_stream_that_is_current(cuda, kwargs):
    import cupy

    uploads, results = Uploads(cuda.stream), []
    with cupy.cuda.Stream(**kwargs):
        for _, array in go_on(1, steps=30, uploads=uploads, size=lambda step: 10**5):
            results.append(cuda.add_one(array))
            del array
        for step, result in enumerate(results):
            np.testing.assert_array_equal(cuda.read(result), rows(step, 10**5) + 1)
    uploads.close()


@pytest.mark.gpu
def test_the_current_stream_may_change_from_batch_to_batch(cuda):
    import cupy

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    uploads, results = Uploads(cuda.stream), []
    under_way = uploads.upload(rows(0, 10**5))
    for step in range(30):
        with streams[step % 3]:
            array = take(under_way)
            under_way = uploads.upload(rows(step + 1, 10**5))
            results.append(cuda.add_one(array))
            del array
    uploads.close()
    for stream in streams:
        stream.synchronize()
    for step, result in enumerate(results):
        np.testing.assert_array_equal(cuda.read(result), rows(step, 10**5) + 1)


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_current_stream(cuda):
    import cupy

    uploads = Uploads(cuda.stream)
    take(uploads.upload(rows(0, 10**5)))  # what is made once is made now
    gate, here = threading.Event(), cupy.cuda.get_current_stream()
    here.launch_host_func(lambda _: gate.wait(600), None)
    upload = uploads.upload(rows(1, 10**5))
    upload.slot.sent.synchronize()
    assert not here.done
    gate.set()
    np.testing.assert_array_equal(cuda.read(take(upload)), rows(1, 10**5))
    uploads.close()


@pytest.mark.gpu
def test_too_little_page_locked_memory_is_an_error_that_says_so(cuda):
    import cupy

    uploads = Uploads(cuda.stream)

    def fail(size):
        raise cupy.cuda.runtime.CUDARuntimeError(2)  # cudaErrorMemoryAllocation

    cupy.cuda.set_pinned_memory_allocator(fail)
    try:
        with pytest.raises(MemoryError, match="no 256 bytes of page-locked memory"):
            uploads.upload(np.arange(3))
    finally:
        pool = cupy.get_default_pinned_memory_pool()
        cupy.cuda.set_pinned_memory_allocator(pool.malloc)
    assert cuda.read(take(uploads.upload(np.arange(3)))).tolist() == [0, 1, 2]
    uploads.close()


@pytest.mark.gpu
def test_iterations_leave_no_memory_behind(cuda):
    import cupy

    pool, sizes = cupy.get_default_memory_pool(), []
    for _ in range(20):
        uploads = Uploads(cuda.stream)
        for _, array in go_on(1, steps=4, uploads=uploads, size=lambda step: 10**6):
            device_bytes = array.nbytes
        uploads.close()
        del uploads, array
        sizes.append(pool.total_bytes())
    assert max(sizes) - sizes[0] < device_bytes
