"""Run folders: what is written is read back, and a killed or failed writer leaves no half table."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash2_lab.errors import LabError
from dflash2_lab.schema import SCHEMA_VERSION, SCHEMAS
from dflash2_lab.tables import (
    Run,
    assert_comparable,
    file_hash,
    read_run_info,
    read_table,
    shard_done,
    shard_path,
    write_run_info,
    write_shard,
)

ROOT = Path(__file__).resolve().parents[1]


def slots_frame(prompt="a", num=3):
    return pd.DataFrame(
        {
            "prompt_id": prompt,
            "turn": 0,
            "sample": 0,
            "anchor": range(num),
            "slot": 1,
            "target_token": range(10, 10 + num),
            "target_rank": 0,
            "p_target": 0.5,
        }
    )


def traces_frame(**changes):
    row = {
        "prompt_id": "é-1",
        "turn": 0,
        "sample": 1,
        "dataset": "d",
        "prompt_ids": [1, 2],
        "response_ids": [3],
        "logprob": [-0.125],
        "logprob_unfiltered": [float("-inf")],
        "finish": "eos",
        "on_policy": True,
    }
    return pd.DataFrame([row | changes])


def test_shards_come_back_in_order_with_the_schema_types(tmp_path):
    write_shard(tmp_path, "slots", 1, slots_frame("b", 2))
    write_shard(tmp_path, "slots", 0, slots_frame("a", 3)[reversed(SCHEMAS["slots"].names)])
    frame = read_table(tmp_path, "slots")
    assert list(frame.columns) == SCHEMAS["slots"].names
    assert frame["prompt_id"].tolist() == ["a", "a", "a", "b", "b"]
    assert frame["target_token"].tolist() == [10, 11, 12, 10, 11]
    assert frame["slot"].dtype == "int8" and frame["target_rank"].dtype == "int32"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "slots-00000.parquet",
        "slots-00001.parquet",
    ]
    assert pq.ParquetFile(tmp_path / "slots-00000.parquet").schema_arrow.names == list(frame)


def test_list_columns_round_trip_exactly_and_an_empty_list_is_kept(tmp_path):
    written = pd.concat([traces_frame(), traces_frame(prompt_ids=[], logprob=[0.1])])
    write_shard(tmp_path, "traces", 0, written)
    frame = read_table(tmp_path, "traces")
    assert [list(ids) for ids in frame["prompt_ids"]] == [[1, 2], []]
    assert [list(values) for values in frame["logprob"]] == [[-0.125], [0.1]]
    assert frame["logprob_unfiltered"][0][0] == float("-inf")
    assert frame["prompt_id"][0] == "é-1"


def test_a_single_file_table_is_read_too(tmp_path):
    write_shard(tmp_path, "slots", 0, slots_frame())
    (tmp_path / "slots-00000.parquet").rename(tmp_path / "slots.parquet")
    assert len(read_table(tmp_path, "slots")) == 3
    write_shard(tmp_path, "slots", 0, slots_frame())
    with pytest.raises(LabError, match=r"both slots\.parquet and slots-00000"):
        read_table(tmp_path, "slots")


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (slots_frame().drop(columns="p_target"), r"'slots'.*missing columns \['p_target'\]"),
        (slots_frame().assign(extra=1), r"unknown columns \['extra'\]"),
        (slots_frame().assign(p_target="x"), r"'slots'.*column 'p_target'"),
        (slots_frame().assign(slot=400), r"column 'slot'.*int8"),
        (slots_frame().assign(target_rank=0.5), r"column 'target_rank'.*int32"),
        (slots_frame().assign(p_target=[0.5, float("nan"), 1.0]), "column 'p_target'.*1 null"),
        (slots_frame().assign(prompt_id=["a", None, "b"]), "column 'prompt_id'.*1 null"),
    ],
)
def test_a_wrong_frame_is_refused_and_nothing_is_written(tmp_path, frame, message):
    with pytest.raises(LabError, match=message):
        write_shard(tmp_path, "slots", 0, frame)
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_parquet_file_with_other_columns_names_table_and_column(tmp_path):
    arrow = pa.table({"prompt_id": ["a"], "turn": [0]})
    pq.write_table(arrow, tmp_path / "slots-00000.parquet")
    with pytest.raises(LabError, match=r"'slots'.*slots-00000.*missing columns.*target_rank"):
        read_table(tmp_path, "slots")
    wrong = pa.Table.from_pandas(slots_frame().assign(anchor=["0", "1", "2"]))
    pq.write_table(wrong, tmp_path / "slots-00000.parquet")
    with pytest.raises(LabError, match=r"column 'anchor': found type .*string.*expected int32"):
        read_table(tmp_path, "slots")


def test_missing_table_shard_gap_and_truncated_file_are_named(tmp_path):
    with pytest.raises(LabError, match=r"table 'slots' not found, expected slots-00000\.parquet"):
        read_table(tmp_path, "slots")
    with pytest.raises(LabError, match="'slotz': unknown"):
        read_table(tmp_path, "slotz")
    write_shard(tmp_path, "slots", 0, slots_frame())
    write_shard(tmp_path, "slots", 2, slots_frame())
    with pytest.raises(LabError, match=r"slots-00002\.parquet found, expected slots-00001"):
        read_table(tmp_path, "slots")
    whole = (tmp_path / "slots-00002.parquet").read_bytes()
    (tmp_path / "slots-00001.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LabError, match=r"slots-00001\.parquet: not a readable Parquet file"):
        read_table(tmp_path, "slots")


def test_shard_done_needs_every_table(tmp_path):
    write_shard(tmp_path, "slots", 0, slots_frame())
    assert shard_done(tmp_path, ["slots"], 0)
    assert not shard_done(tmp_path, ["slots", "traces"], 0)
    assert not shard_done(tmp_path, ["slots"], 1)
    with pytest.raises(LabError, match="found -1"):
        shard_path(tmp_path, "slots", -1)


def test_a_reader_of_the_old_shard_is_not_disturbed_by_a_new_one(tmp_path):
    """The new file takes the name in one step; it is never written into the old one."""
    write_shard(tmp_path, "slots", 0, slots_frame("old"))
    os.link(tmp_path / "slots-00000.parquet", tmp_path / "held.parquet")
    write_shard(tmp_path, "slots", 0, slots_frame("new"))
    assert pq.ParquetFile(tmp_path / "held.parquet").read()["prompt_id"].to_pylist() == ["old"] * 3
    assert set(read_table(tmp_path, "slots")["prompt_id"]) == {"new"}


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("module", "name"), [(os, "fsync"), (pq, "write_table")])
def test_a_full_disk_leaves_the_old_shard_and_no_temporary_file(
    tmp_path, monkeypatch, module, name
):
    write_shard(tmp_path, "slots", 0, slots_frame("old"))
    with monkeypatch.context() as patch:
        patch.setattr(module, name, full_disk)
        for index in (0, 1):
            with pytest.raises(LabError, match=rf"slots-0000{index}\.parquet.*No space left"):
                write_shard(tmp_path, "slots", index, slots_frame("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["slots-00000.parquet"]
    assert set(read_table(tmp_path, "slots")["prompt_id"]) == {"old"}


def test_a_full_disk_leaves_the_old_run_information(tmp_path, monkeypatch):
    write_run_info(tmp_path, {"round": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(LabError, match=r"run\.json.*No space left"):
            write_run_info(tmp_path, {"round": 2})
    assert read_run_info(tmp_path)["round"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


LIMITED = """
import resource, signal, sys
import pandas as pd
from pathlib import Path
from dflash2_lab.errors import LabError
from dflash2_lab.tables import write_shard
sys.path.insert(0, "tests")
from test_tables import slots_frame
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_shard(Path(sys.argv[1]), "slots", 0, slots_frame())
except LabError as error:
    sys.exit(f"refused: {error}")
