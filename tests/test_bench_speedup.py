"""`bench speedup`: replayed acceptance lengths times cycle times, by hand on a made-up run."""

import json

import pytest
from drafters import tiny_drafter
from helpers import tiny_target
from recordings import Request, make_run, repeat_prompt

from dflash2_lab.bench.speedup import bench_speedup
from dflash2_lab.cli import main
from dflash2_lab.errors import LabError
from dflash2_lab.prompts import Prompt
from dflash2_lab.recording import record
from dflash2_lab.replaying import replay
from dflash2_lab.tables import read_run_info, write_run_info
from dflash2_lab.tracing import trace

SIDES = {"autoregressive": 1.0, "dflash": 1.5, "dflash2 top1": 1.6, "dflash2 selector": 2.0}


def cell(batch, num_draft, **seconds):
    times = SIDES | seconds
    sides = {name: {"cycle": {"median": 1e-3 * value}} for name, value in times.items()}
    return {"batch": batch, "num_draft": num_draft, "context": 512, "sides": sides}


@pytest.fixture
def cycle_run(tmp_path):
    def write(cells, **changes):
        folder = tmp_path / "cycle"
        write_run_info(folder, {"kind": "bench", "bench": "cycle"})
        result = {"shapes": "toy", "device": "gpu", "temperature": 0.0, "cells": cells}
        (folder / "bench.json").write_text(json.dumps(result | changes))
        return folder

    return write


def recording(**changes):
    """One response of 13 tokens in which every block accepts 2 of 3 drafts (selector) or 1."""
    request = Request(13, accept={"selector": 2, "top1": 1})
    return make_run([request], 3, target={"name": "toy"}, **changes)


def speeds(result):
    rows = result["json"]["rows"]
    keys = ("policy", "num_draft", "batch")
    return {tuple(row[key] for key in keys): row["speedup"]["value"] for row in rows}


def test_speedup_is_length_times_the_ratio_of_times(cycle_run, tmp_path):
    slow = {"dflash2 selector": 4.0}
    folder = cycle_run([cell(1, 1), cell(1, 3), cell(8, 3, **slow)])
    result = bench_speedup(recording(), folder, tmp_path / "out")
    # 12 tokens after the first in blocks of 3 (selector) or 2, with one draft in blocks of 2
    assert speeds(result) == pytest.approx(
        {
            ("selector", 1, 1): 2 / 2.0,
            ("selector", 3, 1): 3 / 2.0,
            ("selector", 3, 8): 3 / 4.0,
            ("top1", 1, 1): 2 / 1.6,
            ("top1", 3, 1): 2 / 1.6,
            ("top1", 3, 8): 2 / 1.6,
        }
    )
    assert "best at concurrency 1: selector, 3 drafts, 1.50" in result["text"]
    assert (tmp_path / "out" / "bench.json").is_file()
    assert "note:" not in result["text"]
    assert "skipped" not in result["text"]


def test_the_interval_is_that_of_the_length(cycle_run, tmp_path):
    requests = [
        Request(13, accept={"selector": n % 3, "top1": 0}, prompt_id=f"p{n}") for n in range(9)
    ]
    run = make_run(requests, 3, target={"name": "toy"})
    result = bench_speedup(run, cycle_run([cell(1, 3)]), tmp_path / "out")
    (row,) = [row for row in result["json"]["rows"] if row["policy"] == "selector"]
    length = replay(run, "selector", 3).pooled
    assert length.low < length.value < length.high
    low, high = row["speedup"]["interval"]
    assert (low, high) == pytest.approx((length.low / 2.0, length.high / 2.0))


def test_a_single_prompt_has_no_interval(cycle_run, tmp_path):
    result = bench_speedup(recording(), cycle_run([cell(1, 3)]), tmp_path / "out")
    assert {row["speedup"]["interval"] for row in result["json"]["rows"]} == {None}


def test_what_does_not_fit_is_skipped_with_its_reason(cycle_run, tmp_path):
    request = Request(13, accept={"selector": 2, "selector_greedy": 2})
    run = make_run([request], 3, target={"name": "toy"})
    folder = cycle_run([cell(1, 3), cell(1, 7)])
    text = bench_speedup(run, folder, tmp_path / "out")["text"]
    assert "skipped: policy selector_greedy (bench cycle does not time it for kind dflash2)" in text
    assert "skipped: 7 drafts (the recording has 3)" in text


def test_times_of_another_model_or_temperature_are_noted(cycle_run, tmp_path):
    folder = cycle_run([cell(1, 3)], shapes="qwen3-4b", temperature=1.0)
    text = bench_speedup(repeat_prompt(recording(), 3), folder, tmp_path / "out")["text"]
    assert "note: acceptance is that of target toy, times are those of qwen3-4b" in text
    assert "note: acceptance at temperature 0, cycle times at 1" in text
    assert max(map(len, text.splitlines()[:-1])) <= 100


def test_runs_that_cannot_be_combined_are_refused(cycle_run, tmp_path):
    with pytest.raises(LabError, match="expected one that"):
        bench_speedup(recording(), cycle_run([cell(1, 7)]), tmp_path / "out")
    other = tmp_path / "other"
    write_run_info(other, {"kind": "record"})
    with pytest.raises(LabError, match="found a run of kind record, expected a run of bench cycle"):
        bench_speedup(recording(), other, tmp_path / "out")
    with pytest.raises(LabError, match=r"run.json: not found"):
        bench_speedup(recording(), tmp_path / "nothing", tmp_path / "out")


def test_the_command_combines_folders(cycle_run, tmp_path, capsys):
    target = tiny_target()
    traces = trace(target, [Prompt("p", ("hello",), "set")], max_new_tokens=12)
    record(target, tiny_drafter("dflash2"), traces, out=tmp_path / "record", attention=False)
    words = ["--cycle", str(cycle_run([cell(1, 3)])), "--out", str(tmp_path / "out"), "--json"]
    assert main(["bench", "speedup", str(tmp_path / "record"), *words]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["policy"] for row in printed["rows"]} == {"top1", "selector"}
    assert read_run_info(tmp_path / "out")["bench"] == "speedup"
    assert main(["bench", "speedup", str(tmp_path / "out"), *words]) == 2
    assert "expected" in capsys.readouterr().err
