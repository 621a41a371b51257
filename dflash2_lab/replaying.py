"""Replay: the acceptance of a policy from a recording, exactly and without running a model.

On a trace sampled from p, accept trace token x_i with probability min(1, q_i / p_i) of that token
and stop at the first refusal. Given acceptance x_i has the law of min(p, q), given refusal that of
the residual (p - q)+, so tokens and accepted counts have the joint law of live speculative
decoding. Nothing has to be drawn: per block the law P(n) follows from the ratios, the expected
visits along the trace are v[0] = 1, v[a + n + 1] += v[a] P_a(n), and the acceptance length is
sum v_a E_a[emitted] / sum v_a. On a greedy trace the ratios are the hits (0 or 1), v is 0 or 1,
and the replay is the decode itself.

Block verification (Sun et al. 2024, arXiv 2403.10444) has P(n >= i | trace) = min(1, min over
j <= i of prod over l <= j of q_l / p_l). tests/test_replay_law.py enumerates both rules against
live decoding on a small vocabulary.
"""

import re
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from dflash2_lab.blocks import REQUEST_KEY, Blocks, load_blocks
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import Estimate, cluster_estimates, ratio, sum_by
from dflash2_lab.schema import conform_frame
from dflash2_lab.tables import Run


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """Acceptance of one policy. Lengths are tokens emitted per verify step, bonus counted.

    Attributes:
        policy, num_draft, acceptance, temperature: what was replayed.
        pooled: expected tokens / expected steps, over all steps.
        per_request: mean over requests of their expected tokens / expected steps.
        pooled_uncut, per_request_uncut: the same without steps cut by EOS or the length limit.
        survival: per slot j, of the steps with at least j offered slots the fraction in which
            slots 1..j were accepted.
        conditional_acceptance: per slot j, survival[j] / survival[j - 1] on those same steps.
        num_requests: requests with at least one verify step.
        num_requests_dropped: requests without one; None when the run does not tell
            (neither a traces table nor `num_requests` in run.json).
        requests: one row per request: prompt_id, turn, sample, dataset and the expected sums
            tokens, steps, tokens_uncut, steps_uncut, from which the lengths can be recomputed.
        by_dataset: acceptance_length per dataset: dataset, aggregation, terminal, value, low,
            high, num.
        visits: one row per block that can be visited: prompt_id, turn, sample, anchor, weight
            (expected number of visits, 0 < weight <= 1).
        steps: one walk as a steps table; at temperature 0 the walk, else one drawn with `seed`.
    """

    policy: str
    num_draft: int
    acceptance: str
    temperature: float
    pooled: Estimate
    per_request: Estimate
    pooled_uncut: Estimate
    per_request_uncut: Estimate
    survival: tuple[Estimate, ...]
    conditional_acceptance: tuple[Estimate, ...]
    num_requests: int
    num_requests_dropped: int | None
    requests: pd.DataFrame
    by_dataset: pd.DataFrame
    visits: pd.DataFrame
    steps: pd.DataFrame


def replay(
    run: Run,
    policy: str = "selector",
    num_draft: int | None = None,
    acceptance: str = "token",
    seed: int = 0,
) -> ReplayResult:
    """Replay `policy` (a recorded one, or "oracle@k") over every block of `run`.

    Args:
        run: a recording of every anchor (anchor_stride 1) of on-policy traces.
        policy: a policy of the paths table, or "oracle@k" (accept iff the target's token is among
            the k best unary candidates: an upper bound, not a policy with a q).
        num_draft: verify window in slots, at most the recorded number (None: all of them).
        acceptance: "token", or "block" (Sun et al.; differs at temperature > 0 only).
        seed: draws the walk of `.steps` at temperature > 0; every other number is exact.

    Returns:
        Acceptance lengths (tokens a verify step, bonus counted), survival by slot, and the sums
        behind them: see `ReplayResult`. Why it is exact: the module's docstring.

    Raises:
        LabError: a policy that was not recorded or offers nothing, a larger window than recorded,
            anchors left out, off-policy traces, or columns that are no probabilities.
    """
    walk = expected_walk(run, policy, num_draft, acceptance)
    blocks = walk.blocks
    sums = request_sums(walk)
    survival, conditional = path_estimates(walk)
    keys = blocks.requests.loc[blocks.request, REQUEST_KEY].reset_index(drop=True)
    visits = keys.assign(anchor=blocks.anchor, weight=walk.visits)[walk.visits > 0]
    return ReplayResult(
        policy=policy,
        num_draft=blocks.num_draft,
        acceptance=acceptance,
        temperature=run.temperature,
        **acceptance_lengths(sums),
        survival=survival,
        conditional_acceptance=conditional,
        num_requests=len(blocks.requests),
        num_requests_dropped=_num_dropped(run, len(blocks.requests)),
        requests=sums,
        by_dataset=_by_dataset(sums),
        visits=visits.reset_index(drop=True),
        steps=_drawn_steps(walk, keys, policy, run.temperature, seed),
    )


