"""Selection headroom: how far the candidates could carry, and how far a selector goes.

oracle@k accepts the target's token whenever it is among the k best unary candidates: an upper bound
for every selector on those k.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from dflash2_lab.blocks import load_blocks
from dflash2_lab.intervals import cluster_draws, cluster_ratio, percentile_interval, ratio, sum_by
from dflash2_lab.replaying import (
    Walk,
    accept_ratios,
    acceptance_lengths,
    check_every_anchor,
    check_replayable,
    count_law,
    expected_walk,
    request_sums,
    visit_weights,
)
from dflash2_lab.tables import Run

CANDIDATES = 16  # of a drafter whose checkpoint names no number of its own


def num_candidates(run: Run) -> int:
    """Candidates that the drafter's selector chooses among; 16 for one without a selector."""
    return int(run.info.get("drafter", {}).get("selector_top_k") or CANDIDATES)


def headroom(
    run: Run, policies: Sequence[str] | None = None, baseline: str = "top1", oracle_k: int = 16
) -> pd.DataFrame:
    """Return how much of the way from `baseline` to oracle@k each policy goes.

    (length - baseline) / (oracle - baseline) of pooled lengths, on the same bootstrap draws; NaN
    where the oracle is no better than the baseline. Columns: policy, value, low, high.
    """
    names = run.policies if policies is None else policies
    lengths = {
        policy: _pooled_draws(expected_walk(run, policy))
        for policy in dict.fromkeys([*names, baseline, f"oracle@{oracle_k}"])
    }
    base, oracle = lengths[baseline], lengths[f"oracle@{oracle_k}"]
    rows = []
    for policy in names:
        shares = ratio(lengths[policy] - base, oracle - base)
        low, high = percentile_interval(shares[1:])
        rows.append((policy, float(shares[0]), float(low), float(high)))
    return pd.DataFrame(rows, columns=["policy", "value", "low", "high"])


def _pooled_draws(walk: Walk) -> Float[np.ndarray, "1+draws"]:
    """Return the pooled acceptance length, then its bootstrap draws."""
    sums = request_sums(walk)
    parts = [
        sum_by(walk.blocks.cluster, sums[name].to_numpy(), walk.blocks.num_clusters)
        for name in ("tokens", "steps")
    ]
    value, samples = cluster_draws(*parts)
    return np.concatenate([value[None], samples])


def oracle_by_k(run: Run, ks: Sequence[int]) -> pd.DataFrame:
    """Return the pooled acceptance length of oracle@k for each k, terminal steps included.

    Returns:
        Frame with the columns k, value, low, high (tokens per verify step, bonus counted),
        num_steps (expected verify steps).
    """
    check_replayable(run)
    blocks = load_blocks(run)
    check_every_anchor(blocks)
    rank = blocks.slot_matrix(run.slots, "target_rank", 0, "table 'slots'")
    rows = []
    for k in ks:  # as `expected_walk` of "oracle@k", with the tables read once
        law = count_law((blocks.offered_mask & (rank < k)).astype(np.float64))
        walk = Walk(blocks, law, visit_weights(blocks, law))
        pooled = acceptance_lengths(request_sums(walk))["pooled"]
        rows.append((int(k), pooled.value, pooled.low, pooled.high, pooled.num))
    return pd.DataFrame(rows, columns=["k", "value", "low", "high", "num_steps"])


def selector_recovery(
    run: Run, policy: str = "selector", baseline: str = "top1", k: int | None = None
) -> pd.DataFrame:
    """Return per slot where `policy` beats `baseline` and where it loses, over all anchors.

    A block reaches a slot when both policies were accepted at every slot before it. Of those
    blocks: `helped`, the share in which the policy is accepted and the baseline is not; `hurt`,
    the reverse; `net`, helped - hurt; `within`, both refused though the target's token is among
    the k best candidates (what a selector could still win); `beyond`, both refused and it is not.
    At temperature > 0 both policies are judged by one uniform number per token, so that "accepted
    by one alone" has probability |a - b| for acceptance probabilities a and b; shares are
    expectations under that coupling, and `beyond` counts what is refused outside the k.

    Args:
        run: a recording with both policies.
        policy: the policy under study.
        baseline: what it is held against.
        k: candidates of the oracle; None: those of the drafter's selector.

    Returns:
        Frame with the columns slot, quantity, value, low, high, num_blocks (expected number of
        blocks that reach the slot).
    """
    blocks = load_blocks(run)
    new, old = (np.minimum(accept_ratios(run, blocks, name), 1.0) for name in (policy, baseline))
    rank = blocks.slot_matrix(run.slots, "target_rank", 0, "table 'slots'")
    inside = rank < (num_candidates(run) if k is None else k)
    before = np.cumprod(np.minimum(new, old), axis=1)[:, :-1]
    reached = np.concatenate([np.ones_like(new[:, :1]), before], axis=1) * blocks.offered_mask
    refused = 1 - np.maximum(new, old)
    quantities = {
        "helped": np.maximum(new - old, 0.0),
        "hurt": np.maximum(old - new, 0.0),
        "net": new - old,
        "within": refused * inside,
        "beyond": refused * ~inside,
    }
    cases = sum_by(blocks.block_cluster, reached, blocks.num_clusters)
    parts = []
    for name, share in quantities.items():
        sums = sum_by(blocks.block_cluster, reached * share, blocks.num_clusters)
        value, low, high = cluster_ratio(sums, cases)
        part = {"slot": np.arange(1, blocks.num_draft + 1), "quantity": name}
        part |= {"value": value, "low": low, "high": high, "num_blocks": cases.sum(axis=0)}
        parts.append(pd.DataFrame(part))
    return pd.concat(parts, ignore_index=True)