"""


def run_python(code, *args):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_write_the_system_cuts_short_is_refused_and_removed(tmp_path):
    with run_python(LIMITED, tmp_path) as process:
        _, stderr = process.communicate(timeout=60)
    assert "refused:" in stderr and "slots-00000.parquet" in stderr, stderr
    assert list(tmp_path.iterdir()) == []


STUCK_BEFORE_RENAME = """
import os, sys, time
from pathlib import Path
from dflash2_lab.tables import write_shard
sys.path.insert(0, "tests")
from test_tables import slots_frame
folder = Path(sys.argv[1])
write_shard(folder, "slots", 0, slots_frame("whole"))
def stuck(descriptor):
    print("written", flush=True)
    time.sleep(60)
os.fsync = stuck
write_shard(folder, "slots", 1, slots_frame("half"))
"""


def test_kill_nine_in_the_middle_leaves_whole_shards_and_a_resumed_run_is_identical(tmp_path):
    with run_python(STUCK_BEFORE_RENAME, tmp_path) as process:
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    leftovers = [path.name for path in tmp_path.glob(".*")]
    assert leftovers == [f".slots-00001.parquet.{process.pid}.tmp"]
    assert set(read_table(tmp_path, "slots")["prompt_id"]) == {"whole"}
    assert not shard_done(tmp_path, ["slots"], 1)

    write_shard(tmp_path, "slots", 1, slots_frame("half"))
    assert not list(tmp_path.glob(".*"))
    straight = tmp_path / "straight"
    for index, prompt in enumerate(("whole", "half")):
        write_shard(straight, "slots", index, slots_frame(prompt))
        name = f"slots-0000{index}.parquet"
        assert file_hash(tmp_path / name) == file_hash(straight / name)


BUSY = """
import sys
from pathlib import Path
from dflash2_lab.tables import write_run_info, write_shard
sys.path.insert(0, "tests")
from test_tables import slots_frame
frame = slots_frame("x", 3000)
for round in range(10**6):
    write_shard(Path(sys.argv[1]), "slots", round % 4, frame.assign(target_rank=round))
    write_run_info(Path(sys.argv[1]), {"round": round})
    print(round, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_only_readable_tables(tmp_path):
    with run_python(BUSY, tmp_path) as process:
        for _ in range(5):
            process.stdout.readline()
        time.sleep(0.0371)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    frame = read_table(tmp_path, "slots")
    assert len(frame) == 4 * 3000
    assert (frame["target_rank"].to_numpy().reshape(4, 3000).std(axis=1) == 0).all()
    assert read_run_info(tmp_path)["round"] >= 4


def test_run_info_round_trips_with_sorted_keys(tmp_path):
    write_run_info(tmp_path, {"zeta": [1, 2.5], "alpha": {"b": None, "a": "ü"}})
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert text.index('"alpha"') < text.index('"schema_version"') < text.index('"zeta"')
    assert read_run_info(tmp_path) == {
        "alpha": {"a": "ü", "b": None},
        "schema_version": SCHEMA_VERSION,
        "zeta": [1, 2.5],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema_version": 99}', f"found schema_version 99, expected {SCHEMA_VERSION}"),
        ("{}", "schema_version is missing"),
        ("[1]", "found list, expected a JSON object"),
        ('{"schema_version": 1', "malformed"),
    ],
)
def test_foreign_or_malformed_run_information_is_refused(tmp_path, text, message):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(LabError, match=rf"run\.json.*{message}"):
        Run.open(tmp_path)


