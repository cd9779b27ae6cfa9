"""Versions of CuPy, and of what it has loaded."""

from __future__ import annotations

import warnings

__all__ = ["cuda_versions", "cupy_version", "nccl_version"]


def cupy_version() -> str:
    """Return CuPy's version."""
    import cupy

    return str(cupy.__version__)


def cuda_versions() -> tuple[int, int]:
    """Return the CUDA versions of the driver and of the runtime, such as 13000."""
    from cupy.cuda import runtime

    return int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())


def nccl_version() -> int:
    """Return the version of NCCL that CuPy has, such as 22703; 0 without."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns where it finds no NCCL
            from cupy.cuda import nccl

        return int(nccl.get_version())
    except (ImportError, AttributeError, RuntimeError):
        return 0
