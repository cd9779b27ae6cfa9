"""DistributedDataParallel: PyTorch's, with weights for ranks with unlike rows."""

from __future__ import annotations

import collections
import functools
import inspect
import math
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch

from mpidist.comm.consensus.signatures import CallSignature
from mpidist.context import has_strategy
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    UnsupportedError,
)
from mpidist.strategy.strategy import Strategy
from mpidist.torch import compat, devices, weights
from mpidist.torch.batch_norm import find_strategy
from mpidist.torch.process_group import group_of
from mpidist.util import logs, nest, validation

CALL = "DistributedDataParallel"
# Arguments of earlier versions of this class, and what to do instead
_FORMER = {
    "batch_dim": "pass rows=len (called with the inputs), or rows='equal'",
    "options": "use bucket_cap_mb, and register_comm_hook with PyTorch's "
    "bf16_compress_hook to send less",
}
_OF_GROUPS = "process_group", "device_mesh"
_NO_ROWS = "Expected more than 1 value per channel"
_models: collections.Counter[str] = collections.Counter()  # in process groups
_owners: Any = torch.utils.weak.WeakTensorKeyDictionary()


class _Structure:
    """The modules and parameters of a model, to notice quickly that they changed."""

    def __init__(self, model: torch.nn.Module):
        parameters = list(model.parameters())
        self.every = {id(p) for p in parameters}
        self.trained = {id(p) for p in parameters if p.requires_grad}
        self._untrained = {
            name: p
            for name, p in model.named_parameters()
            if not p.requires_grad and p.is_floating_point()
        }
        tables = [t for m in model.modules() for t in compat.tables_of(m)]
        self._sizes = [(table, len(table)) for table in tables]
        self._places = [(table, *item) for table in tables for item in table.items()]
        self._flags = [(p, p.requires_grad) for p in parameters]

    def is_as_before(self) -> bool:
        """Return whether all is what and where it was, and trained if it was."""
        return (
            all(len(table) == size for table, size in self._sizes)
            and all(table.get(name) is it for table, name, it in self._places)
            and all(p.requires_grad is flag for p, flag in self._flags)
        )

    def versions(self) -> dict[str, int]:
        """Return how often each parameter that is not trained was changed."""
        return {name: p._version for name, p in self._untrained.items()}


