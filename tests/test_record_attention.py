"""Attention kept key by key for a sample of anchors: cases I1 (weights are the softmax and change
nothing), I2 (memory does not grow with the context) and I5 (axes and keys are named)."""

import itertools

import numpy as np
import pytest
import torch
from brute import HOT, SLOT, same_tables, some_traces
from drafters import tiny_drafter
from helpers import tiny_target
from profiling import peak_bytes

from dflash2_lab import recording_attention
from dflash2_lab.cli import parser
from dflash2_lab.errors import LabError
from dflash2_lab.models.attention import dense_attention, merged_attention
from dflash2_lab.models.layers import embed_rows
from dflash2_lab.recording import record
from dflash2_lab.recording_attention import block_weights, sampled_anchors
from dflash2_lab.schema import NEAREST, SCHEMAS
from dflash2_lab.target import features

CONTEXT = 40  # prompt tokens of the one trace: more than NEAREST, so some context is older


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def one_trace(prompt=CONTEXT, response=9):
    return some_traces(lengths=((prompt, response),))


def plain_rows(target, drafter, row, anchor):
    """[layer, slot, S + G] in float64: softmax(q k) of one block alone, mean over heads."""
    rows = {}
    shift = 0 if drafter.settings.sample_from_anchor else 1

    def attend(layer, query, context, block, anchors, window, causal):
        at, size = int(anchors), query.shape[3]
        for head, slot in itertools.product(range(4), range(drafter.settings.num_draft)):
            own = slot + shift
            keys = torch.cat([context[0][0, head // 2, :at], block[0][0, head // 2, 0]]).double()
            scores = keys @ query[0, head, 0, own].double() / 8**0.5
            for key in range(at):
                if window is not None and at + own - key >= window:
                    scores[key] = -torch.inf
            for key in range(size):
                hidden = causal and key > own
                if hidden or (window is not None and abs(own - key) >= window):
                    scores[at + key] = -torch.inf
            rows[layer, slot] = rows.get((layer, slot), 0) + scores.softmax(0) / 4
        return dense_attention(query, context, block, anchors, window, causal)

    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    at = len(row.prompt_ids) + anchor
    with torch.no_grad():
        context, _ = features(target, ids[:, :at], drafter.settings.target_layer_ids)
        embeds = embed_rows(target.embed_weight, drafter.block_ids(ids[:, at : at + 1]), 1.0)
        drafter(embeds, drafter.context_keys(context), torch.tensor([[at]]), attend)
    return rows


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
@pytest.mark.parametrize("causal", [(False, False), (True, False)])
def test_kept_rows_are_the_softmax_of_every_key_by_name(target, kind, causal):
    drafter, traces = tiny_drafter(kind, causal=causal), one_trace()
    run = record(target, drafter, traces, attention_sample=2)
    table = run.table("block_attention")
    assert list(table.columns) == SCHEMAS["block_attention"].names
    assert sorted(set(table["anchor"])) == [2, 6]
    num_draft = drafter.settings.num_draft
    assert len(table) == 2 * 2 * num_draft
    row = next(traces.traces.itertuples(index=False))
    for anchor, part in table.groupby("anchor"):
        expected = plain_rows(target, drafter, row, anchor)
        assert set(zip(part["layer"], part["slot"] - 1, strict=True)) == set(expected)
        at = CONTEXT + anchor
        for line in part.itertuples(index=False):
            full = expected[line.layer, line.slot - 1].numpy()
            assert (len(line.nearest), len(line.block)) == (NEAREST, 4)
            np.testing.assert_allclose(line.older, full[: at - NEAREST].sum(), atol=1e-5)
            np.testing.assert_allclose(line.nearest, full[at - NEAREST : at], atol=1e-5)
            np.testing.assert_allclose(line.block, full[at:], atol=1e-5)
            np.testing.assert_allclose(line.share_context, full[:at].sum(), atol=1e-5)
            np.testing.assert_allclose(line.share_anchor, full[at], atol=1e-5)
            np.testing.assert_allclose(line.share_drafted, full[at + 1 :].sum(), atol=1e-5)


def test_shares_sum_to_one_and_are_those_of_the_sums_table(target):
    drafter = tiny_drafter()
    run = record(target, drafter, one_trace(), attention_sample=8)
    table, sums = run.table("block_attention"), run.attention
    shares = ["share_context", "share_anchor", "share_drafted"]
    np.testing.assert_allclose(table[shares].sum(axis=1), 1.0, atol=1e-6)
    kept = table.groupby(["layer", "slot"])[shares].sum()
    names = ["sum_context", "sum_anchor", "sum_drafted"]
    expected = sums.groupby(["layer", "slot"])[names].sum() / sums["head"].nunique()
    np.testing.assert_allclose(kept, expected, atol=1e-5)  # every anchor was in the sample


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_keeping_attention_changes_nothing_else(target, kind):
    drafter, traces = tiny_drafter(kind), some_traces(HOT, lengths=((5, 9), (3, 6)))
    options = {"keep_candidates": True}
    plain_tables = ("anchors", "slots", "paths", "candidates", "attention")
    plain = record(target, drafter, traces, **options)
    full = record(target, drafter, traces, attention_sample=3, **options)
    same_tables(plain, full, plain_tables, exact=True)
    assert not plain.has_table("block_attention")


def test_a_short_context_has_no_older_part_and_fewer_nearest(target):
    table = record(target, tiny_drafter(), one_trace(prompt=5), attention_sample=8).table(
        "block_attention"
    )
    assert (table["older"] == 0).all()
    assert (table["nearest"].map(len) == 5 + table["anchor"]).all()


# --- which anchors


@pytest.mark.parametrize(
    ("recorded", "count", "expected"),
    [
        (range(10), 0, []),
        (range(10), 1, [5]),
        (range(10), 2, [2, 7]),
        (range(0, 40, 4), 2, [8, 28]),
        (range(3), 3, [0, 1, 2]),
        (range(3), 9, [0, 1, 2]),
        (range(0), 4, []),
    ],
)
def test_sampled_anchors_are_the_middles_of_equal_parts(recorded, count, expected):
    assert sampled_anchors(np.array(recorded), count).tolist() == expected


@pytest.mark.parametrize("options", [{"batch_size": 1}, {"memory_gb": 1e-9}, {"memory_gb": 2e-4}])
def test_batching_and_tiling_do_not_change_what_is_kept(target, options):
    drafter, traces = tiny_drafter(), some_traces(lengths=((5, 9), (1, 7), (40, 2)))
    options = options | {"attention_sample": 4}
    one, other = (
        record(target, drafter, traces, **o).table("block_attention")
        for o in (options, {"attention_sample": 4})
    )
    keys = [*SLOT, "layer"]
    assert one[keys].equals(other[keys])
    for name in ("older", "share_context", "share_anchor", "share_drafted"):
        np.testing.assert_allclose(one[name], other[name], atol=1e-5)
    for name in ("nearest", "block"):
        for found, expected in zip(one[name], other[name], strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)


def test_another_sample_in_the_same_folder_is_refused(target, tmp_path):
    drafter, traces = tiny_drafter(), one_trace()
    record(target, drafter, traces, attention_sample=2, out=tmp_path)
    with pytest.raises(LabError, match=r"another run, attention_sample is 2"):
        record(target, drafter, traces, attention_sample=3, out=tmp_path)


def test_a_lost_shard_comes_back_with_the_same_bytes(target, tmp_path):
    drafter, traces = tiny_drafter(), some_traces()
    options = {"attention_sample": 2, "batch_size": 2, "out": tmp_path}
    record(target, drafter, traces, **options)
    lost = tmp_path / "block_attention-00001.parquet"
    before = lost.read_bytes()
    lost.unlink()
    record(target, drafter, traces, **options)
    assert lost.read_bytes() == before


def test_a_negative_sample_is_named(target):
    with pytest.raises(LabError, match="attention_sample: found -1"):
        record(target, tiny_drafter(), one_trace(), attention_sample=-1)


def test_the_command_line_has_the_sample():
    words = ["record", "--drafter", "zoo:dflash", "--out", "run"]
    assert parser().parse_args(words).attention_sample == 0
    assert parser().parse_args([*words, "--attention-sample", "8"]).attention_sample == 8


# --- one block's weights


def random_block(context, heads=4, kv_heads=2, rows=16, width=16):
    query = torch.randn(heads, rows, width)
    keys = torch.randn(kv_heads, context, width)
    return query, keys, torch.randn(kv_heads, rows, width)


@pytest.mark.parametrize("window", [None, 100, 600])
def test_rows_at_512_tokens_are_those_of_full_maps_in_any_chunks(monkeypatch, window):
    query, keys, block = random_block(512)
    maps = torch.cat([keys, block], dim=1).repeat_interleave(2, dim=0)
    scores = query @ maps.mT / 16**0.5
    place = 512 + torch.arange(16)[:, None] - torch.arange(512 + 16)
    if window is not None:
        scores = scores.masked_fill(place.abs() >= window, -torch.inf)
    full = scores.softmax(-1)
    for chunk in (4096, 100):
        monkeypatch.setattr(recording_attention, "CHUNK", chunk)
        older, near, own = block_weights(query, keys, block, 512, window, False)
        split = 512 - NEAREST
        torch.testing.assert_close(older, full[..., :split].sum(-1), rtol=0, atol=1e-5)
        torch.testing.assert_close(near, full[..., split:512], rtol=0, atol=1e-5)
        torch.testing.assert_close(own, full[..., 512:], rtol=0, atol=1e-5)


def test_rows_are_fp32_for_narrow_inputs_and_agree_with_the_masses():
    query, keys, block = (part.bfloat16() for part in random_block(300))
    older, near, own = block_weights(query, keys, block, 300, None, False)
    assert {part.dtype for part in (older, near, own)} == {torch.float32}
    pairs = tuple((x[None], x[None]) for x in (keys, block[:, None]))
    _, mass = merged_attention(query[None, :, None], *pairs, torch.tensor([[300]]), None, False)
    found = torch.stack([older + near.sum(-1), own[..., 0], own[..., 1:].sum(-1)], dim=-1)
    torch.testing.assert_close(found, mass[0, :, 0], rtol=0.02, atol=0.005)


def test_memory_of_one_block_at_32k_context_is_a_chunk_of_scores():
    parts = random_block(32_768, heads=32, kv_heads=8)
    peak = peak_bytes(lambda: block_weights(*parts, 32_768, None, False))
    # The rows of the block alone over the whole context would be 67 MB, and a softmax twice that.
    assert 0 < peak < 50e6
