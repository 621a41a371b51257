"""Faults of the acceptance test and of the residual draw, and the harmless verifiers.

The harmless ones keep the target's law and are the controls: no test may speak there.
"""

import numpy as np

from dflash2_lab.losslessness.fault import Fault
from dflash2_lab.losslessness.toy_decoding import (
    Rules,
    Verification,
    acceptance,
    leading,
    residual,
)
from dflash2_lab.losslessness.toy_noise import Noise, taken


def _typical(v: Verification):
    """Medusa's rule: p(x) > min(0.09, 0.3 exp(-H(p)))."""
    p = v.table
    entropy = -(p * np.log(p, where=p > 0, out=np.zeros_like(p))).sum(-1)
    threshold = np.minimum(0.09, 0.3 * np.exp(-entropy))[v.contexts[:, :-1]]
    return (v.p_drafted() > threshold).astype(float)


def _first_unverified(v: Verification):
    probability = acceptance(v)
    probability[:, 0] = 1.0
    return probability


def _unnormalised(v: Verification, slot):
    """Inverse cdf of (p - q)+ as it is: a u above its mass runs off the end, to the last token."""
    left = residual(v, slot)
    left[:, -1] += 1 - left.sum(-1)
    return left


def _on_candidates(v: Verification, slot):
    return residual(v, slot) * (v.q(slot) > 0)


def _argmax(v: Verification, slot):
    left = residual(v, slot)
    return (left.argmax(-1)[:, None] == np.arange(left.shape[1])).astype(float)


def _without_draft(v: Verification, slot):
    left = v.p(slot)
    left[np.arange(len(left)), taken(v.path, slot)] = 0.0
    return left


def _wrong_q(v: Verification, slot):
    """q of the slot after; of the one before at the last slot."""
    other = np.where(slot + 1 < v.num_draft, slot + 1, slot - 1)
    return np.maximum(v.p(slot) - v.q(other), 0.0)


def _token_matching(rules: Rules, v: Verification, noise: Noise):
    """Draw the target's own token at every slot; keep the draft while it is that token."""
    slots = range(v.num_draft)
    rows = np.full(len(v.path), 0)
    own = [noise.draw_target(slot, v.p(rows + slot)) for slot in slots]
    own = np.stack(own, axis=1)
    num = leading(own == v.path)
    full = num == v.num_draft
    chosen = taken(own, np.minimum(num, v.num_draft - 1))
    match = (chosen[:, None] == np.arange(v.table.shape[1])).astype(float)
    return num, np.where(full[:, None], rules.bonus(v), match)


def block_weights(v: Verification):
    """Weights w_i [N, P + 1] and probabilities h_i [N, P] of block verification (Sun et al. 2024).

    w_0 = 1, w_i = min(1, w_{i-1} p_i / q_i). With R_i = |(w_i p - q)+| at the slot after i drafts,
    h_i = R_i / (R_i + 1 - w_i) for i < P, and h_P = w_P: tests run from i = P down, the first
    success keeps i drafts, and none keeps 0.
    """
    ratio = v.p_drafted() / v.q_drafted()
    weights = [np.ones(len(v.path))]
    for slot in range(v.num_draft):
        weights.append(np.minimum(1.0, weights[-1] * ratio[:, slot]))
    weights = np.stack(weights, axis=1)
    chances = []
    for num in range(1, v.num_draft):
        mass = block_residual(v, weights, np.full(len(v.path), num)).sum(-1)
        # Where nothing is left and nothing was lost (w = 1, p = q), any chance will do.
        total = mass + 1 - weights[:, num]
        chances.append(np.where(mass > 0, mass / np.where(total > 0, total, 1.0), 0.0))
    return weights, np.stack([*chances, weights[:, -1]], axis=1)


def block_residual(v: Verification, weights, num):
    """(w p - q)+ at the slot after `num` accepted drafts, not normalised, [N, V]."""
    return np.maximum(taken(weights, num)[:, None] * v.p(num) - v.q(num), 0.0)


def _block_verification(rules: Rules, v: Verification, noise: Noise):
    weights, chances = block_weights(v)
    passed = noise.test(chances)
    num = np.where(passed, np.arange(1, v.num_draft + 1), 0).max(1)
    full = num == v.num_draft
    left = block_residual(v, weights, np.minimum(num, v.num_draft - 1))
    total = left.sum(-1, keepdims=True)
    fallback = v.p(np.minimum(num, v.num_draft - 1))
    left = np.where(total > 0, left / np.where(total > 0, total, 1.0), fallback)
    return num, np.where(full[:, None], rules.bonus(v), left)


def _fault(name: str, stage: str, formula: str, why: str, num_tokens: int, **hooks) -> Fault:
    return Fault(name, stage, formula, why, num_tokens, Rules(**hooks))


