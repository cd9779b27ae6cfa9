"""Makes CuPy use the emulated CUDA, in each Python that has this folder in its path."""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

# The extension modules that hold CUDA's runtime
_MODULES = (
    "cupy_backends.cuda.api.runtime",
    "cupy.cuda.cub",
    "cupy.cuda.jitify",
    "cupy.cuda.thrust",
    "cupy.random._generator_api",
)


class _Redirecting:
    """Loads and redirects these modules before they are imported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            ctypes.CDLL(spec.origin)
            emulator = ctypes.CDLL("libcuda.so.1")
            if emulator.cuda_emulator_redirect(spec.origin.encode()) < 100:
                raise ImportError(
                    f"the CUDA emulator finds no runtime in {spec.origin}"
                )
        return spec


sys.meta_path.insert(0, _Redirecting)  # type: ignore[arg-type]
