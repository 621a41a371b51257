"""Two recordings of the same prompts: differences with paired cluster-bootstrap intervals.

Every draw takes the same prompts, with the same multiplicity, of both runs, so what a prompt adds
to both runs leaves the difference, and its interval is narrower than that of two independent runs.
Where only a stored value with its interval is known, the interval of the difference comes from the
two (MOVER: Zou and Donner 2008, Statistics in Medicine 27, 1693).
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float

from dflash2_lab.blocks import load_blocks
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import Estimate, cluster_draws, percentile_interval, ratio, sum_by
from dflash2_lab.replaying import Walk, expected_walk, request_sums
from dflash2_lab.tables import Run

COLUMNS = (
    *("dataset", "quantity", "policy", "position"),
    *("a", "a_low", "a_high", "b", "b_low", "b_high"),
    *("difference", "low", "high", "num_prompts"),
)
ORACLE = "oracle@16"
Samples = Float[np.ndarray, "1+draws M"]  # a value, then its bootstrap draws; a column an entry
Sums = Float[np.ndarray, "C M"]


def samples_of(numerator: Sums, denominator: Sums) -> Samples:
    """The ratio of sums over C prompts, then its draws.

    Two calls with the same number of prompts resample the same ones: their draws are paired.
    """
    value, draws = cluster_draws(numerator, denominator)
    return np.concatenate([value[None], draws])


def estimate(samples: Float[np.ndarray, " 1+draws"], num: float) -> Estimate:
    """A value with its 95 % interval over the draws; NaN bounds for fewer than two prompts."""
    low, high = percentile_interval(samples[1:])
    return Estimate(float(samples[0]), float(low), float(high), float(num))


def independent_difference(a: Estimate, b: Estimate) -> Estimate:
    """b - a of values known by their intervals alone, as of independent samples (MOVER)."""
    value = b.value - a.value
    low = value - np.hypot(b.value - b.low, a.high - a.value)
    high = value + np.hypot(b.high - b.value, a.value - a.low)
    return Estimate(value, float(low), float(high), min(a.num, b.num))


def shared_prompts(a: Run, b: Run) -> list[str]:
    """Prompts with a recorded block in both runs, sorted.

    Raises:
        LabError: there is none.
    """
    sides = [set(run.anchors["prompt_id"]) for run in (a, b)]
    shared = sorted(sides[0] & sides[1])
    if not shared:
        examples = " and ".join(f"{len(side)} ({min(side, default='none')}, ...)" for side in sides)
        raise LabError(f"prompts: found {examples}, expected at least one that both runs have")
    return shared


def restrict(run: Run, prompts: Sequence[str]) -> Run:
    """The run with the rows of these prompts alone, in memory."""
    frames = {}
    for name in ("anchors", "slots", "paths", "attention"):
        if run.has_table(name):
            table = run.table(name)
            frames[name] = table[table["prompt_id"].isin(prompts)].reset_index(drop=True)
    info = {key: value for key, value in run.info.items() if key != "num_requests"}
    return Run(info=info, frames=frames)


def recall_samples(run: Run, k: int) -> Samples:
    """position_recall@k by slot, over all recorded anchors."""
    blocks = load_blocks(run)
    rank = blocks.slot_matrix(run.slots, "target_rank", 0, "table 'slots'")
    cases = blocks.offered_mask
    sums = (
        sum_by(blocks.block_cluster, part, blocks.num_clusters)
        for part in (cases & (rank < k), cases)
    )
    return samples_of(*sums)


def decay_samples(recall: Samples) -> Samples:
    """Suffix decay of recall by slot: log-slope per slot, drop from the first slot to the last."""
    logs = np.log(recall, out=np.full(recall.shape, np.nan), where=recall > 0)
    slot = np.arange(recall.shape[1]) - (recall.shape[1] - 1) / 2
    slope = ratio(logs @ slot, slot @ slot)
    return np.stack([slope, recall[:, 0] - recall[:, -1]], axis=1)


def length_samples(walk: Walk) -> Samples:
    """Acceptance length (tokens per verify step, bonus counted): pooled, per request."""
    sums, blocks = request_sums(walk), walk.blocks
    tokens, steps = sums["tokens"].to_numpy(), sums["steps"].to_numpy()
    has_step = steps > 0
    mean = np.where(has_step, ratio(tokens, steps), 0.0)
    parts = np.stack([tokens, mean, steps, has_step], axis=1)
    summed = sum_by(blocks.cluster, parts, blocks.num_clusters)
    return samples_of(summed[:, :2], summed[:, 2:])


def survival_samples(walk: Walk) -> Samples:
    """Survival by slot: of the steps that offer j slots, those that accept 1..j."""
    blocks = walk.blocks
    reach = np.cumsum(walk.weights[:, ::-1], axis=1)[:, ::-1][:, 1:]
    steps = walk.visits[:, None] * blocks.offered_mask
    sums = (
        sum_by(blocks.block_cluster, part, blocks.num_clusters)
        for part in (reach * blocks.offered_mask, steps)
    )
    return samples_of(*sums)


def share_samples(run: Run) -> Samples:
    """within_block_share by layer, pooled over heads, slots and context lengths."""
    table = run.attention
    prompts = sorted(run.anchors["prompt_id"].unique())
    cluster = pd.Index(prompts).get_indexer(table["prompt_id"])
    layers, layer = np.unique(table["layer"], return_inverse=True)
    within = table["sum_anchor"] + table["sum_drafted"]
    values = np.stack([within.to_numpy(), table["count"].to_numpy(dtype=np.float64)], axis=1)
    sums = sum_by(cluster * len(layers) + layer, values, len(prompts) * len(layers))
    sums = sums.reshape(len(prompts), len(layers), 2)
    return samples_of(sums[:, :, 0], sums[:, :, 1])


def paired_differences(
    a: Run, b: Run, pairs: Sequence[tuple[str, str]] = (), ks: Sequence[int] = (1, 16)
) -> pd.DataFrame:
    """Every quantity of two runs over the prompts that both have, and b - a with its interval.

    Series by slot or layer end with the shorter of the two. Acceptance is also given for each
    dataset when there are several.

    Args:
        pairs: (policy of a, policy of b) to hold against each other; empty: unary recall, suffix
            decay and attention only, which need no replay.

    Returns:
        Frame with `COLUMNS`: dataset ("" for all of them), quantity, policy ("" for the unary
        candidates; "x/y" when the two differ), position (slot from 1, layer from 0; -1 for
        neither), a, b and difference with their 95 % intervals, num_prompts.

    Raises:
        LabError: no shared prompt, a prompt of two datasets, a policy that was not recorded.
    """
    prompts = shared_prompts(a, b)
    sides = [restrict(run, prompts) for run in (a, b)]
    slots = min(run.num_draft for run in sides)
    parts = [_rows(*_paths(sides, pairs), len(prompts))] if pairs else []
    parts.append(_rows(*(_unary(side, ks, slots) for side in sides), len(prompts)))
    if pairs:
        sets = _datasets(sides)
        for name in sorted(set(sets)) if sets.nunique() > 1 else []:
            chosen = list(sets.index[sets == name])
            some = [restrict(side, chosen) for side in sides]
            rows = _rows(*_paths(some, pairs, ("acceptance_length",)), len(chosen))
            parts.append(rows.assign(dataset=name))
    return pd.concat(parts, ignore_index=True)[list(COLUMNS)]


def _datasets(sides: Sequence[Run]) -> pd.Series:
    """The dataset of each shared prompt."""
    rows = pd.concat([side.anchors[["prompt_id", "dataset"]] for side in sides]).drop_duplicates()
    twice = rows["prompt_id"][rows["prompt_id"].duplicated()]
    if len(twice):
        raise LabError(f"prompt {twice.iloc[0]!r}: found in two datasets, expected one")
    return rows.set_index("prompt_id")["dataset"]


Key = tuple[str, str, int]  # quantity, policy, first position


def _unary(run: Run, ks: Sequence[int], slots: int) -> dict[Key, Samples]:
    found: dict[Key, Samples] = {}
    for k in ks:
        found[f"position_recall@{k}", "", 1] = recall_samples(run, k)[:, :slots]
    decay = decay_samples(recall_samples(run, 1)[:, :slots])
    found["suffix_decay slope", "", -1] = decay[:, :1]
    found["suffix_decay drop", "", -1] = decay[:, 1:]
    if run.has_table("attention") and len(run.attention):
        found["within_block_share", "", 0] = share_samples(run)
    return found


def _paths(
    sides: Sequence[Run],
    pairs: Sequence[tuple[str, str]],
    only: Sequence[str] = ("acceptance_length", "headroom_recovered", "survival"),
) -> list[dict[Key, Samples]]:
    found: list[dict[Key, Samples]] = [{}, {}]
    for at, side in enumerate(sides):
        needed = list(dict.fromkeys(pair[at] for pair in pairs))
        ends = ["top1", ORACLE] if all("top1" in run.policies for run in sides) else []
        walks = {name: expected_walk(side, name) for name in dict.fromkeys([*needed, *ends])}
        lengths = {name: length_samples(walk) for name, walk in walks.items()}
        for pair in pairs:
            label, own = pair_label(pair), pair[at]
            measured = {
                ("acceptance_length pooled", label, -1): lengths[own][:, :1],
                ("acceptance_length per_request", label, -1): lengths[own][:, 1:],
            }
            if ends and set(pair) - set(ends):
                low, high = (lengths[name][:, :1] for name in ends)
                share = ratio(lengths[own][:, :1] - low, high - low)
                measured["headroom_recovered", label, -1] = share
            measured["survival", label, 1] = survival_samples(walks[own])
            found[at] |= {key: v for key, v in measured.items() if key[0].startswith(tuple(only))}
    return found


def pair_label(pair: tuple[str, str]) -> str:
    """ "x" for the same policy in both runs, else "x/y"."""
    return pair[0] if pair[0] == pair[1] else "/".join(pair)


def _rows(a: dict[Key, Samples], b: dict[Key, Samples], num_prompts: int) -> pd.DataFrame:
    rows = []
    for (quantity, policy, first), left in a.items():
        right = b.get((quantity, policy, first))
        if right is None:
            continue
        for column in range(min(left.shape[1], right.shape[1])):
            x, y = left[:, column], right[:, column]
            three = [estimate(part, num_prompts) for part in (x, y, y - x)]
            position = first + column if first >= 0 else -1
            rows.append(("", quantity, policy, position, *row_values(*three)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def row_values(a: Estimate, b: Estimate, difference: Estimate) -> tuple[float, ...]:
    """The columns from `a` to `num_prompts` of a row."""
    bounds = [(e.value, e.low, e.high) for e in (a, b, difference)]
    return (*(value for side in bounds for value in side), difference.num)
