"""Statistics of recordings: tables in, tables out, with cluster-bootstrap intervals over prompts.

Recall is about the unary candidates (the target token's rank in the draft logits), path metrics
about what a policy proposes; the two are never mixed. Sums are pooled and ratios formed once, at
the end. An interval is NaN when a run has a single prompt.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float

from dflash2_lab.blocks import Blocks, load_blocks
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import (
    Estimate,
    cluster_draws,
    cluster_ratio,
    percentile_interval,
    ratio,
    sum_by,
)
from dflash2_lab.replaying import (
    acceptance_lengths,
    check_replayable,
    expected_walk,
    path_estimates,
    request_sums,
)
from dflash2_lab.stats_attention import attention_by_layer, attention_map, share_against_recall
from dflash2_lab.stats_headroom import headroom, num_candidates, oracle_by_k, selector_recovery
from dflash2_lab.tables import Run

__all__ = [
    "Estimate",
    "SuffixDecay",
    "acceptance_by_policy",
    "attention_by_layer",
    "attention_map",
    "by_dataset",
    "cluster_ratio",
    "default_policy",
    "degenerate_output",
    "headroom",
    "num_candidates",
    "oracle_by_k",
    "own_policy",
    "path_by_slot",
    "recall_by_slot",
    "selector_recovery",
    "share_against_recall",
    "suffix_decay",
]

logger = logging.getLogger(__name__)

_DEFAULT_POLICIES = {"dflash": "top1", "dflash2": "selector", "dspark": "markov"}


def default_policy(run: Run) -> str:
    """Return the drafter's own policy: top1 for DFlash, selector for DFlash 2, markov for DSpark.

    Raises:
        LabError: a drafter of another kind.
    """
    return own_policy(run.info.get("drafter", {}).get("kind"))


def own_policy(kind: str | None) -> str:
    """The policy of a kind of drafter, as `default_policy`."""
    if kind not in _DEFAULT_POLICIES:
        raise LabError(f"drafter.kind: found {kind!r}, expected one of {[*_DEFAULT_POLICIES]}")
    return _DEFAULT_POLICIES[kind]


def recall_by_slot(
    run: Run, ks: Sequence[int] = (1, 16), policy: str | None = None
) -> pd.DataFrame:
    """Return marginal and conditional recall of the unary candidates per slot.

    position_recall@k: of the blocks with this slot, the fraction whose target token is among the
    k best; conditional_recall@k: the same among blocks whose earlier slots all were. "all" counts
    every recorded block once, "visited" by its expected visits in a replay of `policy` (None: the
    drafter's own). A run that cannot be replayed (it skips anchors, or its traces are not the
    target's own) has no visited rows, and that is logged.

    Returns:
        Frame with the columns anchors, metric, k, slot, value, low, high, num_blocks.
    """
    parts = []
    for anchors in ("all", "visited") if _replayable(run) else ("all",):
        blocks, weights = _block_weights(run, anchors, policy)
        rank = blocks.slot_matrix(run.slots, "target_rank", 0, "table 'slots'")
        for metric in ("position_recall", "conditional_recall"):
            for k in ks:
                sums = _recall_sums(blocks, weights, rank < k, metric)
                part = _slot_frame(sums, *cluster_ratio(*sums))
                parts.append(part.assign(anchors=anchors, metric=metric, k=k))
    columns = ["anchors", "metric", "k", "slot", "value", "low", "high", "num_blocks"]
    return pd.concat(parts, ignore_index=True)[columns]


def _replayable(run: Run) -> bool:
    try:
        check_replayable(run)
    except LabError as reason:
        logger.warning("recall over visited anchors is left out: %s", reason)
        return False
    return True


def _block_weights(
    run: Run, anchors: str, policy: str | None
) -> tuple[Blocks, Float[np.ndarray, " A"]]:
    if anchors == "all":
        blocks = load_blocks(run)
        return blocks, np.ones(len(blocks.anchor))
    if anchors == "visited":
        walk = expected_walk(run, policy or default_policy(run))
        return walk.blocks, walk.visits
    raise LabError(f"anchors: found {anchors!r}, expected 'all' or 'visited'")


def _recall_sums(
    blocks: Blocks, weights: Float[np.ndarray, " A"], found: Bool[np.ndarray, "A P"], metric: str
) -> tuple[Float[np.ndarray, "C P"], Float[np.ndarray, "C P"]]:
    """Return weighted hits and weighted cases per prompt and slot."""
    cases = blocks.offered_mask
    if metric == "conditional_recall":
        earlier = np.logical_and.accumulate(found, axis=1)[:, :-1]
        cases = cases & np.concatenate([np.ones_like(cases[:, :1]), earlier], axis=1)
    hits = cases & found
    return tuple(
        sum_by(blocks.block_cluster, weights[:, None] * part, blocks.num_clusters)
        for part in (hits, cases)
    )


def _slot_frame(sums, value, low, high) -> pd.DataFrame:
    slot = np.arange(1, len(value) + 1)
    num = sums[1].sum(axis=0)
    return pd.DataFrame({"slot": slot, "value": value, "low": low, "high": high, "num_blocks": num})


@dataclass(frozen=True)
class SuffixDecay:
    """Fall of position recall with the slot, with 95 % intervals.

    `slope` is the least-squares slope of log recall per slot (NaN when a slot has recall 0),
    `drop` the recall of the first slot minus that of the last.
    """

    slope: float
    slope_low: float
    slope_high: float
    drop: float
    drop_low: float
    drop_high: float


def suffix_decay(
    run: Run, k: int = 1, anchors: str = "all", policy: str | None = None
) -> tuple[pd.DataFrame, SuffixDecay]:
    """Return the curve of position_recall@k (slot, value, low, high) and its decay."""
    blocks, weights = _block_weights(run, anchors, policy)
    rank = blocks.slot_matrix(run.slots, "target_rank", 0, "table 'slots'")
    sums = _recall_sums(blocks, weights, rank < k, "position_recall")
    value, samples = cluster_draws(*sums)
    curve = _slot_frame(sums, value, *percentile_interval(samples)).drop(columns="num_blocks")
    slope, slopes = _log_slope(value), _log_slope(samples)
    drop, drops = value[0] - value[-1], samples[:, 0] - samples[:, -1]
    bounds = [*percentile_interval(slopes), *percentile_interval(drops)]
    slope_low, slope_high, drop_low, drop_high = map(float, bounds)
    decay = SuffixDecay(float(slope), slope_low, slope_high, float(drop), drop_low, drop_high)
    return curve, decay


def _log_slope(recall: Float[np.ndarray, "*draws P"]) -> Float[np.ndarray, "*draws"]:
    logs = np.log(recall, out=np.full(recall.shape, np.nan), where=recall > 0)
    slot = np.arange(recall.shape[-1]) - (recall.shape[-1] - 1) / 2
    return ratio(logs @ slot, slot @ slot)


def path_by_slot(run: Run, policy: str | None = None) -> pd.DataFrame:
    """Return survival and conditional acceptance of a policy's path per slot, visited steps.

    Returns:
        Frame with the columns metric, slot, value, low, high, num_blocks (expected steps behind
        the value).
    """
    survival, conditional = path_estimates(expected_walk(run, policy or default_policy(run)))
    rows = [
        (metric, slot, estimate.value, estimate.low, estimate.high, estimate.num)
        for metric, series in (("survival", survival), ("conditional_acceptance", conditional))
        for slot, estimate in enumerate(series, start=1)
    ]
    return pd.DataFrame(rows, columns=["metric", "slot", "value", "low", "high", "num_blocks"])


def acceptance_by_policy(
    run: Run, policies: Sequence[str] | None = None, oracle_ks: Sequence[int] = (16,)
) -> pd.DataFrame:
    """Return the acceptance length of recorded policies (None: all) and of the oracles.

    Returns:
        Frame with the columns policy, aggregation ("pooled", "per_request"), terminal ("with",
        "without" the steps cut by EOS or the length limit), value, low, high (tokens per verify
        step, bonus counted), num_steps.
    """
    names = [*(run.policies if policies is None else policies), *(f"oracle@{k}" for k in oracle_ks)]
    rows = []
    for policy in names:
        sums = request_sums(expected_walk(run, policy))
        for name, estimate in acceptance_lengths(sums).items():
            uncut = name.endswith("_uncut")
            rows.append(
                {
                    "policy": policy,
                    "aggregation": name.removesuffix("_uncut"),
                    "terminal": "without" if uncut else "with",
                    "value": estimate.value,
                    "low": estimate.low,
                    "high": estimate.high,
                    "num_steps": sums["steps_uncut" if uncut else "steps"].sum(),
                }
            )
    return pd.DataFrame(rows)


def by_dataset(run: Run, statistic: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
    """Apply `statistic` to each dataset of a run alone; a first column `dataset` names it.

    Acceptance differs between datasets by factors, so a pooled number of several is read beside
    this table. Example: `by_dataset(run, acceptance_by_policy)`.

    Raises:
        LabError: a prompt id that belongs to two datasets.
    """
    anchors = run.anchors
    owners = anchors[["prompt_id", "dataset"]].drop_duplicates()
    twice = owners["prompt_id"][owners["prompt_id"].duplicated()]
    if len(twice):
        raise LabError(f"prompt {twice.iloc[0]!r}: found in two datasets, expected one")
    tables = [name for name in ("anchors", "slots", "paths", "attention") if run.has_table(name)]
    parts = []
    for dataset, part in owners.groupby("dataset", sort=True):
        frames = {
            name: run.table(name)[run.table(name)["prompt_id"].isin(part["prompt_id"])]
            for name in tables
        }
        result = statistic(Run(info=run.info, frames=frames))
        result.insert(0, "dataset", dataset)
        parts.append(result)
    return pd.concat(parts, ignore_index=True)


def degenerate_output(traces: pd.DataFrame, limit: float = 0.5) -> pd.DataFrame:
    """Flag responses that repeat themselves: those have the best acceptance in any table.

    The ratio is distinct 4-grams / 4-grams of the response ids (1 for fewer than four tokens);
    below `limit` the response is degenerate, which is also logged.

    Returns:
        Frame with the columns prompt_id, turn, sample, distinct_4gram_ratio, degenerate.
    """
    frame = traces[["prompt_id", "turn", "sample"]].reset_index(drop=True)
    shares = np.array([_distinct_ratio(ids) for ids in traces["response_ids"]])
    frame = frame.assign(distinct_4gram_ratio=shares, degenerate=shares < limit)
    num = int(frame["degenerate"].sum())
    if num:
        logger.warning(
            "degenerate_output: %d of %d responses repeat themselves (distinct 4-grams below %g); "
            "their acceptance says little about the drafter",
            num,
            len(frame),
            limit,
        )
    return frame


def _distinct_ratio(ids: Sequence[int]) -> float:
    if len(ids) < 4:
        return 1.0
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(ids), 4)
    return len(np.unique(windows, axis=0)) / len(windows)