class _Passes:
    """The forward and backward passes of a model.

    Not attributes of the model: it is a Module, which takes long to set them.
    """

    def __init__(self, structure: _Structure):
        self.structure, self.trained = structure, structure.trained
        self.accumulators: dict[str, Any] = {}  # of gradients that PyTorch averages
        # Whether PyTorch averages the gradients that come, or they add up
        self.expects = self.accumulates = False
        self.task = self.gradient_task = 0  # numbers of backward passes
        self.newest: Any = lambda: None  # reference to the newest forward pass
        self.next_rows: float | None = None
        self.is_said = self.is_change_said = False

    def allow(self, task: int) -> bool:
        """Return whether gradients of a backward pass are averaged, or add up."""
        return self.expects or self.accumulates or self.task == task


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """PyTorch's DistributedDataParallel over MPI, exact if ranks have unlike batches.

    Creating it is collective. It is PyTorch's own class, over a process group of the
    strategy's ranks, with one addition: the gradient is the mean over the rows of all
    ranks. Ranks may have batches of different lengths, or no rows. The loss must be the
    mean over a rank's own rows. All ranks must call `backward` equally often.

        model = mpidist.torch.DistributedDataParallel(model)
        for x, y in mpidist.torch.as_tensors(data):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    The number of rows is known for batches of `as_tensors`. For other batches pass
    `rows`, or call `set_rows`. Without them all ranks weigh the same, and it is an
    error if inputs or outputs of the ranks have unlike first dimensions. Each forward
    pass has its own weight, in `no_sync`, too. A loss that uses the weights without
    calling `model(...)`, such as a penalty, counts with equal weights.

    Args:
      module: the model, on the replica's device (the CPU, or its GPU: "GPU:1" is
        "cuda:1"), with the same parameters on all ranks.
      strategy: whose ranks train it. None for the current one; outside of a strategy,
        the default process group of torch.distributed, or all ranks.
      rows: called with the inputs of the model; returns the number of rows of the mean
        loss, which may be a float, such as a sum of weights. "equal" if ranks weigh the
        same.
      reduction: "mean", or "sum" if each rank's loss is a sum that it divides by the
        size of the global batch, as in TensorFlow: then gradients are summed.
      **arguments: PyTorch's, such as find_unused_parameters.

    Raises, on all ranks:
      MismatchError: names, shapes or dtypes of parameters or buffers differ.
      ArgumentError: no parameter requires a gradient; the model is on another device.
      ArgumentTypeError: an invalid type, or an unknown argument.
      UnsupportedError: layers whose training would be wrong on several ranks.

    Example:
      >>> layer = torch.nn.Linear(1, 1, bias=False)
      >>> model = mpidist.torch.DistributedDataParallel(layer, strategy, rows=len)
      >>> rank = strategy.rank
      >>> x = torch.ones(3 - rank, 1) * (rank + 1.0)  # 3 rows of 1, and 2 rows of 2
      >>> model(x).mean().backward()
      >>> layer.weight.grad  # of all 5 rows
      tensor([[1.4000]])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: Strategy | None = None,
        *,
        rows: Callable[..., float] | str | None = None,
        reduction: str = "mean",
        **arguments: Any,
    ):
        theirs = [n for n in _OF_GROUPS if arguments.get(n) is not None]
        is_ready = torch.distributed.is_initialized() and not has_strategy()
        is_ours = strategy is not None or not (theirs or is_ready)
        strategy = find_strategy(strategy) if is_ours else None
        check = functools.partial(_check, module, rows, reduction, arguments)
        if strategy is None:
            check("")
        else:
            group = strategy.extended
            settings = {"reduction": reduction, "rows": rows == "equal", **arguments}

            def describe() -> CallSignature:
                check(group.device)
                return _describe(module, settings)

            group.consensus.run(CALL, describe, same=lambda described: described)
            arguments["process_group"] = group_of(strategy)
        compat.keep_untraced()
        super().__init__(module, **arguments)
        self._strategy, self._rows = strategy, rows
        self._number = _models[self.process_group.group_name]
        _models[self.process_group.group_name] += 1
        # The weight, where no rows are needed
        self._weight: float | None = 1.0 if rows == "equal" else None
        if reduction == "sum":
            self._weight = float(self.process_group.size())
        self._watch_gradients()
        # Such as weights that torch.nn.utils.weight_norm has computed
        self._kept = weights.attributes_in_graph(module)

    def _watch_gradients(self) -> None:
        """Notice gradients that PyTorch's class would not average."""
        self._passes = _Passes(_Structure(self))
        ignored = self.parameters_to_ignore
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                self._passes.accumulators[name] = compat.accumulator_of(parameter)
                _owners.setdefault(parameter, weakref.WeakSet()).add(self._passes)
                hook = functools.partial(_on_gradient, weakref.ref(self._passes), name)
                parameter.register_post_accumulate_grad_hook(hook)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the output of the model."""
        if not torch.is_grad_enabled():
            return super().forward(*inputs, **kwargs)
        self._require_unchanged()
        if compat.are_transforms_active():  # of this rank's outputs
            return super().forward(*inputs, **kwargs)
        if self._passes.structure.trained:
            return self._forward(inputs, kwargs)
        # PyTorch would wait for gradients that do not come, and take others for them
        is_synced = self.require_backward_grad_sync
        with self.no_sync():
            output = self._forward(inputs, kwargs)
        self.require_forward_param_sync = is_synced
        return output

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def _forward(self, inputs: Any, kwargs: Any) -> Any:
        tensors = list(weights.tensors_in((inputs, kwargs)))
        passing = self._new_pass(tensors, inputs, kwargs)
        self._require_known("has an input", (inputs, kwargs))
        if leaving := _with_gradients(tensors):
            new = weights.Weighed.apply(passing.leave, *leaving.values())
            replaced = dict(zip(leaving, new))
            inputs, kwargs = weights.replace_tensors((inputs, kwargs), replaced)
        versions = self._passes.structure.versions()
        try:
            output = super().forward(*inputs, **kwargs)
        except ValueError as error:
            if _NO_ROWS not in str(error):
                raise
            raise ArgumentError(
                f"{error}: this rank has one row; use mpidist.torch."
                "convert_sync_batchnorm(model), or batch(n, drop_remainder=True)"
            ) from error
        self._say_changed(versions)
        return self._weighed(passing, output)

    def _say_changed(self, versions: dict[str, int]) -> None:
        """Name once what a forward pass has changed on each rank alone."""
        if self._passes.is_change_said or self.process_group.size() == 1:
            return
        now = self._passes.structure.versions()
        changed = [name for name, version in versions.items() if now[name] != version]
        if changed:
            self._passes.is_change_said = True
            said = f"{CALL}: the model changes {_shortened(', '.join(changed))}"
            why = "which is not trained, and not made equal on all ranks as buffers are"
            other = "for batch normalisation of Keras use mpidist.keras.distribute"
            logs.info("torch", f"{said}, {why}; {other}")

    def _require_unchanged(self) -> None:
        before, wrapped = self._passes.structure, self._passes.trained
        if before.is_as_before():
            return
        now = _Structure(self)
        if now.every != before.every or now.trained - wrapped:
            raise ContextError(
                f"{CALL}: parameters were added, replaced or thawed since the model "
                "was wrapped; wrap it again"
            )
        # All may be frozen for a while, as those of a critic while its generator learns
        is_static = getattr(self, "static_graph", False)
        may_be_frozen = self.find_unused_parameters or not now.trained
        if now.trained != wrapped and (is_static or not may_be_frozen):
            raise ContextError(
                f"{CALL}: some parameters were frozen since the model was wrapped; "
                "pass find_unused_parameters=True, or wrap it again"
            )
        self._passes.structure = now

    def _new_pass(self, tensors: list[Any], inputs: Any, kwargs: Any) -> weights.Pass:
        is_synced = self.require_backward_grad_sync
        self._passes.accumulates = not is_synced
        self._passes.expects |= is_synced
        rows, self._passes.next_rows = self._passes.next_rows, None
        if rows is None and callable(self._rows):
            rows = _number_of_rows(self._rows(*inputs, **kwargs))
        axes = -1
        if rows is None and self._weight is None:
            rows, axes = weights.batch_rows(tensors)
        passing = weights.Pass(self._begin_backward, is_synced, rows, axes)
        self._passes.newest = weakref.ref(passing)
        if self._weight is None and (rows is None or axes >= 0):
            passing.shapes += [len(tensor) for tensor in tensors if tensor.dim()]
        return passing

    def _weighed(self, passing: weights.Pass, output: Any) -> Any:
        tensors = list(weights.tensors_in(output))
        entering = _with_gradients(tensors)
        self._require_known("returns", output)
        self._require_no_attributes(passing)
        if not entering:
            return output
        if self.find_unused_parameters:
            passing.outputs += entering.values()
        passing.shapes += [len(tensor) for tensor in tensors if tensor.dim()]
        new = weights.Weighed.apply(passing.enter, *entering.values())
        return weights.replace_tensors(output, dict(zip(entering, new)))

    def _require_known(self, verb: str, nest: Any) -> None:
        if self._weight == 1:
            return
        found = weights.escaping(nest, is_output=verb == "returns")
        if found is not None:
            raise UnsupportedError(
                f"{CALL}: the model {verb} {validation.shown(found)}, in which no "
                "tensors are found, so that their gradients would not be weighed by "
                "rows; use tensors, tuples, dicts or dataclasses, or pass rows='equal'"
            )

    def _require_no_attributes(self, passing: weights.Pass) -> None:
        """Raise for a result that the model keeps for a loss, such as a penalty."""
        if self._weight == 1 or (self._weight is None and passing.rows is None):
            return
        if kept := weights.attributes_in_graph(self.module) - self._kept:
            raise UnsupportedError(
                f"{CALL}: the model keeps results with gradients in {sorted(kept)}, "
                "which would not be weighed by rows in a loss; return them, too, or "
                "detach() them, or pass rows='equal'"
            )

    def _begin_backward(self, passing: weights.Pass) -> float:
        """Return the weight of a backward pass that has reached outputs. Collective."""
        task = compat.current_task()
        if passing.is_synced and not self._passes.expects and self._passes.task != task:
            # A second backward pass for one forward pass: do what that does
            compat.prepare_backward(self, passing.outputs)
            self._passes.expects = True
        self._passes.task = task
        compat.reduce_static_graph(self)
        compat.queue_callback(self._end_pass)
        if self._weight is not None:
            return self._weight
        weight = weights.exchange_rows(
            self.process_group,
            passing.rows,
            passing.axes,
            passing.shapes,
            compat.is_mean_of_present(self),
            self._number,
        )
        if weight is None and not self._passes.is_said:
            self._passes.is_said = True
            said = f"{CALL} weighs all ranks the same, as rows are not stated"
            other = "for a loss divided by the rows of all ranks pass reduction='sum'"
            logs.info("torch", f"{said}; {other}")
        return 1.0 if weight is None else weight

    def _end_pass(self) -> None:
        if self._passes.gradient_task == self._passes.task and self._passes.expects:
            self._passes.expects = False
            # After PyTorch's own end of the pass, unless the user ends it
            if not getattr(self, "require_manual_backward_finalization", False):
                compat.queue_callback(self._check_reducer_finalized)

    def set_rows(self, rows: float) -> None:
        """Set the number of rows in this step's mean loss.

        Call it between forward and backward, or before forward. Use it if that is not
        the length of the batch, for example tokens without padding. Not collective.

        Raises:
          ArgumentError: below 0. ArgumentTypeError: not a number.
        """
        number = _number_of_rows(rows)
        passing = self._passes.newest()
        if passing is None or passing.is_entered:
            self._passes.next_rows = number
        else:
            passing.rows, passing.axes = number, -1

    @property
    def distribute_strategy(self) -> Strategy | None:
        """The strategy whose ranks train the model, if it was made with one."""
        return self._strategy

    # What PyTorch's class calls

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        is_needed = super()._check_global_requires_backward_grad_sync(is_joined_rank)
        if is_joined_rank and self._weight is None:
            weights.exchange_rows(self.process_group, weights.ENDED, model=self._number)
        return is_needed

    def _sync_buffers(self) -> None:
        self._assign_modules_buffers()  # some may have been replaced
        super()._sync_buffers()

    def __getstate__(self) -> Any:
        state = super().__getstate__()
        for name in ("_strategy", "_passes"):
            del state[name]
        return state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._strategy = None
        self._watch_gradients()


def _with_gradients(tensors: list[Any]) -> dict[int, Any]:
    """Return those in the graph, by their ids."""
    return {id(tensor): tensor for tensor in tensors if tensor.requires_grad}


def _number_of_rows(rows: Any) -> float:
    number = rows.item() if isinstance(rows, torch.Tensor) else rows
    number = validation.number("rows", number, ">= 0")
    if not math.isfinite(number):
        raise ArgumentError(f"rows must be finite, not {number}")
    return float(number)


def _on_gradient(reference: Any, name: str, parameter: Any) -> None:
    """Raise for a gradient that no rank would average."""
    passes = reference()
    if passes is None:
        return
    task = passes.gradient_task = compat.current_task()
    if compat.current_node() not in (passes.accumulators[name], None):
        raise ContextError(
            f"{CALL}: {name} was cast or moved since the model was wrapped, so its "
            "gradient would be of this rank alone; wrap the model again"
        )
    if not passes.allow(task) and not any(p.allow(task) for p in _owners[parameter]):
        raise ContextError(
            f"{CALL}: a backward pass has reached {name}, but not by an output of the "
            "model, so its gradient would be of this rank alone: call model(...) "
            "itself, not a method of model.module"
        )


def _check(
    module: Any, rows: Any, reduction: Any, arguments: dict[str, Any], device: str
) -> None:
    """Raise if arguments are wrong; `device` is the replica's, or "" without one."""
    for name in arguments:
        if device and name in _OF_GROUPS and arguments[name] is not None:
            raise ArgumentError(f"{CALL} needs strategy or {name}, not both")
        if name in _FORMER:
            raise ArgumentTypeError(f"{CALL} has no argument {name!r}: {_FORMER[name]}")
        if name not in _arguments_of_torch():
            raise ArgumentTypeError(f"{CALL} has no argument {name!r}")
    if not (rows is None or rows == "equal" or callable(rows)):
        raise ArgumentTypeError(
            f"rows must be a function or 'equal', not {validation.shown(rows)}"
        )
    if reduction not in ("mean", "sum"):
        raise ArgumentError(
            f"reduction must be 'mean' or 'sum', not {validation.shown(reduction)}"
        )
    if not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(
            f"module must be a torch.nn.Module, not {validation.shown(module)}"
        )
    for name, tensor in _state(module).items():
        _check_tensor(name, tensor, device)
    for name, layer in module.named_modules():
        _check_layer(name or "module", layer, device)
    if not any(p.requires_grad for p in module.parameters()):
        raise ArgumentError(f"{CALL} needs a parameter that requires a gradient")