ACCEPTANCE_FAULTS = (
    _fault(
        "accept-inverted",
        "acceptance",
        "accept when u < q/p",
        "the ratio is written upside down",
        64,
        acceptance=lambda v: v.q_drafted() / v.p_drafted(),
    ),
    _fault(
        "accept-typical",
        "acceptance",
        "accept when p(x) > min(0.09, 0.3 exp(-H(p)))",
        "a lossy rule of other methods is left on (thresholds in SGLang's kernel, Medusa)",
        128,
        acceptance=_typical,
    ),
    _fault(
        "accept-p-alone",
        "acceptance",
        "accept when u <= p(x), then the residual (p - q)+ of the soft q",
        "one-hot acceptance meets the residual of a soft q (speculative-sampling #3, xLLM #2175)",
        256,
        acceptance=lambda v: v.p_drafted(),
    ),
    _fault(
        "accept-target-argmax",
        "acceptance",
        "accept when x = argmax p, else the residual",
        "the greedy rule is used at T > 0",
        256,
        acceptance=lambda v: v.is_top().astype(float),
    ),
    _fault(
        "no-cumulative-stop",
        "acceptance",
        "the number accepted is the sum of all tests, not of those before the first refusal",
        "sum in place of cumprod (n_matches in transformers #28508)",
        256,
        count=lambda flags: flags.sum(1),
    ),
    _fault(
        "first-token-unverified",
        "acceptance",
        "the first draft is always accepted",
        "the block is compared from its second token on (lattice #243)",
        512,
        acceptance=_first_unverified,
    ),
    _fault(
        "ratio-times-1.3",
        "acceptance",
        "accept when u < 1.3 p/q",
        "a leniency factor from an experiment stays in",
        1024,
        acceptance=lambda v: 1.3 * acceptance(v),
    ),
    _fault(
        "accept-target-top",
        "acceptance",
        "accept when x = argmax p or u < p/q",
        "a shortcut for the target's best token",
        1024,
        acceptance=lambda v: np.where(v.is_top(), 1.0, acceptance(v)),
    ),
    _fault(
        "ratio-power-0.9",
        "acceptance",
        "accept when u < (p/q)^0.9",
        "p and q are tempered differently inside the test",
        16384,
        acceptance=lambda v: acceptance(v) ** 0.9,
    ),
    _fault(
        "ratio-times-1.05",
        "acceptance",
        "accept when u < 1.05 p/q",
        "a tolerance against rounding that is far too large",
        32768,
        acceptance=lambda v: 1.05 * acceptance(v),
    ),
)

RESIDUAL_FAULTS = (
    _fault(
        "residual-next-position",
        "residual",
        "the residual is (p_{n+1} - q_n)+ after n accepted drafts",
        "p rows are indexed with the anchor's row in, q rows without",
        64,
        residual=lambda v, slot: np.maximum(v.p(slot + 1) - v.q(slot), 0.0),
    ),
    _fault(
        "residual-unnormalised",
        "residual",
        "inverse cdf of (p - q)+ with sum < 1: a u above the sum takes the last token",
        "the division by the sum is left out of a kernel",
        64,
        residual=_unnormalised,
    ),
    _fault(
        "residual-absolute",
        "residual",
        "the residual is |p - q|",
        "the clamp at 0 becomes a modulus, or target probabilities are edited in place "
        "(vllm-ascend #2881)",
        128,
        residual=lambda v, slot: np.abs(v.p(slot) - v.q(slot)),
    ),
    _fault(
        "residual-candidates-only",
        "residual",
        "the residual is restricted to the K candidates",
        "recovery works on the drafter's compact rows",
        256,
        residual=_on_candidates,
    ),
    _fault(
        "residual-is-p",
        "residual",
        "after a refusal the token is drawn from p",
        "a fresh draw is thought to be safe (mlx-swift-lm #459, 1bit-MONSTER #637)",
        512,
        residual=lambda v, slot: v.p(slot),
    ),
    _fault(
        "residual-q-wrong-position",
        "residual",
        "the residual is (p_n - q_{n+1})+",
        "tests that repeat one q over all positions cannot see it",
        512,
        residual=_wrong_q,
    ),
    _fault(
        "residual-argmax",
        "residual",
        "the replacement is argmax (p - q)+",
        "recovery reuses the greedy path",
        512,
        residual=_argmax,
    ),
    _fault(
        "residual-p-without-draft",
        "residual",
        "the residual is p without x while q is soft",
        "the one-hot formula meets sampled drafts (speculative-sampling #4)",
        1024,
        residual=_without_draft,
    ),
)

VERIFIER_CONTROLS = (
    Fault(
        "correct",
        "acceptance",
        "accept when u < p/q, then (p - q)+",
        "the token-level rule of Leviathan et al. and Chen et al.",
        None,
        Rules(),
    ),
    Fault(
        "block-verification",
        "acceptance",
        "the block is tested from its end with h_i, then (w p - q)+",
        "the rule of Sun et al. 2024, lossless and longer",
        None,
        Rules(verify=_block_verification, block_rule=True),
    ),
    Fault(
        "token-matching",
        "acceptance",
        "y ~ p; keep x while x = y, emit y either way",
        "said to be biased (mlx-swift-lm #459); every token is the target's own draw (lablup #902)",
        None,
        Rules(verify=_token_matching, one_hot=True),
    ),
    Fault(
        "bonus-dropped",
        "bonus",
        "a block accepted in full ends without its bonus token",
        "an engine that leaves the bonus out only loses length",
        None,
        Rules(keeps_bonus=False),
    ),
)
