"""DistributedDataParallel and SyncBatchNorm with torch.compile."""

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn

from torch_rows import rows_of  # noqa: E402

from mpidist.torch import DistributedDataParallel, convert_sync_batchnorm  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # torch.compile takes seconds
    # PyTorch warns of what it does itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def backward(model, x, y):
    nn.functional.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("is_whole_step", [False, True])
def test_training_is_that_of_one_process(strategy, is_whole_step):
    alone = Network()
    model = DistributedDataParallel(
        convert_sync_batchnorm(Network(), strategy), strategy, rows=len
    )
    torch._dynamo.reset()
    compiled, find_gradients = torch.compile(model, backend="aot_eager"), backward
    if is_whole_step:
        compiled = model
        find_gradients = torch.compile(backward, backend="aot_eager")
    everything, mine = rows_of(strategy, 4 * strategy.num_replicas_in_sync - 1)
    first, second = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone))
    for _ in range(3):
        model.zero_grad()
        find_gradients(compiled, *mine)
        first.step()
        alone.zero_grad()
        backward(alone, *everything)
        second.step()
    for got, want in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(got, want)
    for got, want in zip(model.buffers(), alone.buffers()):
        torch.testing.assert_close(got, want)