@functools.cache
def _arguments_of_torch() -> frozenset[str]:
    """Return the names of the arguments of PyTorch's class, but for the module."""
    signature = inspect.signature(torch.nn.parallel.DistributedDataParallel)
    return frozenset(signature.parameters) - {"module"}


def _check_tensor(name: str, tensor: Any, device: str) -> None:
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise ArgumentError(
            f"{name} is not initialized; call the model once with some rows first"
        )
    if tensor.is_sparse:
        raise ArgumentError(f"{name} is a sparse tensor; a dense one is needed")
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            f"{name} is a conjugate view; use tensor.resolve_conj().resolve_neg()"
        )
    kind, _, index = device.partition(":")
    wanted, other = ("CPU:0", "cpu") if kind == "CPU" else (device, f"cuda:{index}")
    if device and devices.device_name(tensor) != wanted:
        raise ArgumentError(
            f"{name} is on {tensor.device}, and this replica on {device}: call "
            f"model.to({other!r}) first, or choose the replica's device by "
            "mpidist.MirroredStrategy(devices=[...])"
        )


def _check_layer(name: str, layer: Any, device: str) -> None:
    if isinstance(layer, torch.nn.SyncBatchNorm) and not device.startswith("GPU"):
        raise UnsupportedError(
            f"{name} is a torch.nn.SyncBatchNorm, which works on GPUs only; use "
            "mpidist.torch.convert_sync_batchnorm(model)"
        )
    if getattr(layer, "max_norm", None) is not None:
        raise UnsupportedError(
            f"{name} has max_norm, by which each rank would change its own rows of the "
            "weights; clip them after the optimizer's step instead"
        )
    if getattr(layer, "sparse", False) is True:
        raise UnsupportedError(f"{name} has sparse gradients; pass sparse=False")


def _state(module: torch.nn.Module) -> dict[str, Any]:
    ignored = compat.ignored_names(module)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in state.items() if name not in ignored}


def _describe(module: torch.nn.Module, settings: dict[str, Any]) -> CallSignature:
    """Return what must be equal on all ranks: a model, and simple settings."""
    state = _state(module)
    needs = {name for name, p in module.named_parameters() if p.requires_grad}
    described = tuple(
        (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            "with gradient" if name in needs else "without gradient",
        )
        for name, tensor in state.items()
    )
    plain = bool, int, float, str, type(None)
    options = (
        *((name, value) for name, value in settings.items() if type(value) in plain),
        ("the number of parameters and buffers", len(state)),
        ("the names of parameters and buffers", _shortened(", ".join(state))),
    )
    names, spec = nest.flatten({name: name for name in state})
    by_name = dict(zip(state, described))
    leaves = tuple(by_name[name] for name in names)
    return CallSignature(CALL, options, spec, leaves)


def _shortened(names: str) -> str:
    checksum = zlib.crc32(names.encode())
    return names if len(names) < 200 else f"{names[:200]} ... ({checksum:08x})"
