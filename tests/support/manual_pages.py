"""Look at every page of the built manual in a headless Chromium.

    python tests/support/manual_pages.py docs/_build/html

A page is wrong if it is wider than the window, if a picture is missing, or if it stays
light where the reader asked for dark. The search must work from the files alone.
"""

from __future__ import annotations

import functools
import http.server
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import chromium

__all__ = ["look_at_all"]

WIDTHS = (1400, 390)
_SECONDS = 300
# One Chromium loads all pages, one after the other, in a frame
_LOOK = """<!DOCTYPE html><html><body style="margin:0"><script>
const pages = %s, widths = %s;
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `border:0;width:${width}px;height:2000px`;
  const loaded = new Promise(done => frame.onload = done);
  frame.src = page;
  document.body.append(frame);
  await loaded;
  const inner = frame.contentDocument, wrong = [];
  const pictures = [...inner.images];
  for (const picture of pictures) picture.loading = "eager";
  await Promise.all(pictures.map(picture => picture.decode().catch(() => 0)));
  for (const picture of pictures)
    if (!picture.complete || picture.naturalWidth === 0)
      wrong.push("no picture: " + picture.src);
    else if (!picture.alt) wrong.push("no text for the picture: " + picture.src);
  const root = inner.documentElement, window_ = frame.contentWindow;
  if (root.scrollWidth > window_.innerWidth)
    wrong.push(`${root.scrollWidth} wide in ${window_.innerWidth}`);
  // What sticks out of its own scrolling box is fine; what is cut off is not
  for (const box of inner.querySelectorAll("article p, article li, article dt"))
    if (box.getBoundingClientRect().right > window_.innerWidth + 1
        && !box.closest("pre, .table-wrapper, .highlight"))
      wrong.push("too far right: " + box.textContent.trim().slice(0, 60));
  const paper = window_.getComputedStyle(inner.body).backgroundColor;
  frame.remove();
  return {page, width, wrong, paper};
}
(async () => {
  const found = [];
  for (const page of pages)
    for (const width of widths) found.push(await look(page, width));
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script></body></html>
"""


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the manual, and the page that looks at it, which posts what it finds."""

    def do_GET(self) -> None:
        if self.path != "/look":
            super().do_GET()
            return
        page = self.server.look.encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()
        self.server.found.append(json.loads(body))  # type: ignore[attr-defined]
        self.server.is_done.set()  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def look_at_all(folder: Path, is_dark: bool) -> list[dict[str, Any]]:
    """Return page, width, wrong (a list) and paper (its colour) of each view."""
    pages = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.html"))
    handler = functools.partial(_Handler, directory=str(folder))
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home,
    ):
        server.look = _LOOK % (json.dumps(pages), json.dumps(WIDTHS))  # type: ignore[attr-defined]
        server.found, server.is_done = [], threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/look"
        browser = chromium.start(Path(home), is_dark, address)
        try:
            is_done = server.is_done.wait(_SECONDS)  # type: ignore[attr-defined]
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
        if not is_done:
            raise TimeoutError(f"Chromium looked for {_SECONDS} s and did not end")
        found = server.found[0]  # type: ignore[attr-defined]
    assert isinstance(found, list)
    return found


def finds_offline(folder: Path, word: str) -> bool:
    """Return whether the manual's search finds a word, without any server."""
    address = f"{(folder / 'search.html').resolve().as_uri()}?q={word}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        page = chromium.text_of(address, Path(home))
    return f"mpidist.{word}" in page and "found" in page


def main(folder: Path) -> int:
    """Print what is wrong; return 1 if anything is."""
    if chromium.find() is None:
        print("SKIPPED: looking at the manual (Chromium is not installed)")
        return 0
    wrong = []
    papers: list[set[str]] = []
    for is_dark in (False, True):
        found = look_at_all(folder, is_dark)
        mode = "dark" if is_dark else "light"
        for page in found:
            where = f"{page['page']}, {page['width']} wide, {mode}"
            wrong += [f"{where}: {text}" for text in page["wrong"]]
        papers.append({page["paper"] for page in found})
    if (folder / "search.html").exists() and not finds_offline(folder, "Dataset"):
        wrong.append("search.html does not find Dataset")
    if papers[0] & papers[1]:
        wrong.append(f"the same colour, light and dark: {papers}")
    print(*wrong, f"{len(found)} views, {len(wrong)} wrong", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
