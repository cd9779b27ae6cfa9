"""Random models of PyTorch on all ranks against plain PyTorch in one process.

Each rank draws the rows of all ranks. Gradients are those of the ranks' mean losses,
weighed by their rows, of one model: however the rows are stated, in however many
passes. What the manual calls an error is one on all ranks, and other models go on.
"""

import collections
import contextlib
import copy
import dataclasses
import gc
import random
import traceback

import torch
from oracle import random_cut, usual

import mpidist
import mpidist.torch

dist, nn = torch.distributed, torch.nn
FEATURES = 3
torch.set_num_threads(1)  # ranks share the cores

# Models


def linears(width, count):
    return [nn.Linear(width, width) for _ in range(count)]


def tied(width):
    """Return layers with one weight."""
    first, second = linears(width, 2)
    second.weight = first.weight
    return [first, second]


def scale(width):
    """Return a layer with a parameter without dimensions."""
    layer = nn.Module()
    layer.scale = nn.Parameter(torch.tensor(0.5))
    return [layer]


# Inner modules by the width, and what they make of rows; `flag` is a rank's own
LAYERS = {
    "linear": (lambda w: linears(w, 1), lambda m, x, flag: m[0](x)),
    "branch": (lambda w: linears(w, 2), lambda m, x, flag: m[flag](x)),
    "idle": (lambda w: linears(w, 2), lambda m, x, flag: m[0](x)),
    "shared": (lambda w: linears(w, 1), lambda m, x, flag: m[0](torch.tanh(m[0](x)))),
    "tied": (tied, lambda m, x, flag: m[1](torch.tanh(m[0](x)))),
    "norm": (
        lambda w: [nn.BatchNorm1d(w, momentum=None if w % 2 else 0.3)],
        lambda m, x, flag: m[0](x),
    ),
    "checkpointed": (
        lambda w: linears(w, 1),
        lambda m, x, flag: torch.utils.checkpoint.checkpoint(
            m[0], x, use_reentrant=False
        ),
    ),
    "narrow": (lambda w: linears(w, 1), lambda m, x, flag: m[0](x.float()).to(x.dtype)),
    "scaled": (scale, lambda m, x, flag: m[0].scale * x),
    "parametrized": (
        lambda w: [nn.utils.parametrizations.weight_norm(nn.Linear(w, w))],
        lambda m, x, flag: m[0](x),
    ),
    "embedded": (
        lambda w: [nn.Embedding(4, w)],
        lambda m, x, flag: m[0]((x[:, :3] > 0).sum(1)),
    ),
}
UNUSED = {"branch", "idle"}
Pair = collections.namedtuple("Pair", "last hidden")
Record = dataclasses.make_dataclass("Record", ["last", "hidden"])
OUTPUTS = {
    "tensor": (lambda last, hidden: last, lambda o: (o, None)),
    "tuple": (lambda last, hidden: (last, hidden), lambda o: o),
    "named": (Pair, lambda o: o),
    "record": (Record, lambda o: (o.last, o.hidden)),
    "dict": (
        lambda last, hidden: {"hidden": [hidden], "last": last},
        lambda o: (o["last"], o["hidden"][0]),
    ),
}


class Net(nn.Module):
    def __init__(self, draw):
        super().__init__()
        width = draw.choice([3, 4, 5, 300])
        self.first = nn.Linear(FEATURES, width)
        self.kinds = [draw.choice([*LAYERS]) for _ in range(draw.randrange(4))]
        layers = [nn.ModuleList(LAYERS[kind][0](width)) for kind in self.kinds]
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(width, FEATURES)
        self.output = draw.choice([*OUTPUTS])
        self.double()
        for kind, layer in zip(self.kinds, self.layers):
            if kind == "narrow":
                layer.float()
        for p in list(self.parameters())[1:]:
            p.requires_grad_(draw.random() < 0.9)

    def forward(self, x, flag=0):
        x = torch.tanh(self.first(x))
        for kind, layer in zip(self.kinds, self.layers):
            x = torch.tanh(x + LAYERS[kind][1](layer, x, flag))
        return OUTPUTS[self.output][0](self.last(x), x)

    def parts(self, outputs):
        """Return the last layer's output, and what was before it or None."""
        return OUTPUTS[self.output][1](outputs)

    def losses(self, outputs, y):
        """Return the loss of each row."""
        last, hidden = self.parts(outputs)
        losses = (last - y).square().mean(1)
        return losses if hidden is None else losses + hidden.square().mean(1)


