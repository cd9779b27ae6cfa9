"""`torch.distributed` over MPI: NumPy and one process of PyTorch are the oracles."""

import copy
import datetime
import gc
import inspect
import threading
import traceback

import pytest

import mpidist

torch = pytest.importorskip("torch")
dist = torch.distributed
pytestmark = [
    pytest.mark.comm,
    # Names that older versions have
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning"),
]


@pytest.fixture(scope="module")
def world():
    import mpidist.torch  # noqa: F401  # makes the backend known

    if dist.is_initialized():  # by the tests of another file
        dist.destroy_process_group()
    dist.init_process_group("mpidist")
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def rank(world):
    return dist.get_rank()


@pytest.fixture
def ranks(world):
    return dist.get_world_size()


def numbers(rank, size, dtype=torch.float32):
    """Small whole numbers, so that sums are exact in each dtype."""
    return ((torch.arange(size) * (rank + 3)) % 5 + rank + 1).to(dtype)


def views(rank):
    """Tensors of 12 elements that are not contiguous, or have lazy bits."""
    flat = numbers(rank, 24, torch.complex64) * (1 + 2j)
    yield flat[::2]
    yield flat.real[:12]
    yield flat[:12].conj().imag
    yield flat[:12].reshape(3, 4).t()
    yield torch.zeros(1, 12).expand(1, 12) + rank


def test_tensors_of_any_layout_are_written_in_place(rank, ranks):
    for index in range(5):
        mine = list(views(rank))[index]
        before = mine._version
        expected = sum(list(views(r))[index] for r in range(ranks))
        dist.all_reduce(mine)
        torch.testing.assert_close(mine, expected)
        assert mine._version == before  # as if written by C++: no graph notices
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar == sum(range(ranks))


def test_outputs_whose_elements_share_memory_are_an_error(rank, ranks):
    """An expanded gradient, and windows; as inputs they may be sent."""
    weights = torch.zeros(4, requires_grad=True)
    (gradient,) = torch.autograd.grad((weights + 1).sum(), weights)
    windows = torch.zeros(3).as_strided((2, 2), (1, 1))
    places = [torch.zeros(2, 2) for _ in range(ranks)]
    calls = [
        lambda t: dist.all_reduce(t),
        lambda t: dist.broadcast(t, 0),
        lambda t: dist.reduce(t, 0),
        lambda t: dist.all_gather([t] * ranks, places[0]),
        lambda t: dist.reduce_scatter(t, places),
        lambda t: dist.all_to_all([t] * ranks, places),
        lambda t: dist.scatter(t, places if rank == 0 else None),
    ]
    for shared in (gradient.view(2, 2), windows, torch.zeros(2, 1).expand(2, 2)):
        for call in calls:
            with pytest.raises(mpidist.UnsupportedError, match="contiguous"):
                call(shared if rank == ranks - 1 else places[0])
        dist.all_gather(places, shared)
        assert all(torch.equal(place, shared) for place in places)


def test_messages_from_any_rank_and_of_other_lengths(rank, ranks):
    if rank == 0:
        others = [torch.empty(2) for _ in range(1, ranks)]
        senders = [dist.recv(tensor) for tensor in others]
        assert sorted(senders) == list(range(1, ranks))
        assert all(t[0] == sender for t, sender in zip(others, senders))
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    if ranks > 1 and rank < 2:
        if rank == 0:
            dist.send(torch.ones(2), 1)
            dist.send(torch.ones(9), 1)
            return
        for text in (r"sent 8 bytes .* has 12", "has sent 36 bytes"):
            with pytest.raises(mpidist.MismatchError, match=text):
                dist.recv(torch.empty(3), 0)


