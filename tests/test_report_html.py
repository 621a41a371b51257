"""Reports as pages: what stands on them, the same bytes again, how a real browser shows them."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from recordings import Request, make_run
from test_comparison import recorded, saved

import dflash2_lab as lab
from dflash2_lab.browser import FLAGS, find_browser
from dflash2_lab.cli import main
from dflash2_lab.comparison import compare
from dflash2_lab.conditions import doubts, responses
from dflash2_lab.errors import LabError
from dflash2_lab.html_comparison import comparison_page
from dflash2_lab.html_page import facts, page, paragraph, warning_box
from dflash2_lab.html_report import record_page
from dflash2_lab.recording_figures import figure_names
from dflash2_lab.replaying import replay
from dflash2_lab.report_commands import report_page
from dflash2_lab.tables import Run, write_run_info, write_shard

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "figures" / "bench"
LIMIT = 6_000_000  # bytes


def spoken(run):
    """The run with responses of ever new tokens, but for prompt p0, which repeats one."""
    slots = run.slots.copy()
    new = np.where(slots["prompt_id"] == "p0", 7, 100 + slots["anchor"] + slots["slot"])
    slots["target_token"] = new.astype(np.int32)
    return Run(info=run.info, frames=run.frames | {"slots": slots})


@pytest.fixture(scope="module")
def run():
    return spoken(recorded(1, template=[{"options": {"enable_thinking": False}, "system": None}]))


@pytest.fixture(scope="module")
def text(run):
    return record_page(run)


@pytest.fixture
def no_figures(monkeypatch):
    """Pages without figures, which take seconds to draw."""
    monkeypatch.setattr("dflash2_lab.html_report.record_figures", lambda runs: {})


def without_scripts(text):
    return re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def between(text, start, end="<h2>"):
    found = without_scripts(text).split(f"<h2>{start}</h2>")[1]
    return found.split(end)[0]


# what stands on the page of a recording


def test_the_summary_has_every_policy_with_its_interval(run, text):
    rows = between(text, "Acceptance length")
    for policy in ("top1", "selector", "oracle@16"):
        assert policy in rows
    pooled = replay(run, "selector").pooled
    assert f"{pooled.value:.2f} " in rows
    assert f"[{pooled.low:.2f}, {pooled.high:.2f}]" in rows


def test_all_figures_that_the_tables_allow_are_there_with_their_captions(run, text):
    names = figure_names({"d": run})
    assert len(names) == 8
    assert re.findall(r'<div id="(\w+)" style', text) == names
    captions = re.findall(r"<figcaption>(.+?)</figcaption>", text)
    assert len(captions) == 8
    for caption in captions:
        assert f'aria-label="{caption}"' in text


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"attention": False}, {"attention_share", "attention_map", "share_against_recall"}),
        ({"anchor_stride": 2}, {"acceptance_by_policy", "headroom_by_k", "selector_recovery"}),
    ],
)
def test_figures_without_their_tables_are_left_out(run, options, missing):
    every = set(figure_names({"d": run}))
    assert set(figure_names({"d": recorded(1, **options)})) == every - missing


@pytest.mark.usefixtures("no_figures")
def test_provenance_has_the_command_versions_hashes_sampling_and_template_options():
    made = {
        "command": ["dflash2-lab", "record", "--out", "a folder"],
        "git": "abc-dirty",
        "date": "2026-01-02",
        "packages": {"torch": "2.13.0"},
    }
    template = [{"options": {"enable_thinking": True}, "system": "be brief"}]
    run = recorded(1, environment=made, template=template, prompt_set_hash="hash-of-prompts")
    found = between(record_page(run), "Provenance", "</table>")
    for word in ("dflash2-lab record --out", "&#x27;a folder&#x27;", "abc-dirty", "2026-01-02"):
        assert word in found
    for word in (
        "2.13.0",
        "hash-of-prompts",
        "sampling.temperature",
        "enable_thinking",
        "be brief",
    ):
        assert word in found
    assert "target.files.model.safetensors" in found


def test_a_page_asks_for_nothing_outside_itself_and_is_small(text):
    assert len(text.encode()) < LIMIT
    body = without_scripts(text)
    assert "http" not in body and " src=" not in body and "<link" not in body
    assert "url(" not in body and "@import" not in body


@pytest.mark.slow
def test_the_same_tables_give_the_same_bytes_in_a_process_with_another_hash_seed(text):
    program = (
        "import sys; sys.path[:0] = ['tests']\n"
        "import hashlib, test_report_html as t\n"
        "from test_comparison import recorded\n"
        "options = [{'options': {'enable_thinking': False}, 'system': None}]\n"
        "page = t.record_page(t.spoken(recorded(1, template=options)))\n"
        "print(hashlib.sha256(page.encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.usefixtures("no_figures")
def test_names_from_outside_cannot_become_markup():
    evil = "<script>alert(1)</script>"
    run = recorded(1, name=evil, datasets=(evil,), prompt_set_hash=evil)
    text = record_page(run)
    assert evil not in text
    assert "&lt;script&gt;alert(1)" in text
    assert evil not in warning_box([evil]) + facts({evil: evil}) + paragraph(evil)
    assert evil not in page(evil, evil, [])


# what puts the numbers in doubt


@pytest.mark.usefixtures("no_figures")
def test_repetition_is_shown_beside_the_lengths(text):
    assert "degenerate_output: 1 of 5 prompts" in without_scripts(text).split("<h2>")[0]
    assert "1 of 5 prompts have a response that repeats itself" in text
    clean = spoken(recorded(1, num_prompts=3))
    slots = clean.slots.assign(target_token=100 + clean.slots["anchor"] + clean.slots["slot"])
    clean = record_page(Run(info=clean.info, frames=clean.frames | {"slots": slots}))
    assert "degenerate_output" not in clean
    assert "0 of 3 prompts have a response that repeats itself" in clean


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_responses_are_rebuilt_from_the_slots_of_any_stride(stride):
    run = spoken(recorded(1))
    kept = {n: f[f["anchor"] % stride == 0] for n, f in run.frames.items() if "anchor" in f}
    some = Run(info=run.info | {"anchor_stride": stride}, frames=run.frames | kept)
    rebuilt = responses(some).set_index("prompt_id")["response_ids"]
    lengths = run.anchors.groupby("prompt_id")["response_len"].first()
    for prompt in ("p1", "p4"):
        assert rebuilt[prompt] == list(range(101, 100 + lengths[prompt]))


def test_anchors_too_far_apart_say_nothing_about_repetition():
    run = Run(info=recorded(1).info | {"anchor_stride": 9}, frames=recorded(1).frames)
    assert responses(run) is None
    assert doubts(run).degenerate == ()


@pytest.mark.usefixtures("no_figures")
def test_off_policy_traces_are_marked_and_their_acceptance_is_not_shown():
    text = without_scripts(record_page(recorded(1, on_policy=False)))
    assert "off-policy traces" in text
    assert "Acceptance length" not in text.split("How to read")[0]
    assert "position recall@1" in text


def test_traces_by_a_target_of_another_precision_are_marked():
    other = {"name": "smollm2-135m", "dtype": "bfloat16", "quantisation": None}
    notes = doubts(recorded(1, trace_target=other)).warnings
    assert any("dtype bfloat16, recorded with float32" in note for note in notes)


@pytest.mark.usefixtures("no_figures")
def test_datasets_stand_in_their_own_table_always_and_random_tokens_are_called_so():
    one = between(record_page(recorded(1)), "Acceptance length by dataset")
    assert one.count("gsm8k") == 3
    run = recorded(1, datasets=("gsm8k", "random-512"))
    text = record_page(run)
    table = between(text, "Acceptance length by dataset")
    assert table.count("gsm8k") == 3
    assert table.count("random-512 (random tokens, not text)") == 3
    assert "dataset random-512 (random tokens" in without_scripts(text).split("<h2>")[0]
    lengths = replay(run, "top1").by_dataset.query("aggregation == 'pooled' and terminal == 'with'")
    for row in lengths.itertuples():
        assert f"{row.value:.2f} " in table


@pytest.mark.usefixtures("no_figures")
def test_a_dataset_with_random_in_its_name_is_not_taken_for_random_tokens():
    text = without_scripts(record_page(recorded(1, datasets=("randomised-trials",))))
    assert "random tokens" not in text


# other kinds of run


def test_a_decode_has_the_lengths_of_its_steps(tmp_path):
    requests = [
        Request(
            response_len=25,
            accept={"top1": np.random.default_rng(seed).integers(0, 4, 24)},
            prompt_id=f"{group}/{seed}",
        )
        for seed, group in enumerate(("gsm8k", "gsm8k", "mbpp"))
    ]
    result = replay(make_run(requests, num_draft=3), "top1")
    info = {"kind": "decode", "policy": "top1", "num_draft": 3, "engine": "eager"}
    info |= {"target": {"name": "t", "dtype": "float32"}, "drafter": {"name": "d"}}
    info |= {"sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0}, "tokens_per_second": 12.3}
    write_run_info(tmp_path, info | {"complete": True})
    write_shard(tmp_path, "steps", 0, result.steps)
    text = report_page(tmp_path)
    rows = between(text, "Acceptance length")
    for one in (result.pooled, result.per_request):
        assert f"{one.value:.2f} " in rows
        assert f"[{one.low:.2f}, {one.high:.2f}]" in rows
    assert f">{result.pooled_uncut.value:.2f}<" in rows
    groups = between(text, "By group of prompts")
    assert "gsm8k" in groups and "mbpp" in groups
    survival = between(text, "Survival by slot")
    for slot in result.survival:
        assert f"{slot.value:.3f} " in survival
    assert "12.3 tokens/s" in text and "<script" not in text


def test_a_decode_without_a_step_is_an_error():
    empty = {"steps": pd.DataFrame({name: [] for name in ("prompt_id",)})}
    with pytest.raises(LabError, match="found no verify step"):
        report_page(Run(info={"kind": "decode", "drafter": {"name": "d"}}, frames=empty))


@pytest.mark.parametrize(
    ("folder", "words", "figure"),
    [
        (BENCH / "cycle_smollm2", "Benchmark: cycle", "cycle_breakdown"),
        (BENCH / "throughput", "tokens over all time", "throughput_by_concurrency"),
        (BENCH / "kernels", "Benchmark: kernels", None),
        (
            ROOT / "figures" / "losslessness" / "tables" / "mutation_score",
            "broken decoders found",
            "tokens_to_detection",
        ),
        (ROOT / "figures" / "losslessness" / "tables" / "monitor_paths", "paths", "monitor_path"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_benchmarks_and_scores_have_their_text_and_their_figure(folder, words, figure):
    text = report_page(folder)
    assert words in without_scripts(text)
    assert re.findall(r'<div id="(\w+)" style', text) == ([figure] if figure else [])
    assert len(text.encode()) < LIMIT


# the command and the function


@pytest.mark.usefixtures("no_figures")
def test_the_command_writes_the_page_and_says_where(run, tmp_path, capsys):
    folder = saved(run, tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values == {"file": str(out), "bytes": out.stat().st_size}
    assert out.read_bytes() == (folder / "report.html").read_bytes()
    assert lab.write_report(Run.open(folder), out) == out
    assert lab.write_report(run, out).read_bytes() == (folder / "report.html").read_bytes()


# in a browser

TOLD = """<script>
document.body.insertAdjacentHTML("beforeend", `<pre id="told">${JSON.stringify({
  wide: document.documentElement.scrollWidth,
  window: innerWidth,
  drawn: [...document.querySelectorAll("figure .js-plotly-plot")].map((div) => [
    div.id,
    div.querySelectorAll("svg.main-svg").length,
    getComputedStyle(div.querySelector(".gtitle")).fill,
    div.parentElement.getBoundingClientRect().right,
  ]),
  buttons: [...new Set([...document.querySelectorAll(".modebar-btn")].map(
    (button) => button.dataset.title))],
  cut: [...document.querySelectorAll(".scroll, pre:not(#told)")].filter(
    (box) => box.scrollWidth > box.clientWidth).length,
})}</pre>`);
</script></body>"""


def opened(text, width, *flags):
    """What a headless Chrome without network says about a page, and its console's lines."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "page.html"
        path.write_text(text.replace("</body>", TOLD))
        command = [str(find_browser()), *FLAGS, *flags, "--enable-logging=stderr"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},1000"]
        done = subprocess.run(
            [*command, f"--user-data-dir={folder}/profile", path.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout)
    lines = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(found.group(1)) if found else None, lines


needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chrome on this machine")


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [1200, 600])
@pytest.mark.parametrize("kind", ["report", "comparison"])
def test_a_browser_shows_every_figure_offline_without_an_error_or_an_overflow(text, kind, width):
    names = figure_names({"d": recorded(1)})
    if kind == "comparison":
        runs = recorded(1, "dflash"), recorded(2)
        text = comparison_page(compare(*runs), runs)
    told, lines = opened(text, width)
    assert lines == []
    assert [name for name, *_ in told["drawn"]] == names
    assert all(svgs > 0 for _, svgs, *_ in told["drawn"])
    assert told["window"] == width
    assert told["wide"] <= width
    assert max(right for *_, right in told["drawn"]) <= width
    assert told["cut"] == 0
    assert "Zoom" in told["buttons"]
    assert not [title for title in told["buttons"] if "Share" in title]


@pytest.mark.slow
@needs_browser
def test_figures_are_dark_where_the_system_is(text):
    dark, lines = opened(text, 1000, "--blink-settings=preferredColorScheme=0")
    light, _ = opened(text, 1000)
    assert lines == []
    assert {color for _, _, color, _ in light["drawn"]} == {"rgb(34, 34, 34)"}
    assert {color for _, _, color, _ in dark["drawn"]} == {"rgb(236, 236, 236)"}


@pytest.mark.slow
@needs_browser
def test_the_browser_test_sees_an_error_and_an_overflow():
    broken = page("t", "", ['<div style="width: 3000px">x</div><script>nothing()</script>'])
    told, lines = opened(broken, 600)
    assert any("nothing is not defined" in line for line in lines)
    assert told["wide"] > 600 and told["drawn"] == []
