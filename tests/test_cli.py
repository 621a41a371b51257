"""The command line on tiny models: every command, --json, exit codes, one-line errors."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from drafters import tiny_drafter
from helpers import save_tiny

from dflash2_lab.cli import main, parser
from dflash2_lab.models.io import save_drafter
from dflash2_lab.recording_figures import ATTENTION, PATH, SELECTOR, UNARY
from dflash2_lab.tables import Run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tiny target, a drafter, prompts, and trace and record runs made by the command line."""
    root = tmp_path_factory.mktemp("cli")
    save_tiny(root / "target")
    save_drafter(tiny_drafter("dflash2"), root / "drafter")
    lines = [{"id": f"p{i}", "turns": [f"tell me {i}"]} for i in range(3)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ["--target", str(root / "target"), "--device", "cpu"]
    flow = ["--prompts", str(root / "prompts.jsonl"), "--max-new-tokens", "12"]
    assert main(["trace", *common, *flow, "--out", str(root / "traces")]) == 0
    record = ["record", *common, "--drafter", str(root / "drafter")]
    out = ["--traces", str(root / "traces"), "--out", str(root / "run")]
    assert main([*record, *out]) == 0
    return root


def run(arguments, capsys, code=0):
    """Run a command; returns its standard output and error after checking the exit code."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    return capsys.readouterr()


def test_json_is_one_object_and_all_there_is_on_standard_output(made, capsys):
    out = run(["replay", made / "run", "--policy", "selector", "--json"], capsys).out
    result = json.loads(out)
    assert result["policy"] == "selector"
    assert result["num_draft"] == 3
    pooled = result["acceptance_length"]["pooled"]
    assert pooled["interval"][0] <= pooled["value"] <= pooled["interval"][1]
    for key in ("position_recall@1", "position_recall@16", "survival"):
        assert len(result[key]) == 3
    assert len(result["within_block_share"]) == 2


def test_record_with_prompts_traces_first_and_gives_the_tables_of_the_two_steps(
    made, capsys, tmp_path
):
    common = ["--target", made / "target", "--device", "cpu", "--drafter", made / "drafter"]
    flow = ["--prompts", made / "prompts.jsonl", "--max-new-tokens", "12", "--out", tmp_path]
    run(["record", *common, *flow], capsys)
    one, two = Run.open(tmp_path), Run.open(made / "run")
    assert one.paths.equals(two.paths)
    assert one.slots.equals(two.slots)


def test_replay_of_all_policies_prints_a_table(made, capsys):
    out = run(["replay", made / "run"], capsys).out
    for word in ("selector", "top1", "oracle@16", "acceptance length", "position_recall@1"):
        assert word in out


def test_figures_writes_the_files_it_names(made, capsys, tmp_path):
    run(
        ["figures", f"ours={made / 'run'}", "--out", tmp_path, "--format", "json", "--json"], capsys
    )
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{name}.json" for name in (*UNARY, *PATH, *SELECTOR, *ATTENTION)}


def test_train_then_record_with_what_was_trained(made, capsys, tmp_path):
    run(
        [
            *("train", "--target", made / "target", "--device", "cpu", "--data", made / "traces"),
            *("--held-out", 1, "--num-layers", 1, "--intermediate-size", 16, "--block-size", 4),
            *("--steps", 2, "--batch-size", 2, "--num-anchors", 2, "--mask-token-id", 3),
            *("--report-every", 1, "--out", tmp_path / "train"),
        ],
        capsys,
    )
    common = ["--target", made / "target", "--device", "cpu", "--traces", made / "traces"]
    drafter = ["--drafter", tmp_path / "train" / "drafter"]
    run(["record", *common, *drafter, "--out", tmp_path / "run"], capsys)
    assert Run.open(tmp_path / "run").policies == ("top1", "selector")


def test_inspect_exits_2_when_a_checkpoint_has_problems(made, capsys, tmp_path):
    assert "problems (0)" in run(["inspect", made / "drafter"], capsys).out
    shutil.copytree(made / "drafter", tmp_path / "broken")
    config = json.loads((tmp_path / "broken" / "config.json").read_text())
    del config["dflash_config"]["mask_token_id"]
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    out = run(["inspect", tmp_path / "broken", "--json"], capsys, code=2).out
    assert any("mask_token_id" in problem for problem in json.loads(out)["problems"])


def test_imported_traces_are_recorded_like_traced_ones_and_off_policy_ones_are_told(
    made, capsys, tmp_path
):
    traces = Run.open(made / "traces").traces
    columns = ["prompt_id", "prompt_ids", "response_ids"]
    traces[columns].to_parquet(tmp_path / "ours.parquet")
    common = ["--target", made / "target", "--device", "cpu"]
    files = ["--import", tmp_path / "ours.parquet", "--out", tmp_path / "traces", "--json"]
    assert json.loads(run(["trace", *common, *files], capsys).out)["num_off_policy"] == 0
    drafter = ["--drafter", made / "drafter", "--traces", tmp_path / "traces"]
    run(["record", *common, *drafter, "--out", tmp_path / "run"], capsys)
    assert Run.open(tmp_path / "run").paths.equals(Run.open(made / "run").paths)
    row = {"prompt_id": "x", "prompt_ids": [4, 5, 6], "response_ids": [9] * 8}
    (tmp_path / "other.jsonl").write_text(json.dumps(row) + "\n")
    files = ["--import", tmp_path / "other.jsonl", "--out", tmp_path / "other", "--json"]
    assert json.loads(run(["trace", *common, *files], capsys).out)["num_off_policy"] == 1


def flow_with(made, tmp_path, *options):
    common = ["--target", made / "target", "--device", "cpu", "--drafter", made / "drafter"]
    return ["record", *common, *options, "--out", tmp_path / "run", "--json"]


@pytest.mark.parametrize("why", ["stride", "off-policy"])
def test_a_recording_that_cannot_be_replayed_is_told_and_drawn_without_acceptance(
    why, made, capsys, tmp_path
):
    options = ["--traces", made / "traces", "--anchor-stride", 3]
    if why == "off-policy":
        row = {"prompt_id": "x", "prompt_ids": [4, 5, 6], "response_ids": [9] * 8}
        (tmp_path / "other.jsonl").write_text(json.dumps(row) + "\n")
        common = ["--target", made / "target", "--device", "cpu"]
        files = ["--import", tmp_path / "other.jsonl", "--out", tmp_path / "other"]
        run(["trace", *common, *files], capsys)
        options = ["--traces", tmp_path / "other"]
    done = run(flow_with(made, tmp_path, *options), capsys)
    assert json.loads(done.out) == {"folder": str(tmp_path / "run")}
    figures = ["figures", tmp_path / "run", "--format", "json", "--out", tmp_path / "figures"]
    told = run(figures, capsys).err
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert names == {*UNARY, *ATTENTION}
    assert "figures of acceptance are left out" in told


def test_traces_of_other_weights_are_off_policy(made, capsys, tmp_path):
    save_tiny(tmp_path / "target", seed=5)
    options = ["--traces", made / "traces", "--target", tmp_path / "target"]
    told = run(flow_with(made, tmp_path, *options), capsys).err
    assert Run.open(tmp_path / "run").info["on_policy"] is False
    assert "the traces were made by target" in told


def test_a_reader_that_leaves_early_is_no_error(made, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["replay", str(made / "run"), "--json"]) == 0


def test_benchmarks_take_json_and_verbose():
    arguments = parser().parse_args(["bench", "record", "--json", "--verbose"])
    assert arguments.json
    assert arguments.verbose


def test_help_of_every_command_needs_no_torch():
    code = (
        "import sys\nfrom dflash2_lab.cli import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    try:\n        main([name, '--help'])\n"
        "    except SystemExit as stop:\n        assert stop.code == 0, name\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: dflash2-lab") >= 8


TRAIN = (
    *("train", "{target}", "--data", "{made}/traces", "--held-out", "1", "--num-layers", "1"),
    *("--steps", "1", "--batch-size", "2", "--mask-token-id", "3"),
)
BAD = {
    "a missing run": (["replay", "{tmp}/none"], "run.json"),
    "an unknown policy": (["replay", "{made}/run", "--policy", "viterbi"], "viterbi"),
    "a larger verify window": (["replay", "{made}/run", "--num-draft", "9"], "num_draft"),
    "a missing prompt file": (["trace", "{target}", "--prompts", "{tmp}/no.jsonl"], "no.jsonl"),
    "a malformed prompt line": (["trace", "{target}", "--prompts", "{tmp}/bad.jsonl"], "bad.jsonl"),
    "an empty prompt": (["trace", "{target}", "--prompts", "{tmp}/empty.jsonl"], "empty.jsonl"),
    "a prompt longer than the positions": (
        ["trace", "{target}", "--prompts", "{tmp}/long.jsonl"],
        "512 positions",
    ),
    "a bad temperature": (
        ["trace", "{target}", "--prompts", "{made}/prompts.jsonl", "--temperature", "-1"],
        "temperature",
    ),
    "another run in the folder": (
        ["trace", "{target}", "--prompts", "{made}/prompts.jsonl", "--out", "{made}/run"],
        "another run",
    ),
    "a drafter that is not there": (
        ["record", "{target}", "--drafter", "zoo:none", "--traces", "{made}/traces"],
        "zoo:none",
    ),
    "a drafter of another target": (
        ["record", "{target}", "--drafter", "zoo:dflash", "--traces", "{made}/traces"],
        "hidden",
    ),
    "a policy that the drafter lacks, before anything is traced": (
        [
            *("record", "{target}", "--drafter", "{made}/drafter", "--policy", "viterbi"),
            *("--prompts", "{tmp}/no.jsonl"),
        ],
        "viterbi",
    ),
    "a stride of zero, before anything is traced": (
        [
            *("record", "{target}", "--drafter", "{made}/drafter", "--anchor-stride", "0"),
            *("--prompts", "{tmp}/no.jsonl"),
        ],
        "anchor_stride",
    ),
    "a malformed row to import": (
        ["trace", "{target}", "--import", "{tmp}/bad.jsonl"],
        "bad.jsonl:2",
    ),
    "traces and prompts": (
        [
            *("record", "{target}", "--drafter", "{made}/drafter", "--traces", "{made}/traces"),
            *("--prompts", "default"),
        ],
        "--traces",
    ),
    "traces and a limit": (
        [
            *("record", "{target}", "--drafter", "{made}/drafter", "--traces", "{made}/traces"),
            *("--limit", "1"),
        ],
        "--traces and --limit exclude each other",
    ),
    "imported traces and a limit": (
        ["trace", "{target}", "--import", "{made}/prompts.jsonl", "--limit", "1"],
        "--import and --limit exclude each other",
    ),
    "a record run as traces": (
        ["record", "{target}", "--drafter", "{made}/drafter", "--traces", "{made}/run"],
        "trace",
    ),
    "a run of another schema version": (["replay", "{tmp}/old"], "schema_version"),
    "a template option without value": (
        ["trace", "{target}", "--prompts", "{made}/prompts.jsonl", "--template-option", "shout"],
        "KEY=VALUE",
    ),
    "two runs of one name": (
        ["figures", "a={made}/run", "a={made}/run", "--out", "{tmp}/figures"],
        "called 'a'",
    ),
    "a trace run to replay": (["replay", "{made}/traces"], "kind 'trace', expected 'record'"),
    "a trace run to draw": (["figures", "{made}/traces"], "kind 'trace', expected 'record'"),
    "a file as run": (["replay", "{made}/prompts.jsonl"], "not found, expected a run folder"),
    "a file as trace folder": (
        ["trace", "{target}", "--prompts", "default", "--out", "{made}/prompts.jsonl"],
        "prompts.jsonl",
    ),
    "a file as figure folder": (
        ["figures", "{made}/run", "--format", "json", "--out", "{made}/prompts.jsonl"],
        "prompts.jsonl",
    ),
    "a file as training folder": (
        [*TRAIN, "--out", "{made}/prompts.jsonl"],
        "prompts.jsonl: cannot be made a folder",
    ),
    "a trace run as training folder": ([*TRAIN, "--out", "{made}/traces"], "choose another"),
    "an unknown device": (
        ["trace", "{target}", "--device", "gpu", "--prompts", "default"],
        "device gpu: cannot be used",
    ),
    "an endless temperature": (
        ["trace", "{target}", "--prompts", "default", "--temperature", "inf"],
        "temperature: found inf",
    ),
    "a template option that is not the template's": (
        ["trace", "{target}", "--prompts", "default", "--template-option", "tokenize=false"],
        "template option tokenize",
    ),
    "a training in the folder": (
        ["trace", "{target}", "--prompts", "{made}/prompts.jsonl", "--out", "{tmp}/trained"],
        "trained: holds a training; choose another folder",
    ),
    "a training in the folder of a benchmark": (
        ["bench", "kernels", "--out", "{tmp}/trained"],
        "trained: holds a training; choose another folder",
    ),
    "a training in the folder of the main job": (
        ["reproduce", "{target}", "--drafter", "{made}/drafter", "--out", "{tmp}/trained"],
        "trained: holds a training; choose another folder",
    ),
    "a run in the folder of the main job": (
        ["reproduce", "{target}", "--drafter", "{made}/drafter", "--out", "{made}/run"],
        "holds another run",
    ),
    "a target of an unknown kind": (
        ["trace", "--target", "{tmp}/martian", "--prompts", "default"],
        "model type `martian`",
    ),
    "a target whose config is a list": (
        ["trace", "--target", "{tmp}/list", "--prompts", "default"],
        "list: cannot load",
    ),
    "no traces to import": (
        ["trace", "{target}", "--import", "{tmp}/none.parquet"],
        "none.parquet: no such file",
    ),
    "layers of no width": ([*TRAIN, "--intermediate-size", "0"], "intermediate_size is 0"),
    "bytes that are no text": (
        ["decode", "{target}", "--drafter", "{made}/drafter", "--prompt", "\udcff"],
        "found bytes that are no UTF-8",
    ),
    "no such data": (["train", "{target}", "--data", "{tmp}/none.parquet"], "none.parquet"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(name, made, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "turns": ["x"]}\n{"id": "b", "turns": \n')
    (tmp_path / "empty.jsonl").write_text('{"id": "a", "turns": [""]}\n')
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "a", "turns": ["x" * 600]}) + "\n")
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "checkpoint.pt").touch()
    for folder, config in (("martian", '{"model_type": "martian"}'), ("list", "[]")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(config)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text('{"schema_version": 0}')
    words, expected = BAD[name]
    target = ["--target", str(made / "target"), "--device", "cpu"]
    arguments = []
    for word in words:
        arguments += target if word == "{target}" else [word.format(made=made, tmp=tmp_path)]
    if words[0] != "replay" and "--out" not in words:
        arguments += ["--out", str(tmp_path / "out")]
    captured = run(arguments, capsys, code=2)
    assert captured.out == ""
    last = captured.err.strip().splitlines()[-1]
    assert last.startswith("dflash2-lab: ")
    assert expected in last
    assert "Traceback" not in captured.err
