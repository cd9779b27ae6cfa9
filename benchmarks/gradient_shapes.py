"""The shapes of the gradients of two known models, parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["MODELS"]

Shape = tuple[int, ...]


def resnet50() -> Iterator[Shape]:
    """Yield 161 shapes, of 25.6 million numbers (He et al., CVPR 2016, table 1)."""

    def convolution(outputs: int, inputs: int, width: int) -> Iterator[Shape]:
        yield outputs, inputs, width, width
        yield from [(outputs,), (outputs,)]  # batch normalisation: scale and shift

    yield from convolution(64, 3, 7)
    inputs = 64
    for blocks, width in [(3, 64), (4, 128), (6, 256), (3, 512)]:
        for block in range(blocks):
            yield from convolution(width, inputs, 1)
            yield from convolution(width, width, 3)
            yield from convolution(4 * width, width, 1)
            if block == 0:
                yield from convolution(4 * width, inputs, 1)
            inputs = 4 * width
    yield from [(1000, 2048), (1000,)]


def gpt2() -> Iterator[Shape]:
    """Yield 148 shapes, of 124 million numbers (Radford et al., 2019: GPT-2 small)."""
    width = 768
    yield from [(50257, width), (1024, width)]
    for _ in range(12):
        yield from [(width,), (width,)]
        yield from [(width, 3 * width), (3 * width,), (width, width), (width,)]
        yield from [(width,), (width,)]
        yield from [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    yield from [(width,), (width,)]


MODELS = {"ResNet-50": list(resnet50()), "GPT-2 small": list(gpt2())}