def make(seed, rank=0):
    """Return a net of a seed; on other ranks than the first with other numbers."""
    torch.manual_seed(seed + rank)
    return Net(random.Random(seed))


def squared(x, *_):
    return len(x) ** 2


# How rows are stated: arguments of the wrapper, and the weight of so many rows
WEIGHTS = {
    "len": ({"rows": lambda x, *_: len(x)}, float),
    "function": ({"rows": squared}, lambda n: float(n * n)),
    "set before": ({}, lambda n: 2.5 * n),
    "set after": ({"rows": squared}, float),
    "equal": ({"rows": "equal"}, lambda n: 1.0),
    "sum": ({"reduction": "sum"}, float),
    "unstated": ({}, lambda n: 1.0),
    "batches": ({}, float),
}


def reduce_by_hook(group, bucket):
    """Average a bucket of gradients, as a user's hook does."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    size = dist.get_world_size(group)
    return work.get_future().then(lambda future: future.value()[0] / size)


class Model:
    """A net on some ranks, and the same in one process.

    Attributes:
      ranks: how many have it: the first ones.
      how: its rows are stated.
      alone: the net in one process.
      wrapped: the net of this rank; None on one that has it not.
    """

    def __init__(self, world, seed):
        draw, self.world = random.Random(seed), world
        self.ranks = max(1, world.size - (draw.random() < 0.25))
        self.is_here = world.rank < self.ranks
        self.how, self.alone = draw.choice([*WEIGHTS]), make(seed)
        kinds = set(self.alone.kinds)
        self.tolerance = 1e-4 if "narrow" in kinds else 1e-7
        self.is_normed = "norm" in kinds
        self.is_synced = self.is_normed and draw.random() < 0.7
        self.has_own = self.is_normed and not self.is_synced
        self.finds = bool(UNUSED & kinds) or draw.random() < 0.3
        self.is_static = not self.finds and draw.random() < 0.2
        self.strategy, self.group = world.strategy(self.ranks), None
        self.wrapped = self.wrap(draw, make(seed, world.rank))
        if draw.random() < 0.3:  # before gradients are averaged
            name = draw.choice([n for n, _ in self.alone.named_parameters()])
            for p in [dict(net.named_parameters())[name] for net in self.nets]:
                if p.requires_grad:
                    p.register_hook(lambda gradient: 2 * gradient)

    def wrap(self, draw, net):
        """Return the wrapped net; None on a rank that has it not. Collective."""
        place = draw.choice(["strategy", "scope", "group", "group"])
        backend, given = draw.choice(["mpidist", "mpidist", "gloo"]), {}
        if place == "group" and self.how != "batches":
            self.group = dist.new_group(range(self.ranks), backend=backend)
            given = {"process_group": self.group}
        elif place != "scope":
            given = {"strategy": self.strategy}
        arguments = {
            "find_unused_parameters": self.finds,
            "static_graph": self.is_static,
            "gradient_as_bucket_view": draw.random() < 0.3,
            "bucket_cap_mb": draw.choice([25, 1e-4]),
            **WEIGHTS[self.how][0],
        }
        has_hook = draw.random() < 0.2
        if not self.is_here:
            return None
        if self.is_synced:
            mpidist.torch.convert_sync_batchnorm(net, self.strategy)
        with contextlib.nullcontext() if given else self.strategy.scope():
            wrap = mpidist.torch.DistributedDataParallel
            wrapped = wrap(net, **given, **arguments)
        if has_hook:
            wrapped.register_comm_hook(wrapped.process_group, reduce_by_hook)
        return wrapped

    def __str__(self):
        shown = "ranks", "how", "is_synced", "finds", "is_static"
        return f"{self.alone.kinds} {[f'{k} {getattr(self, k)}' for k in shown]}"

    @property
    def nets(self):
        """Return the net in one process, and this rank's."""
        return [self.alone, *([self.wrapped.module] if self.is_here else [])]

    def weights(self, rows):
        """Return the share of each rank's loss in the loss of all."""
        made = [WEIGHTS[self.how][1](n) for n in rows]
        return [1 if self.how == "sum" else weight / sum(made) for weight in made]

    def forward_alone(self, xs, flags):
        """Return the outputs of all ranks, by one process."""
        if self.is_synced:
            outputs = self.alone.parts(self.alone(torch.cat(xs), flags[0]))
            split = [o.split([len(x) for x in xs]) for o in outputs if o is not None]
            whole = OUTPUTS[self.alone.output][0]
            return [whole(*parts, *[None] * (2 - len(parts))) for parts in zip(*split)]
        # Each normalizes its own rows; the first rank's buffers are everyone's
        buffers = list(self.alone.buffers())
        before, outputs = [b.clone() for b in buffers], []
        for x, flag in reversed([*zip(xs, flags)]):
            for buffer, old in zip(buffers, before):
                buffer.data.copy_(old)
            outputs.append(self.alone(x, flag))
        return outputs[::-1]

    def names(self):
        """Return the names of parameters that are trained."""
        return [n for n, p in self.alone.named_parameters() if p.requires_grad]

    @contextlib.contextmanager
    def frozen(self, names):
        """Freeze parameters in the block."""
        changed = [dict(net.named_parameters())[n] for net in self.nets for n in names]
        for p in changed:
            p.requires_grad_(False)
        yield
        for p in changed:
            p.requires_grad_(True)


