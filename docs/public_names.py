"""What the API reference shows: public names, and the public members of classes."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

PAGES = Path(__file__).parent / "api"
# Members without an underscore that are for the library alone, by the class they are of
INTERNAL = {
    "Checkpoint": "save_as saver",
    "CheckpointManager": "longest_save_seconds",
    "CrossDeviceOps": "bind close collectives describe prepare require_unbound unbound",
    "Dataset": "pipeline",
    "DistributedDataset": "from_function of_global_batches",
    "DistributedIterator": "abandon",
    "DistributedValues": "is_variable",
    "StrategyExtended": "all_gather all_reduce broadcast_from_first close "
    "gather merge_call recorders_beside reduce reduce_over_axis reduce_own register "
    "symmetric_like use_device variables zeros",
    "MpiAllReduce": "is_sum prepare_sum",
    "Variable": "is_variable local on_read replace_local",
}


def has_keras() -> bool:
    """Return whether Keras can be imported, after choosing a backend for it."""
    found = [name for name in ("torch", "jax") if importlib.util.find_spec(name)]
    if not found or importlib.util.find_spec("keras") is None:
        return False
    os.environ.setdefault("KERAS_BACKEND", found[0])
    return True


def listed() -> set[str]:
    """Return the names that the tables of the reference list."""
    found = set()
    for page in sorted(PAGES.glob("*.md")):
        text = page.read_text()
        modules = re.findall(r"^\.\. (?:auto|current)module:: (\S+)$", text, re.M)
        prefix = f"{modules[-1]}." if modules else ""
        found |= {prefix + n for n in re.findall(r"^ {3}([\w.]+)$", text, re.M)}
        found |= {*re.findall(r"^\.\. py:data:: (\S+)$", text, re.M)}
    return found


def public_names() -> dict[str, Any]:
    """Return what is public by its name, of the modules that can be imported."""
    names = ["mpidist", "mpidist.statistics"]
    names += [f"mpidist.{n}" for n in ("torch", "jax") if importlib.util.find_spec(n)]
    names += ["mpidist.keras"] * has_keras()
    modules = list(map(importlib.import_module, names))
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        for name in module.__all__
        if name != "__version__"
    }


def public_members(name: str) -> list[str]:
    """Return the public members of a class, without what Python or NumPy define."""
    module, _, kind_name = name.rpartition(".")
    kind = getattr(importlib.import_module(module), kind_name)
    owners = [o for o in kind.__mro__ if o.__module__.startswith("mpidist")]
    internal = {n for o in owners for n in INTERNAL.get(o.__name__, "").split()}
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    found = dict.fromkeys(field.name for field in fields)
    found |= dict.fromkeys(member for owner in owners for member in vars(owner))
    return [n for n in found if not n.startswith("_") and n not in internal]
