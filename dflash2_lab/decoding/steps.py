"""The steps of speculative decoding for one row: draft, verify, accept, commit, roll back.

A step at an anchor drafts a block and verifies [anchor, drafts] in one target pass, by one of two
rules under which every emitted token has the law p. Either accepts n of P drafts; the next token
comes from the residual (w_n p_n+1 - q_n+1)+, normalised, and after all P drafts from p_P+1.

"token" (Leviathan et al. 2023, Chen et al. 2023): draft x_i is accepted while u_i q_i(x_i) <
p_i(x_i); all w_n = 1.

"block" (Sun et al. 2024, arXiv 2403.10444, algorithm 2): w_0 = 1, w_i = min(1, w_i-1 p_i(x_i) /
q_i(x_i)). Each slot is tested, u_i < h_i, and n is the last one that passes (none: 0). With the
laws p_i+1 and q_i+1 after x_1..i,

    h_i = s_i / (s_i + 1 - w_i),   s_i = sum over x of (w_i p_i+1(x) - q_i+1(x))+,   h_P = w_P.

Given the emitted tokens, n >= i has probability min(1, min over j <= i of prod over l <= j of
q_l / p_l), never less than the prod over l <= i of min(1, q_l / p_l) of the rule "token".

At T = 0 all laws are one-hot and both rules are equality with the target's argmax. What goes from
one step to the next is a span of tokens and its q.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import transformers
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import inverse_cdf, walk
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.models.layers import embed_rows
from dflash2_lab.policies import Block, candidates, markov_logits
from dflash2_lab.sampling import Sampling, filter_logits, uniforms
from dflash2_lab.target import Target, layer_outputs

ACCEPTANCES = ("token", "block")


def check_acceptance(acceptance: str) -> None:
    """Raise `LabError` for an unknown rule."""
    if acceptance not in ACCEPTANCES:
        raise LabError(f"acceptance: found {acceptance!r}, expected 'token' or 'block'")


@dataclass(frozen=True, eq=False)
class Proposal:
    """Drafted tokens and the law q that each was drawn from.

    `law` is None where q is one-hot on the tokens; else a row holds q over the K `ids` of its slot,
    or over the whole vocabulary when `ids` is None.
    """

    tokens: Int[Tensor, " P"]
    law: Float[Tensor, "P N"] | None = None
    ids: Int[Tensor, "P N"] | None = None

    def first(self, num: int) -> "Proposal":
        """Its first slots."""
        law, ids = (None if x is None else x[:num] for x in (self.law, self.ids))
        return Proposal(self.tokens[:num], law, ids)

    def mass(self) -> Float[Tensor, " P"]:
        """q of the drafted tokens, float64."""
        if self.law is None:
            return torch.ones(len(self.tokens), dtype=torch.float64, device=self.tokens.device)
        if self.ids is None:
            return self.law.double().gather(-1, self.tokens[:, None])[:, 0]
        return (self.law.double() * (self.ids == self.tokens[:, None])).sum(-1)

    def dense(self, slot: int | Int[Tensor, " n"], vocab: int) -> Float[Tensor, "*n V"]:
        """q of one slot or of some over the whole vocabulary, float64."""
        if self.law is not None and self.ids is None:
            return self.law[slot].double()
        chosen = self.tokens[slot]
        q = torch.zeros(*chosen.shape, vocab, dtype=torch.float64, device=chosen.device)
        if self.law is None:
            return q.scatter_(-1, chosen[..., None], 1.0)
        return q.scatter_add_(-1, self.ids[slot], self.law[slot].double())


class Accepted(NamedTuple):
    """How many drafts the target accepted, and the token that follows them."""

    num: int
    token: int


def draws(key: int, first: int, num: int, device: torch.device) -> Float[Tensor, " num"]:
    """Uniform numbers of one key at the counters first, first + 1, ..."""
    counters = torch.arange(first, first + num, device=device)
    return uniforms(torch.full_like(counters, key), counters)


def target_law(target: Target, logits: Float[Tensor, "n V"], sampling: Sampling) -> Tensor:
    """p of every row, [n, V] float32. Raises `LabError` for logits that are not finite."""
    check_logits(logits, f"target {target.name}: its logits are not finite in {target.dtype}")
    return filter_logits(logits, sampling.temperature, sampling.top_p, sampling.top_k)


def check_logits(logits: Float[Tensor, "n V"], what: str) -> None:
    """Raise `LabError` for rows with NaN, +inf, or nothing but -inf (a -inf is a token ruled out).

    The message is `what` and what was found.
    """
    best = logits.amax(-1)
    bad = (~best.isfinite()).nonzero()[:, 0]
    if len(bad):
        raise LabError(f"{what}: found {best[bad[0]].item()} as the best of row {bad[0].item()}")


def propose(block: Block, policy: str) -> Proposal:
    """A policy's path through the one block of `block`, with its q.

    `block.before` holds the anchor token; `block.uniforms[policy]` [1, P] drive the draws.
    """
    sampling, logits = block.sampling, block.logits[0]
    if policy == "top1" or (policy == "sampled" and sampling.greedy):
        return Proposal(logits.argmax(-1))
    uniform = block.uniforms[policy]
    if policy == "sampled":
        law = filter_logits(logits, sampling.temperature, sampling.top_p, sampling.top_k)
        return Proposal(inverse_cdf(law, uniform[0]), law)
    temperature = 0.0 if policy.endswith("_greedy") else sampling.temperature
    if policy.startswith("markov"):
        return _markov(block, temperature, uniform[0])
    found = candidates(block)
    if not (found.first.isfinite().all() and found.lattice.isfinite().all()):
        raise LabError(
            f"drafter {block.drafter.name}: the selector gives scores that are not finite"
        )
    tokens, law = walk(found.unary, found.ids, found.first, found.lattice, temperature, uniform)
    return Proposal(tokens[0], law[0], found.ids[0]) if temperature > 0 else Proposal(tokens[0])


def _markov(block: Block, temperature: float, uniform: Float[Tensor, " P"]) -> Proposal:
    """Left to right over the full vocabulary: logits + W2 W1[previous token]."""
    broken = f"drafter {block.drafter.name}: the Markov head's values are not finite"
    tokens, laws, previous = [], [], block.before[:, 0]
    for slot in range(len(uniform)):
        scores = markov_logits(block, slot, previous)
        check_logits(scores, broken)
        if temperature > 0:
            laws.append(filter_logits(scores, temperature))
            previous = inverse_cdf(laws[-1], uniform[slot : slot + 1])
        else:
            previous = scores.argmax(-1)
        tokens.append(previous)
    return Proposal(torch.cat(tokens), torch.cat(laws) if laws else None)


def accept(
    p: Float[Tensor, "P1 V"],
    proposal: Proposal,
    uniform: Float[Tensor, " P"],
    final: Float[Tensor, ""],
    acceptance: str = "token",
) -> Accepted:
    """Verify a proposal: `p` are the target's laws at its P slots and after them (P1 = P + 1).

    `uniform` decides the acceptance tests and `final` the one residual or bonus draw, by the rule
    `acceptance` of the module's first lines; all of it in float64.
    """
    num_slots, law = len(proposal.tokens), p
    if acceptance == "block":
        weights, left = block_weights(p, proposal)
        passed = uniform * (left + 1 - weights[1:]) < left
        num = num_slots - int((~passed).flip(-1).cumprod(-1).sum())
        law = weights[:, None] * p
    else:
        passed = uniform * proposal.mass() < at_tokens(p, proposal)
        num = int(passed.cumprod(-1).sum())
    after = p[num] if num == num_slots else residual(law[num], proposal.dense(num, p.shape[-1]))
    return Accepted(num, int(inverse_cdf(after, final)))


def at_tokens(p: Float[Tensor, "P1 V"], proposal: Proposal) -> Float[Tensor, " P"]:
    """p of the drafted tokens, float64."""
    return p[:-1].double().gather(-1, proposal.tokens[:, None])[:, 0]


def block_weights(
    p: Float[Tensor, "P1 V"], proposal: Proposal
) -> tuple[Float[Tensor, " P1"], Float[Tensor, " P"]]:
    """w_0..w_P and s_1..s_P of block verification, float64; s_P = w_P, which makes h_P = w_P."""
    ratios = (at_tokens(p, proposal) / proposal.mass()).tolist()
    # The order of `min` keeps a NaN (a token that neither law has), which fails every test.
    running = accumulate(ratios, lambda w, ratio: min(w * ratio, 1.0), initial=1.0)
    weights = torch.tensor(list(running), dtype=torch.float64, device=p.device)
    law = weights[1:-1, None] * p[1:-1].double()
    behind = torch.arange(len(ratios), device=p.device)[1:]
    left = excess(law, proposal.dense(behind, p.shape[-1])).sum(-1)
    return weights, torch.cat([left, weights[-1:]])[: len(ratios)]


def block_chances(p: Float[Tensor, "P1 V"], proposal: Proposal) -> Float[Tensor, " P"]:
    """h_1..h_P of block verification, float64; 0 where a test cannot pass (0 / 0: equal laws)."""
    weights, left = block_weights(p, proposal)
    return (left / (left + 1 - weights[1:])).nan_to_num(0.0)


def residual(p: Float[Tensor, "*n V"], q: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
    """(p - q)+ with sum 1, float64; p itself where nothing is left (equal laws, up to rounding)."""
    left = excess(p, q)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p.double())


def excess(p: Float[Tensor, "*n V"], q: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
    """(p - q)+, float64."""
    return (p.double() - q.double()).clamp_min(0.0)


class TargetRow:
    """The target's side of one row: its cache, rolled back after each verify pass.

    With `rolls_back` false nothing can be taken back, which every target with a cache can do.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int] = (), rolls_back: bool = True):
        self.target, self.layer_ids = target, layer_ids
        self.cache = DynamicCache(config=target.model.config)
        self.rolls_back = rolls_back
        if rolls_back:
            self.cache.activate_past_recording()  # or a layer with a window forgets too much
        self.length = 0

    def extend(
        self, span: Sequence[int], logits_to_keep: int = 0
    ) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n NH"] | None]:
        """Pass the next tokens through the target: logits after each (or the last n of them), and
        the drafter's features of each when layers were named."""
        ids = torch.tensor([list(span)], device=self.target.device)
        with layer_outputs(self.target, self.layer_ids) as outputs:
            logits = self.target.model(
                input_ids=ids,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            ).logits[0]
        self.length += ids.shape[1]
        if not self.layer_ids:
            return logits, None
        return logits, torch.cat([outputs[layer][0] for layer in self.layer_ids], dim=-1)

    def roll_back(self, num: int) -> None:
        """Take back the last `num` tokens. To be called after every pass: a layer with a window
        keeps all that it saw until then."""
        if not 0 <= num <= self.length:
            raise LabError(f"roll back: found {num} tokens, expected 0 to {self.length}")
        if self.rolls_back:
            self.cache.crop(-num)
            self.length -= num
        elif num:
            raise LabError(f"roll back: found {num} tokens in a row that keeps all")