def test_tensors_are_gathered_and_scattered_together(rank, ranks):
    mine = [numbers(rank, 3), numbers(rank, 4)]
    wholes = [torch.empty(3 * ranks), torch.empty(4 * ranks)]
    sums = [torch.empty(3), torch.empty(4)]
    with dist._coalescing_manager():
        for whole, part in zip(wholes, mine):
            dist.all_gather_into_tensor(whole, part)
    with dist._coalescing_manager(async_ops=True) as work:
        for part, whole in zip(sums, wholes):
            dist.reduce_scatter_tensor(part, whole)
    work.wait()
    for part, total in zip(mine, sums):
        assert torch.equal(total, ranks * part)


def test_nothing_and_one_number_are_moved(rank, ranks):
    for shape, value in (((), rank), ((0,), 0), ((0, 3), 0)):
        mine = torch.full(shape, float(value))
        places = [torch.empty(shape) for _ in range(ranks)]
        dist.all_gather(places, mine)
        assert [p.sum() for p in places] == [r * mine.numel() for r in range(ranks)]
        dist.gather(mine, places if rank == 0 else None)
        dist.scatter(mine, places if rank == 0 else None)
        assert mine.sum() == value
        dist.broadcast(mine, 0)
        assert mine.sum() == 0
        dist.reduce(mine, 0)
        dist.all_to_all([torch.empty(shape) for _ in range(ranks)], [mine] * ranks)
        dist.all_to_all_single(torch.empty(0, 3), torch.empty(0, 3))


def test_a_matrix_of_ranks_has_groups_of_rows_and_columns(rank, ranks):
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (1, ranks), mesh_dim_names=("row", "column")
    )
    for name, members in (("row", [rank]), ("column", range(ranks))):
        mine = torch.tensor([rank])
        dist.all_reduce(mine, group=mesh.get_group(name))
        assert mine == sum(members)
    with pytest.raises(RuntimeError, match=r"split|device"):  # PyTorch's rule for CPUs
        dist.split_group(split_ranks=[[r] for r in range(ranks)])


def test_another_thread_may_call(rank, ranks):
    mine = torch.ones(1)
    for _ in range(3):
        thread = threading.Thread(target=dist.all_reduce, args=[mine])
        thread.start()
        thread.join()
        dist.all_reduce(mine)
    assert mine == ranks**6


def test_a_message_that_does_not_come_is_an_error_at_the_timeout(rank, ranks, comm):
    if ranks == 1:
        return
    with pytest.raises(mpidist.DeadlineError, match=r"recv has not ended in 0\.2 s"):
        dist.irecv(torch.empty(3), (rank + 1) % ranks, tag=5).wait(
            datetime.timedelta(seconds=0.2)
        )
    comm.Barrier()
    dist.send(torch.ones(3), (rank - 1) % ranks, tag=5)  # no later call is to get it
    dist.barrier()


def calls_that_differ(rank):
    """One call on rank 0, another one on the others; and what the error says."""
    first = rank == 0
    yield lambda: dist.all_reduce(torch.ones(3 if first else 4)), "float32 \\(3,\\)"
    yield lambda: dist.all_reduce(torch.ones(3 if first else 400_000)), "."
    yield (
        lambda: dist.all_reduce(
            torch.ones(3).to(torch.int32 if first else torch.int64)
        ),
        "int32",
    )
    yield (
        lambda: dist.all_reduce(
            torch.ones(3), dist.ReduceOp.SUM if first else dist.ReduceOp.MAX
        ),
        "MAX",
    )
    yield lambda: dist.broadcast(torch.ones(3), 0 if first else 1), "root is 0"
    yield (
        lambda: dist.barrier() if first else dist.broadcast(torch.ones(3), 0),
        "barrier.*broadcast|broadcast.*barrier",
    )
    sparse = torch.ones(3).to_sparse()
    yield lambda: dist.all_reduce(sparse if first else torch.ones(3)), "sparse"


