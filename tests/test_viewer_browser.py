"""The block viewer in a real JupyterLab and in exported HTML, driven through DevTools."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import websocket
from brute import greedy_trace
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.browser import FLAGS, find_browser
from dflash2_lab.recording import record
from dflash2_lab.tables import Run, write_run_info, write_shard
from dflash2_lab.viewer import block_viewer
from dflash2_lab.viewer_block import visible

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chrome or Chromium on this machine"),
]
ROOT = Path(__file__).parents[1]
TOKEN = "viewer-test"
COMMAND = "window.jupyterapp.commands.execute"
CODE = """import dflash2_lab as lab

run, traces = lab.Run.open("run"), lab.Run.open("traces")
lab.block_viewer(run, traces=traces)"""
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "apputils-extension/themes": {"theme": "JupyterLab Light"},
}
READ = """(() => {
  const live = document.querySelector(".dflash2-block .live");
  const pick = (name) => live.querySelector(`select[name=${name}]`);
  return live && {
    prompt: pick("prompt").selectedOptions[0].text,
    anchor: pick("anchor").selectedOptions[0].text,
    anchors: [...pick("anchor").options].map((option) => option.text),
    walk: pick("walk").value,
    text: live.querySelector(".text").textContent,
    verdict: live.querySelector(".verdict strong").textContent,
    cells: live.querySelectorAll("td").length,
  };
})()"""
READY = """(() => {
  const shell = window.jupyterapp?.shell;
  if (!shell) return false;
  const started = (widget) => widget.sessionContext?.session?.kernel;
  const notebook = [...shell.widgets("main")].find(started);
  if (notebook) shell.activateById(notebook.id);
  return !!notebook && shell.currentWidget === notebook;
})()"""
PICK = """(() => {{
  const select = document.querySelector(".dflash2-block select[name={name}]");
  select.selectedIndex = {index};
  select.dispatchEvent(new Event("change", {{bubbles: true}}));
}})()"""


def wait_for(read, what, seconds=60.0):
    """What `read` returns once it is something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = read()
        if found:
            return found
        time.sleep(0.2)
    raise AssertionError(f"{what} did not appear within {seconds:g} s")


def started(stack, command, folder, **environment):
    """A process with its own log in `folder`, ended with the stack."""
    log = stack.enter_context((folder / "log.txt").open("w"))
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | environment, stdout=log, stderr=log
    )

    def stop():
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(stop)
    return process