def test_run_information_that_cannot_be_stored_or_found_is_refused(tmp_path):
    with pytest.raises(LabError, match="not plain JSON"):
        write_run_info(tmp_path, {"value": float("nan")})
    with pytest.raises(LabError, match="found schema_version 7"):
        write_run_info(tmp_path, {"schema_version": 7})
    with pytest.raises(LabError, match=r"run\.json: not found"):
        read_run_info(tmp_path / "nowhere")


def test_a_run_reads_its_tables_once_and_names_what_it_lacks(tmp_path):
    info = {"policies": ["top1"], "drafter": {"num_draft": 7}, "sampling": {"temperature": 0.5}}
    write_run_info(tmp_path, info)
    write_shard(tmp_path, "slots", 0, slots_frame())
    run = Run.open(tmp_path)
    assert run.has_table("slots") and not run.has_table("paths")
    assert run.slots is run.slots
    assert (run.policies, run.num_draft, run.temperature) == (("top1",), 7, 0.5)
    with pytest.raises(LabError, match="table 'paths' not found"):
        _ = run.paths
    bare = Run.in_memory({"drafter": {}}, {"slots": slots_frame()})
    assert bare.info["schema_version"] == SCHEMA_VERSION
    assert bare.slots["slot"].dtype == "int8"
    with pytest.raises(LabError, match=r"lacks drafter\.num_draft"):
        _ = bare.num_draft
    with pytest.raises(LabError, match="table 'traces' not found"):
        _ = bare.traces


def test_runs_over_other_prompts_or_target_precision_are_reported(caplog):
    def run(prompts, dtype):
        target = {"name": "t", "dtype": dtype, "quantisation": None}
        return Run.in_memory({"prompt_set_hash": prompts, "target": target}, {})

    with caplog.at_level(logging.WARNING):
        assert assert_comparable({"x": run("1", "f32"), "y": run("1", "f32")}) == ()
        assert caplog.records == []
        found = assert_comparable({"x": run("1", "f32"), "y": run("2", "bf16")})
    assert len(found) == 2 and [record.getMessage() for record in caplog.records] == list(found)
    assert "'x' and 'y' differ in prompt_set_hash" in found[0] and "template" in found[0]
    assert "target.dtype" in found[1] and "'bf16'" in found[1]


def test_file_hash_is_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert file_hash(tmp_path / "x") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


def test_unfinished_run_is_an_error_and_not_a_smaller_result(tmp_path):
    write_run_info(tmp_path, {"kind": "record", "complete": False})
    with pytest.raises(LabError, match="unfinished"):
        Run.open(tmp_path)
    write_run_info(tmp_path, {"kind": "record", "complete": True})
    assert Run.open(tmp_path).info["kind"] == "record"
