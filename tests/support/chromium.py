"""Pages in a headless Chromium, and what is wrong with their looks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["find", "look", "screenshot", "start", "text_of"]

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_SECONDS = 300
# The page is in a frame, which may be narrower than any window
_FRAME = """<!DOCTYPE html><html><body style="margin:0">
<iframe style="border:0;width:%(width)dpx;height:%(height)dpx"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, wrong = [], boxes = [];
  const width = page.documentElement.clientWidth;
  if (page.documentElement.scrollWidth > width + 1)
    wrong.push("the page is " + page.documentElement.scrollWidth + " wide");
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, text = node.textContent.trim();
    const parent = node.parentElement;
    if (!text || parent.closest("title, style, script")) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    const svg = parent.closest("svg");
    for (const box of range.getClientRects()) {
      const place = {text, x1: box.left, x2: box.right, y1: box.top, y2: box.bottom};
      const outer = svg ? svg.getBoundingClientRect() : null;
      if (outer && (box.left < outer.left - 1 || box.right > outer.right + 1
          || box.bottom > outer.bottom + 1 || box.top < outer.top - 1))
        wrong.push("cut off: " + text);
      if (!parent.closest(".wide") && box.right > width + 1)
        wrong.push("too far right: " + text);
      boxes.push(place);
    }
  }
  for (let i = 0; i < boxes.length; i++)
    for (let j = i + 1; j < boxes.length; j++) {
      const a = boxes[i], b = boxes[j];
      const over = Math.min(a.x2, b.x2) - Math.max(a.x1, b.x1);
      const high = Math.min(a.y2, b.y2) - Math.max(a.y1, b.y1);
      if (over > 1 && high > 4) wrong.push("overlap: " + a.text + " | " + b.text);
    }
  const style = frame.contentWindow.getComputedStyle(page.body);
  const found = {wrong, texts: boxes.length, paper: style.backgroundColor,
    loaded: performance.getEntriesByType("resource").map(e => e.name),
    inner: frame.contentWindow.performance.getEntriesByType("resource").length};
  document.documentElement.setAttribute("data-found", JSON.stringify(found));
};
frame.srcdoc = %(page)s;
</script></body></html>
"""


def find() -> str | None:
    """Return Chromium's path, if it is installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def look(page: str, folder: Path, width: int, is_dark: bool = False) -> dict[str, Any]:
    """Return what is found on a page: `wrong`, a list, `texts`, their number, ..."""
    path = folder / "frame.html"
    # "</" would end the script
    text = json.dumps(page).replace("</", "<\\/")
    path.write_text(_FRAME % {"width": width, "height": 4000, "page": text})
    out = _run(folder, is_dark, "--virtual-time-budget=5000", "--dump-dom", str(path))
    found = re.search(r'data-found="([^"]*)"', out)
    assert found, out[-2000:]
    result = json.loads(found[1].replace("&quot;", '"').replace("&amp;", "&"))
    assert isinstance(result, dict)
    return result


def screenshot(
    page: Path, image: Path, width: int, height: int, is_dark: bool = False
) -> None:
    """Write a picture of a page."""
    size = f"--window-size={width},{height}"
    _run(image.parent, is_dark, size, f"--screenshot={image}", page.as_uri())


def text_of(address: str, folder: Path) -> str:
    """Return a page's HTML, after its scripts have run."""
    return _run(folder, False, "--virtual-time-budget=8000", "--dump-dom", address)


def start(folder: Path, is_dark: bool, address: str) -> subprocess.Popen[bytes]:
    """Open a page and stay there; the caller ends it."""
    command = [*_command(folder, is_dark), "--window-size=1400,1000", address]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


def _command(folder: Path, is_dark: bool) -> list[str]:
    chromium = find()
    assert chromium is not None
    command = [chromium, *_FLAGS, f"--user-data-dir={folder / 'chromium'}"]
    return [*command, "--force-dark-mode"] if is_dark else command


def _run(folder: Path, is_dark: bool, *arguments: str) -> str:
    command = [*_command(folder, is_dark), "--window-size=1400,1000", *arguments]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=True,
    ).stdout
