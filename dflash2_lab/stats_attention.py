"""Statistics of the attention shares: pooled by layer, by head, and held against recall.

within_block_share is the mass of a drafted slot's query on its own block, anchor + drafted; sums
and counts are pooled and the ratio formed once, with cluster-bootstrap intervals over prompts.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from dflash2_lab.blocks import load_blocks
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import cluster_ratio, ratio, sum_by
from dflash2_lab.tables import Run

_GROUPS = ("context", "anchor", "drafted", "within_block")
ALL_CONTEXTS = "all"


def attention_by_layer(run: Run) -> pd.DataFrame:
    """Return mean attention shares per layer and slot, pooled over heads and context lengths.

    Slot 0 is pooled over the slots. `uniform` is the share under uniform attention over the
    visible keys: of the block for within_block, of the rest for context; NaN for anchor and
    drafted, whose key counts are not recorded. `count` is the number of query rows x heads.

    Returns:
        Frame with the columns layer, slot, group, value, low, high, uniform, count.
    """
    table = _attention(run)
    cluster, prompts = pd.factorize(table["prompt_id"])
    within = table["sum_anchor"] + table["sum_drafted"]
    names = ["sum_context", "sum_anchor", "sum_drafted"]
    columns = [*(table[name] for name in names), within, table["sum_uniform"], table["count"]]
    values = np.stack([column.to_numpy(dtype=np.float64) for column in columns], axis=1)
    parts = []
    layers, layer = np.unique(table["layer"], return_inverse=True)
    slots = table["slot"].to_numpy()
    for slot in [0, *np.unique(slots)]:
        rows = slice(None) if slot == 0 else np.flatnonzero(slots == slot)
        codes = cluster[rows] * len(layers) + layer[rows]
        sums = sum_by(codes, values[rows], len(prompts) * len(layers))
        sums = sums.reshape(len(prompts), len(layers), values.shape[1])
        count = sums[:, :, -1]
        value, low, high = cluster_ratio(sums[:, :, :4], count[:, :, None])
        uniform = ratio(sums[:, :, 4].sum(axis=0), count.sum(axis=0))
        unknown = np.full_like(uniform, np.nan)
        for index, group in enumerate(_GROUPS):
            baseline = {"within_block": uniform, "context": 1 - uniform}.get(group, unknown)
            part = {"layer": layers, "slot": int(slot), "group": group}
            part |= {"value": value[:, index], "low": low[:, index], "high": high[:, index]}
            parts.append(pd.DataFrame(part | {"uniform": baseline, "count": count.sum(axis=0)}))
    frame = pd.concat(parts, ignore_index=True).astype({"layer": int, "count": int})
    frame = frame[frame["count"] > 0]
    return frame.sort_values(["layer", "slot"], kind="stable", ignore_index=True)


def attention_map(run: Run) -> pd.DataFrame:
    """Return within_block_share of every layer, head and slot, pooled over context lengths.

    Returns:
        Frame with the columns layer, head, slot, value, low, high, uniform (the share under
        uniform attention over the visible keys), count (query rows).
    """
    return _shares(_attention(run), ["layer", "head", "slot"]).astype(
        {"layer": int, "head": int, "slot": int, "count": int}
    )


def share_against_recall(run: Run, k: int = 1) -> pd.DataFrame:
    """Return per slot the within_block_share beside position_recall@k, over all recorded anchors.

    The share is the mean over layers and heads. `context_bin` is "all" or one of the recorded
    bins of context length; both numbers are then those of the blocks in that bin.

    Returns:
        Frame with the columns context_bin, slot, share, share_low, share_high, uniform, recall,
        recall_low, recall_high, num_blocks.
    """
    table = _attention(run)
    blocks = load_blocks(run)
    rank = blocks.slot_matrix(run.slots, "target_rank", 0, "table 'slots'")
    parts = []
    for name in [ALL_CONTEXTS, *_bins(table["context_bin"].unique())]:
        inside = np.ones(len(blocks.anchor), dtype=bool)
        rows = table
        if name != ALL_CONTEXTS:
            first, last = _bounds(name)
            inside = (blocks.context_len >= first) & (blocks.context_len <= last)
            rows = table[table["context_bin"] == name]
        cases = blocks.offered_mask & inside[:, None]
        sums = (
            sum_by(blocks.block_cluster, part, blocks.num_clusters)
            for part in (cases & (rank < k), cases)
        )
        hits, offered = sums
        value, low, high = cluster_ratio(hits, offered)
        recall = pd.DataFrame(
            {
                "slot": np.arange(1, blocks.num_draft + 1),
                "recall": value,
                "recall_low": low,
                "recall_high": high,
                "num_blocks": offered.sum(axis=0).astype(int),
            }
        )
        shares = _shares(rows, ["slot"]).drop(columns="count")
        shares = shares.rename(
            columns={"value": "share", "low": "share_low", "high": "share_high"}
        ).astype({"slot": int})
        parts.append(shares.merge(recall, on="slot").assign(context_bin=name))
    columns = ["context_bin", "slot", "share", "share_low", "share_high", "uniform"]
    columns += ["recall", "recall_low", "recall_high", "num_blocks"]
    return pd.concat(parts, ignore_index=True)[columns]


def _attention(run: Run) -> pd.DataFrame:
    table = run.attention
    if table.empty:
        raise LabError("table 'attention': found no row, expected recorded attention shares")
    return table


def _shares(table: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """within_block_share with its interval and baseline for each value of the key columns."""
    cluster, prompts = pd.factorize(table["prompt_id"])
    groups = table.groupby(list(keys), sort=True)
    code: Int[np.ndarray, " N"] = groups.ngroup().to_numpy()
    found = groups.size().reset_index()[list(keys)]
    columns: list[Float[np.ndarray, " N"]] = [
        (table["sum_anchor"] + table["sum_drafted"]).to_numpy(),
        table["sum_uniform"].to_numpy(),
        table["count"].to_numpy(dtype=np.float64),
    ]
    sums = sum_by(
        cluster * len(found) + code, np.stack(columns, axis=1), len(prompts) * len(found)
    ).reshape(len(prompts), len(found), 3)
    value, low, high = cluster_ratio(sums[:, :, 0], sums[:, :, 2])
    total = sums.sum(axis=0)
    uniform = ratio(total[:, 1], total[:, 2])
    return found.assign(value=value, low=low, high=high, uniform=uniform, count=total[:, 2])


def _bins(names: Sequence[str]) -> list[str]:
    return sorted(map(str, names), key=lambda name: _bounds(name)[0])


def _bounds(name: str) -> tuple[int, int]:
    """First and last context length of a bin, as in "128-255"."""
    first, _, last = name.partition("-")
    return int(first), int(last)
