"""Comparisons: what is refused, what is a warning, reference values by their interval."""

import json
import shutil
from pathlib import Path

import figure_frames as frames
import pytest

import dflash2_lab as lab
from dflash2_lab import report
from dflash2_lab.cli import main
from dflash2_lab.comparison import compare, read_reference, verdict
from dflash2_lab.errors import LabError
from dflash2_lab.models.io import drafter_info
from dflash2_lab.stats_paired import COLUMNS
from dflash2_lab.tables import Run, write_run_info, write_shard

ROOT = Path(__file__).resolve().parents[1]
THINKING = [{"options": {"enable_thinking": True}, "system": None}]
TARGET = {
    "name": "smollm2-135m",
    "dtype": "float32",
    "quantisation": None,
    "files": {"model.safetensors": "ab"},
}


def recorded(seed=0, name="dflash2", target=TARGET, **options):
    run = frames.recorded_run(name, seed=seed, **options)
    run.info.update(target=dict(target), token_hash="of the traces")
    return run


def saved(run, folder):
    for name, frame in run.frames.items():
        write_shard(folder, name, 0, frame)
    write_run_info(folder, run.info | {"complete": True})
    return folder


def command(arguments, capsys, code=0):
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == code
    return capsys.readouterr()


@pytest.fixture(scope="module")
def sides():
    return recorded(1, "dflash"), recorded(2)


