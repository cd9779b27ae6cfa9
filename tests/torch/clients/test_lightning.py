"""Lightning's Trainer and Fabric over MPI give the model of one process of PyTorch."""

import warnings

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.strategies import DDPStrategy
pytestmark = [pytest.mark.comm, pytest.mark.filterwarnings("ignore")]
nn = torch.nn
ROWS, BATCH, EPOCHS = 48, 12, 3


def data(rows=ROWS):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.log("error", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer(ranks, folder, epochs=EPOCHS, **arguments):
    return lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="mpidist"),
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


def loader(ranks, workers=0, rows=ROWS):
    return torch.utils.data.DataLoader(
        data(rows), batch_size=BATCH // ranks, num_workers=workers
    )


def train_alone(accumulated=1, clip=None, shuffle=True):
    """Return the model, and the mean loss of the last epoch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    # As Lightning's Trainer does; the order does not depend on the number of ranks
    order = torch.utils.data.DistributedSampler(
        data(), num_replicas=1, rank=0, shuffle=shuffle
    )
    batches = torch.utils.data.DataLoader(data(), BATCH, sampler=order)
    for epoch in range(EPOCHS):
        losses = []
        order.set_epoch(epoch)
        for index, (x, y) in enumerate(batches):
            loss = nn.functional.mse_loss(model(x), y)
            (loss / accumulated).backward()
            losses.append(loss.item())
            if (index + 1) % accumulated == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return model, sum(losses) / len(losses)


def same(model, alone):
    for p, q in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(p, q)


@pytest.fixture
def ended(comm):
    """End the process group that Lightning has made."""
    import mpidist.torch  # noqa: F401  # makes the backend known

    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def folder(mpi_tmp_path):
    return str(mpi_tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer(ended, ranks, folder, workers):
    model = Regression()
    run = trainer(ranks, folder)
    run.fit(model, loader(ranks, workers))
    assert run.world_size == ranks
    assert torch.distributed.get_backend() == "mpidist"
    alone, loss = train_alone()
    same(model.net, alone)
    assert run.callback_metrics["loss"].item() == pytest.approx(loss, rel=1e-6)


def test_trainer_with_accumulation_clipping_and_validation(ended, ranks, folder):
    model = Regression()
    run = trainer(ranks, folder, accumulate_grad_batches=2, gradient_clip_val=0.5)
    run.fit(model, loader(ranks), loader(ranks, rows=30))
    alone, _ = train_alone(2, 0.5)
    same(model.net, alone)
    assert torch.isfinite(run.callback_metrics["error"])


def test_checkpoint_of_the_trainer(ended, ranks, folder):
    first = trainer(ranks, folder, 1)
    first.fit(Regression(), loader(ranks))
    path = f"{folder}/checkpoint"
    first.save_checkpoint(path)
    model = Regression()
    trainer(ranks, folder).fit(model, loader(ranks), ckpt_path=path)
    same(model.net, train_alone()[0])


def test_fabric(ended, ranks):
    fabric = lightning.Fabric(
        accelerator="cpu",
        devices=ranks,
        strategy=lightning.fabric.strategies.DDPStrategy(
            process_group_backend="mpidist"
        ),
    )
    fabric.launch()
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    batches = fabric.setup_dataloaders(loader(ranks))
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            optimizer.step()
    same(model, train_alone(shuffle=False)[0])
    assert fabric.all_gather(torch.tensor(fabric.global_rank)).numel() == ranks
