"""What follows the backbone: the path selector of DFlash 2 and the Markov head of DSpark."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dflash2_lab.models.config import DrafterConfig


class CandidateSelector(nn.Module):
    """Codes of predecessor and successor tokens and the gate that couples them.

    *free*: one [V, r] table each, the published form. *projected*: linear maps of the target's
    frozen embedding rows (3 H r parameters in all); `tables` turns them into the published form.
    A fresh selector scores zero everywhere, so the path starts as the unary argmax.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        rank, hidden = config.selector_rank, config.hidden_size
        self.top_k = config.selector_top_k
        self.projected = config.selector_parametrization == "projected"
        if self.projected:
            self.predecessor_projection = nn.Linear(hidden, rank, bias=False)
            self.successor_projection = nn.Linear(hidden, rank, bias=False)
        else:
            self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
            self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def predecessor(
        self, ids: Int[Tensor, "*rows"], embedding: Float[Tensor, "V H"]
    ) -> Float[Tensor, "*rows r"]:
        if self.projected:
            return self._project(self.predecessor_projection, embedding[ids])
        return self.predecessor_codebook[ids]

    def successor(
        self, ids: Int[Tensor, "*rows"], embedding: Float[Tensor, "V H"]
    ) -> Float[Tensor, "*rows r"]:
        if self.projected:
            return self._project(self.successor_projection, embedding[ids])
        return self.successor_codebook[ids]

    @staticmethod
    def _project(projection: nn.Linear, rows: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows r"]:
        # The target may be held in another dtype than its drafter.
        return projection(rows.to(projection.weight.dtype))

    def tables(self, embedding: Float[Tensor, "V H"]) -> dict[str, Float[Tensor, "V r"]]:
        """The two codebooks of the published form, by their published names."""
        ids = torch.arange(len(embedding), device=embedding.device)
        return {
            "predecessor_codebook": self.predecessor(ids, embedding),
            "successor_codebook": self.successor(ids, embedding),
        }


class MarkovHead(nn.Module):
    """logits_k += W2 W1[x_{k-1}] over the full vocabulary (DSpark, 'vanilla')."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        vocab = config.draft_vocab_size or config.vocab_size
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, vocab, bias=False)

    def forward(self, previous: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows V"]:
        return self.markov_w2(self.markov_w1(previous))


class ConfidenceHead(nn.Module):
    """Predicted chance that a draft is accepted, from its hidden state and predecessor code."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        extra = config.markov_rank if config.confidence_head_with_markov else 0
        self.proj = nn.Linear(config.hidden_size + (extra or 0), 1)

    def forward(self, features: Float[Tensor, "*rows F"]) -> Float[Tensor, "*rows"]:
        return torch.sigmoid(self.proj(features))[..., 0]