@dataclass(frozen=True, eq=False)
class Walk:
    """Where a replay goes: the blocks, P(n accepted) of each and its expected visits."""

    blocks: Blocks
    law: Float[np.ndarray, "A P+1"]
    visits: Float[np.ndarray, " A"]

    @property
    def weights(self) -> Float[np.ndarray, "A P+1"]:
        """Expected number of verify steps at each block that accept n = 0..P, [A, P + 1]."""
        return self.visits[:, None] * self.law


def expected_walk(
    run: Run, policy: str, num_draft: int | None = None, acceptance: str = "token"
) -> Walk:
    """Return the exact walk of `policy`; arguments and errors as `replay`."""
    check_replayable(run)
    blocks = load_blocks(run, num_draft)
    check_every_anchor(blocks)
    law = count_law(accept_ratios(run, blocks, policy), acceptance)
    return Walk(blocks, law, visit_weights(blocks, law))


def check_replayable(run: Run) -> None:
    """Raise LabError unless `run` records every anchor of on-policy traces."""
    stride = run.info.get("anchor_stride", 1)
    if stride != 1:
        raise LabError(f"anchor_stride: found {stride}, expected 1: a replay visits every anchor")
    if run.info.get("on_policy") is False:
        raise LabError(
            "on_policy: found false, expected true: a replay is exact only on the target's own "
            "continuations; trace the prompts again or replay recall only"
        )


def check_every_anchor(blocks: Blocks) -> None:
    """Raise LabError unless each request has the anchors 0, 1, ..., response_len - 2."""
    expected = np.arange(len(blocks.anchor)) - blocks.first[blocks.request]
    last = blocks.first + blocks.length - 1
    wrong = np.flatnonzero(blocks.anchor != expected)
    rows = wrong if len(wrong) else last[blocks.remaining[last] != 1]
    if len(rows):
        raise LabError(
            f"table 'anchors': anchors are missing around {blocks.describe(int(rows[0]))}; a "
            f"replay needs all of 0..response_len - 2 (was the recording finished?)"
        )


def accept_ratios(run: Run, blocks: Blocks, policy: str) -> Float[np.ndarray, "A P"]:
    """Return q / p of each target token under `policy`, 0 where a slot has no target token.

    At temperature 0, and for "oracle@k", 1 where the policy has the target's token, else 0.
    """
    offered = blocks.offered_mask
    oracle = re.fullmatch(r"oracle@([1-9]\d*)", policy)
    if oracle:
        rank = blocks.slot_matrix(run.slots, "target_rank", 0, "table 'slots'")
        return np.where(offered & (rank < int(oracle[1])), 1.0, 0.0)
    rows = _path_rows(run, policy, len(blocks.anchor))
    what = f"table 'paths', policy {policy!r}"
    if run.temperature == 0:
        return blocks.slot_matrix(rows, "hit", False, what).astype(np.float64)
    p = blocks.slot_matrix(run.slots, "p_target", 1.0, "table 'slots'")
    q = blocks.slot_matrix(rows, "q_target", 0.0, what)
    top = 1 + 1e-5  # a float32 softmax may round above 1
    _check_probabilities(blocks, "slots", "p_target", p, (p > 0) & (p <= top), "above 0")
    _check_probabilities(blocks, "paths", "q_target", q, (q >= 0) & (q <= top), "at least 0")
    return q / p


