"""Models, optimizers and schedulers in checkpoints."""

import h5py
import numpy as np
import pytest

import mpidist

torch = pytest.importorskip("torch")
nn = torch.nn

from mpidist.torch import DistributedDataParallel  # noqa: E402 - after the skip

KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "groups": lambda p: torch.optim.AdamW([{"params": [q], "lr": 0.1} for q in p]),
}


class Training:
    def __init__(self, strategy, kind, dtype=torch.float32):
        torch.manual_seed(strategy.extended.replica_id)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.model = DistributedDataParallel(model.to(dtype), strategy)
        self.optimizer = KINDS[kind](list(self.model.parameters()))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.checkpoint = mpidist.Checkpoint(
            model=self.model, optimizer=self.optimizer, schedule=self.schedule
        )
        self.dtype, self.steps = dtype, 0

    def step(self):
        x = torch.from_numpy(np.random.default_rng(self.steps).normal(size=(6, 4)))
        self.optimizer.zero_grad()
        self.model(x.to(self.dtype)).pow(2).mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.steps += 1

    def weights(self):
        return [t.clone() for t in self.model.state_dict().values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_as_if_nothing_had_been(strategy, mpi_tmp_path, kind, dtype):
    first = Training(strategy, kind, getattr(torch, dtype))
    for _ in range(3):
        first.step()
    path = first.checkpoint.save(str(mpi_tmp_path / "ckpt"))
    second = Training(strategy, kind, getattr(torch, dtype))
    second.steps = 3
    parameters = list(second.model.parameters())
    second.checkpoint.restore(path)
    assert all(p is q for p, q in zip(parameters, second.model.parameters()))
    for training in (first, second):
        for _ in range(2):
            training.step()
    for got, want in zip(second.weights(), first.weights()):
        assert torch.equal(got, want)
    assert second.schedule.get_last_lr() == first.schedule.get_last_lr()
    # What it goes on with is its own
    assert all(torch.isfinite(t).all() for t in first.weights())


def test_arrays_have_the_names_of_the_state_dict(strategy, mpi_tmp_path):
    training = Training(strategy, "adam")
    training.step()
    path = training.checkpoint.save(str(mpi_tmp_path / "ckpt"))
    with h5py.File(path) as file:
        weight = file["model/module.0.weight"][:]
        assert file["optimizer/state/0/exp_avg"].shape == (5, 4)
    np.testing.assert_array_equal(weight, training.model.module[0].weight.detach())


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: nn.Linear(4, 3), r"weight is torch.float32 of shape \(3, 4\)"),
        (lambda: nn.Linear(4, 2).double(), "torch.float64"),
        (lambda: nn.Linear(4, 2, bias=False), r"the model lacks.*bias"),
        (lambda: nn.Sequential(nn.Linear(4, 2)), r"lacks.*0\.bias"),
    ],
    ids=["shape", "dtype", "less", "names"],
)
def test_a_model_that_does_not_fit_is_left_alone(strategy, mpi_tmp_path, model, text):
    saved = mpidist.Checkpoint(model=nn.Linear(4, 2), strategy=strategy)
    saved.model.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
    path = saved.save(str(mpi_tmp_path / "ckpt"))
    other = model()
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(mpidist.CheckpointError, match=text):
        mpidist.Checkpoint(model=other, strategy=strategy).restore(path)
    assert all(torch.equal(p, q) for p, q in zip(before, other.parameters()))


def test_an_optimizer_that_does_not_fit_is_an_error(strategy, mpi_tmp_path):
    training = Training(strategy, "groups")
    training.step()
    path = training.checkpoint.save(str(mpi_tmp_path / "ckpt"))
    other = Training(strategy, "adam")
    before = other.weights()
    with pytest.raises(mpidist.CheckpointError, match="groups"):
        other.checkpoint.restore(path)
    assert all(torch.equal(p, q) for p, q in zip(before, other.weights()))


def test_an_object_of_the_users_with_arrays_of_numpy(strategy, mpi_tmp_path):
    class Average:
        def __init__(self):
            self.value = np.zeros(2)

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            assert type(state["value"]) is np.ndarray
            self.value = state["value"]

    average = Average()
    checkpoint = mpidist.Checkpoint(average=average, strategy=strategy)
    average.value += 3
    path = checkpoint.save(str(mpi_tmp_path / "ckpt"))
    average.value += 1
    checkpoint.restore(path)
    assert average.value.tolist() == [3, 3]