class Rows:
    """The rows of one forward pass, on all ranks; perhaps through a second model."""

    def __init__(self, models, draw, flags):
        self.models, self.flags, self.model = models, flags, models[0]
        size, how = self.model.ranks, self.model.how
        is_normed = any(m.is_normed for m in models)
        n = draw.choice([1, 2, 7, 11, 40]) + 2 * is_normed
        self.rows = random_cut(draw, n, size)
        if any(m.has_own for m in models):
            self.rows = [draw.randrange(2, 9) for _ in range(size)]
        elif how == "equal":
            self.rows = [n + 1 for n in self.rows]
        elif how == "batches":
            self.rows = usual(n, size)
        if how == "unstated" and draw.random() < 0.95:
            self.rows = [n] * size
        self.total = sum(self.rows)
        self.numbers = torch.Generator().manual_seed(draw.getrandbits(30))
        self.xs, self.ys = self.normal(), self.normal()
        self.penalty = draw.choice([0, 0, 0.1])
        self.needs = draw.random() < 0.3  # gradients of inputs
        self.waits = False
        has_slope = draw.random() < 0.2 and not any(m.is_synced for m in models)
        self.slope = 0.1 * has_slope

    def normal(self):
        shape, dtype = (self.total, FEATURES), torch.float64
        return torch.randn(shape, generator=self.numbers, dtype=dtype).split(self.rows)

    def prepare(self):
        """Begin with inputs without gradients."""
        needs = self.needs or bool(self.slope)
        self.xs = [x.detach().clone().requires_grad_(needs) for x in self.xs]

    def loss(self, net, outputs, x, y):
        """Return the loss of one rank's rows."""
        losses = net.losses(outputs, y)
        if self.slope:
            (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
            losses = losses + self.slope * slope.square().sum(1)
        return losses.sum() / (
            self.total if self.model.how == "sum" else max(1, len(x))
        )

    def forward(self):
        """Return the loss of this rank."""
        model, rank = self.model, self.model.world.rank
        x, y, flag = self.xs[rank], self.ys[rank], self.flags[rank]
        iterator, how = None, model.how
        if how == "batches" and self.rows == usual(self.total, model.ranks):
            whole = tuple(torch.cat([*parts]).detach() for parts in (self.xs, self.ys))
            data = mpidist.Dataset.from_tensor_slices(whole).batch(self.total)
            data = model.strategy.experimental_distribute_dataset(data)
            iterator = iter(mpidist.torch.as_tensors(data))
            assert torch.equal(next(iterator)[0], x)
        elif how == "batches":
            how = "set after"
        # Before it would be said of a pass that waits for its backward pass
        how = "set after" if how == "set before" and self.waits else how
        weight, penalty = WEIGHTS[model.how][1](len(x)), 0
        if how == "set before":
            model.wrapped.set_rows(weight)
        outputs = x
        for each in self.models:
            outputs = each.wrapped(outputs, flag)
            net = each.wrapped.module
            penalty = penalty + self.penalty * net.first.weight.square().sum()
            last = each is self.models[-1]
            outputs = outputs if last else net.parts(outputs)[0]
        if how == "set after":
            model.wrapped.set_rows(weight)
        loss = self.loss(net, outputs, x, y)
        if not len(x) and model.how != "sum":
            loss = loss * torch.nan  # as a mean; it does not count
        return loss + penalty

    def forward_alone(self):
        """Return the loss of all ranks."""
        outputs, penalty = self.xs, 0
        for each in self.models:
            outputs, net = each.forward_alone(outputs, self.flags), each.alone
            penalty = penalty + self.penalty * net.first.weight.square().sum()
            if each is not self.models[-1]:
                outputs = [net.parts(output)[0] for output in outputs]
        parts = zip(outputs, self.xs, self.ys, self.model.weights(self.rows))
        losses = [self.loss(net, o, x, y) * w for o, x, y, w in parts]
        return sum(losses) + penalty


# How passes follow each other, where `models` have no other passes


def each(models, passes):
    for rows in passes:
        rows.forward().backward()


def twice(models, passes):
    for rows in passes:
        loss = rows.forward()
        loss.backward(retain_graph=True)
        loss.backward()


def accumulated(models, passes):
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(model.wrapped.no_sync())
        each(models, passes[:-1])
    each(models, passes[-1:])


def overlapping(models, passes):
    with contextlib.ExitStack() as stack:
        for model in models:
            stack.enter_context(model.wrapped.no_sync())
        losses = [rows.forward() for rows in passes[:-1]]
    for loss in [*losses, passes[-1].forward()]:
        loss.backward()


def waiting(models, passes):
    for loss in [rows.forward() for rows in passes]:
        loss.backward()


def together(models, passes):
    sum([rows.forward() for rows in passes]).backward()


ONE_BY_ONE = [each, twice, accumulated]
STYLES = {f.__name__: f for f in (*ONE_BY_ONE, overlapping, waiting, together)}


# What is done to a net after it was wrapped; `ContextError` follows


def cast(net):
    net.first.float().double()


def replace(net):
    net.last = copy.deepcopy(net.last)


def add(net):
    net.layers.append(nn.ModuleList([nn.Linear(2, 2)]))


def freeze(net):
    net.first.weight.requires_grad_(False)


def thaw(net):
    net.requires_grad_()


CHANGES = {f.__name__: f for f in (cast, replace, add, freeze, thaw)}


def move(net):
    """Change the weights by their gradients."""
    with torch.no_grad():
        for p in net.parameters():
            p -= 0 if p.grad is None else 0.05 * p.grad


def draw(random):
    """Draw models, and what is done with them."""
    keys = [random.getrandbits(30) for _ in range(random.randrange(1, 4))]
    steps = [["model", key] for key in keys]
    kinds = ["train"] * 5 + ["pair", "pair", "evaluate", "join", "change"]
    for _ in range(random.randrange(4, 20)):
        step = [random.choice(kinds), random.choice(keys), random.getrandbits(30)]
        extra = {"pair": keys, "change": [*CHANGES]}.get(step[0])
        steps.append([*step, *([random.choice(extra)] if extra else [])])
    return steps


class Play:
    """The models of a program, by their keys."""

    def __init__(self, world):
        self.world, self.models, self.groups = world, {}, []

    def model(self, key):
        self.models[key] = Model(self.world, key)
        if self.models[key].group is not None:
            self.groups.append(self.models[key].group)

    def attempt(self, models, what, call, kind=None):
        """Make a call where the models are; require an error if there must be one."""
        error, is_here = None, models[0].is_here
        try:
            if is_here:
                call()
        except Exception as caught:
            error = caught
        is_right = isinstance(error, kind if kind and is_here else type(None))
        shown = "".join(traceback.format_exception(error)) if error else "no error"
        text = f"{what} of {', '.join(map(str, models))}: {shown}, not {kind}"
        self.world.require(is_right, text)

    def close(self, model, what, got, want):
        """Require that tensors are alike, where the model is."""
        wrong = ""
        for name, tensor in want.items() if model.is_here else ():
            found, tolerance = got[name], model.tolerance
            if tensor is None or found is None:
                is_right = tensor is found
            else:
                tensor = tensor.to(found.dtype)
                is_right = torch.allclose(found, tensor, tolerance, tolerance)
            if not is_right and not wrong:
                wrong = f"{name} is {found!s:.300}, not {tensor!s:.300}"
        self.world.require(not wrong, f"{what} of {model}: {wrong}")

    def pair(self, key, seed, other):
        """Make a step of a model whose outputs go into another one."""
        models = [self.models.get(key), self.models.get(other)]
        if None in models or key == other:
            return
        is_alike = len({(m.ranks, m.how) for m in models}) == 1
        if is_alike and models[0].how in ("len", "function", "equal", "sum"):
            self.step(models, random.Random(seed))

    def train(self, key, seed):
        """Make a step of one model."""
        if key in self.models:
            self.step([self.models[key]], random.Random(seed))

    def step(self, models, draw):
        """Compute gradients in some way, compare them, and change the weights."""
        first, count = models[0], draw.choice([1, 1, 2, 3])
        is_static = any(m.is_static for m in models)
        has_own = any(m.has_own for m in models)
        style = draw.choice(ONE_BY_ONE if has_own else [*STYLES.values()])
        flags = [draw.randrange(2) for _ in range(first.ranks)]
        flags = flags[:1] * first.ranks if any(m.is_synced for m in models) else flags
        style, count = (each, 1) if is_static else (style, count)
        passes = [Rows(models, draw, flags) for _ in range(count)]
        for rows in passes:
            rows.slope *= not (is_static or style is twice)
            rows.waits = style not in ONE_BY_ONE
        zero, frozen = draw.choice(["none", "none", "zero", "keep"]), []
        names = models[-1].names()
        if draw.random() < 0.15:
            frozen = names if draw.random() < 0.5 else names[1:2]
        if frozen == names and len(models) == 1:
            for rows in passes:
                rows.needs, rows.penalty = True, 0
        kind = self.predict(models, passes, frozen, names)
        what = f"{style.__name__} {[p.rows for p in passes]} {zero} frozen {frozen}"
        for rows in passes:
            rows.prepare()
        for net in [net for m in models for net in m.nets if zero != "keep"]:
            net.zero_grad(set_to_none=zero == "none")
        with models[-1].frozen(frozen):
            self.attempt(models, what, lambda: style(models, passes), kind)
            if kind is not None:
                self.models = {k: m for k, m in self.models.items() if m not in models}
                return
            rank = min(self.world.rank, first.ranks - 1)
            own = [rows.xs[rank].grad for rows in passes]
            for rows in passes:
                rows.prepare()
                loss = rows.forward_alone()
                for _ in range(1 + (style is twice)):
                    loss.backward(retain_graph=True)
        self.check_inputs(first, what, passes, own)
        for model in models:
            self.descend(model, what)

    def predict(self, models, passes, frozen, names):
        """Return the error that a step is, if it is one."""
        last = models[-1]
        if frozen and (last.is_static or (frozen != names and not last.finds)):
            return mpidist.ContextError
        is_unlike = any(len(set(p.rows)) > 1 for p in passes)
        is_unstated = models[0].how == "unstated"
        return mpidist.ArgumentError if is_unstated and is_unlike else None

    def check_inputs(self, model, what, passes, own):
        """Require that inputs have the gradients of this rank's own loss."""
        got, want, rank = {}, {}, self.world.rank
        for i, (rows, found) in enumerate(zip(passes, own)):
            if rows.needs and not rows.slope and model.is_here and rows.rows[rank]:
                weight = model.weights(rows.rows)[rank]
                got[f"input {i}"], want[f"input {i}"] = (
                    found,
                    rows.xs[rank].grad / weight,
                )
        self.close(model, what, got, want)

    def descend(self, model, what):
        """Compare gradients and buffers; then change the weights by them."""
        net = model.nets[-1]
        pairs = [dict(n.named_parameters()) for n in (net, model.alone)]
        got, want = ({k: p.grad for k, p in ps.items()} for ps in pairs)
        self.close(model, f"gradients after {what}", got, want)
        if not model.has_own or self.world.rank == 0:
            got = dict(net.named_buffers())
            want = dict(model.alone.named_buffers())
        self.close(model, f"buffers after {what}", got, want)
        move(net)
        self.agree(model, what)

    def agree(self, model, what):
        """Require equal weights on all ranks; go on with them in one process."""
        net = model.nets[-1]
        mine = {name: t.numpy() for name, t in net.state_dict().items()}
        first = {n: torch.tensor(a) for n, a in self.world.comm.bcast(mine).items()}
        pairs = [(p, first[n]) for n, p in net.named_parameters()]
        is_equal = all(torch.equal(p, q) for p, q in pairs)
        self.world.require(is_equal or not model.is_here, f"{what}: weights differ")
        model.alone.load_state_dict(first)
        for p, q in zip(model.alone.parameters(), net.parameters()):
            p.grad = None if q.grad is None else q.grad.clone()

    def evaluate(self, key, seed):
        """Compare outputs of a net that does not learn."""
        model, draw = self.models.get(key), random.Random(seed)
        if model is None:
            return
        rows = Rows([model], draw, [draw.randrange(2)] * model.ranks)
        got, want, rank = {}, {}, self.world.rank
        if model.is_here:
            x, flag = rows.xs[rank], rows.flags[rank]
            nets = model.wrapped.eval(), model.alone.eval()
            with torch.no_grad():
                outputs = [model.alone.parts(net(x, flag))[0] for net in nets]
            got["last"], want["last"] = outputs
            for net in nets:
                net.train()
        is_compared = not model.has_own or rank == 0
        self.close(model, "evaluate", got, want if is_compared else {})

    def change(self, key, seed, how):
        """Change a net that is wrapped; then no step is possible."""
        model, draw = self.models.pop(key, None), random.Random(seed)
        if model is None:
            return
        is_error = how != "thaw" or len(model.names()) < len(
            [*model.alone.parameters()]
        )
        is_error &= how != "freeze" or not model.finds or model.is_static
        if model.is_here:
            CHANGES[how](model.wrapped.module)
        rows = Rows([model], draw, [0] * model.ranks)
        rows.slope = 0
        rows.prepare()
        kind = mpidist.ContextError if is_error else None
        if model.how == "unstated":
            return
        self.attempt([model], how, lambda: each([model], [rows]), kind)

    def join(self, key, seed):
        """Train while ranks have unlike numbers of batches."""
        model, draw = self.models.get(key), random.Random(seed)
        cannot = model is None or model.is_normed or model.finds or model.is_static
        if cannot or model.how not in ("len", "function", "set after"):
            return
        counts = [draw.randrange(4) for _ in range(model.ranks)]
        passes = [Rows([model], draw, [0] * model.ranks) for _ in range(max(counts))]

        def descend(net, loss):
            net.zero_grad()
            loss.backward()
            move(net)

        def train():
            with model.wrapped.join():
                for rows in passes[: counts[self.world.rank]]:
                    descend(model.wrapped.module, rows.forward())

        for i, rows in enumerate(passes):
            rows.penalty = rows.slope = 0
            kept = [n * (counts[q] > i) for q, n in enumerate(rows.rows)]
            if not sum(kept):  # nobody knows the mean of nothing
                return
            rows.prepare()
        self.attempt([model], f"join {counts}", train)
        for i, rows in enumerate(passes):
            parts = [
                (x, y)
                for q, (x, y) in enumerate(zip(rows.xs, rows.ys))
                if counts[q] > i
            ]
            rows.xs, rows.ys = ([*column] for column in zip(*parts))
            rows.rows = [len(x) for x in rows.xs]
            descend(model.alone, rows.forward_alone())
        states = [dict(net.named_parameters()) for net in (model.nets[-1], model.alone)]
        self.close(model, f"weights after join {counts}", *states)
        for net in model.nets:
            net.zero_grad()
        self.agree(model, "join")


def play(world, steps):
    """Play a program."""
    if not dist.is_initialized():
        mpidist.torch.init_process_group()
    made = Play(world)
    for name, *arguments in steps:
        getattr(made, name)(*arguments)
    made.models.clear()
    gc.collect()
    for group in made.groups:
        if world.rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)
