"""A toy of speculative decoding whose laws are all known: an order-2 target and a selector drafter.

The target draws the next token from p(. | last two tokens), tempered, cut to top-k, then to top-p.
The drafter sees the two tokens at the anchor: for each slot they give K candidates with unary
scores, and a pairwise score of (token before, candidate) makes the walk of one block:
q = softmax((unary + pairwise) / T) over the candidates, as in DFlash 2. Everything is a numpy
table, so that thousands of runs decode side by side.

A context is the number `before_last * V + last` of the two last tokens.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from dflash2_lab.errors import LabError

ARMS = ("realistic", "opposite", "near-perfect")
_NEAR = 0.9  # share of the target's own p in q of the near-perfect arm
# The target's logits: their deviation, and the bigram term's share of the variance. The drafter:
# what it keeps of the log-marginals, its error there, what its pairwise scores make of the bigram
# term. Set, with the seed, for a support of 8.8, an entropy of 1.4 nat and a length of 2.45:
# a drafter that orders its candidates well but misses some tokens.
_SPREAD, _BIGRAM = 2.2, 0.87
_UNARY, _BLUR, _PAIRWISE = 0.4, 0.35, 1.4


@dataclass(frozen=True)
class ToyConfig:
    """Sizes and sampling of a toy; `seed` draws its tables, not what is decoded from them.

    `arm` says which drafter: realistic; opposite (scores negated on the candidates, so that most
    drafts are refused); near-perfect (q mixed with the target's own p, so that most blocks are
    accepted).
    """

    vocab: int = 40
    temperature: float = 0.8
    top_k: int = 24
    top_p: float = 0.95
    num_candidates: int = 8
    num_draft: int = 4
    arm: str = "realistic"
    seed: int = 2

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise LabError(f"arm: found {self.arm!r}, expected one of {', '.join(ARMS)}")
        if not 1 <= self.num_candidates <= self.vocab:
            raise LabError(
                f"num_candidates: found {self.num_candidates}, expected 1 to {self.vocab}"
            )


@dataclass(frozen=True, eq=False)
class Toy:
    """Tables of one toy; W = V * V contexts, P drafted slots.

    `logits` and `p` are the target's, by context. `ids` and `unary` are the candidates of each slot
    after an anchor, `pairwise` the scores of (token before, token).
    """

    config: ToyConfig
    logits: Float[np.ndarray, "W V"]
    p: Float[np.ndarray, "W V"]
    ids: Int[np.ndarray, "P W K"]
    unary: Float[np.ndarray, "P W K"]
    pairwise: Float[np.ndarray, "V V"]


def make_toy(config: ToyConfig | None = None) -> Toy:
    """Draw the tables of a toy.

    The target's logits are a bigram and a trigram term. The drafter's unary scores are the
    log-marginals of the slot given the anchor's context, damped and blurred; its pairwise scores
    are the bigram term, sharpened.
    """
    config = config or ToyConfig()
    rng = np.random.default_rng(config.seed)
    V, P = config.vocab, config.num_draft
    bigram = rng.normal(size=(V, V)) * _SPREAD * np.sqrt(_BIGRAM)
    trigram = rng.normal(size=(V, V, V)) * _SPREAD * np.sqrt(1 - _BIGRAM)
    logits = (bigram + trigram).reshape(V * V, V)
    p = filtered_law(logits, config.temperature, config.top_k, config.top_p)
    marginal, ids, unary = p.reshape(V, V, V), [], []
    for _ in range(P):
        scores = _UNARY * config.temperature * np.log(marginal.reshape(V * V, V) + 1e-3)
        scores = scores + _BLUR * rng.normal(size=scores.shape)
        best = np.argsort(-scores, axis=-1, kind="stable")[:, : config.num_candidates]
        ids.append(best)
        unary.append(np.take_along_axis(scores, best, axis=-1))
        # One slot further: sum over the next token v of p(v | a, b) * marginal(. | b, v).
        marginal = np.einsum("abv,bvw->abw", p.reshape(V, V, V), marginal)
    shape = (P, V * V, config.num_candidates)
    return Toy(
        config=config,
        logits=logits,
        p=p,
        ids=np.array(ids, dtype=int).reshape(shape),
        unary=np.array(unary).reshape(shape),
        pairwise=_PAIRWISE * bigram,
    )


def softmax(scores: Float[np.ndarray, "*rows V"]) -> Float[np.ndarray, "*rows V"]:
    """Softmax over the last axis; -inf is a token ruled out."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def filtered_law(
    logits: Float[np.ndarray, "*rows V"], temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Float[np.ndarray, "*rows V"]:
    """softmax(logits / T) cut to the `top_k` best (0: all), then to the shortest prefix of the
    ranking that reaches `top_p`; rank by (logit descending, id ascending)."""
    order = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(logits, order, axis=-1) / temperature
    if 0 < top_k < logits.shape[-1]:
        ranked[..., top_k:] = -np.inf
    ranked = top_p_law(softmax(ranked), top_p)
    law = np.empty_like(ranked)
    np.put_along_axis(law, order, ranked, axis=-1)
    return law


def top_p_law(law: Float[np.ndarray, "*rows V"], top_p: float) -> Float[np.ndarray, "*rows V"]:
    """A law cut to the shortest prefix of its ranking that reaches `top_p`, renormalised."""
    order = np.argsort(-law, axis=-1, kind="stable")
    ranked = np.take_along_axis(law, order, axis=-1)
    before = ranked.cumsum(-1) - ranked  # the token that crosses the threshold stays
    kept = np.zeros_like(law)
    np.put_along_axis(kept, order, np.where(before < top_p, ranked, 0.0), axis=-1)
    return kept / kept.sum(-1, keepdims=True)


def candidate_scores(
    toy: Toy, slot: int, context: Int[np.ndarray, " N"], before: Int[np.ndarray, " N"]
) -> tuple[Int[np.ndarray, "N K"], Float[np.ndarray, "N K"], Float[np.ndarray, "N K"]]:
    """Candidates of a slot after the anchors with these contexts: their ids, their unary scores,
    and their scores after the tokens `before`. The opposite arm negates all of them."""
    ids, unary = toy.ids[slot][context], toy.unary[slot][context]
    scores = unary + toy.pairwise[before[:, None], ids]
    sign = -1.0 if toy.config.arm == "opposite" else 1.0
    return ids, sign * unary, sign * scores


def mix_target(
    toy: Toy,
    ids: Int[np.ndarray, "N K"],
    law: Float[np.ndarray, "N K"],
    context: Int[np.ndarray, " N"],
) -> tuple[Int[np.ndarray, "N M"], Float[np.ndarray, "N M"]]:
    """The arm's q from a law on the candidates: the near-perfect arm adds the target's p."""
    if toy.config.arm != "near-perfect":
        return ids, law
    dense = _NEAR * toy.p[context]
    rows = np.arange(len(ids))[:, None]
    dense[rows, ids] += (1 - _NEAR) * law
    return np.broadcast_to(np.arange(toy.config.vocab), dense.shape), dense