def check_row(target: Target, layer_ids: Sequence[int], rolls_back: bool) -> None:
    """Raise `LabError` for a target that cannot be decoded step by step, or not rolled back."""
    name = f"target {target.name} ({target.config.model_type})"
    try:
        row = TargetRow(target, layer_ids, rolls_back)
        row.extend([0])
        held = row.cache.get_seq_length()
    except LabError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LabError(f"{name}: does not take the cache of transformers: {error}") from error
    if held != 1:
        raise LabError(f"{name}: keeps its past elsewhere than in the cache of transformers")
    recurrent = [
        number
        for number, layer in enumerate(row.cache.layers)
        if any(getattr(layer, "is_recurrent_states_initialized", {}).values())
    ]
    if rolls_back and recurrent:
        raise LabError(
            f"{name}: layers {recurrent} keep a recurrent state, which transformers "
            f"{transformers.__version__} cannot roll back after a rejected draft; expected layers "
            "of attention or short convolutions (without a drafter it can be decoded)"
        )


class DrafterRow:
    """The drafter's side of one row: keys and values of the committed context."""

    def __init__(self, drafter: Drafter, target: Target):
        self.drafter, self.target = drafter, target
        self.keys: list[tuple[Tensor, Tensor]] | None = None
        self.length = 0

    def commit(self, features: Float[Tensor, "n NH"]) -> None:
        """Append committed tokens, by the target's features of them."""
        new = self.drafter.context_keys(features[None].to(self.drafter.dtype), self.length)
        if self.keys is not None:
            new = [
                tuple(torch.cat(parts, dim=2) for parts in zip(old, added, strict=True))
                for old, added in zip(self.keys, new, strict=True)
            ]
        self.keys = list(new)
        self.length += len(features)

    def draft(
        self, anchor_id: int, policy: str, sampling: Sampling, uniform: Float[Tensor, " P"]
    ) -> Proposal:
        """The policy's path through the full block after an anchor that follows the committed
        context. Raises `LabError` naming the first part whose values are not finite."""
        return propose(self.block(anchor_id, policy, sampling, uniform), policy)

    def block(
        self, anchor_id: int, policy: str, sampling: Sampling, uniform: Float[Tensor, " P"]
    ) -> Block:
        """What the drafter says about that block."""
        drafter, target = self.drafter, self.target
        anchors = torch.tensor([[self.length]], device=target.device)
        ids = drafter.block_ids(torch.full_like(anchors, anchor_id))
        embedding = drafter.input_embedding(target.embed_weight)
        embeds = embed_rows(embedding, ids, drafter.settings.input_embedding_scale)
        embeds = embeds.to(drafter.dtype)
        hidden = drafter(embeds, self.keys, anchors)
        if not hidden.isfinite().all():
            part = drafter.first_bad_layer(embeds, self.keys, anchors)
            raise LabError(f"drafter {drafter.name}: {part} gives values that are not finite")
        hidden = drafter.slot_rows(hidden)[0]
        logits = drafter.logits(hidden.to(target.dtype), target.head)
        check_logits(logits[0], f"drafter {drafter.name}: the output head is not finite")
        before = torch.full((1, hidden.shape[1]), anchor_id, device=target.device)
        return Block(
            drafter=drafter,
            embedding=embedding,
            hidden=hidden,
            logits=logits,
            before=before,
            targets=before,
            sampling=sampling,
            uniforms={policy: uniform[None]},
        )