def test_a_thread_saves_what_was_when_it_was_asked_to(strategy, mpi_tmp_path):
    training = Training(strategy, "adam")
    manager = mpidist.CheckpointManager(
        training.checkpoint, mpi_tmp_path / "run", 3, is_background=True
    )
    with manager:
        training.step()
        saved = training.weights()
        path = manager.save()
        for _ in range(5):
            training.step()
    again = Training(strategy, "adam")
    again.checkpoint.restore(path or manager.latest_checkpoint)
    for got, want in zip(again.weights(), saved):
        assert torch.equal(got, want)


def pair(is_tied):
    """A model with two layers, of one weight or of two."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    if is_tied:
        model[1].weight = model[0].weight
    return model


TIES = {
    "one model": lambda is_tied: {"model": pair(is_tied)},
    "two models": lambda is_tied: dict(zip("ab", pair(is_tied))),
    "a view": lambda is_tied: {
        "model": (model := pair(True)),
        "w": model[0].weight.detach().t() if is_tied else torch.ones(3, 3),
    },
    "tensors": lambda is_tied: {
        "a": (base := torch.arange(6.0))[:4],
        "b": base[2:] if is_tied else torch.ones(4),
    },
}


def tensors(checkpoint):
    """The tensors of modules, and other tensors, as lists."""
    found = []
    for value in checkpoint.objects.values():
        if isinstance(value, nn.Module):
            found += [tensor.tolist() for tensor in value.state_dict().values()]
        elif isinstance(value, torch.Tensor):
            found.append(value.tolist())
    return found


@pytest.mark.parametrize("tie", TIES)
def test_tied_tensors(strategy, mpi_tmp_path, tie):
    torch.manual_seed(0)
    saved = {}
    for is_tied in (True, False):
        checkpoint = mpidist.Checkpoint(strategy=strategy, **TIES[tie](is_tied))
        path = checkpoint.save(mpi_tmp_path / str(is_tied))
        saved[is_tied] = path, tensors(checkpoint)
    torch.manual_seed(1)
    checkpoint = mpidist.Checkpoint(strategy=strategy, **TIES[tie](True))
    before = tensors(checkpoint)
    path, expected = saved[False]
    if "model" in tie:
        with pytest.raises(mpidist.CheckpointError, match="share memory"):
            checkpoint.restore(path)
        assert tensors(checkpoint) == before
    else:  # a tensor of its own takes the place
        checkpoint.restore(path)
        assert tensors(checkpoint) == expected
    checkpoint = mpidist.Checkpoint(strategy=strategy, **TIES[tie](True))
    objects = dict(checkpoint.objects)
    path, expected = saved[True]
    checkpoint.restore(path)
    assert tensors(checkpoint) == expected
    assert all(checkpoint.objects[n] is x for n, x in objects.items() if n.isalpha())


class Logarithm(nn.Module):
    """Version 1 stored the logarithm, as "log_scale"."""

    def __init__(self, version):
        super().__init__()
        name = "scale" if version > 1 else "log_scale"
        self.register_parameter(name, nn.Parameter(torch.tensor([1.0, 2.0, 3.0])))
        self._version = version

    def _load_from_state_dict(self, state, prefix, local_metadata, *others):
        if local_metadata.get("version", 1) < self._version:
            state[prefix + "scale"] = state.pop(prefix + "log_scale").exp()
        super()._load_from_state_dict(state, prefix, local_metadata, *others)


class Trainer:
    """Has the state of a model within its own."""

    def __init__(self, model):
        self.model = model

    def state_dict(self):
        return {"models": [self.model.state_dict()], "step": 3}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["models"][0])


class Getter(Trainer):
    def get_state(self):
        return {"models": [arrays_of(self.model.state_dict())]}

    def set_state(self, state):
        (found,) = state["models"]
        tensors = {name: torch.from_numpy(a) for name, a in found.items()}
        state = type(found)(tensors)
        state._metadata = found._metadata
        self.model.load_state_dict(state)


LAZY = {
    "negative": lambda z: z.conj().imag,
    "conjugate": lambda z: z.conj(),
    "both, strided": lambda z: torch._neg_view(z.conj()[::2]),
}


class Lazy(nn.Module):
    def __init__(self, kind, factor, is_shared):
        super().__init__()
        x = torch.arange(4.0) + 1
        z = torch.complex(x, 10 * x) * factor
        view = LAZY[kind](z)
        # Or the numbers that the memory holds, which must not pass for equal
        other = z[::2] if "strided" in kind else z.imag if kind == "negative" else z
        self.register_buffer("z", z)
        self.register_buffer("view", view if is_shared else other.clone())


@pytest.mark.parametrize("kind", LAZY)
def test_tensors_with_lazy_bits(strategy, mpi_tmp_path, kind):
    """PyTorch keeps a bit in place of opposite numbers, which memory does not show."""
    saved, own = Lazy(kind, 1, True), Lazy(kind, 3, True)
    path = mpidist.Checkpoint(strategy=strategy, m=saved, view=saved.view).save(
        f"{mpi_tmp_path}/shared"
    )
    checkpoint = mpidist.Checkpoint(strategy=strategy, m=own, view=own.view)
    checkpoint.restore(path)
    for name in ("z", "view"):
        assert torch.equal(getattr(own, name), getattr(saved, name))
    assert torch.equal(checkpoint.view, saved.view)
    path = mpidist.Checkpoint(strategy=strategy, m=Lazy(kind, 1, False)).save(
        f"{mpi_tmp_path}/separate"
    )
    with pytest.raises(mpidist.CheckpointError, match="share memory"):
        mpidist.Checkpoint(strategy=strategy, m=own).restore(path)


def arrays_of(state):
    made = type(state)({name: tensor.numpy() for name, tensor in state.items()})
    made._metadata = state._metadata
    return made


@pytest.mark.parametrize("holder", [lambda model: model, Trainer, Getter])
@pytest.mark.parametrize("saved", [1, 2])
def test_versions_of_modules(strategy, mpi_tmp_path, holder, saved):
    def model(version):
        return nn.Sequential(nn.Linear(3, 3), Logarithm(version))

    old, new = model(saved), model(2)
    path = mpidist.Checkpoint(x=holder(old), strategy=strategy).save(mpi_tmp_path / "c")
    new[1].scale.data.zero_()
    mpidist.Checkpoint(x=holder(new), strategy=strategy).restore(path)
    start = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(new[1].scale, start.exp() if saved == 1 else start)
    assert torch.equal(new[0].weight, old[0].weight)


def test_a_state_dict_in_a_checkpoint_keeps_versions(strategy, mpi_tmp_path):
    state = nn.BatchNorm1d(3).state_dict()
    path = mpidist.Checkpoint(state=state, strategy=strategy).save(mpi_tmp_path / "c")
    other = nn.BatchNorm1d(3).state_dict()
    other._metadata = {"": {"version": 1}}
    checkpoint = mpidist.Checkpoint(state=other, strategy=strategy)
    checkpoint.restore(path)
    assert checkpoint.state._metadata == state._metadata


def test_versions_that_cannot_be_saved_are_named(strategy, mpi_tmp_path):
    model = nn.Linear(2, 2)
    model._register_state_dict_hook(
        lambda module, state, *_: state._metadata.update({"": {"made": object()}})
    )
    checkpoint = mpidist.Checkpoint(model=model, strategy=strategy)
    with pytest.raises(mpidist.ArgumentTypeError, match=r"_metadata .*'model'.*made"):
        checkpoint.save(mpi_tmp_path / "c")


class Extra(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


EXTRAS = {
    "tensor": torch.arange(3),
    "longer": torch.arange(9),
    "another dtype": torch.ones(3, dtype=torch.bfloat16),
    "array": np.arange(3.0),
    "number": np.float32(2.5),
    "nest": {"a": [torch.ones(2), np.ones(2)], "n": 1},
    "None": None,
}


@pytest.mark.parametrize("saved", EXTRAS)
@pytest.mark.parametrize("fresh", EXTRAS)
def test_extra_states_come_back_as_they_were(strategy, mpi_tmp_path, saved, fresh):
    old, new = (nn.Sequential(Extra(EXTRAS[name])) for name in (saved, fresh))
    path = mpidist.Checkpoint(x=old, strategy=strategy).save(mpi_tmp_path / "c")
    mpidist.Checkpoint(x=new, strategy=strategy).restore(path)
    assert repr(new[0].value) == repr(old[0].value)
    assert torch.equal(new[0].inner.weight, old[0].inner.weight)


WRAPPED = {
    "plain": lambda model, strategy: model,
    "ddp": DistributedDataParallel,
    "compiled": lambda model, strategy: torch.compile(model, backend="eager"),
    "both": lambda model, strategy: torch.compile(
        DistributedDataParallel(model, strategy), backend="eager"
    ),
    "compiled inside": lambda model, strategy: DistributedDataParallel(
        torch.compile(model, backend="eager"), strategy
    ),
}


@pytest.mark.parametrize("before", WRAPPED)
@pytest.mark.parametrize("after", WRAPPED)
def test_models_that_are_wrapped_otherwise(strategy, mpi_tmp_path, before, after):
    def make(kind, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        return model, WRAPPED[kind](model, strategy)

    (saved, wrapped), (other, other_wrapped) = make(before, 0), make(after, 1)
    path = mpidist.Checkpoint(strategy=strategy, model=wrapped).save(mpi_tmp_path / "c")
    status = mpidist.Checkpoint(strategy=strategy, model=other_wrapped).restore(path)
    status.assert_consumed()
    for name, value in saved.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
