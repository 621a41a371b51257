"""The block viewer without a browser: the data of a block, its still figure, the piece of HTML."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from brute import HOT, SLOT, greedy_trace, some_traces
from drafters import tiny_drafter
from helpers import tiny_target

import dflash2_lab as lab
from dflash2_lab import viewer
from dflash2_lab.browser import NoBrowserError
from dflash2_lab.errors import LabError
from dflash2_lab.figures import figure_json
from dflash2_lab.plots import draw_block
from dflash2_lab.recording import record
from dflash2_lab.replaying import replay
from dflash2_lab.schema import NEAREST
from dflash2_lab.tables import Run
from dflash2_lab.viewer_block import block_view, token_ids, token_texts, visible

PNG = b"\x89PNG not really"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def traces(target):
    return greedy_trace(target, tokens=12, prompts=2)


@pytest.fixture(scope="module")
def run(target, traces):
    return record(target, tiny_drafter(), traces, keep_candidates=True, attention_sample=3)


@pytest.fixture
def picture(monkeypatch):
    """A browser that draws at once; the figures it was given."""
    drawn = []

    def render(jobs, **_):
        drawn.extend(figure for figure, _ in jobs)
        return [PNG for _ in jobs]

    monkeypatch.setattr(viewer, "render_images", render)
    return drawn


# --- the data of a block


def test_a_view_says_what_the_tables_say(run, traces):
    view = block_view(run, "p1", sample=1, anchor=3, traces=traces)
    assert view == json.loads(json.dumps(view, allow_nan=False))
    row = traces.traces.set_index("prompt_id").loc["p1"]
    tokens = [*row["prompt_ids"], *row["response_ids"]]
    at = len(row["prompt_ids"]) + 3
    assert (view["context_len"], view["response_len"]) == (at, 12)
    assert view["anchor_token"] == tokens[at]
    assert view["context"] == tokens[max(0, at - NEAREST) : at]
    assert [slot["target"] for slot in view["slots"]] == tokens[at + 1 : at + 4]
    key = ("p1", 0, 1, 3)
    slots, candidates = (t.set_index(SLOT).loc[key] for t in (run.slots, run.candidates))
    paths = run.paths.set_index([*SLOT[:4], "policy", "slot"]).sort_index().loc[key]
    for slot in view["slots"]:
        assert slot["rank"] == slots.loc[slot["slot"], "target_rank"]
        assert slot["ids"] == candidates.loc[slot["slot"], "ids"].tolist()
        np.testing.assert_allclose(slot["unary"], candidates.loc[slot["slot"], "unary"], rtol=1e-4)
        for policy, path in slot["paths"].items():
            assert path["token"] == paths.loc[(policy, slot["slot"]), "token"]
            assert path["hit"] == (path["token"] == slot["target"])


def test_the_best_score_of_each_slot_is_where_the_greedy_walk_goes(run):
    overruled = 0
    for anchor in range(10):
        view = block_view(run, "p0", anchor=anchor)
        for slot in view["slots"]:
            path = slot["paths"]["selector"]
            best = int(np.argmax(path["scores"]))
            assert slot["ids"][best] == path["token"]
            overruled += best > 0
            assert slot["paths"]["top1"]["scores"] is None
            assert slot["paths"]["top1"]["token"] == slot["ids"][0]
    assert overruled  # else the pairwise scores were not looked at


def test_matched_slots_are_the_accepted_drafts_of_a_replay(run):
    for policy in run.policies:
        steps = replay(run, policy=policy).steps
        for step in steps.itertuples():
            view = block_view(run, step.prompt_id, step.turn, step.sample, step.anchor)
            assert view["matched"][policy] == step.num_accepted
        assert len(steps)


def test_the_own_policy_comes_first(run, target, traces):
    assert block_view(run, "p0")["policies"] == ["selector", "top1"]
    other = record(target, tiny_drafter("dspark"), traces, keep_candidates=True)
    view = block_view(other, "p0")
    assert view["policies"] == ["markov", "top1"]
    assert view["slots"][0]["paths"]["markov"]["scores"] is None
    assert view["attention"] == []


def test_a_drawn_walk_is_scored_after_its_own_tokens(target):
    run = record(target, tiny_drafter(), some_traces(HOT), keep_candidates=True)
    view = block_view(run, "p0", anchor=2)
    candidates = run.candidates.set_index(SLOT).loc[("p0", 0, 0, 2)]
    first, second = view["slots"][:2]
    pairs = np.reshape(candidates.loc[2, "pairwise"], (5, 5))
    came = first["ids"].index(first["paths"]["selector"]["token"])
    expected = candidates.loc[2, "unary"] + pairs[came]
    np.testing.assert_allclose(second["paths"]["selector"]["scores"], expected, rtol=1e-3)


def test_attention_rows_name_older_nearest_and_block(run):
    sampled = run.table("block_attention")
    anchor = int(sampled["anchor"].iloc[0])
    view = block_view(run, "p0", anchor=anchor)
    assert [part["layer"] for part in view["attention"]] == [0, 1]
    for part in view["attention"]:
        assert len(part["rows"]) == run.num_draft
        for row in part["rows"]:
            assert len(row) == 1 + len(view["context"]) + 4
            assert sum(row) == pytest.approx(1, abs=0.01)
    line = sampled.query("prompt_id == 'p0' and anchor == @anchor and layer == 1 and slot == 2")
    found = view["attention"][1]["rows"][1][-4:]
    np.testing.assert_allclose(found, line["block"].iloc[0], atol=1e-4)
    missing = set(range(11)) - set(sampled["anchor"])
    assert block_view(run, "p0", anchor=min(missing))["attention"] == []


def test_without_traces_only_what_was_a_target_is_known(run, traces):
    view = block_view(run, "p0", anchor=4)
    known = block_view(run, "p0", anchor=4, traces=traces)
    assert view["anchor_token"] == known["anchor_token"]
    # three tokens of the response before the anchor follow another anchor; the first one does not
    assert view["context"][-3:] == known["context"][-3:]
    assert not any(view["context"][:-3])
    assert block_view(run, "p0", anchor=0)["anchor_token"] is None


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"prompt_id": "p9"}, "found no block of .*'p9'.*its prompts are 'p0', 'p1'"),
        ({"prompt_id": "p0", "turn": 3}, "found no block"),
        ({"prompt_id": "p0", "anchor": 11}, "no block at anchor 11 .*the last is 10"),
    ],
)
def test_a_block_that_was_not_recorded_is_named(run, key, message):
    with pytest.raises(LabError, match=message):
        block_view(run, **key)


def test_runs_and_traces_that_do_not_fit_are_refused(run, target, traces):
    plain = record(target, tiny_drafter(), traces)
    for call in (block_view, lambda run, _: lab.block_viewer(run)):
        with pytest.raises(LabError, match="keep_candidates=True"):
            call(plain, "p0")
    with pytest.raises(LabError, match=r"no response of .* with 12 tokens"):
        block_view(run, "p0", traces=some_traces(lengths=((5, 13),)))
    frame = traces.traces
    changed = frame.assign(response_ids=[[9] * 12] * len(frame))
    with pytest.raises(LabError, match="not the recorded one"):
        block_view(run, "p0", traces=Run.in_memory(traces.info, {"traces": changed}))


# --- texts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "␣the"),
        ("\n\n", "⏎⏎"),
        ("\t x", "⇥␣x"),
        ("\r", "␍"),
        ("a\u200bb\x07", "a\\u200bb\\u0007"),
        ("naïve 数", "naïve␣数"),
    ],
)
def test_blanks_and_controls_are_visible(text, shown):
    assert visible(text) == shown


def test_token_texts_come_from_the_tokenizer_or_are_ids(target):
    encode = target.tokenizer.encode
    ids = [*encode(" a\n"), *encode("é")]
    texts = token_texts(target, ids)
    assert [texts[token] for token in ids[:3]] == ["␣", "a", "⏎"]
    # half a character has no text: the vocabulary's own spelling is shown
    assert [texts[token] for token in ids[3:]] == ["Ã", "©"]
    assert token_texts(None, [7]) == {7: "#7"}


def test_every_id_of_a_view_has_a_text(run):
    view = block_view(run, "p0", anchor=1)
    ids = token_ids([view])
    assert None not in ids
    named = {slot["target"] for slot in view["slots"]}
    assert named | {i for slot in view["slots"] for i in slot["ids"]} <= set(ids)


# --- the still figure


def test_the_figure_marks_walk_and_targets_and_is_the_same_twice(run, target, traces):
    view = block_view(run, "p0", anchor=2, traces=traces)
    texts = token_texts(target, token_ids([view]))
    figure = draw_block(view, texts)
    assert figure_json(figure) == figure_json(draw_block(view, texts))
    grid, _, targets = figure.data[:3]
    assert grid.x == (1, 2, 3)
    assert len(grid.z) == 5 + 1  # candidates, and a row for tokens that are none
    np.testing.assert_allclose(np.sum(np.array(grid.z[:5], dtype=float), axis=0), 1.0)
    for slot, row, shape in zip(view["slots"], targets.y, figure.layout.shapes, strict=True):
        ids = slot["ids"]
        assert row == (ids.index(slot["target"]) if slot["target"] in ids else 5)
        middle = (shape.y0 + shape.y1) / 2
        assert ids[round(middle)] == slot["paths"]["selector"]["token"]
    caption = figure.layout.meta["caption"]
    assert f"{view['matched']['selector']} of 3 drafts of selector accepted" in caption


def test_the_figure_shows_attention_only_where_there_is_some(run):
    anchor = int(run.table("block_attention")["anchor"].iloc[0])
    view = block_view(run, "p0", anchor=anchor)
    mean = draw_block(view)
    layers = [draw_block(view, layer=layer) for layer in (0, 1)]
    values = [np.array([t for t in f.data if t.type == "heatmap"][1].z) for f in (mean, *layers)]
    np.testing.assert_allclose(values[0], (values[1] + values[2]) / 2)
    assert [t.type for t in draw_block(view | {"attention": []}).data].count("heatmap") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"policy": "markov"}, "policy: found 'markov'"), ({"layer": 7}, "layer: found 7")],
)
def test_the_figure_refuses_what_the_view_lacks(run, options, message):
    anchor = int(run.table("block_attention")["anchor"].iloc[0])
    with pytest.raises(LabError, match=message):
        draw_block(block_view(run, "p0", anchor=anchor), **options)


def test_long_and_hostile_texts_are_cut_and_escaped(run):
    view = block_view(run, "p0")
    texts = dict.fromkeys(token_ids([view]), "<b>" + "x" * 40)
    grid = draw_block(view, texts).data[0]
    cells = [text for row in grid.text for text in row if text]
    assert cells
    for cell in cells:
        assert cell.startswith("&lt;b&gt;x")
        assert "…" in cell


# --- the viewer


def test_the_default_blocks_are_those_with_attention(run, picture):
    shown = lab.block_viewer(run)
    sampled = run.table("block_attention").drop_duplicates(SLOT[:4])
    assert [(v["prompt_id"], v["anchor"]) for v in shown.views] == list(
        zip(sampled["prompt_id"], sampled["anchor"], strict=True)
    )
    assert all(view["attention"] for view in shown.views)
    assert repr(shown) == "BlockViewer(6 blocks of 2 prompts)"
    assert not picture  # nothing is drawn before it is shown


def test_prompts_anchors_and_a_limit_choose_blocks(run):
    def keys(**options):
        return [(v["prompt_id"], v["anchor"]) for v in lab.block_viewer(run, **options).views]

    assert keys(prompts=["p1"], anchors=[0, 4]) == [("p1", 0), ("p1", 4)]
    assert len(keys(anchors=range(99))) == 22
    assert keys(anchors=range(99), max_blocks=2) == [("p0", 0), ("p1", 0)]
    with pytest.raises(LabError, match="no recorded block of prompts"):
        keys(prompts=["p7"])
    with pytest.raises(LabError, match="max_blocks: found 0"):
        keys(max_blocks=0)


class _Scripts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.scripts = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.tags[-1][0] == "script" and data.strip():
            self.scripts.append(data)


def test_the_page_holds_data_script_and_picture_and_asks_for_nothing(run, traces, picture):
    hostile = SimpleNamespace(
        tokenizer=SimpleNamespace(decode=lambda ids: "</script><script>alert(1)</script>")
    )
    shown = lab.block_viewer(run, hostile, traces)
    text = shown.html()
    page = _Scripts()
    page.feed(text)
    data, script = page.scripts
    assert json.loads(data)["views"] == list(shown.views)
    assert set(json.loads(data)["texts"].values()) == {"</script><script>alert(1)</script>"}
    assert "document.currentScript" in script
    (image,) = (attributes for tag, attributes in page.tags if tag == "img")
    assert image["src"].startswith("data:image/png;base64,")
    assert "drafts of selector accepted" in image["alt"]
    assert not re.search(r"https?://", text)
    assert len(text) < 400_000
    assert picture[0] == json.loads(figure_json(shown.figure()))
    bundle = shown._repr_mimebundle_()
    assert bundle == {"text/html": text, "text/plain": repr(shown)}


def test_without_a_browser_the_page_says_so_in_place_of_the_picture(run, monkeypatch):
    def none(*_, **__):
        raise NoBrowserError("install Chromium")

    monkeypatch.setattr(viewer, "render_images", none)
    text = lab.block_viewer(run).html()
    assert "No still picture: install Chromium" in text
    assert "<img" not in text
    assert "drafts of selector accepted" in text


def test_the_script_never_writes_markup(run):
    # token texts are whatever a model says: they may only ever become text nodes
    source = (viewer.resources.files("dflash2_lab") / "viewer.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", source)


def test_viewing_needs_neither_torch_nor_a_model():
    code = (
        "import sys, dflash2_lab.viewer\n"
        "assert not [m for m in ('torch', 'transformers', 'plotly') if m in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