def _path_rows(run: Run, policy: str, num_blocks: int) -> pd.DataFrame:
    rows = run.paths[(run.paths["policy"] == policy).to_numpy()]
    if rows.empty and policy in run.policies:
        raise LabError(f"policy {policy!r}: no drafts proposed in {num_blocks} blocks")
    if rows.empty:
        raise LabError(
            f"policy {policy!r}: not recorded, found {', '.join(run.policies)}; "
            f"'oracle@k' is there too"
        )
    return rows


def _check_probabilities(blocks: Blocks, table: str, column: str, values, valid, bound) -> None:
    wrong = np.argwhere(~valid)
    if len(wrong):
        row, index = map(int, wrong[0])
        raise LabError(
            f"table {table!r}, column {column!r}: found {values[row, index]} for "
            f"{blocks.describe(row)}, slot {index + 1}, expected {bound} and at most 1"
        )


def count_law(
    ratios: Float[np.ndarray, "*A P"], acceptance: str = "token"
) -> Float[np.ndarray, "*A P+1"]:
    """Return P(n accepted), n = 0..P, from the ratios q / p of a trace's tokens."""
    if acceptance == "token":
        reach = np.cumprod(np.minimum(1.0, ratios), axis=-1)
    elif acceptance == "block":
        products = np.cumprod(ratios, axis=-1)
        reach = np.minimum(1.0, np.minimum.accumulate(products, axis=-1))
    else:
        raise LabError(f"acceptance: found {acceptance!r}, expected 'token' or 'block'")
    ends = np.ones_like(reach[..., :1])
    return np.concatenate([ends, reach], axis=-1) - np.concatenate([reach, 0 * ends], axis=-1)


def accept_law(
    p: Float[np.ndarray, "*A P"], q: Float[np.ndarray, "*A P"], acceptance: str = "token"
) -> Float[np.ndarray, "*A P+1"]:
    """Return P(n accepted), n = 0..P, given p > 0 and q of the trace's tokens at slots 1..P."""
    return count_law(np.asarray(q, dtype=np.float64) / np.asarray(p, dtype=np.float64), acceptance)


def visit_weights(blocks: Blocks, law: Float[np.ndarray, "A P+1"]) -> Float[np.ndarray, " A"]:
    """Return the expected visits of each block: v[0] = 1, v[a + n + 1] += v[a] P_a(n)."""
    width, lengths = law.shape[1], blocks.length
    # One cell per block, and `width` spare cells per request, where walks leave the response.
    spare = width * np.arange(len(lengths))
    visits = np.zeros(len(law) + width * len(lengths))
    visits[blocks.first + spare] = 1.0
    # Longest first: the requests that still have anchor a are then a prefix.
    longest_first = np.argsort(-lengths, kind="stable")
    rows = blocks.first[longest_first]
    cells = rows + spare[longest_first]
    num_active = np.searchsorted(-lengths[longest_first], -np.arange(lengths.max()))
    jumps = np.arange(1, width + 1)
    for anchor, num in enumerate(num_active):
        here = cells[:num, None] + anchor
        visits[here + jumps] += visits[here] * law[rows[:num] + anchor]
    return visits[np.arange(len(law)) + spare[blocks.request]]


def emitted_tokens(blocks: Blocks) -> Int[np.ndarray, "A P+1"]:
    """Return the tokens that leave a step which accepts n = 0..P slots, [A, P + 1]."""
    return np.minimum(np.arange(1, blocks.num_draft + 2), blocks.remaining[:, None])


def cut_steps(blocks: Blocks) -> Bool[np.ndarray, "A P+1"]:
    """Tell which steps the end of the response cuts: fewer slots offered, or no bonus token."""
    offered_less = blocks.remaining < blocks.num_draft
    return offered_less[:, None] | (emitted_tokens(blocks) < np.arange(1, blocks.num_draft + 2))


