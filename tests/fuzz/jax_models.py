"""Random losses and collectives in JAX on all ranks against JAX in one process.

Each rank draws the rows of all ranks. Gradients are those of the mean over all rows, or
of the sum of all ranks' losses; collectives are those of the list of all ranks' values,
also where they are differentiated, mapped and looped over. After an error, which all
ranks raise, later calls are exact.
"""

import contextlib
import random
import traceback

import numpy as np
from oracle import REFUSED, random_cut, reduced, usual

import mpidist
import mpidist.jax as mj

import jax  # isort: skip  # after mpidist.jax, which makes it dispatch synchronously
import jax.numpy as jnp  # isort: skip

FEATURES = 3
FLOATS = ["float32", "float32", "float64", "float16", "bfloat16"]
DTYPES = [*FLOATS, "int32", "int8", "uint8", "complex64"]
TOLERANCES = {"float16": 0.02, "bfloat16": 0.1, "float64": 1e-10}
WRAPS = {"plain": lambda f: f, "jit": jax.jit, "ours": lambda f: mj.jit(f)}
# How the leaves of a pytree are nested
TREES = [
    lambda a, b, c: a,
    lambda a, b, c: [a],
    lambda a, b, c: {"w": a, "b": b},
    lambda a, b, c: (a, {"x": (c,)}),
    lambda a, b, c: [c, {"q": b, "p": a}],
]


def numbers(key, shape, dtype):
    """Return random numbers: whole ones, but for the gradients of floats."""
    values = np.random.default_rng(key)
    if np.dtype(jnp.dtype(dtype)).kind in "iu":
        low, high = (-20, 21) if dtype[0] == "i" else (0, 70)
        return jnp.asarray(values.integers(low, high, shape), dtype)
    made = values.integers(-8, 9, shape) / 4
    return jnp.asarray(made + 1j * made[..., ::-1] if dtype[0] == "c" else made, dtype)


def x64(dtype):
    """Return a context in which JAX has a dtype."""
    if jnp.dtype(dtype).itemsize < 8 or dtype == "complex64":
        return contextlib.nullcontext()
    module = jax if hasattr(jax, "enable_x64") else jax.experimental  # by its version
    return module.enable_x64(True)


def wrong(got, want, dtype):
    """Return in what two pytrees differ, or nothing."""
    if jax.tree.structure(got) != jax.tree.structure(want):
        return f"{jax.tree.structure(got)}, not {jax.tree.structure(want)}"
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        tolerance, wide = TOLERANCES.get(dtype, 2e-5), "c16"
        is_right = (a.shape, a.dtype) == (np.shape(b), b.dtype) and np.allclose(
            np.asarray(a).astype(wide), np.asarray(b).astype(wide), tolerance, tolerance
        )
        if not is_right:
            return f"{a!r:.300}, not {b!r:.300}"
    return ""