@pytest.fixture(scope="module")
def folders(sides, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [saved(run, root / name) for run, name in zip(sides, "ab", strict=True)]


@pytest.fixture(scope="module")
def reference(sides, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference") / "reference.json"
    path.write_text(json.dumps(report.summarise(sides[0])))
    return path


def test_like_runs_are_compared_without_a_warning(sides):
    found = lab.compare(*sides)
    assert found.names == ("dflash", "dflash2")
    assert found.warnings == ()
    assert found.paired
    assert found.num_prompts == 5
    assert tuple(found.table.columns) == COLUMNS


def test_the_drafters_own_policies_stand_first_then_the_shared_ones_then_the_oracle():
    a, b = recorded(1, kind="dflash"), recorded(2)
    policies = compare(a, b).table["policy"]
    assert list(policies[policies != ""].unique()) == [
        "top1/selector",
        "top1",
        "selector",
        "oracle@16",
    ]


def test_a_policy_can_be_chosen_for_both_or_for_each(sides):
    found = compare(*sides, policies=("top1", "top1:selector"))
    assert set(found.table["policy"]) == {"", "top1", "top1/selector"}
    with pytest.raises(LabError, match="policy 'markov': not recorded"):
        compare(*sides, policies=("markov",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_set_hash": "other"}, ["prompt_set_hash", "chat template"]),
        ({"template": THINKING}, ["template was rendered", "enable_thinking"]),
        ({"target": TARGET | {"dtype": "bfloat16"}}, ["target.dtype", "bfloat16"]),
        ({"target": TARGET | {"quantisation": "gguf Q4_1"}}, ["target.quantisation"]),
        ({"target": TARGET | {"files": {"model.safetensors": "cd"}}}, ["other weights"]),
        ({"sampling": {"temperature": 0.0, "top_p": 0.9, "top_k": 0}}, ["sampling"]),
        ({"token_hash": "other"}, ["other responses to the same prompts"]),
    ],
)
def test_conditions_that_differ_are_a_warning_each(sides, change, words):
    other = Run(info=sides[1].info | change, frames=sides[1].frames)
    (warning,) = compare(sides[0], other).warnings
    assert all(word in warning for word in words)


def test_a_drafter_in_another_precision_is_a_warning(sides):
    drafter = sides[1].info["drafter"] | {"dtype": "bfloat16"}
    other = Run(info=sides[1].info | {"drafter": drafter}, frames=sides[1].frames)
    assert compare(sides[0], other).warnings == (
        "the drafters ran in other precisions: None and bfloat16",
    )


def test_what_only_one_run_has_is_left_out_and_said():
    a = recorded(1, num_prompts=5)
    b = recorded(2, num_prompts=3, num_draft=6, attention=False)
    found = compare(a, b)
    assert found.num_prompts == 3
    told = "\n".join(found.warnings)
    assert "3 of its 5 prompts are in both runs" in told
    assert "attention was not recorded" in told
    assert "series by slot and suffix decay end at slot 4" in told
    assert "within_block_share" not in set(found.table["quantity"])


def test_off_policy_traces_are_compared_by_recall_alone(sides):
    off = Run(info=sides[1].info | {"on_policy": False}, frames=sides[1].frames)
    found = compare(sides[0], off)
    assert "position_recall@1" in set(found.table["quantity"])
    assert "acceptance_length pooled" not in set(found.table["quantity"])
    assert any("acceptance cannot be replayed" in note for note in found.warnings)
    with pytest.raises(LabError, match="on_policy"):
        compare(sides[0], off, policies=("top1",))


def test_other_kinds_of_run_no_common_prompt_and_another_schema_are_refused(sides, folders, capsys):
    decode = Run(info=sides[1].info | {"kind": "decode"}, frames=sides[1].frames)
    with pytest.raises(LabError, match="found a run of kind 'decode'"):
        compare(sides[0], decode)
    moved = {n: f.assign(prompt_id="x" + f["prompt_id"]) for n, f in sides[1].frames.items()}
    with pytest.raises(LabError, match="at least one that both runs have"):
        compare(sides[0], Run(info=sides[1].info, frames=moved))
    old = folders[0].parent / "old"
    shutil.copytree(folders[1], old)
    info = json.loads((old / "run.json").read_text())
    (old / "run.json").write_text(json.dumps(info | {"schema_version": 0}))
    assert "schema_version 0" in command(["compare", folders[0], old], capsys, code=2).err


def test_several_datasets_are_never_compared_pooled_alone():
    sides = [recorded(seed, datasets=("gsm8k", "mbpp")) for seed in (1, 2)]
    found = compare(*sides)
    assert list(found.table["dataset"].unique()) == ["", "gsm8k", "mbpp"]
    text = found.text()
    assert "== dataset gsm8k" in text and "== dataset mbpp" in text


def test_a_policy_of_each_side_is_told_which_is_whose(sides):
    legend = "x/y: policy x of A, policy y of B"
    assert legend in compare(*sides, policies=["top1:selector"]).text()
    assert legend not in compare(*sides, policies=["top1"]).text()


def test_runs_of_one_drafter_get_names_of_their_own(sides, folders):
    same = Run(info=sides[1].info, frames=sides[1].frames)
    assert compare(sides[1], same).names == ("dflash2 (A)", "dflash2 (B)")
    opened = [Run.open(folders[1]), Run(info=sides[1].info, folder=folders[0])]
    assert compare(*opened).names == ("dflash2 (b)", "dflash2 (a)")


def test_the_verdict_is_where_the_interval_lies():
    assert verdict({"low": 0.1, "high": 0.2}) == "higher"
    assert verdict({"low": -0.2, "high": -0.1}) == "lower"
    assert verdict({"low": -0.1, "high": 0.2}) == "no difference shown"
    assert verdict({"low": None, "high": None}) == "unknown"
    assert verdict({"low": float("nan"), "high": float("nan")}) == "unknown"


def test_text_fits_a_hundred_columns_and_json_is_strict():
    sides = [
        recorded(seed, name=f"zoo:dflash2-with-quite-a-long-name-{seed}", num_draft=15)
        for seed in (1, 2)
    ]
    found = compare(*sides)
    assert max(map(len, found.text().splitlines())) <= 100
    values = found.to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert "nan" not in compare(sides[0], recorded(2, num_prompts=1)).text()


# reference values


def scaled(reference, factor, shrink=1.0):
    """The reference with its lengths moved, and its intervals scaled about their values."""
    values = json.loads(reference.read_text())
    for entry in values["policies"].values():
        for length in entry["acceptance_length"].values():
            low, high = length["interval"]
            value = length["value"] * factor
            half = (high - low) / 2 * shrink
            length |= {"value": value, "interval": [value - half, value + half]}
    return values


def pooled(comparison, policy):
    rows = comparison.table.query("quantity == 'acceptance_length pooled' and dataset == ''")
    return rows[rows["policy"] == policy].iloc[0]


def test_a_run_agrees_with_its_own_stored_values(sides, reference):
    found = compare(read_reference(reference), sides[0])
    assert not found.paired
    row = pooled(found, "selector")
    assert row.difference == 0 and row.low < 0 < row.high
    assert "drafter" not in "".join(found.warnings)


def test_a_difference_is_judged_by_the_intervals_and_not_by_its_size(sides, reference):
    # 1.3 times the run's own half interval beside a narrow reference is a difference, 20 % of the
    # value beside a wide one is none
    row = pooled(compare(read_reference(reference), sides[0]), "top1")
    half = (row.a_high - row.a_low) / 2
    wide = scaled(reference, 1.2, shrink=10.0)
    assert verdict(pooled(compare(wide, sides[0]), "top1")) == "no difference shown"
    narrow = scaled(reference, 1 + 1.3 * half / row.a, shrink=0.01)
    assert verdict(pooled(compare(narrow, sides[0]), "top1")) == "lower"


def test_reference_values_carry_revision_precision_datasets_n_and_interval(reference):
    values = json.loads(reference.read_text())
    found = values["conditions"]
    assert found["target"] == TARGET
    assert found["datasets"] == {"gsm8k": 5}
    assert found["num_prompts"] == 5
    length = values["policies"]["top1"]["acceptance_length"]["pooled"]
    assert len(length["interval"]) == 2 and length["num"] > 0


@pytest.mark.parametrize("key", ["target.name", "target.dtype", "target.files", "datasets"])
def test_reference_values_without_a_condition_are_refused(sides, reference, key):
    values = json.loads(reference.read_text())
    first, _, inner = key.partition(".")
    del (values["conditions"][first] if inner else values["conditions"])[inner or first]
    with pytest.raises(LabError, match=f"conditions.{key} not found"):
        compare(values, sides[0])


@pytest.mark.parametrize("key", ["interval", "num", "value"])
def test_reference_values_without_n_or_interval_are_refused(sides, reference, key):
    values = json.loads(reference.read_text())
    del values["policies"]["top1"]["acceptance_length"]["pooled"][key]
    with pytest.raises(LabError, match="expected all of them"):
        compare(values, sides[0])


def test_a_reference_of_other_conditions_is_a_warning(sides, reference):
    other = Run(
        info=sides[0].info | {"target": TARGET | {"dtype": "bfloat16"}}, frames=sides[0].frames
    )
    assert any(
        "target.dtype" in note for note in compare(read_reference(reference), other).warnings
    )


def test_values_of_another_drafter_are_a_warning_and_another_precision_is_none_of_it(sides):
    run = Run(
        info=sides[0].info | {"drafter": dict(sides[0].info["drafter"])}, frames=sides[0].frames
    )
    values = report.summarise(run)
    drafter = values["conditions"]["drafter"]
    values["conditions"]["drafter"] = drafter | {"weights_hash": "of bf16", "dtype": "bfloat16"}
    told = compare(values, run).warnings
    assert any("other precisions" in note for note in told)
    assert "the reference values are of another drafter" not in told
    values["conditions"]["drafter"] = drafter | {"weights_hash": "of another"}
    assert "the reference values are of another drafter" in compare(values, run).warnings


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_the_zoos_evaluation_is_a_reference_with_revision_precision_dataset_n_and_interval(name):
    values = read_reference(ROOT / "dflash2_lab" / "zoo" / name / "evaluation.json")
    found = values["conditions"]
    assert (found["target"]["dtype"], found["datasets"]) == ("bfloat16", {"gsm8k": 512})
    run = recorded(1, f"zoo:{name}")
    compared = compare(values, run)
    assert not compared.paired and compared.num_prompts == 5
    row = pooled(compared, "top1")
    stored = values["policies"]["top1"]["acceptance_length"]["pooled"]
    assert [row.a, row.a_low, row.a_high] == [stored["value"], *stored["interval"]]
    assert row.low < row.difference < row.high
    assert any("target.dtype" in note for note in compared.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_the_zoos_evaluation_names_the_weights_that_are_here(name):
    found = read_reference(ROOT / "dflash2_lab" / "zoo" / name / "evaluation.json")["conditions"]
    target = lab.load_target("smollm2-135m", dtype="bfloat16")
    drafter = lab.load_drafter(f"zoo:{name}", target=target, dtype="bfloat16")
    assert found["drafter"].items() <= drafter_info(drafter).items()
    assert found["target"]["files"].items() <= target.identity["files"].items()
    assert found["target"]["quantisation"] == target.identity["quantisation"]


def test_a_stored_comparison_is_a_reference_of_its_second_run(sides, tmp_path):
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(compare(*sides).to_dict()))
    found = compare(read_reference(path), sides[1])
    assert set(found.table["policy"]) == {"top1", "selector", "oracle@16"}
    assert (found.table["difference"] == 0).all()
    assert [note.partition(":")[0] for note in found.warnings] == ["degenerate_output"]
    own = report.summarise(sides[1])["policies"]["selector"]["acceptance_length"]["pooled"]
    row = pooled(found, "selector")
    assert [row.a, row.a_low, row.a_high] == pytest.approx([own["value"], *own["interval"]])
    again = tmp_path / "again.json"
    again.write_text(json.dumps(found.to_dict()))
    assert compare(read_reference(again), sides[1]).table.equals(found.table)


def test_a_stored_comparison_keeps_its_datasets_apart(tmp_path):
    sides = [recorded(seed, datasets=("gsm8k", "mbpp")) for seed in (1, 2)]
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(compare(*sides).to_dict()))
    found = compare(read_reference(path), sides[1])
    assert list(found.table["dataset"].unique()) == ["", "gsm8k", "mbpp"]
    assert (found.table["difference"] == 0).all()


def test_a_comparison_over_a_part_of_its_prompts_is_no_reference(sides, tmp_path):
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(compare(recorded(3, num_prompts=3), sides[1]).to_dict()))
    with pytest.raises(LabError, match="compared over 3 of the 5 prompts"):
        read_reference(path)


