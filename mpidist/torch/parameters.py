"""The parameters of a model when it was wrapped, and what has changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules import module as registration

from mpidist.comm.consensus.signatures import name_ranks
from mpidist.errors import ContextError, MismatchError

__all__ = ["CALL", "Parameters"]

CALL = "DistributedDataParallel"
_registrations = 0  # of parameters and modules, in all modules of the program


def _count(*_: Any) -> None:
    global _registrations
    _registrations += 1


# While the number stays, no model has changed: that is cheaper than to compare
# parameters in each step
registration.register_module_parameter_registration_hook(_count)
registration.register_module_module_registration_hook(_count)


class Parameters:
    """The parameters of a model when it was wrapped.

    Args:
      module: the model.
    """

    def __init__(self, module: torch.nn.Module):
        self._module = module
        named = dict(module.named_parameters())
        self.trained = {name: p for name, p in named.items() if p.requires_grad}
        self._frozen = {name: p for name, p in named.items() if not p.requires_grad}
        self._known = set(map(id, named.values()))
        self._registrations = _registrations

    def find_change(self) -> ContextError | None:
        """Return an error if there are parameters whose gradients are not averaged."""
        thawed = [name for name, p in self._frozen.items() if p.requires_grad]
        if thawed:
            return ContextError(
                f"parameters require gradients that did not when {CALL} was created: "
                f"{thawed[:5]}; create it after setting requires_grad"
            )
        count = _registrations
        if self._registrations == count:
            return None
        named = self._module.named_parameters()
        new = [n for n, p in named if p.requires_grad and id(p) not in self._known]
        if new:
            return ContextError(
                f"parameters were added or replaced after {CALL} was created: "
                f"{new[:5]}; create it afterwards, and then the optimizer"
            )
        self._registrations = count
        return None

    def require_same_frozen(self, frozen: Mapping[int, int]) -> None:
        """Raise unless the same parameters were frozen on all ranks since.

        Args:
          frozen: for each rank, a bit for each parameter that requires no gradient.

        Raises:
          MismatchError: they differ.
        """
        if len(set(frozen.values())) <= 1:
            return
        for j, name in enumerate(self.trained):
            ranks = [rank for rank, bits in frozen.items() if bits >> j & 1]
            if 0 < len(ranks) < len(frozen):
                raise MismatchError(
                    f"{CALL}: parameter {name} requires no gradient on "
                    f"{name_ranks(ranks)}, but does on the others"
                )