class Page:
    """One tab of a headless Chrome; `errors` are its console's."""

    def __init__(self, stack, folder, width=1000, height=1100):
        folder.mkdir()
        flags = [flag for flag in FLAGS if not flag.startswith(("--dump", "--virtual"))]
        command = [str(find_browser()), *flags, "--remote-debugging-port=0", "about:blank"]
        size = f"--window-size={width},{height}"
        started(stack, [*command, size, f"--user-data-dir={folder / 'profile'}"], folder)
        active = folder / "profile" / "DevToolsActivePort"
        port = wait_for(lambda: active.is_file() and active.read_text().split(), "Chrome")[0]

        def tabs():
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as reply:
                return [tab for tab in json.load(reply) if tab["type"] == "page"]

        address = wait_for(tabs, "a tab")[0]["webSocketDebuggerUrl"]
        self.socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        stack.callback(self.socket.close)
        self.number, self.errors = 0, []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        # JupyterLab knows a current widget only in a window that has the focus
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method, **parameters):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.note(message.get("method"), message.get("params", {}))

    def note(self, event, said):
        if event == "Runtime.exceptionThrown":
            self.errors.append(said["exceptionDetails"])
        elif event == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.errors.append(said["entry"])
        elif event == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
            self.errors.append(said["args"])

    def run(self, script):
        """The value of a script, of its promise when it gives one."""
        options = {"returnByValue": True, "awaitPromise": True}
        done = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def pick(self, name, index):
        self.run(PICK.format(name=name, index=index))
        return self.run(READ)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A notebook beside a recording of a tiny drafter and its traces."""
    folder = tmp_path_factory.mktemp("viewer")
    target = tiny_target()
    traces = greedy_trace(target, tokens=14, prompts=2)
    write_run_info(folder / "traces", traces.info)
    write_shard(folder / "traces", "traces", 0, traces.traces)
    options = {"keep_candidates": True, "attention_sample": 3}
    record(target, tiny_drafter(), traces, out=folder / "run", **options)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CODE)], metadata=kernel)
    nbformat.write(notebook, folder / "viewer.ipynb")
    # the same with its output, as a stranger's notebook: JupyterLab runs no script of it
    shown = block_viewer(Run.open(folder / "run"))._repr_mimebundle_()
    notebook.cells[0].outputs = [nbformat.v4.new_output("display_data", data=shown)]
    nbformat.write(notebook, folder / "foreign.ipynb")
    return folder


def check_pickers(page):
    """Every picker changes what is shown, and the change can be undone."""
    first = page.run(READ)
    assert first["walk"] == "selector"
    assert len(first["anchors"]) == 3
    assert first["cells"] > 3 * (2 + 5)
    second = page.pick("anchor", 1)
    assert second["anchor"] == first["anchors"][1]
    assert second["text"] != first["text"]
    other = page.pick("prompt", 1)
    assert (other["prompt"][:2], first["prompt"][:2]) == ("p1", "p0")
    assert other["text"] != second["text"]
    assert page.pick("prompt", 0) == first
    page.pick("walk", 1)
    assert page.run(READ)["walk"] == "top1"
    page.pick("walk", 0)
    assert page.run(READ) == first
    shades = """[...document.querySelectorAll(".dflash2-block .text .token")].map(
        (token) => token.style.backgroundColor).join()"""
    before = page.run(shades)
    page.run("document.querySelectorAll('.dflash2-block th button')[2].click()")
    assert page.run(shades) != before
    by_slot = page.run(shades)
    page.pick("attention", 1)
    assert page.run(shades) != by_slot


def check_keyboard(page):
    """The element in focus keeps it when the viewer is built anew."""
    focused = "document.activeElement.name"
    press = """((name) => {
        const button = document.querySelector(`.dflash2-block [name="${name}"]`);
        button.focus();
        button.click();
    })"""
    anchors = page.run(READ)["anchors"]
    page.pick("anchor", 0)
    for place in range(1, len(anchors) - 1):
        page.run(f"{press}('next')")
        assert (page.run(READ)["anchor"], page.run(focused)) == (anchors[place], "next")
    page.run(f"{press}('next')")  # to the last one, where there is no next
    assert (page.run(READ)["anchor"], page.run(focused)) == (anchors[-1], "anchor")
    page.run(f"{press}('slot 2')")
    assert page.run(focused) == "slot 2"
    unnamed = """[...document.querySelectorAll(".live button, .live select")].filter(
        (element) => !element.ariaLabel && !element.labels.length).length"""
    assert page.run(unnamed) == 0
    page.pick("anchor", 0)


def open_in_lab(stack, folder, tmp_path):
    """A JupyterLab of its own with the notebook open and its kernel started."""
    settings = tmp_path / "settings"
    for name, values in SETTINGS.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    places = {name: str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0"]
    command += ["--allow-root", "--expose-app-in-browser", f"--IdentityProvider.token={TOKEN}"]
    started(
        stack,
        [*command, f"--ServerApp.root_dir={folder}"],
        tmp_path,
        PYTHONPATH=str(ROOT),
        JUPYTERLAB_SETTINGS_DIR=str(settings),
        JUPYTERLAB_WORKSPACES_DIR=str(tmp_path / "workspaces"),
        **{f"JUPYTER_{name}_DIR": place for name, place in places.items()},
    )
    page = Page(stack, tmp_path / "chrome")
    address = wait_for(lambda: server_address(runtime), "the server")
    page.call("Page.navigate", url=f"{address}lab/tree/viewer.ipynb?token={TOKEN}")
    wait_for(lambda: page.run(READY), "the notebook")
    return page


def server_address(runtime):
    for path in runtime.glob("jpserver-*.json"):
        try:
            return json.loads(path.read_text())["url"]
        except json.JSONDecodeError:
            return None  # half written
    return None


def test_the_viewer_in_jupyterlab_follows_its_pickers(folder, tmp_path):
    with ExitStack() as stack:
        page = open_in_lab(stack, folder, tmp_path)
        page.run(f"{COMMAND}('notebook:run-all-cells')")
        wait_for(lambda: page.run(READ), "the viewer")
        check_pickers(page)
        page.run(f"{COMMAND}('docmanager:open', {{path: 'foreign.ipynb'}}).then(() => true)")
        still = 'document.querySelector(`img[alt*="drafts of selector"]`)?.naturalWidth'
        assert wait_for(lambda: page.run(still), "the still picture") == 1350
        assert page.errors == []


def test_the_viewer_in_an_exported_page_follows_its_pickers_offline(folder, tmp_path):
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", "viewer.ipynb"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"--output-dir={tmp_path}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "viewer.html").read_text()
    assert '<div class="still"><img alt=' in text
    with ExitStack() as stack:
        page = Page(stack, tmp_path / "chrome")
        page.call("Network.enable")
        page.call("Network.setBlockedURLs", urls=["http://*", "https://*"])
        page.call("Page.navigate", url=(tmp_path / "viewer.html").as_uri())
        wait_for(lambda: page.run(READ), "the viewer")
        check_pickers(page)
        check_keyboard(page)
        own = [error for error in page.errors if "net::" not in str(error)]
        assert own == []  # nbconvert's own template asks for two scripts, which are not needed


def test_what_a_model_says_stays_text_in_the_page(folder, tmp_path):
    said = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=1</script>\n\"q\""
    model = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: said))
    shown = block_viewer(Run.open(folder / "run"), model, Run.open(folder / "traces"))
    page_file = tmp_path / "page.html"
    page_file.write_text(f"<!DOCTYPE html><meta charset='utf-8'>{shown.html()}")
    with ExitStack() as stack:
        page = Page(stack, tmp_path / "chrome", width=600)
        page.call("Page.navigate", url=page_file.as_uri())
        found = wait_for(lambda: page.run(READ), "the viewer")
        assert visible(said) in found["text"]
        assert page.run("[window.hacked, document.querySelectorAll('.live img').length]") == [
            None,
            0,
        ]
        wide = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert page.run(wide)  # a long token breaks the line and not the page
        assert page.errors == []
