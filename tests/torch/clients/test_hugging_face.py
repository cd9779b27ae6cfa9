"""Accelerate and transformers' Trainer over MPI: one process is the oracle."""

import warnings

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate")
dist = torch.distributed
nn = torch.nn
pytestmark = [pytest.mark.comm, pytest.mark.filterwarnings("ignore")]
ROWS, BATCH, EPOCHS, WORDS, LENGTH = 48, 12, 3, 17, 8


@pytest.fixture(autouse=True)
def forget():
    """Let each test start as a new process does."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def regression(accelerator, model, ranks):
    """Train; return the mean loss of the last batch, and the model."""
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH // ranks)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(EPOCHS):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    mean = accelerator.gather_for_metrics(loss.detach().reshape(1)).mean()
    return mean, accelerator.unwrap_model(model)


def regression_alone():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH)
    for _ in range(EPOCHS):
        for index, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y)
            (loss / 2).backward()
            if index % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return loss.detach(), model


def test_accelerate(group, rank, ranks):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == ranks
    loss, model = regression(accelerator, net(), ranks)
    expected, alone = regression_alone()
    torch.testing.assert_close(loss, expected)
    for p, q in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(p, q)
    assert dist.get_backend() == "mpidist"


def test_accelerates_operations(group, rank, ranks, mpi_tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    gathered = accelerator.gather_for_metrics([f"rank {rank}"], use_gather_object=True)
    assert gathered == [f"rank {r}" for r in range(ranks)]
    uneven = torch.full((rank + 1, 2), float(rank))
    padded = accelerator.pad_across_processes(uneven, pad_index=-1)
    assert padded.shape == (ranks, 2)
    total = accelerator.reduce(torch.tensor([float(rank)]), reduction="mean")
    assert total.item() == pytest.approx((ranks - 1) / 2)
    with accelerator.split_between_processes(list(range(7))) as mine:
        everyone = accelerate.utils.gather_object(mine)
    assert everyone == list(range(7))
    model = accelerator.prepare(net())
    accelerator.save_state(str(mpi_tmp_path / "state"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(mpi_tmp_path / "state"))
    same = [p.sum().item() for p in model.parameters()]
    assert same == [p.sum().item() for p in net().parameters()]


def language_model(transformers):
    transformers.set_seed(0)
    shape = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(shape)


def texts():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    labels[:, 0] = -100  # predicted from nothing: the trainer would count it
    return [{"input_ids": x, "labels": y} for x, y in zip(tokens, labels)]


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer(group, rank, ranks, mpi_tmp_path, workers):
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(mpi_tmp_path / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=BATCH // ranks,
        per_device_eval_batch_size=BATCH // ranks,
        gradient_accumulation_steps=2,
        dataloader_num_workers=workers,
        num_train_epochs=EPOCHS,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        save_strategy="epoch",
        eval_strategy="epoch",
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,
        disable_tqdm=True,
        report_to=[],
    )
    assert arguments.world_size == ranks
    trainer = transformers.Trainer(
        language_model(transformers),
        arguments,
        train_dataset=texts(),
        eval_dataset=texts(),
    )
    loss = torch.tensor(trainer.train().training_loss)  # of this rank
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    found = loss.item(), trainer.evaluate()["eval_loss"]
    assert found == pytest.approx(train_language_model_alone(transformers), rel=1e-4)


def train_language_model_alone(transformers):
    """Return the mean training loss, and that of all rows at the end, as by hand."""
    model = language_model(transformers)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    steps = EPOCHS * ROWS // BATCH // 2
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, steps)
    tokens = torch.stack([row["input_ids"] for row in texts()])
    losses = []
    for _ in range(EPOCHS):
        for index, batch in enumerate(tokens.split(BATCH)):
            loss = model(input_ids=batch, labels=batch).loss
            (loss / 2).backward()
            losses.append(loss.item())
            if index % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    with torch.no_grad():
        end = model(input_ids=tokens, labels=tokens).loss.item()
    return sum(losses) / len(losses), end
