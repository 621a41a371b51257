"""A benchmark looks at its run folder before it measures, and never takes another run's."""

import json

import pytest

from dflash2_lab.bench.cycle import CycleOptions
from dflash2_lab.bench.report import check_out
from dflash2_lab.cli import main
from dflash2_lab.errors import LabError


@pytest.mark.parametrize(
    "info", [{"kind": "record"}, {"kind": "bench", "bench": "cycle"}], ids=["record", "bench"]
)
def test_another_runs_folder_is_left_alone(tmp_path, info, capsys):
    content = json.dumps(info | {"schema_version": 1})
    (tmp_path / "run.json").write_text(content)
    command = ["bench", "kernels", "--shapes", "tiny", "--device", "cpu", "--out", str(tmp_path)]
    assert main(command) == 2
    assert "expected a new folder or a run of bench kernels" in capsys.readouterr().err
    assert (tmp_path / "run.json").read_text() == content
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="could not be written"):
        check_out(tmp_path / "file" / "run", "kernels")


def test_a_benchmark_may_be_repeated_into_its_own_folder(tmp_path):
    (tmp_path / "run.json").write_text(
        json.dumps({"kind": "bench", "bench": "kernels", "schema_version": 1})
    )
    check_out(tmp_path, "kernels")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_context_beyond_reason_is_told():
    with pytest.raises(LabError, match="context: found 10000000, expected at most"):
        CycleOptions(batches=[1], num_drafts=None, context=10_000_000)
