"""Data for the digits job where scikit-learn, which has the real digits, is missing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))
import digits

__all__ = ["write_if_needed"]


def write_if_needed(folder: Path) -> bool:
    """Write the files that jobs/train_digits.py reads, unless it can do so itself.

    The rows are noisy copies of ten made-up pictures. Returns whether it wrote them.
    """
    if importlib.util.find_spec("sklearn") is not None:
        return False
    random = np.random.default_rng(0)
    rows, shape = 1797, (digits.CLASSES, digits.PIXELS)
    pictures = random.uniform(0, digits.BRIGHTEST, shape)
    labels = random.integers(0, digits.CLASSES, rows)
    noisy = pictures[labels] + random.normal(0, 6, (rows, digits.PIXELS))
    shifts = digits.make_parser(None).get_default("shifts")
    digits.write(folder, shifts, noisy.clip(0, digits.BRIGHTEST), labels)
    return True