class Loss:
    """A loss of random parts, and the rows of all ranks.

    Attributes:
      order: where parameters, more of them, inputs and targets are in its arguments.
      argnums: of the parameters that are differentiated.
    """

    def __init__(self, draw, size):
        self.dtype, self.key = draw.choice(FLOATS), draw.getrandbits(30)
        self.rows = random_cut(draw, draw.choice([1, 2, 7, 40]), size)
        self.reduction = draw.choice(["mean", "mean", "sum", "equal"])
        if self.reduction == "equal":
            self.rows = [n + 1 for n in self.rows]
        self.total = sum(self.rows)
        is_wide = self.dtype in ("float32", "float64")
        self.exchanges = is_wide and self.reduction != "equal" and draw.random() < 0.3
        self.has_aux, self.frozen = draw.random() < 0.3, draw.random() < 0.3
        self.order = draw.sample(["params", "more", "x", "y"], 4)
        self.differentiates = draw.choice([["params"], ["params"], ["more", "params"]])
        self.nest = draw.choice(TREES)
        numbers_of = [self.order.index(name) for name in self.differentiates]
        numbers_of = [n - 4 * (draw.random() < 0.2) for n in numbers_of]
        is_one = len(numbers_of) == 1 and draw.random() < 0.7
        self.argnums = numbers_of[0] if is_one else tuple(numbers_of)

    def leaf(self, k, *shape):
        return numbers([self.key, k], shape, self.dtype) / 4

    def arguments(self, rank=None, weights=None):
        """Return the arguments of one rank, or of one process with all rows."""
        leaves = self.leaf(0, FEATURES), self.leaf(1), self.leaf(2, FEATURES, FEATURES)
        x, y = self.leaf(3, self.total, FEATURES), self.leaf(4, self.total)
        start = 0 if rank is None else sum(self.rows[:rank])
        part = slice(start, None if rank is None else start + self.rows[rank])
        values = {"params": self.nest(*leaves), "more": [self.leaf(5, FEATURES)]}
        values |= {"x": x[part], "y": y[part]} | (weights or {})
        return [values[name] for name in self.order]

    def value(self, exchange, *args, scale=1.0):
        """Return the loss of some rows."""
        named = dict(zip(self.order, args))
        z = named["x"] + named["more"][0]
        for i, leaf in enumerate(jax.tree.leaves(named["params"])):
            if i == 1 and self.frozen:
                leaf = jax.lax.stop_gradient(leaf)
            z = jnp.tanh(z @ leaf if leaf.ndim == 2 else z * (1 + leaf))
        if self.exchanges:  # normalized by the rows of all ranks
            total, count = exchange((z.sum(0), jnp.asarray(len(z), z.dtype)))
            z = z - total / count
        losses = jnp.asarray(scale, z.dtype) * (z.sum(1) - named["y"]) ** 2
        value = losses.sum() / self.total if self.reduction == "sum" else losses.mean()
        return (value, {"rows": len(z), "sum": losses.sum()}) if self.has_aux else value

    def alone(self, scale, weights):
        """Return value and gradients of all rows, by one process."""
        both = jax.value_and_grad(
            lambda *args: self.value(lambda v: v, *args, scale=scale),
            self.argnums,
            self.has_aux,
        )
        both = jax.jit(both)  # as one computation, which is fast
        if self.reduction != "equal":
            value, gradients = both(*self.arguments(weights=weights))
            return value[0] if self.has_aux else value, gradients
        every = [both(*self.arguments(q, weights)) for q in range(len(self.rows))]
        every = [(v[0] if self.has_aux else v, g) for v, g in every]
        n = len(every)
        return jax.tree.map(lambda *a: (sum(a) / n).astype(a[0].dtype), *every)


# Collectives: of a strategy, and of the list of all ranks' values


class Collective:
    def __init__(self, draw, size):
        self.name = draw.choice(["all_reduce", "all_reduce", "all_gather", "broadcast"])
        self.op = draw.choice(["SUM", "SUM", "MEAN", "MIN", "MAX", "PRODUCT"])
        self.axis, self.root = draw.choice([0, -1]), draw.randrange(size)

    def __call__(self, strategy, value):
        more = {"strategy": strategy}
        if self.name == "all_reduce":
            return mj.all_reduce(self.op, value, **more)
        if self.name == "all_gather":
            return mj.all_gather(value, self.axis, **more)
        return mj.broadcast(value, self.root, **more)

    def combined(self, parts):
        """Return the result of NumPy's arrays; REFUSED if there is none."""
        if self.name == "all_gather":
            return np.concatenate(parts, self.axis)
        if self.name == "broadcast":
            return parts[self.root]
        total = reduced(self.op, parts)
        is_mean = self.op == "MEAN" and parts[0].dtype.kind in "iu"
        return total.astype("float32") if is_mean else total

    def derived(self, parts):
        """Return the result of JAX's arrays, which is differentiated."""
        if self.name == "all_gather":
            return jnp.concatenate(parts, self.axis)
        if self.name == "broadcast":
            return parts[self.root]
        return sum(parts) / (len(parts) if self.op == "MEAN" else 1)


def looped(call, value):
    """Return results for each element of the first dimension."""
    return jax.lax.scan(lambda carry, x: (carry, call(x)), 0, value)[1]


def chosen(call, value):
    return jax.lax.cond(jnp.ones((), bool), call, call, value)


# How a collective is called, and whether for each element of the first dimension
TRANSFORMS = {
    "once": (lambda call, value: call(value), False),
    "cond": (chosen, False),
    "scan": (looped, True),
    "vmap": (lambda call, value: jax.vmap(call)(value), True),
    "jvp": (lambda call, value: jax.jvp(call, (value,), (value,))[1], False),
}


def draw(random):
    """Draw steps."""
    kinds = ["loss", "loss", "collective", "collective", "gradient", "mean", "batches"]
    kinds += ["gradient", "fail"]
    return [
        [random.choice(kinds), random.getrandbits(30)]
        for _ in range(random.randrange(2, 9))
    ]


