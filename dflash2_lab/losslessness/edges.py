"""Tokens at the edge of a top-k or top-p cut: rounding may have put them on its other side.

Such a token is held against the law whose cut is moved by as much as rounding explains; one that is
further behind the edge keeps the probability 0. So is a law that keeps a token more or less.
"""

from dataclasses import asdict, replace

from jaxtyping import Bool, Float, Int
from scipy.special import expit, logit
from torch import Tensor

from dflash2_lab.sampling import Sampling, filter_logits


def law_at(
    logits: Float[Tensor, "n V"], tokens: Int[Tensor, " n"], sampling: Sampling, band: float
) -> tuple[Float[Tensor, "n V"], int]:
    """Laws of some rows, and how many of the tokens are at the edge of a cut.

    Args:
        logits: float64.
        band: how far rounding moves the difference of two logits.
    """
    law = filter_logits(logits, **asdict(sampling))
    num_edge = 0
    for row in (law.gather(-1, tokens[:, None])[:, 0] == 0).nonzero()[:, 0].tolist():
        moved = filter_logits(logits[row], **asdict(_moved_cut(logits[row], sampling, 2 * band)))
        if moved[tokens[row]] > 0:
            law[row] = moved
            num_edge += 1
    return law, num_edge


def law_of(
    kept: Bool[Tensor, " V"], logits: Float[Tensor, " V"], sampling: Sampling, band: float
) -> Float[Tensor, " V"]:
    """The law of a row that keeps just the tokens `kept`, if rounding explains that; else the law
    of its own cut. Arguments as in `law_at`."""
    tight, loose = (
        filter_logits(logits, **asdict(_moved_cut(logits, sampling, slack))) > 0
        for slack in (-2 * band, 2 * band)
    )
    if bool((tight & ~kept).any() or (kept & ~loose).any()):
        return filter_logits(logits, **asdict(sampling))
    law = (logits / sampling.temperature).softmax(-1) * kept
    return law / law.sum()


def _moved_cut(logits: Float[Tensor, " V"], sampling: Sampling, slack: float) -> Sampling:
    """Filters that keep whatever the given ones may keep once differences of logits have moved by
    `slack`: then the odds of any set of tokens have moved by the factor exp(slack / T) at most. A
    negative one gives what they keep in any case."""
    top_p, top_k = sampling.top_p, sampling.top_k
    if top_p < 1:
        top_p = float(expit(logit(top_p) + slack / sampling.temperature))
    if 0 < top_k < len(logits):
        last = logits.topk(top_k).values[-1]
        top_k = max(1, int((logits >= last - slack).sum()))
    return replace(sampling, top_p=top_p, top_k=top_k)
