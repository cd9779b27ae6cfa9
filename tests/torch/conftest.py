"""Tests of `mpidist.torch`, which are skipped where there is no PyTorch."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("torch") is None:
    assert os.environ.get("GATE_NEED_TORCH") != "1", "PyTorch is not installed"
else:
    import torch

    torch.set_num_threads(1)  # ranks share the cores
