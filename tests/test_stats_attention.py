"""Statistics of attention shares on hand-made tables: by layer, by head, against recall."""

import numpy as np
import pandas as pd
import pytest
from recordings import Request, make_run

from dflash2_lab import stats
from dflash2_lab.errors import LabError
from dflash2_lab.tables import Run


def values(table, column="value", **where):
    for name, value in where.items():
        table = table[table[name] == value]
    return table[column].tolist()


def attention_rows():
    rows = []
    for prompt, scale in (("a", 1.0), ("b", 3.0)):
        for layer in (0, 1):
            for head in (0, 1):
                for slot in (1, 2):
                    for bin_ in ("0-255", "256-511"):
                        anchor, drafted = (0.1 * (layer + 1), 0.05 * slot)
                        shares = {
                            "sum_context": 1 - anchor - drafted,
                            "sum_anchor": anchor,
                            "sum_drafted": drafted + (0.02 if head else -0.02),
                            "sumsq_within": 0.0,
                            "sum_uniform": 0.04,
                        }
                        key = dict(prompt_id=prompt, turn=0, sample=0, layer=layer, head=head)
                        counts = {name: 10 * scale * value for name, value in shares.items()}
                        rows.append(
                            key | {"slot": slot, "context_bin": bin_} | counts
                            | {"count": int(10 * scale)}
                        )  # fmt: skip
    return pd.DataFrame(rows)


def test_attention_is_pooled_over_heads_and_context_bins():
    run = Run.in_memory({}, {"attention": attention_rows()})
    table = stats.attention_by_layer(run)
    columns = ["layer", "slot", "group", "value", "low", "high", "uniform", "count"]
    assert list(table) == columns
    assert values(table, layer=1, slot=2, group="anchor") == pytest.approx([0.2])
    assert values(table, layer=1, slot=2, group="drafted") == pytest.approx([0.1])
    assert values(table, layer=1, slot=2, group="within_block") == pytest.approx([0.3])
    assert values(table, layer=1, slot=2, group="context") == pytest.approx([0.7])
    # Slot 0 pools the slots.
    assert values(table, layer=0, slot=0, group="within_block") == pytest.approx([0.175])
    assert values(table, "count", layer=0, slot=0, group="context") == [2 * 2 * 2 * (10 + 30)]
    assert values(table, "count", layer=0, slot=1, group="context") == [2 * 2 * (10 + 30)]
    assert values(table, "uniform", layer=0, slot=1, group="within_block") == pytest.approx([0.04])
    assert values(table, "uniform", layer=0, slot=1, group="context") == pytest.approx([0.96])
    assert np.isnan(values(table, "uniform", layer=0, slot=1, group="anchor")).all()


def test_attention_is_weighted_by_counts_and_its_interval_follows_the_prompts():
    rows = attention_rows()
    other = rows["prompt_id"] == "b"
    rows.loc[other, "sum_anchor"] *= 2
    table = stats.attention_by_layer(Run.in_memory({}, {"attention": rows}))
    row = table[(table["layer"] == 0) & (table["slot"] == 1) & (table["group"] == "anchor")]
    # Prompt a has share 0.1 on 10 rows, prompt b 0.2 on 30.
    assert row["value"].tolist() == pytest.approx([(0.1 * 10 + 0.2 * 30) / 40])
    assert (row["low"].item(), row["high"].item()) == pytest.approx((0.1, 0.2))
    with pytest.raises(LabError, match="'attention': found no row"):
        stats.attention_by_layer(Run.in_memory({}, {"attention": rows.iloc[:0]}))


def test_the_map_keeps_heads_apart_and_pools_context_bins():
    table = stats.attention_map(Run.in_memory({}, {"attention": attention_rows()}))
    columns = ["layer", "head", "slot", "value", "low", "high", "uniform", "count"]
    assert list(table) == columns
    assert len(table) == 2 * 2 * 2
    # anchor 0.1 (layer + 1), drafted 0.05 slot -+ 0.02
    assert values(table, layer=0, head=0, slot=1) == pytest.approx([0.1 + 0.05 - 0.02])
    assert values(table, layer=1, head=1, slot=2) == pytest.approx([0.2 + 0.10 + 0.02])
    assert values(table, "uniform", layer=1, head=1, slot=2) == pytest.approx([0.04])
    assert values(table, "count", layer=0, head=0, slot=1) == [2 * (10 + 30)]


def test_the_map_weighs_prompts_by_their_rows_and_resamples_them():
    rows = attention_rows()
    rows.loc[rows["prompt_id"] == "b", ["sum_anchor", "sum_drafted"]] *= 2
    table = stats.attention_map(Run.in_memory({}, {"attention": rows}))
    row = table[(table["layer"] == 0) & (table["head"] == 0) & (table["slot"] == 1)]
    assert row["value"].tolist() == pytest.approx([(0.13 * 10 + 0.26 * 30) / 40])
    assert (row["low"].item(), row["high"].item()) == pytest.approx((0.13, 0.26))


def attention_of(bins):
    """One row per prompt, slot and context bin, with the within-block share that `bins` says."""
    rows = [
        {"prompt_id": prompt, "slot": slot, "context_bin": name, "sum_anchor": 10 * share}
        for prompt in ("a", "b")
        for slot in (1, 2)
        for name, share in bins.items()
    ]
    frame = pd.DataFrame(rows).assign(turn=0, sample=0, layer=0, head=0, sum_drafted=0.0)
    frame["sum_context"] = 10 - frame["sum_anchor"]
    return frame.assign(sumsq_within=0.0, sum_uniform=0.5, count=10)


def test_share_and_recall_of_a_bin_are_those_of_its_blocks():
    # contexts of `make_run` start at 10 tokens: anchors 0..1 end before 12, the others do not
    rank = np.array([[0, 0], [0, 5], [5, 5], [0, 5]])
    requests = [Request(5, rank=rank, prompt_id=p, accept={"top1": np.zeros(4, int)}) for p in "ab"]
    run = make_run(requests, num_draft=2)
    shares = {"12-31": 0.1, "0-11": 0.4}
    run = Run.in_memory(run.info, {**run.frames, "attention": attention_of(shares)})
    table = stats.share_against_recall(run)
    assert list(dict.fromkeys(table["context_bin"])) == ["all", "0-11", "12-31"]
    assert values(table, "recall", context_bin="0-11", slot=1) == [1.0]
    assert values(table, "recall", context_bin="0-11", slot=2) == [0.5]
    assert values(table, "recall", context_bin="12-31", slot=1) == [0.5]
    assert values(table, "num_blocks", context_bin="12-31", slot=2) == [
        2
    ]  # one block has no slot 2
    assert values(table, "num_blocks", context_bin="all", slot=1) == [8]
    assert values(table, "share", context_bin="0-11", slot=1) == pytest.approx([0.4])
    assert values(table, "share", context_bin="all", slot=1) == pytest.approx([0.25])
    assert values(stats.share_against_recall(run, k=6), "recall", context_bin="all", slot=2) == [
        1.0
    ]


def test_a_run_without_attention_says_so():
    run = make_run([Request(5, accept={"top1": np.zeros(4, int)})], num_draft=2)
    for statistic in (stats.attention_map, stats.share_against_recall):
        with pytest.raises(LabError, match="table 'attention' not found"):
            statistic(run)
