"""The main job and its figures of record, as a user runs them."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from dflash2_lab.figures import figure_json
from dflash2_lab.recording_figures import record_figures
from dflash2_lab.tables import Run

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "figures" / "main_job"
DRAFTERS = ("dflash", "dflash2")


def test_figures_of_record_are_byte_identical_when_drawn_from_their_tables():
    runs = {name: Run.open(RECORDED / "tables" / name) for name in DRAFTERS}
    figures = record_figures(runs)
    assert {*figures} == {path.stem for path in RECORDED.glob("*.json")}
    for name, figure in figures.items():
        assert figure_json(figure) == (RECORDED / f"{name}.json").read_text(), name


def test_shipped_tables_hold_no_text():
    for path in (RECORDED / "tables").rglob("*.parquet"):
        assert not path.name.startswith("traces")


@pytest.mark.slow
@pytest.mark.timed
def test_main_job_is_quick_small_and_reuses_what_it_left(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "dflash2_lab", "reproduce", "--out", str(out), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}

    def go():
        started = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=900, check=True, env=environment
        )
        return json.loads(done.stdout), time.perf_counter() - started

    first, seconds = go()
    assert seconds < 180
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 1024 * 1024
    assert set(first["runs"]) == set(DRAFTERS)
    selector = first["runs"]["dflash2"]["policies"]["selector"]["acceptance_length"]["pooled"]
    top1 = first["runs"]["dflash"]["policies"]["top1"]["acceptance_length"]["pooled"]
    assert selector["value"] > top1["value"]
    drawn = {path.stem for path in RECORDED.glob("*.json")}
    assert {path.stem for path in (out / "figures").glob("*.html")} == drawn
    anchors = pd.concat([Run.open(out / name).anchors for name in DRAFTERS])
    assert anchors["prompt_id"].nunique() == 24
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    second, seconds = go()
    assert second == first
    assert seconds < 60
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == stamps
