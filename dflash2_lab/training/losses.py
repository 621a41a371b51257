"""Losses of a block drafter, with the decay exp(-(slot - 1) / decay) over slots.

Backbone: (1 - s) CE(token of the trace) + s CE(target's own law), through the frozen head in chunks
so that no [rows, V] tensor outlives its chunk. Selector: CE over the K candidates with the trace's
token as predecessor; rows whose target is not among the candidates carry no selector loss (nothing
is injected), and the sum is divided by the weight of the rows that do, at least one.
Sources: arXiv 2602.06036 (decay, CE), shared practice of the public DFlash 2 trainers.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from dflash2_lab.models.drafter import DFlash2Drafter, Drafter
from dflash2_lab.models.layers import softcap


def slot_weights(valid: Bool[Tensor, "B A P"], decay: float) -> Float[Tensor, "B A P"]:
    """exp(-(slot - 1) / decay) where the slot has a label, else 0; sums to 1 over the batch."""
    slots = torch.arange(valid.shape[-1], device=valid.device)
    weights = torch.exp(-slots / decay) * valid
    return weights / weights.sum().clamp_min(1e-9)


class ChunkedHeadLoss(torch.autograd.Function):
    """Weighted soft-label cross entropy of `head(hidden)`; the gradient is formed chunk by chunk.

    Returns the summed loss and the ids of each row's `num_candidates` best tokens (any tie order).
    """

    @staticmethod
    def forward(ctx, hidden, head, labels, weights, teacher, soft, scale, cap, chunk, candidates):
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        ids = labels.new_empty((len(hidden), candidates))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            with torch.enable_grad():
                rows = hidden[part].detach().requires_grad_()
                logits = softcap((rows @ head.T) * scale, cap).float()
                loss = F.cross_entropy(logits, labels[part], reduction="none") * (1.0 - soft)
                if soft > 0:
                    law = torch.softmax((teacher[part] @ head.T).float(), dim=-1)
                    loss = loss + soft * F.cross_entropy(logits, law, reduction="none")
                loss = (loss * weights[part]).sum()
            gradient[part] = torch.autograd.grad(loss, rows)[0]
            total += loss.detach()
            ids[part] = torch.topk(logits.detach(), candidates, dim=-1).indices
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ids)
        return total, ids

    @staticmethod
    def backward(ctx, grad_total, _):
        return (ctx.saved_tensors[0] * grad_total, *([None] * 9))


def backbone_loss(
    drafter: Drafter,
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    labels: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
    teacher: Float[Tensor, "N H"],
    soft: float,
    chunk: int = 4096,
) -> tuple[Float[Tensor, ""], Int[Tensor, "N K"]]:
    """Loss over rows and each row's candidates. `teacher` is the target's final hidden state that
    predicts the row's label; `soft` is the weight of the target's own law."""
    settings = drafter.settings
    return ChunkedHeadLoss.apply(
        hidden,
        head,
        labels,
        weights,
        teacher,
        soft,
        settings.output_multiplier,
        settings.final_logit_softcapping,
        chunk,
        settings.selector_top_k or 16,
    )


def selector_loss(
    drafter: DFlash2Drafter,
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    embedding: Float[Tensor, "V H"],
    ids: Int[Tensor, "N K"],
    predecessors: Int[Tensor, " N"],
    labels: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
) -> Float[Tensor, ""]:
    """K-way cross entropy of the teacher-forced walk; its gradient reaches the backbone through
    the candidates' unary logits and the gate."""
    selector, settings = drafter.candidate_selector, drafter.settings
    unary = torch.einsum("nh,nkh->nk", hidden, head[ids]) * settings.output_multiplier
    unary = softcap(unary, settings.final_logit_softcapping)
    gated = selector.predecessor(predecessors, embedding) * selector.hidden_projection(hidden)
    pairwise = torch.einsum("nr,nkr->nk", gated, selector.successor(ids, embedding))
    found = ids == labels[:, None]
    covered = found.any(-1)
    scores = unary.float() + pairwise.float()
    loss = F.cross_entropy(scores, found.int().argmax(-1), reduction="none")
    kept = weights * covered
    # weights sum to 1 over the batch, so an uncovered batch divides by a floor and not by zero
    return (loss * kept).sum() / kept.sum().clamp_min(1e-3)