def request_sums(walk: Walk) -> pd.DataFrame:
    """Return expected tokens and steps per request, also without the cut steps.

    Columns: prompt_id, turn, sample, dataset, tokens, steps, tokens_uncut, steps_uncut.
    """
    blocks, weights = walk.blocks, walk.weights
    emitted, uncut = emitted_tokens(blocks), weights * ~cut_steps(blocks)
    per_block = {
        "tokens": (weights * emitted).sum(axis=1),
        "steps": walk.visits,
        "tokens_uncut": (uncut * emitted).sum(axis=1),
        "steps_uncut": uncut.sum(axis=1),
    }
    num = len(blocks.requests)
    sums = {name: sum_by(blocks.request, values, num) for name, values in per_block.items()}
    return blocks.requests.assign(**sums)


def acceptance_lengths(requests: pd.DataFrame) -> dict[str, Estimate]:
    """Return the acceptance length from sums per request (a frame as of `request_sums`).

    Keys: pooled and per_request, both also with the suffix _uncut (without cut steps). `num` is
    the number of steps (pooled) or of requests that have one (per_request).
    """
    cluster, prompts = pd.factorize(requests["prompt_id"])
    estimates = {}
    for suffix in ("", "_uncut"):
        tokens, steps = (requests[name + suffix].to_numpy() for name in ("tokens", "steps"))
        has_step = steps > 0
        mean = np.where(has_step, ratio(tokens, steps), 0.0)
        sums = sum_by(cluster, np.stack([tokens, steps, mean, has_step], axis=1), len(prompts))
        pooled, per_request = cluster_estimates(sums[:, [0, 2]], sums[:, [1, 3]])
        estimates |= {f"pooled{suffix}": pooled, f"per_request{suffix}": per_request}
    return estimates


def path_estimates(walk: Walk) -> tuple[tuple[Estimate, ...], tuple[Estimate, ...]]:
    """Return survival and conditional acceptance per slot 1..P, over the visited steps."""
    blocks = walk.blocks
    # reach[:, j] = P(n >= j), weighted by the visits; a step counts for slot j when it offers j.
    reach = np.cumsum(walk.weights[:, ::-1], axis=1)[:, ::-1]
    offered = blocks.offered_mask
    parts = (reach[:, 1:], walk.visits[:, None] * np.ones_like(offered), reach[:, :-1])
    accepted, steps, before = (
        sum_by(blocks.block_cluster, part * offered, blocks.num_clusters) for part in parts
    )
    return cluster_estimates(accepted, steps), cluster_estimates(accepted, before)


def _num_dropped(run: Run, num_requests: int) -> int | None:
    if "num_requests" in run.info:
        return int(run.info["num_requests"]) - num_requests
    return len(run.traces) - num_requests if run.has_table("traces") else None


def _by_dataset(requests: pd.DataFrame) -> pd.DataFrame:
    rows = [
        {
            "dataset": dataset,
            "aggregation": name.removesuffix("_uncut"),
            "terminal": "without" if name.endswith("_uncut") else "with",
            **asdict(estimate),
        }
        for dataset, part in requests.groupby("dataset", sort=True)
        for name, estimate in acceptance_lengths(part).items()
    ]
    return pd.DataFrame(rows)


def _drawn_steps(
    walk: Walk, keys: pd.DataFrame, policy: str, temperature: float, seed: int
) -> pd.DataFrame:
    blocks = walk.blocks
    draws = np.random.default_rng(seed).random(len(walk.law))
    # n = number of slots j with draw < P(n >= j); at temperature 0 the law is one-hot.
    reach = 1.0 - np.cumsum(walk.law, axis=1)[:, :-1]
    accepted = (draws[:, None] < reach).sum(axis=1)
    one_hot = (np.arange(walk.law.shape[1]) == accepted[:, None]).astype(np.float64)
    rows = np.flatnonzero(visit_weights(blocks, one_hot))
    at = (rows, accepted[rows])
    frame = keys.iloc[rows].assign(
        step=0,
        anchor=blocks.anchor[rows],
        context_len=blocks.context_len[rows],
        num_offered=blocks.offered[rows],
        num_accepted=accepted[rows],
        num_accepted_raw=-1,
        num_emitted=emitted_tokens(blocks)[at],
        terminal=np.where(cut_steps(blocks)[at], blocks.finish[rows], ""),
        policy=policy,
        temperature=temperature,
        weight=1.0,
    )
    frame["step"] = frame.groupby(REQUEST_KEY).cumcount()
    return conform_frame(frame, "steps")
