"""DistributedDataParallel of models on GPUs.

Where PyTorch has no CUDA, tensors on the CPU pass for such on the replica's GPU.
"""

import threading

import pytest

import mpidist
from mpidist.device.binding import gpu_count

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.gpu
if not gpu_count():
    pytest.skip("needs a GPU and CuPy", allow_module_level=True)

from torch_rows import loss_of, rows_of  # noqa: E402

from mpidist.torch import (  # noqa: E402
    DistributedDataParallel,
    convert_sync_batchnorm,
    devices,
)


@pytest.fixture
def strategy(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm, allow_shared_gpu=True)
    yield strategy
    strategy.experimental_finalize()


@pytest.fixture(autouse=True)
def device(request, strategy):
    """Where models are: on the replica's GPU, or on the CPU in its place."""
    if not torch.cuda.is_available():
        request.getfixturevalue("tensors_pass_for_cuda")
        return torch.device("cpu")
    return torch.device("cuda", int(strategy.extended.device.partition(":")[2]))


def network(device, seed=0, hidden=2000):
    torch.manual_seed(seed)
    layers = nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3)
    return nn.Sequential(*layers).to(device)


def backward(loss, in_thread):
    """Call `backward`, with hooks in another thread as PyTorch's CUDA has them."""
    if not in_thread:
        loss.backward()
        return
    raised = []

    def work():
        try:
            loss.backward()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


@pytest.mark.parametrize("rows", [12, 7, 1])
def test_training_is_that_of_one_process(strategy, device, rows):
    rank = strategy.extended.replica_id
    alone = network(device)
    model = DistributedDataParallel(
        network(device, seed=rank), strategy, rows=len, bucket_cap_mb=0.01
    )
    optimizers = [
        torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, alone)
    ]
    for step in range(4):
        everything, mine = rows_of(strategy, rows, step, device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, *mine).backward()
        loss_of(alone, *everything).backward()
        for optimizer in optimizers:
            optimizer.step()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got, want)
        everyone = strategy.gather_objects(got.detach().cpu().numpy().tobytes())
        assert len(set(everyone)) == 1


@pytest.mark.parametrize("in_thread", [False, True])
def test_buffers_and_synchronous_batch_norm(strategy, device, in_thread):
    def make(seed):
        torch.manual_seed(seed)
        layers = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        return nn.Sequential(*layers).to(device)

    alone = make(0)
    model = convert_sync_batchnorm(make(strategy.extended.replica_id), strategy)
    model = DistributedDataParallel(model, strategy, rows=len)
    for step in range(3):
        everything, mine = rows_of(strategy, 11, step, device)
        backward(loss_of(model, *mine), in_thread)
        loss_of(alone, *everything).backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-6, rtol=1e-4)
    for got, want in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(got, want)


def test_a_model_elsewhere_is_refused(strategy, monkeypatch):
    monkeypatch.setattr(devices, "device_name", lambda tensor: "GPU:7")
    with pytest.raises(mpidist.ArgumentError, match="this replica on GPU:"):
        DistributedDataParallel(nn.Linear(2, 2), strategy)