class Play:
    """One step: its strategy, on all ranks or without the last."""

    def __init__(self, world, seed):
        self.world, self.draw, self.seed = world, random.Random(seed), seed
        self.size = max(1, world.size - (self.draw.random() < 0.2))
        self.strategy, self.rank = world.strategy(self.size), world.rank
        self.is_here = self.rank < self.size
        self.wrap = self.draw.choice([*WRAPS])

    def check(self, what, call, want, dtype="float32", is_error=False):
        """Require a result, or an error, where the strategy is."""
        found = ""
        try:
            got = call() if self.is_here else want
            found = "no error" if is_error else wrong(got, want, dtype)
        except Exception:
            found = "" if is_error else traceback.format_exc()
        is_wrong = found and self.is_here
        self.world.require(not is_wrong, f"{what} by {self.wrap}, {self.size}: {found}")

    def loss(self):
        """Descend some steps, and compare value, gradients and data aside."""
        loss, draw = Loss(self.draw, self.size), self.draw
        scale, steps = draw.choice([1.0, 1.5]), draw.choice([1, 1, 2])
        options = {"strategy": self.strategy}
        if loss.reduction == "sum":
            options["reduction"] = "sum"
        is_rest = len(loss.differentiates) == 2 and draw.random() < 0.5
        if loss.reduction == "equal":
            options["batch_argnums"] = ()
        elif loss.reduction == "mean" and not is_rest:
            rows = [loss.order.index(name) for name in "xy"]
            options["batch_argnums"] = tuple(n - 4 * (n == 3) for n in rows)
        exchange = lambda v: mj.all_reduce("SUM", v, strategy=self.strategy)  # noqa: E731
        function = lambda *args, **more: loss.value(exchange, *args, **more)  # noqa: E731
        if draw.random() < 0.2 and not loss.exchanges:
            function = jax.checkpoint(function)
        is_grad = draw.random() < 0.3
        by = (mj.grad if is_grad else mj.value_and_grad)(
            function, loss.argnums, loss.has_aux, **options
        )
        by = WRAPS[self.wrap](by)
        what, weights = f"{vars(loss)} grad {is_grad} {options}", {}
        for _ in range(steps):
            with x64(loss.dtype):
                value, gradients = loss.alone(scale, weights)
                want = gradients if is_grad else (value, gradients)

                def call(weights=weights):
                    got = by(*loss.arguments(self.rank, weights), scale=scale)
                    if not loss.has_aux:
                        return got
                    first, second = got
                    value, aux = (None, second) if is_grad else first
                    assert int(aux["rows"]) == loss.rows[self.rank], aux
                    return first if is_grad else (value, second)

                self.check(what, call, want, loss.dtype)
                named = gradients if isinstance(loss.argnums, tuple) else [gradients]
                before = dict(zip(loss.order, loss.arguments(weights=weights)))
                for name, gradient in zip(loss.differentiates, named):
                    step = jax.tree.map(lambda w, g: w - g / 10, before[name], gradient)
                    weights = weights | {name: step}

    def values(self, dtype, shape):
        return [numbers([self.seed, q], shape, dtype) for q in range(self.size)]

    def collective(self):
        """Compare a collective of a pytree in a transformation."""
        call, dtype = Collective(self.draw, self.size), self.draw.choice(DTYPES)
        name = self.draw.choice([*TRANSFORMS])
        can_derive = jnp.dtype(dtype).kind not in "iu" and call.op in ("SUM", "MEAN")
        name = (
            name if name != "jvp" or can_derive or call.name != "all_reduce" else "once"
        )
        if name == "jvp" and jnp.dtype(dtype).kind in "iu":
            name = "once"
        self.wrap = (
            "ours" if name in ("scan", "cond") and self.wrap == "plain" else self.wrap
        )
        transform, is_each = TRANSFORMS[name]
        shape = (2, self.draw.choice([0, 1, 5, 20_000]), 2)
        nest = self.draw.choice(TREES[:3])
        with x64(dtype):
            every = self.values(dtype, shape)
            parts = [np.asarray(v) for v in every]
            sliced = [[p[k] for p in parts] for k in range(2)] if is_each else [parts]
            totals = [call.combined(s) for s in sliced]
            is_error = any(t is REFUSED for t in totals)
            want = None if is_error else np.stack(totals) if is_each else totals[0]
            mine = nest(*[every[min(self.rank, self.size - 1)]] * 3)
            function = WRAPS[self.wrap](
                lambda v: transform(lambda x: call(self.strategy, x), v)
            )
            what = f"{name} of {vars(call)} of {dtype}{shape}"
            whole = nest(want, want, want)
            is_error &= self.is_here
            self.check(what, lambda: function(mine), whole, dtype, is_error)

    def gradient(self):
        """Compare the gradient of the sum of all ranks' losses by a rank's value."""
        call, dtype = Collective(self.draw, self.size), self.draw.choice(FLOATS[:3])
        call.op = call.op if call.op == "MEAN" else "SUM"
        shape = (2, self.draw.choice([1, 5]))
        own = min(self.rank, self.size - 1)
        with x64(dtype):
            every = self.values(dtype, shape)
            shapes = call.derived(every).shape
            factors = [
                numbers([self.seed, q, 1], shapes, dtype) for q in range(self.size)
            ]

            def total(values):
                common = call.derived([jnp.tanh(v) for v in values])
                return sum((common**2 * f).sum() for f in factors)

            def loss(value):
                return (call(self.strategy, jnp.tanh(value)) ** 2 * factors[own]).sum()

            want, what = (
                jax.grad(total)(every)[own],
                f"gradient of {vars(call)} {dtype}",
            )
            by = WRAPS[self.wrap](jax.grad(loss))
            self.check(what, lambda: by(every[own]), want, dtype)

    def mean(self):
        """Compare means over rows, of which some ranks have none."""
        rows = random_cut(self.draw, self.draw.choice([1, 5, 100]), self.size)
        dtype, own = self.draw.choice(DTYPES), min(self.rank, self.size - 1)
        nest = self.draw.choice(TREES[:3])
        with x64(dtype):
            every, kind = self.values(dtype, (3,)), jnp.dtype(dtype).kind
            wide = [np.asarray(v).astype("c16" if kind == "c" else "f8") for v in every]
            total = sum(v * n for v, n in zip(wide, rows)) / sum(rows)
            want = total.astype("float32" if kind in "iu" else jnp.dtype(dtype))
            mine = every[own] if rows[own] or kind in "iu" else every[own] * jnp.nan
            strategy = self.strategy
            by = WRAPS[self.wrap](
                lambda v: mj.mean_over_rows(v, rows[own], strategy=strategy)
            )
            call = lambda: by(nest(mine, mine, mine))  # noqa: E731
            self.check(f"mean {dtype} {rows}", call, nest(want, want, want), dtype)

    def batches(self):
        """Compare the batches of a dataset, which stay as they are."""
        n, size = self.draw.choice([1, 5, 30]), self.draw.choice([4, 7])
        x = np.random.default_rng(self.seed).integers(0, 99, (n, 2000)).astype("f4")
        own, want = min(self.rank, self.size - 1), []
        for start in range(0, n, size):
            batch = x[start : start + size]
            part = np.split(batch, np.cumsum(usual(len(batch), self.size))[:-1])[own]
            want.append({"x": part, "y": part[:, 0].astype("i4")})

        def call():
            rows = {"x": x.copy(), "y": x[:, 0].astype("i8")}
            data = mpidist.Dataset.from_tensor_slices(rows).batch(size)
            return list(mj.as_jax(self.strategy.experimental_distribute_dataset(data)))

        self.check(f"batches {n} {size}", call, want)

    def fail(self):
        """Let one rank fail, by its own code or by what it passes."""
        victim, how = (
            self.draw.randrange(self.size),
            self.draw.choice(["raise", "shape"]),
        )
        is_victim, dtype = self.rank == victim, "float32"
        shape = (3 + (is_victim and how == "shape"),)

        def loss(weights, x):
            total = mj.all_reduce("SUM", weights, strategy=self.strategy)
            if is_victim and how == "raise":
                raise OSError("on one rank")
            return (mj.all_reduce("MEAN", total, strategy=self.strategy) * x).mean()

        by = WRAPS[self.wrap](mj.value_and_grad(loss, strategy=self.strategy))
        arguments = jnp.ones(shape, dtype), jnp.ones((2, 1), dtype)
        is_error = self.is_here and (self.size > 1 or how == "raise")
        self.check(
            f"fail {how} on {victim}",
            lambda: self.strategy.run(by, arguments) and None,
            None,
            is_error=is_error,
        )


def play(world, steps):
    """Play a program."""
    for name, seed in steps:
        getattr(Play(world, seed), name)()
