"""What kernels add up on a GPU, and what CuPy compiles them to."""

import functools
import types
import warnings

import ml_dtypes
import numpy as np
import pytest

from mpidist.device import kernels
from mpidist.device.binding import gpu_count, use_gpu

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def ptx(monkeypatch):
    """A function that compiles as CuPy does for an H100, and returns the assembly."""
    pytest.importorskip("cupy")
    from cupy.cuda import compiler, nvrtc

    try:
        nvrtc.getVersion()
    except RuntimeError as error:
        pytest.skip(f"there is no NVRTC (pip install nvidia-cuda-nvrtc): {error}")
    loaded = []

    class Module:
        """Takes what a GPU would run."""

        load = staticmethod(loaded.append)

        def _set_mapping(self, mapping):
            pass

    # Else it looks at the GPU, and compiles past the assembly
    monkeypatch.setattr(
        compiler,
        "_get_arch_for_options_for_nvrtc",
        lambda arch=None: ("-arch=compute_90", "ptx"),
    )
    monkeypatch.setattr(compiler, "function", types.SimpleNamespace(Module=Module))
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")

    def compile(code, options):
        loaded.clear()
        compiler._compile_module_with_cache(code, options, arch="90")
        return loaded[0].decode()

    return compile


def test_no_kernel_takes_small_numbers_for_zero(ptx):
    """CuPy's option -ftz=true would do so with sums in float32."""
    plain = 'extern "C" __global__ void add(float* x) { x[0] = x[0] + x[1]; }'
    assert "add.ftz.f32" in ptx(plain, kernels.OPTIONS)
    assembly = ptx(kernels.source(), kernels.OPTIONS)
    assert "add.rn.f32" in assembly
    assert "cvt.f32.f16" in assembly
    assert ".ftz" not in assembly


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("name", ["u1", "i8", "f4", "f8", "c8", "float16", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2, 64, 65, 500])
def test_a_gpu_adds_up_any_number_of_parts(name, count, offset):
    """Wherever they begin, `offset` being what keeps them from whole vectors."""
    if not gpu_count():
        pytest.skip("needs a GPU and CuPy")
    import cupy

    use_gpu(0)
    dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    wide = np.dtype("f4") if dtype.name in ("float16", "bfloat16") else dtype
    parts = (np.arange(count * 1003).reshape(count, 1003) % 97).astype(dtype)
    there = cupy.asarray(parts)
    totals = cupy.empty(1003, wide)
    addresses = [there[part, offset:].data.ptr for part in range(count)]
    kernels.add_parts(addresses, totals[offset:], dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sums of few bits wrap around
        expected = functools.reduce(np.add, parts.astype(wide))
    np.testing.assert_array_equal(totals[offset:].get(), expected[offset:])