@pytest.mark.parametrize("text", ["[]", "{", '{"policies": {}}'])
def test_a_file_without_reference_values_is_one_line(folders, tmp_path, capsys, text):
    path = tmp_path / "reference.json"
    path.write_text(text)
    error = command(["compare", path, folders[0]], capsys, code=2).err
    assert str(path) in error.splitlines()[-1]


# the command


def test_the_command_prints_text_or_one_object_and_writes_a_page(
    folders, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("dflash2_lab.html_comparison.record_figures", lambda runs: {})
    out = command(["compare", *folders, "--policy", "top1:selector"], capsys).out
    assert "top1/selector" in out and "paired" in out
    page = tmp_path / "page.html"
    values = json.loads(command(["compare", *folders, "--json", "--out", page], capsys).out)
    assert values["file"] == str(page)
    assert values["num_prompts"] == 5
    assert {row["verdict"] for row in values["differences"]} <= {
        "higher",
        "lower",
        "no difference shown",
    }
    text = page.read_text()
    assert "<h1>dflash2 compared with dflash</h1>" in text
    assert text.count("<h2>Provenance</h2>") == 2


@pytest.mark.slow
def test_the_command_takes_what_replay_printed(folders, capsys, tmp_path):
    path, page = tmp_path / "reference.json", tmp_path / "page.html"
    path.write_text(command(["replay", folders[0], "--json", "--policy", "top1"], capsys).out)
    command(["compare", path, folders[0], "--out", page], capsys)
    assert "A holds stored values" in page.read_text()


def test_folders_of_other_kinds_are_one_line(folders, capsys):
    bench = ROOT / "figures" / "bench" / "kernels"
    error = command(["compare", folders[0], bench], capsys, code=2).err
    assert "found a run of kind 'bench', expected 'record'" in error
