"""`bench record` on a tiny target: both sides do the same work, and the run folder says all."""

import json
import sys

import pytest
import torch
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.bench.record import (
    PAIRS,
    attention_extra_bytes,
    bench_record,
    peak_bytes,
    step_all,
    table,
)
from dflash2_lab.bench.timing import Spread, alternate, ratios
from dflash2_lab.errors import LabError
from dflash2_lab.models.io import save_drafter
from dflash2_lab.prompts import Prompt
from dflash2_lab.published import published_model
from dflash2_lab.recording import record
from dflash2_lab.tables import read_run_info
from dflash2_lab.tracing import trace


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafter():
    return tiny_drafter("dflash2")


@pytest.fixture
def folder(drafter, tmp_path):
    save_drafter(drafter, tmp_path / "drafter")
    return tmp_path / "drafter"


def run_bench(target, folder, **changes):
    options = {"limit": 1, "max_new_tokens": 8, "repeats": 2, "out": folder.parent / "bench"}
    return bench_record(target, str(folder), **(options | changes))


def test_run_folder_holds_table_and_every_measurement(target, folder):
    result = run_bench(target, folder)
    out = folder.parent / "bench"
    saved = json.loads((out / "bench.json").read_text())
    assert result["json"] == saved | {"folder": str(out)}
    assert (out / "table.txt").read_text().strip() in result["text"]
    assert set(saved["seconds"]) == {"record", "published"}
    assert set(saved["attention_seconds"]) == {"record", "record, no attention"}
    assert {len(values) for values in saved["attention_seconds"].values()} == {2 * PAIRS}
    assert {len(values) for values in saved["seconds"].values()} == {2}
    paired = ratios(saved["seconds"]["published"], saved["seconds"]["record"])
    assert saved["speedup"]["low"] == min(paired)
    assert saved["skipped"] is None
    info = read_run_info(out)
    assert info["kind"] == "bench"
    assert {"packages", "git", "threads", "command", "device"} <= set(info["environment"])


def test_without_the_published_package_one_line_says_what_is_skipped(target, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "dflash.model", None)
    result = run_bench(target, folder, repeats=1)
    assert "published" not in result["json"]["seconds"]
    assert "speedup" not in result["json"]
    assert [line for line in result["text"].splitlines() if "skipped" in line] == [
        "skipped: stepping the published package (pip install --no-deps dflash==0.1.0)"
    ]


def test_a_drafter_that_the_package_has_no_model_for_is_skipped_too(target, tmp_path):
    save_drafter(tiny_drafter("dspark"), tmp_path / "drafter")
    result = run_bench(target, tmp_path / "drafter", repeats=1)
    assert "published" not in result["json"]["seconds"]
    assert "the package dflash knows DFlash and DFlash 2" in result["json"]["skipped"]


def test_both_sides_cover_the_same_anchors_with_the_same_outcome(target, drafter):
    traces = trace(target, [Prompt("p", ("hello",), "set")], max_new_tokens=16)
    model = published_model(drafter, target.embed_weight)
    counts = step_all(target, model, traces)[0]
    run = record(target, drafter, traces)
    hits = run.paths[run.paths["policy"] == "selector"].sort_values(["anchor", "slot"])
    ours = hits.groupby("anchor")["hit"].agg(lambda hit: int(hit.cumprod().sum())).tolist()
    offered = hits.groupby("anchor").size()
    assert ours == [min(count, size) for count, size in zip(counts, offered, strict=True)]


def test_sides_alternate_and_the_first_round_is_not_counted():
    calls = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3)
    assert "".join(calls) in ("abbaabba", "baabbaab")
    assert [len(values) for values in seconds.values()] == [3, 3]


def test_spread_is_median_smallest_and_largest():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread(2.0, 1.0, 3.0).text() == "2 [1, 3]"


@pytest.mark.parametrize(
    ("speedup", "ratio", "missed"), [(9.0, 1.1, 0), (7.9, 1.1, 1), (9.0, 1.2, 1), (1.0, 2.0, 2)]
)
def test_table_holds_medians_against_their_bars(speedup, ratio, missed):
    text = table(
        {
            "drafter": "d",
            "num_anchors": 10,
            "num_requests": 1,
            "repeats": 5,
            "seconds_per_anchor": {"record": {"median": 0.01, "low": 0.01, "high": 0.02}},
            "speedup": {"median": speedup, "low": 0.5, "high": 50.0},
            "attention_time_ratio": {"median": ratio, "low": 0.5, "high": 50.0},
            "attention_extra_bytes": {"512": 1_000_000},
            "skipped": None,
        }
    )
    assert text.count("MISSED") == missed
    assert "94 % interval" in text
    assert "10 [10, 20] ms" in text


def test_repeats_below_one_are_refused(target, folder):
    with pytest.raises(LabError, match="repeats"):
        run_bench(target, folder, repeats=0)


def test_peak_is_the_most_held_at_one_time():
    def work():
        for _ in range(3):
            torch.empty(1000, dtype=torch.float32)
        return torch.empty(1000).add(1.0)

    assert 8000 <= peak_bytes(work, torch.device("cpu")) < 9000


def test_extra_memory_of_attention_does_not_grow_with_the_context(target, drafter):
    small, large = (attention_extra_bytes(target, drafter, size) for size in (64, 2048))
    assert large - small < 4096