def test_an_error_in_the_thread_names_the_lines_that_called(rank, ranks):
    if ranks == 1:
        return
    lines = {}
    if rank == 0:
        lines[rank] = inspect.currentframe().f_lineno + 1
        work = dist.all_reduce(torch.ones(3), async_op=True)
    else:
        lines[rank] = inspect.currentframe().f_lineno + 1
        work = dist.broadcast(torch.ones(3), 0, async_op=True)
    with pytest.raises(mpidist.DivergenceError) as raised:
        work.wait()
    assert f"{__file__}:{lines[rank]} on rank" in str(raised.value)
    assert "threading" not in str(raised.value)
    trace = traceback.extract_tb(raised.value.__traceback__)
    assert (__file__, lines[rank]) in [
        (frame.filename, frame.lineno) for frame in trace
    ]


@pytest.mark.parametrize("case", range(7))
@pytest.mark.parametrize("is_async", [False, True])
def test_calls_that_differ_are_an_error_on_all_ranks(rank, ranks, case, is_async):
    if ranks == 1:
        return
    call, message = list(calls_that_differ(rank))[case]
    if is_async:
        kwargs = {"async_op": True}
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "broadcast", "barrier"):
                plain = getattr(dist, name)
                patch.setattr(dist, name, lambda *a, f=plain: f(*a, **kwargs))
            work = call()
        with pytest.raises(mpidist.MpidistError, match=message):
            work.wait()
        with pytest.raises(RuntimeError, match=message):
            work.get_future().wait()
        assert work.is_completed()
    else:
        with pytest.raises(mpidist.MpidistError, match=message):
            call()
    again = torch.ones(2)
    dist.all_reduce(again)
    assert again[0] == ranks


def test_a_missing_rank_is_named_at_the_timeout(rank, ranks, comm):
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.5))
    if ranks > 1 and rank == 0:
        with pytest.raises(mpidist.DeadlineError, match=r"rank.? 1.* did not arrive"):
            dist.all_reduce(torch.ones(1), group=group)
    comm.Barrier()
    dist.destroy_process_group(group)


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(300, 200), torch.nn.Tanh(), torch.nn.Linear(200, 3)
    ).double()


def batch(rows):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 300, generator=generator).double()


def test_an_error_of_one_rank_in_a_hook_reaches_all(rank, ranks):
    model = torch.nn.parallel.DistributedDataParallel(net())
    with pytest.raises(RuntimeError, match=r"sparse"):
        model.register_comm_hook(None, _sparse_on_rank_0)
        model(batch(2)).sum().backward()
    dist.barrier()


def _sparse_on_rank_0(state, bucket):
    tensor = bucket.buffer()
    if dist.get_rank() == 0:
        tensor = tensor.to_sparse()
    return (
        dist.all_reduce(tensor, async_op=True).get_future().then(lambda f: f.value()[0])
    )


@pytest.mark.parametrize("how", ["work", "future", "then", "all", "another group"])
def test_a_callback_may_wait_for_a_later_operation(world, rank, ranks, how):
    """Which its own thread runs then; behind what the callback has issued itself."""
    group = dist.new_group()
    first, last = torch.full((100_000,), rank + 1.0), torch.full((100_000,), 2.0)

    def wait(future):
        dist.all_reduce(future.value()[0], async_op=True).get_future().wait()
        if how == "work":
            later.wait()
        elif how == "all":
            torch.futures.wait_all([later_future])
        elif how == "then":
            later_future.then(lambda f: f.value()).wait()
        else:
            later_future.wait()
        return future.value()[0] + last

    other = group if how == "another group" else None
    with world.operations._executor._turn:  # so that none has ended before the last
        done = dist.all_reduce(first, async_op=True).get_future().then(wait)
        later = dist.all_reduce(last, async_op=True, group=other)
        later_future = later.get_future()
    total = float(ranks * sum(range(1, ranks + 1)) + 2 * ranks)
    assert done.wait().unique().tolist() == [total]
    dist.destroy_process_group(group)


