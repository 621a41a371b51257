"""`bench cycle` at tiny shapes on the CPU: full cycles, paired overheads, and its run folder."""

import json
import sys

import pytest
import torch

from dflash2_lab.bench import cycle, timing
from dflash2_lab.bench.breakdown import kernel_times
from dflash2_lab.bench.cycle import CycleOptions, bench_cycle, check_full, full_cycles, overhead
from dflash2_lab.bench.cycle_table import table
from dflash2_lab.bench.reference import cycle_seconds, published_or_reason
from dflash2_lab.bench.shapes import SHAPES, random_drafter, random_target
from dflash2_lab.bench.timing import Spread
from dflash2_lab.cli import main
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.commit import BROKEN
from dflash2_lab.tables import read_run_info

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]


@pytest.fixture(scope="module", autouse=True)
def _small_copies():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(timing.COPY_BYTES, "cpu", 2**16)
        yield


@pytest.fixture(scope="module")
def target():
    return random_target(TINY, CPU)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The command with two windows, seen from outside."""
    out = tmp_path_factory.mktemp("cycle") / "run"
    options = ["--num-draft", "1", "3", "--context", "12", "--repeats", "2", "--inner", "1"]
    options += ["--reference-cycles", "2", "--device", "cpu", "--out", str(out)]
    assert main(["bench", "cycle", *options]) == 0
    return out, json.loads((out / "bench.json").read_text())


def test_run_folder_holds_every_side_of_every_window(run):
    out, saved = run
    assert [(cell["batch"], cell["num_draft"]) for cell in saved["cells"]] == [(1, 1), (1, 3)]
    for cell in saved["cells"]:
        assert list(cell["sides"]) == sorted(cycle.VARIANTS)
        for side in cell["sides"].values():
            assert len(side["seconds"]) == 2
            assert side["cycle"]["median"] == pytest.approx(sum(side["seconds"]) / 2)
            copy = saved["bandwidth"]["copy"]["median"]
            assert side["floor_seconds"] == pytest.approx(sum(side["weight_bytes"].values()) / copy)
            assert side["startup_seconds"] > 0
    assert set(saved["cells"][0]["kernels"]) == {"dflash2 selector"}
    assert saved["cells"][1]["kernels"] == {}
    info = read_run_info(out)
    assert (info["kind"], info["bench"]) == ("bench", "cycle")
    assert {"packages", "command", "device"} <= set(info["environment"])


def test_overheads_are_differences_of_the_same_round(run):
    cell = run[1]["cells"][0]
    sides = cell["sides"]
    for name, (more, less) in cycle.OVERHEADS.items():
        pairs = zip(sides[more]["seconds"], sides[less]["seconds"], strict=True)
        assert cell["overheads"][name]["seconds"] == [a - b for a, b in pairs]


def test_the_table_names_sides_floors_the_package_and_what_was_skipped(run):
    text = (run[0] / "table.txt").read_text()
    for word in ("dflash2 selector", "x floor", "DSpark", "3 layers instead of 2", "+-"):
        assert word in text
    assert text.count("published package") == 1  # for whole blocks only
    assert "skipped: CUDA graphs (no GPU used; tiny shapes" in text
    assert "MISSED" not in text  # no bar holds for a CPU
    assert max(map(len, text.splitlines())) <= 100


def test_the_package_is_skipped_with_its_reason(monkeypatch, target):
    drafters = {(kind, False): random_drafter(TINY, kind, CPU) for kind in ("dflash", "dflash2")}
    monkeypatch.setitem(sys.modules, "dflash.model", None)
    found, reason = cycle._published(target, drafters, CycleOptions(reference_cycles=1))
    assert (found, reason) == ({}, "pip install --no-deps dflash==0.1.0")
    found, reason = cycle._published(target, drafters, CycleOptions(reference_cycles=0))
    assert (found, reason) == ({}, "--reference-cycles 0")


def test_every_turn_starts_at_the_same_context_and_moves_as_told(target):
    engine = GraphEngine(target, random_drafter(TINY, "dflash2", CPU), "selector", 2, 40)
    side = full_cycles(engine, 12, forced=2)
    progress = engine.cycle.progress
    for _ in range(2):
        side.reset()
        assert progress.start.tolist() == [12, 12]
        side.step()
        side.step()
        assert progress.start.tolist() == [18, 18]
        assert progress.accepted[:, :2].tolist() == [[2, 2], [2, 2]]


def test_cycles_of_broken_values_are_refused_not_timed(target):
    engine = GraphEngine(target, None, None, 1, 40)
    side = full_cycles(engine, 12, forced=0)
    engine.cycle.large.values[0, 0, 0, 3] = float("nan")
    with pytest.raises(LabError, match=rf"status \[{BROKEN}\]"):
        check_full("autoregressive", engine, side, CycleOptions(inner=1))


def test_overhead_and_its_share_by_hand():
    samples = {"dflash": [1.0, 2.0, 4.0], "more": [1.5, 3.0, 4.0], "less": [1.0, 2.0, 3.0]}
    found = overhead(samples, "more", "less")
    assert found["seconds"] == [0.5, 1.0, 1.0]
    assert found["share"] == Spread(0.5, 0.25, 0.5)


def test_the_package_is_timed_cycle_by_cycle_after_warm_up(target):
    model, _ = published_or_reason(random_drafter(TINY, "dflash", CPU), target)
    prompt = torch.arange(5, 17)[None]
    assert len(cycle_seconds(model, target, prompt, 3)) == 3
    assert not model._forward_pre_hooks


def test_kernels_are_counted_per_step():
    x = torch.ones(64, 64)
    (row,) = [r for r in kernel_times(lambda: x.exp().exp(), CPU) if r["name"] == "aten::exp"]
    assert row["count"] == 2
    assert row["us"] > 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_drafts": [0]}, r"num_draft: found \[0\], expected 1 to 3"),
        ({"num_drafts": [1, 4]}, r"num_draft: found \[1, 4\]"),
        ({"batches": [0]}, r"batch: found \[0\]"),
        ({"context": 0}, "context: found 0"),
        ({"forced": -1}, "forced: found -1"),
    ],
)
def test_bad_options_are_told_before_anything_is_made(tmp_path, changes, match):
    with pytest.raises(LabError, match=match):
        bench_cycle("tiny", CPU, CycleOptions(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_shapes_are_refused(tmp_path):
    with pytest.raises(LabError, match="expected one of qwen3-4b, smollm2-135m, tiny"):
        bench_cycle("huge", CPU, CycleOptions(), tmp_path)


def made_up(shapes, us, published_ms):
    """A result of one cell whose full cycle takes `us` with a floor of 1000 us."""
    spread = Spread(us / 1e6, us / 1e6, us / 1e6)
    side = {"cycle": spread, "floor_seconds": 1e-3, "cache_bytes": 0, "startup_seconds": 1.0}
    extra = {"extra": Spread(25e-6, 24e-6, 26e-6), "share": Spread(0.01, 0.009, 0.011)}
    cell = {"batch": 1, "num_draft": 7, "context": 512, "kernels": {}}
    cell |= {"sides": {"dflash2 selector": side}}
    cell |= {"overheads": dict.fromkeys(cycle.OVERHEADS, extra)}
    package = Spread(*[published_ms / 1e3] * 3)
    published = {"dflash2": {"side": "dflash2 selector", "seconds": [1.0], "cycle": package}}
    speed = {"copy": Spread(4e12, 4e12, 4e12), "read": Spread(4e12, 4e12, 4e12)}
    return {
        "shapes": shapes, "dtype": "bfloat16", "device": "gpu", "forced": 3, "repeats": 9,
        "inner": 2, "block_size": 8, "layers": {"dflash": 5, "deep": 15}, "bandwidth": speed,
        "cells": [cell], "published": published, "skipped": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "us", "published_ms", "missed"),
    [
        ("qwen3-4b", 1390.0, 40.0, 1),  # of the overheads the selector alone is over its bar
        ("qwen3-4b", 1410.0, 19.0, 3),
        ("smollm2-135m", 1190.0, 30.0, 0),
        ("smollm2-135m", 1210.0, 30.0, 2),
    ],
)
def test_bars_are_judged_where_they_apply(shapes, us, published_ms, missed):
    result = made_up(shapes, us, published_ms)
    assert table(result).count("MISSED") == missed
    result["cells"][0]["context"] = 1024
    assert "bar:" not in table(result)
