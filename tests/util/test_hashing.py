"""The hash whose values checkpoints hold."""

import pytest

from mpidist.util.serialization import hash62


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0x3929A815DD1E6CAD),
        ("mpidist", 0x3E021AD8850FFD53),
        ("\N{GREEK SMALL LETTER PI}", 0x17BD9A5701153769),
    ],
)
def test_hashes_are_those_of_former_versions(text, value):
    assert hash62(text) == value
    assert 0 <= value < 1 << 62
