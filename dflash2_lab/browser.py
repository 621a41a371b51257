"""Plotly figures to PNG and SVG with the Chrome of the machine, in one supervised process.

A page with plotly.js inlined draws every figure with `Plotly.toImage` and leaves the images as
data URIs in its document, which Chrome prints (`--dump-dom`). No server, no port, no network: what
can go wrong is that there is no Chrome, that it dies, or that it hangs, and each ends in one line.
"""

import base64
import contextlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

from dflash2_lab.errors import LabError

IMAGE_FORMATS = ("png", "svg")
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "chrome-headless-shell",
    "microsoft-edge",
)
APPLICATIONS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
FLAGS = (
    "--headless",
    # Chrome refuses to run as root with its sandbox, and many containers have none to offer; the
    # only page it opens is ours, written from a figure a moment before
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-default-browser-check",
    "--password-store=basic",
    "--use-mock-keychain",
    # --dump-dom prints when this much virtual time has passed and no task is left to run
    "--virtual-time-budget=60000",
    "--dump-dom",
)
PAGE = """<!DOCTYPE html>
<html><head><meta charset="utf-8"><script>{plotly}</script></head><body><script>
const jobs = {jobs};
function leave(id, text) {{
  const node = document.createElement("pre");
  node.id = id;
  node.textContent = text;
  document.body.appendChild(node);
}}
(async () => {{
  for (const [index, job] of jobs.entries()) {{
    const options = {{format: job.format, scale: job.scale, width: job.width, height: job.height}};
    leave("image-" + index, await Plotly.toImage(job.figure, options));
  }}
}})().catch((error) => leave("failure", String(error)));
</script></body></html>
"""


class ImageExportError(LabError):
    """No PNG or SVG could be made; figures can still be saved as JSON and HTML."""


class NoBrowserError(ImageExportError):
    """No Chrome or Chromium on this machine; the message says what to install."""


def find_browser() -> Path | None:
    """The first Chrome, Chromium or Edge on PATH (or among the applications of macOS), or None."""
    found = (shutil.which(name) for name in (*NAMES, *APPLICATIONS))
    return next((Path(path) for path in found if path), None)


def script_json(value: object) -> str:
    """JSON that may stand inside a <script> element: no character sequence can end it."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def render_images(
    jobs: Sequence[tuple[dict, str]],
    *,
    scale: float = 2.0,
    timeout_s: float = 60.0,
    browser: Path | None = None,
) -> list[bytes]:
    """Draw each (plain plotly figure, "png" or "svg") of `jobs`; all in one Chrome process.

    `scale` is pixels per layout pixel of a PNG; `timeout_s` bounds the whole call, in seconds.
    Raises NoBrowserError without a Chrome, ImageExportError when it dies, hangs or draws nothing,
    LabError for another format.
    """
    from plotly.offline import get_plotlyjs

    for _, image_format in jobs:
        if image_format not in IMAGE_FORMATS:
            raise LabError(f"image format: found {image_format!r}, expected one of {IMAGE_FORMATS}")
    chrome = browser or find_browser()
    if chrome is None:
        raise NoBrowserError(
            "PNG and SVG export needs Chrome: install Chromium (Debian, Ubuntu: `apt-get install "
            "chromium`) or Google Chrome; JSON and HTML need none"
        )
    described = [
        {
            "figure": figure,
            "format": image_format,
            "scale": scale if image_format == "png" else 1,
            "width": figure["layout"].get("width", 900),
            "height": figure["layout"].get("height", 500),
        }
        for figure, image_format in jobs
    ]
    with tempfile.TemporaryDirectory(prefix="dflash2-lab-", ignore_cleanup_errors=True) as folder:
        page = Path(folder) / "page.html"
        page.write_text(
            PAGE.format(plotly=get_plotlyjs(), jobs=script_json(described)), encoding="utf-8"
        )
        command = [str(chrome), *FLAGS, f"--user-data-dir={folder}/profile", page.as_uri()]
        document = _supervise(command, timeout_s)
    return [_image(document, index) for index in range(len(jobs))]


def _supervise(command: Sequence[str], timeout_s: float) -> str:
    """Standard output of the command; it and all its children are gone when this returns."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise ImageExportError(
            f"image export: {command[0]} could not be started ({error.strerror})"
        ) from error
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ImageExportError(
            f"image export: {command[0]} gave no image within {timeout_s:g} s and was stopped"
        ) from error
    finally:
        _stop(process)
    if process.returncode != 0:
        code = process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = (errors.decode("utf-8", "replace").strip().splitlines() or ["no message"])[-1]
        raise ImageExportError(f"image export: {command[0]} {how} ({last[:200]})")
    return output.decode("utf-8", "replace")


def _stop(process: subprocess.Popen) -> None:
    # the session that Popen started holds only this browser and its helpers
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _image(document: str, index: int) -> bytes:
    found = re.search(rf'<pre id="image-{index}">data:([^,]*),([^<]*)</pre>', document)
    if found is None:
        failure = re.search(r'<pre id="failure">([^<]*)</pre>', document)
        reason = html.unescape(failure.group(1)) if failure else "the page ended without it"
        raise ImageExportError(f"image export: image {index + 1} was not drawn ({reason})")
    body = html.unescape(found.group(2))
    return base64.b64decode(body) if "base64" in found.group(1) else unquote_to_bytes(body)