@pytest.mark.parametrize("from_any", [False, True])
@pytest.mark.parametrize("nbytes", [24, 240_000])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64, torch.float32),
        (torch.int32, torch.float32),
        (torch.uint8, torch.bool),
        (torch.bfloat16, torch.float16),
    ],
    ids=str,
)
def test_a_message_of_another_dtype_is_an_error(rank, ranks, dtypes, nbytes, from_any):
    size = [nbytes // dtype.itemsize for dtype in dtypes]
    source = None if from_any else 0
    if ranks > 1 and rank == 0:
        sent = [torch.ones(n, dtype=dtype) for n, dtype in zip(size, dtypes)]
        works = [
            dist.isend(sent[k], 1, tag=3 * tag) for k, tag in ((0, 0), (1, 1), (1, 0))
        ]
        for work in works:
            work.wait()
    elif rank == 1:
        got, other = (torch.zeros(size[1], dtype=dtypes[1]) for _ in range(2))
        with pytest.raises(mpidist.MismatchError, match=f"{dtypes[0]} .* {dtypes[1]}"):
            dist.recv(got, source)
        dist.recv(other, 0, tag=3)
        dist.recv(got, source)  # the next one is received by nothing else
        assert (got == 1).all()
        assert (other == 1).all()


@pytest.mark.parametrize("name", ["fp16", "PowerSGD"])
def test_hooks_of_torch(rank, ranks, name):
    """Whose callbacks wait for further reductions."""
    from torch.distributed.algorithms.ddp_comm_hooks import (
        default_hooks,
        powerSGD_hook,
    )

    state, hook = None, default_hooks.fp16_compress_hook
    if name == "PowerSGD":
        hook = powerSGD_hook.powerSGD_hook
        state = powerSGD_hook.PowerSGDState(
            None, 40, start_powerSGD_iter=2, min_compression_rate=0.1
        )
    layers = [torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 20)]
    alone = torch.nn.Sequential(*layers)
    model = torch.nn.parallel.DistributedDataParallel(
        copy.deepcopy(alone), bucket_cap_mb=0.001
    )
    model.load_state_dict({f"module.{k}": v for k, v in alone.state_dict().items()})
    model.register_comm_hook(state, hook)
    for step in range(4):
        rows = torch.randn(2 * ranks, 30, generator=torch.Generator().manual_seed(step))
        for m, own in ((model, rows[rank::ranks]), (alone, rows)):
            m.zero_grad()
            m(own).square().mean().backward()
        for p, q in zip(model.parameters(), alone.parameters()):
            torch.testing.assert_close(p.grad, q.grad, atol=2e-3, rtol=2e-3)


def test_builtin_hooks_of_torch(rank, ranks):
    model = torch.nn.parallel.DistributedDataParallel(net())
    kinds = dist.BuiltinCommHookType
    with pytest.raises(mpidist.UnsupportedError, match="fp16_compress_hook"):
        model._register_builtin_comm_hook(kinds.FP16_COMPRESS)
    model._register_builtin_comm_hook(kinds.ALLREDUCE)
    rows, alone = batch(2 * ranks), net()
    model(rows[rank::ranks]).square().mean().backward()
    alone(rows).square().mean().backward()
    for p, q in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_groups_that_are_destroyed_are_freed(rank, ranks):
    """Without a collection of garbage; communicators, memory and files with them."""
    from mpidist.comm.replica_group import _Resources

    before, other = len(_Resources.in_use), (rank + 1) % ranks
    gc.disable()
    try:
        for _ in range(8):
            group = dist.new_group()
            total = torch.ones(50_000)
            dist.all_reduce(total, group=group)
            dist.all_reduce(total, group=group, async_op=True).get_future().wait()
            sent = dist.isend(total, other, group=group)
            dist.recv(torch.empty(50_000), (rank - 1) % ranks, group=group)
            sent.wait()
            dist.destroy_process_group(group)
            del group, sent
    finally:
        gc.enable()
    assert len(_Resources.in_use) <= before + 2
