"""Headroom by k and what the selector recovers, on recordings small enough to count by hand."""

import numpy as np
import pytest
from recordings import Request, make_run

from dflash2_lab import stats
from dflash2_lab.errors import LabError
from dflash2_lab.replaying import replay


def at(table, slot, quantity):
    row = table[(table["slot"] == slot) & (table["quantity"] == quantity)]
    return row["value"].item()


def random_run(temperature=0.0, seed=0):
    rng = np.random.default_rng(seed)
    requests = []
    for prompt in "abcd":
        num = int(rng.integers(8, 14))
        rank = rng.integers(0, 6, size=(num, 3))
        q = {name: rng.uniform(0, 1, size=(num, 3)) for name in ("top1", "selector")}
        p = rng.uniform(0.05, 1, size=(num, 3))
        hits = {"top1": rank == 0, "selector": rank < rng.integers(1, 4, size=(num, 3))}
        requests.append(Request(num + 1, rank=rank, q=q, p=p, hits=hits, prompt_id=prompt))
    return make_run(requests, num_draft=3, temperature=temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_oracle_by_k_is_the_replay_of_each_oracle(temperature):
    run = random_run(temperature)
    table = stats.oracle_by_k(run, (1, 2, 4))
    for row in table.itertuples():
        pooled = replay(run, f"oracle@{row.k}").pooled
        assert (row.value, row.low, row.high) == (pooled.value, pooled.low, pooled.high)
        assert row.num_steps == pooled.num
    assert table["value"].is_monotonic_increasing


def test_oracle_by_k_needs_every_anchor():
    run = random_run()
    run.info["anchor_stride"] = 2
    with pytest.raises(LabError, match="anchor_stride: found 2"):
        stats.oracle_by_k(run, (1,))


def test_helped_hurt_and_what_is_left_are_shares_of_the_blocks_that_reach_a_slot():
    # slot 1: helped, hurt, both right, both wrong within k, both wrong beyond
    top1 = np.array([[0, 1], [1, 1], [1, 0], [0, 1], [0, 1]], dtype=bool)
    selector = np.array([[1, 1], [0, 1], [1, 1], [0, 1], [0, 1]], dtype=bool)
    rank = np.array([[2, 0], [0, 0], [0, 3], [2, 0], [9, 0]])
    hits = {"top1": top1, "selector": selector}
    run = make_run([Request(7, hits=_six(hits), rank=_six({"r": rank})["r"])], num_draft=2)
    table = stats.selector_recovery(run, k=4)
    # the sixth block has slot 1 alone, where both are right
    assert table[table["slot"] == 1]["num_blocks"].unique().tolist() == [6]
    for quantity in ("helped", "hurt", "within", "beyond"):
        assert at(table, 1, quantity) == pytest.approx(1 / 6)
    assert at(table, 1, "net") == 0
    # slot 2 is reached by the third block alone: the selector has it, top-1 does not
    assert table[table["slot"] == 2]["num_blocks"].unique().tolist() == [1]
    assert at(table, 2, "helped") == 1
    assert at(table, 2, "within") == 0


def _six(arrays):
    """The arrays with a sixth row, in which slot 1 is right."""
    return {
        name: np.concatenate([part, [[1, 1] if part.dtype == bool else [0, 0]]]).astype(part.dtype)
        for name, part in arrays.items()
    }


def test_sampled_shares_are_those_of_one_uniform_number_for_both_policies():
    run = random_run(temperature=1.0)
    table = stats.selector_recovery(run, k=3)
    rng = np.random.default_rng(1)
    paths = run.paths.merge(run.slots, on=["prompt_id", "turn", "sample", "anchor", "slot"])
    accept = {
        name: np.minimum(1, rows["q_target"] / rows["p_target"]).to_numpy()
        for name, rows in paths.groupby("policy")
    }
    slot = run.slots["slot"].to_numpy()
    block = (slot == 1).cumsum()
    helped, hurt, reached = np.zeros(4), np.zeros(4), np.zeros(4)
    for _ in range(3000):
        uniform = rng.random(len(slot))
        new, old = uniform < accept["selector"], uniform < accept["top1"]
        open_ = np.ones(block.max() + 1, dtype=bool)
        for j in (1, 2, 3):
            rows = np.flatnonzero(slot == j)
            rows = rows[open_[block[rows]]]
            reached[j] += len(rows)
            helped[j] += (new & ~old)[rows].sum()
            hurt[j] += (old & ~new)[rows].sum()
            open_[block[rows]] = (new & old)[rows]
    for j in (1, 2, 3):
        assert at(table, j, "helped") == pytest.approx(helped[j] / reached[j], abs=0.02)
        assert at(table, j, "hurt") == pytest.approx(hurt[j] / reached[j], abs=0.02)


def test_the_candidates_are_those_of_the_selector_unless_told():
    run = random_run()
    assert stats.num_candidates(run) == 16
    run.info["drafter"]["selector_top_k"] = 3
    assert stats.num_candidates(run) == 3
    assert stats.selector_recovery(run).equals(stats.selector_recovery(run, k=3))
    assert not stats.selector_recovery(run).equals(stats.selector_recovery(run, k=6))
