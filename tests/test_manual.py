"""What .ci/manual says about pages that are wrong. It says nothing about the others."""

import subprocess
import sys

import chromium
import manual_pages
import pytest

PAGE = """<!DOCTYPE html><html><head><style>
body { background: white; margin: 0 }
@media (prefers-color-scheme: dark) { body { background: black } }
</style></head><body><article>%s</article></body></html>"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<p>fine</p>", []),
        (
            '<p style="width: 600px">wide</p>',
            ["600 wide in 390", "too far right: wide"],
        ),
        ('<img src="missing.svg" alt="x">', ["no picture: ", "no picture: "]),
    ],
)
def test_pages_are_looked_at(tmp_path, capsys, text, said):
    if chromium.find() is None:
        pytest.skip("Chromium is not installed")
    (tmp_path / "page.html").write_text(PAGE % text)
    for is_dark in (False, True):
        found = manual_pages.look_at_all(tmp_path, is_dark)
        assert [view["width"] for view in found] == [1400, 390]
        wrong = [text for view in found for text in view["wrong"]]
        assert len(wrong) == len(said)
        for text, start in zip(wrong, said, strict=True):
            assert start in text
    assert manual_pages.main(tmp_path) == bool(said)
    assert ("2 views, 0 wrong" in capsys.readouterr().out) == (not said)


# As docs/conf.py: the reference is the same where these are not installed
STAND_INS = """
import importlib, sys
from sphinx.ext.autodoc.mock import _MockObject, mock
_MockObject.__setitem__ = lambda *_: None
with mock(["torch", "jax"]):
    importlib.import_module(sys.argv[1])
"""


@pytest.mark.parametrize("room", ["mpidist.torch", "mpidist.jax"])
def test_the_reference_needs_no_framework(room):
    pytest.importorskip("sphinx")
    subprocess.run([sys.executable, "-c", STAND_INS, room], check=True)
