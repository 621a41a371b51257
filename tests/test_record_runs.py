"""Recordings as runs: what is refused, what a folder keeps, what memory it takes."""

import functools
import itertools

import pytest
import torch
from brute import HOT, LENGTHS, same_tables, some_traces
from drafters import tiny_drafter
from helpers import tiny_target
from profiling import peak_bytes

from dflash2_lab.errors import LabError
from dflash2_lab.recording import RecordOptions, record, record_trace, token_groups
from dflash2_lab.sampling import Sampling
from dflash2_lab.tables import Run
from dflash2_lab.target import features


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("fc.weight", "context projection"),
        ("layers.0.mlp.up_proj.weight", "layers.0"),
        ("layers.1.self_attn.v_proj.weight", "layers.1|context projection"),
        ("lm_head.weight", "output head"),
    ],
)
def test_a_drafter_with_nan_is_refused_by_the_layer_that_makes_it(target, broken, named):
    drafter = tiny_drafter("dflash", own_head=True)
    drafter.get_parameter(broken).fill_(float("nan"))
    with pytest.raises(LabError, match=named):
        record(target, drafter, some_traces())


def test_half_precision_overflow_is_an_error_that_names_the_layer():
    target = tiny_target()
    drafter = tiny_drafter("dflash")
    drafter.layers[1].mlp.down_proj.weight.fill_(6e4)
    drafter.half()
    with pytest.raises(LabError, match=r"layers\.1 gives values that are not finite"):
        record(target, drafter, some_traces())


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@pytest.mark.parametrize("form", ["free", "projected"])
def test_a_drafter_in_another_dtype_than_its_target_is_recorded(target, kind, form):
    changes = {"selector_parametrization": form} if kind == "dflash2" else {"own_head": True}
    drafter, traces = tiny_drafter(kind, **changes), some_traces()
    expected = record(target, drafter, traces).slots["target_rank"]
    found = record(target, drafter.bfloat16(), traces).slots["target_rank"]
    assert (abs(found - expected) < 80).mean() > 0.9


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (((5, 1), (5, 0)), "no response has two tokens"),
        (((5, 3), (0, 4)), "'p1'.*no token"),
    ],
)
def test_traces_without_anything_to_record_are_refused(target, lengths, message):
    with pytest.raises(LabError, match=message):
        record(target, tiny_drafter(), some_traces(lengths=lengths))


def test_traces_of_a_larger_vocabulary_are_refused(target):
    with pytest.raises(LabError, match="264 tokens"):
        record(target, tiny_drafter(), some_traces(vocab=5000))


def test_a_drafter_of_another_target_is_refused(target):
    with pytest.raises(LabError, match="wrong target"):
        record(target, tiny_drafter(hidden_size=64), some_traces())


@pytest.mark.parametrize(
    "options", [{"anchor_stride": 0}, {"batch_size": 0}, {"memory_gb": 0.0}, {"memory_gb": -1}]
)
def test_bad_options_are_named(target, options):
    with pytest.raises(LabError, match=next(iter(options))):
        record(target, tiny_drafter(), some_traces(), **options)


# --- folders


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


@pytest.mark.parametrize("lost", ["slots-00001", "attention-00000", "paths-00002"])
def test_a_run_that_lost_a_shard_ends_with_the_same_files(target, tmp_path, lost):
    drafter, traces, options = tiny_drafter(), some_traces(HOT), {"batch_size": 2, "out": tmp_path}
    whole = record(target, drafter, traces, **options)
    before = files(tmp_path)
    assert len(before) == 3 * 4
    (tmp_path / f"{lost}.parquet").unlink()
    again = record(target, drafter, traces, **options)
    assert files(tmp_path) == before
    same_tables(whole, again, exact=True)


def test_a_finished_run_is_read_and_not_made_again(target, tmp_path):
    drafter, traces = tiny_drafter(), some_traces()
    record(target, drafter, traces, out=tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.parquet")}
    record(target, drafter, traces, out=tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.parquet")} == stamps


@pytest.mark.parametrize(
    "change",
    ["stride", "policies", "candidates", "attention", "seed", "weights", "kind", "traces"],
)
def test_another_run_in_the_same_folder_is_refused(target, tmp_path, change):
    drafter, traces, options = tiny_drafter(), some_traces(HOT), {"out": tmp_path}
    record(target, drafter, traces, **options)
    options |= {
        "stride": {"anchor_stride": 2},
        "policies": {"policies": ("top1",)},
        "candidates": {"keep_candidates": True},
        "attention": {"attention": False},
        "seed": {"seed": 5},
    }.get(change, {})
    if change == "weights":
        drafter = tiny_drafter(seed=9)
    elif change == "kind":
        drafter = tiny_drafter("dflash")
    elif change == "traces":
        traces = some_traces(HOT, lengths=(*LENGTHS[:-1], (3, 29)))
    with pytest.raises(LabError, match="another run"):
        record(target, drafter, traces, **options)


def test_run_information_names_what_the_numbers_depend_on(target):
    info = record(target, tiny_drafter(), some_traces(HOT)).info
    assert info["drafter"]["num_draft"] == 3
    assert info["drafter"]["dtype"] == "float32"
    assert info["target"]["name"] == "tiny-qwen3"
    assert info["sampling"] == HOT
    assert info["prompt_set_hash"] == "abc"
    assert info["environment"]["packages"]["torch"]


def test_traces_that_are_off_policy_are_recorded_and_marked(target):
    traces = some_traces()
    frame = traces.traces.assign(on_policy=[True] * 5 + [False])
    run = record(target, tiny_drafter(), Run.in_memory(traces.info, {"traces": frame}))
    assert run.info["on_policy"] is False


# --- pieces


def test_token_groups_are_neighbours_and_keep_the_padded_size():
    lengths = [5, 5, 9, 2, 30, 1, 1]
    groups = token_groups(lengths, 18)
    assert list(itertools.chain(*groups)) == list(range(7))
    for group in groups:
        padded = max(lengths[row] for row in group) * len(group)
        assert padded <= 18 or len(group) == 1
    assert len(groups) == 4


def test_memory_of_recording_attention_does_not_grow_with_the_context():
    target = tiny_target(max_position_embeddings=8256)
    drafter = tiny_drafter(max_position_embeddings=8256)
    peaks = {}
    for context in (512, 8192):
        row = next(some_traces(lengths=((context, 60),)).traces.itertuples(index=False))
        ids = torch.tensor([*row.prompt_ids, *row.response_ids])
        with torch.inference_mode():
            taps, _ = features(target, ids[None], drafter.settings.target_layer_ids)
            keys = drafter.context_keys(taps)
            for attention in (True, False):
                options = RecordOptions(("selector",), memory_gb=0.004, attention=attention)
                call = functools.partial(
                    record_trace, target, drafter, ids, keys, row, Sampling(), options
                )
                peaks[context, attention] = peak_bytes(call)
    # The weights of one layer alone would take 31 MB at the longer context.
    for context in (512, 8192):
        assert 0.0004e9 < peaks[context, True] < 0.004e9
        assert peaks[context, True] - peaks[context, False] < 100_000
