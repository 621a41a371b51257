"""The target's law p and counter-based draws from it.

p is softmax(logits / T), cut to the `top_k` best tokens, renormalised, then cut to the shortest
prefix of the ranking whose mass reaches `top_p` (the token that crosses the threshold stays),
renormalised. Rank is by (logit descending, token id ascending). At T = 0, p is one-hot on the
first of the ranking.

Randomness is a pure function of (row key, position): a row draws the same numbers in any batch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.kernels.candidate_topk import candidate_topk
from dflash2_lab.kernels.tools import uniforms

__all__ = [
    "Sampling",
    "choose",
    "filter_logits",
    "row_key",
    "token_logprobs",
    "uniforms",  # made with the kernels, used with the keys of `row_key`
]

_COLDEST = 1e-4
_PREFIX = 1024  # ranked tokens that top-p looks at on a CPU before it sorts the whole vocabulary


@dataclass(frozen=True)
class Sampling:
    """Temperature (0 = greedy), then top-k (0 = off), then top-p (1 = off)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise LabError(f"temperature: found {self.temperature}, expected a number >= 0")
        # Below, logit / temperature loses the differences between logits to rounding.
        if 0.0 < self.temperature < _COLDEST:
            raise LabError(
                f"temperature: found {self.temperature}, expected 0 (greedy) or {_COLDEST} or more"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise LabError(f"top_p: found {self.top_p}, expected 0 < top_p <= 1")
        if self.top_k < 0:
            raise LabError(f"top_k: found {self.top_k}, expected 0 (off) or a positive number")

    @property
    def greedy(self) -> bool:
        """Whether every draw is the argmax."""
        return self.temperature == 0.0

    @property
    def label(self) -> str:
        """In words."""
        if self.greedy:
            return "greedy"
        words = [f"T = {self.temperature:g}"]
        words += [f"top-k {self.top_k}"] if self.top_k else []
        words += [f"top-p {self.top_p:g}"] if self.top_p < 1 else []
        return ", ".join(words)


def filter_logits(
    logits: Float[Tensor, "*rows V"], temperature: float, top_p: float = 1.0, top_k: int = 0
) -> Float[Tensor, "*rows V"]:
    """The law p of the module's first lines, in float32 (float64 for float64 logits).

    Raises:
        LabError: an option out of its range.
    """
    sampling = Sampling(temperature, top_p, top_k)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.greedy:
        best = logits.argmax(dim=-1, keepdim=True)  # torch gives the first of equal ones
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    vocab = logits.shape[-1]
    limited = 0 < top_k < vocab
    if not limited and top_p >= 1.0:
        return _normalised(logits / temperature)
    if limited:
        values, ids = _topk(logits, top_k)
        kept = _normalised(values / temperature)
    else:
        kept, ids = _ranked_law(logits, temperature, top_p)
    if top_p < 1.0:
        # A token stays while the mass before it has not reached top_p: the crossing one does.
        before = kept.double().cumsum(dim=-1) - kept
        kept = kept.masked_fill(before >= top_p, 0.0)
        kept = kept / kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, ids, kept)


def _normalised(scores: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n"]:
    """softmax with the sum in float64: the sum of a float32 one over 50,000 tokens is off by 4e-6,
    and a law that is drawn from, reported and judged has to be one."""
    weights = (scores - scores.amax(dim=-1, keepdim=True)).exp_()
    return weights / weights.sum(dim=-1, keepdim=True, dtype=torch.float64).to(weights.dtype)


def _ranked_law(logits: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities and ids in rank order, at least until their mass has reached top_p."""
    probs = _normalised(logits / temperature)
    # Sorting a whole vocabulary is slow on a CPU, and asking whether less will do is slow on a GPU.
    if logits.device.type == "cpu" and logits.shape[-1] > _PREFIX:
        _, ids = _topk(logits, _PREFIX)
        kept = probs.gather(-1, ids)
        if bool((kept.double().sum(dim=-1) >= top_p).all()):
            return kept, ids
    _, ids = logits.sort(dim=-1, descending=True, stable=True)
    return probs.gather(-1, ids), ids


def _topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = candidate_topk(logits.reshape(-1, logits.shape[-1]), k)
    shape = (*logits.shape[:-1], values.shape[-1])
    return values.view(shape), ids.view(shape)


def row_key(seed: int, *parts: str | int) -> int:
    """A signed 64-bit key of a row's random numbers, from the seed and what identifies the row."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)


def choose(
    logits: Float[Tensor, "B V"], sampling: Sampling, uniform: Float[Tensor, B]
) -> tuple[Int[Tensor, B], Float[Tensor, B], Float[Tensor, B]]:
    """Next tokens, and their log-probabilities as `token_logprobs` gives them.

    `uniform` decides the draw and is not read when the sampling is greedy.
    """
    if sampling.greedy:
        tokens, law = logits.argmax(dim=-1), None
    else:
        law = filter_logits(logits, sampling.temperature, sampling.top_p, sampling.top_k)
        # A law of NaN ends behind the last token; the caller sees it by the log-probability.
        tokens = inverse_cdf(law, uniform).clamp_max(logits.shape[-1] - 1)
    return tokens, *_logprobs(logits, tokens, sampling, law)


def token_logprobs(
    logits: Float[Tensor, "*rows V"], tokens: Int[Tensor, "*rows"], sampling: Sampling
) -> tuple[Float[Tensor, "*rows"], Float[Tensor, "*rows"]]:
    """Log-probability of each token, float64: (under the filtered law p, before the filters).

    Before the filters means softmax(logits / T), and softmax(logits) at T = 0. Under p a token that
    the filters cut off has -inf; at T = 0 the argmax has 0 and every other token -inf.
    """
    law = filter_logits(logits, sampling.temperature, sampling.top_p, sampling.top_k)
    return _logprobs(logits, tokens, sampling, law)


def _logprobs(
    logits: Tensor, tokens: Tensor, sampling: Sampling, law: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `token_logprobs`; `law` None says that every token is its row's argmax."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scaled = logits if sampling.greedy else logits / sampling.temperature
    index = tokens[..., None]
    plain = (scaled.gather(-1, index) - scaled.logsumexp(dim=-1, keepdim=True)).squeeze(-1).double()
    if law is None:
        return torch.zeros_like(plain), plain
    return law.gather(-1, index).squeeze(-1).double().log(), plain
