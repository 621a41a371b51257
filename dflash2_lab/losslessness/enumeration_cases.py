"""The enumeration suite: the lab's proposers and verifier on tiny vocabularies, every branch (T0).

A world is a random target whose logits depend on the last one or two tokens (its order), and a
drafter whose unary logits and hidden states depend on them and the slot, so that p and q differ at
every position. The drafter's selector and Markov head, `decoding.steps.propose` and `accept` and
`sampling.filter_logits` are the lab's own, run in float64. The judge computes p by itself in numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dflash2_lab.decoding.steps import ACCEPTANCES, Accepted, Proposal, accept, propose
from dflash2_lab.losslessness.enumeration import Noise, Tokens, enumerate_law, float64
from dflash2_lab.models.config import DrafterConfig
from dflash2_lab.models.drafter import Drafter, build_drafter
from dflash2_lab.policies import POLICIES, Block
from dflash2_lab.sampling import Sampling, filter_logits

GATE = 1e-12  # on every total variation of code that runs in float64
POLICY_KIND = {policy: kind for kind in POLICIES for policy in POLICIES[kind]}
_HIDDEN, _RANK = 4, 3


@dataclass(frozen=True)
class Case:
    """A world by its sizes, its sampling, and what its logits are.

    `logits`: "random"; "zeros" (some tokens ruled out, others by target and drafter); "equal" (the
    drafter's are the target's, and its heads silent); "tied" (target laws of 1/2, 1/4, 1/8, 1/8 and
    of 1/4 each, whose sums meet a top-p of 1/2 or 3/4 exactly).
    """

    name: str
    vocab: int
    num_candidates: int
    num_draft: int
    sampling: Sampling
    logits: str = "random"
    order: int = 2
    seed: int = 0


CASES = (
    Case("one slot, K < V", 5, 3, 1, Sampling(0.5), order=1, seed=3),
    Case("two slots, K > V", 3, 5, 2, Sampling(1.0), order=1, seed=10),
    Case("three slots, K < V", 3, 2, 3, Sampling(1.5), order=1, seed=5),
    Case("top-k and top-p", 4, 3, 2, Sampling(1.5, 0.8, 3), seed=4),
    Case("top-p alone, K > V", 4, 6, 2, Sampling(1.0, 0.9), order=1, seed=4),
    Case("tokens ruled out", 4, 3, 2, Sampling(1.0), "zeros", order=1, seed=2),
    Case("p = q", 3, 4, 2, Sampling(1.0), "equal", order=1, seed=3),
    Case("p one-hot by top-k", 4, 3, 2, Sampling(1.0, 1.0, 1), seed=38),
    Case("sums that meet top-p", 4, 3, 2, Sampling(1.0, 0.5), "tied", seed=6),
    Case("ties where top-p cuts", 4, 5, 1, Sampling(1.0, 0.75), "tied", seed=8),
    Case("greedy", 3, 2, 3, Sampling(), seed=8),
)


@dataclass(frozen=True, eq=False)
class World:
    """A case's target logits and laws by the last tokens, and its drafters by kind."""

    case: Case
    target: Float[Tensor, "*last V"]
    p: Float[Tensor, "*last V"]
    unary: Float[Tensor, "*last P V"]
    hidden: Float[Tensor, "*last P H"]
    drafters: dict[str, Drafter] = field(repr=False)

    def rows(self, context: Tokens, drafts: Sequence[int] = ()) -> Float[Tensor, "P1 V"]:
        """The verifier's p after the context and after each of the drafts."""
        tokens, size = (*context, *drafts), len(context)
        return torch.stack([self.p[tokens[at : at + size]] for at in range(len(drafts) + 1)])

    def draft(self, policy: str, context: Tokens, noise: Noise) -> Proposal:
        """What the lab proposes after the context."""
        before = torch.full((1, self.case.num_draft), context[-1])
        drafter = self.drafters[POLICY_KIND[policy]]
        block = Block(
            drafter=drafter,
            embedding=self.target.new_empty(0),  # not read: the codebooks are free
            hidden=self.hidden[context][None],
            logits=self.unary[context][None],
            before=before,
            targets=before,
            sampling=self.case.sampling,
            uniforms={policy: noise.draft[None]},
        )
        with float64():
            return propose(block, policy)

    def verify(
        self, acceptance: str, context: Tokens, proposal: Proposal, noise: Noise
    ) -> Accepted:
        """What the lab accepts of it."""
        p = self.rows(context, proposal.tokens.tolist())
        return accept(p, proposal, noise.accept, noise.final, acceptance)

    def law(self, context: Tokens) -> Float[np.ndarray, " V"]:
        """p after a context, from its definition."""
        return law_by_definition(self.target[context].numpy(), self.case.sampling)


def law_by_definition(logits: Float[np.ndarray, " V"], sampling: Sampling) -> np.ndarray:
    """Softmax at T, then top-k, then top-p (the token that crosses stays), ties by lowest id."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.greedy:
        ranked = ranked[:1]
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    scaled = (logits[ranked] - logits.max()) / (sampling.temperature or 1.0)
    weights = np.exp(scaled) / np.exp(scaled).sum()
    kept = 1 + np.flatnonzero(np.append(weights.cumsum()[:-1] < sampling.top_p, False)).size
    law = np.zeros(len(logits))
    law[ranked[:kept]] = weights[:kept] / weights[:kept].sum()
    return law


@torch.no_grad()
def make_world(case: Case) -> World:
    """The world of a case; equal cases make equal worlds."""
    noise = torch.Generator().manual_seed(case.seed)

    def random(*shape: int) -> Float[Tensor, "*shape"]:
        return torch.randn(shape, generator=noise, dtype=torch.float64)

    vocab, slots, sampling = case.vocab, case.num_draft, case.sampling
    last = (vocab,) * case.order
    target, unary = 1.5 * random(*last, vocab), 1.5 * random(*last, slots, vocab)
    if case.logits == "zeros":
        # One token a row, never the same one for both.
        out = torch.randint(vocab, (*last, 1), generator=noise)
        target.scatter_(-1, out, -torch.inf)
        others = (out[..., None, :] + 1).expand(*last, slots, 1) % vocab
        unary.scatter_(-1, others, -torch.inf)
    elif case.logits == "equal":
        target[:] = unary[:] = random(vocab)
    elif case.logits == "tied":
        laws = torch.tensor([[4.0, 2.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
        for row in target.view(-1, vocab):
            which = torch.randint(2, (1,), generator=noise)
            row[:] = laws[which, torch.randperm(vocab, generator=noise)].log()
    drafters = {}
    for kind in sorted(set(POLICY_KIND.values())):
        drafter = build_drafter(_config(kind, case)).double().eval().requires_grad_(False)
        # More candidates than tokens: no checkpoint may ask for them, so not through its config.
        if kind == "dflash2":
            object.__setattr__(drafter.settings, "selector_top_k", case.num_candidates)
        for name, weight in drafter.named_parameters():
            if name.startswith(("candidate_selector", "markov_head")):
                weight.copy_(0.0 * weight if case.logits == "equal" else random(*weight.shape))
        drafters[kind] = drafter
    p = filter_logits(target, sampling.temperature, sampling.top_p, sampling.top_k)
    return World(case, target, p, unary, random(*last, slots, _HIDDEN), drafters)


def _config(kind: str, case: Case) -> DrafterConfig:
    """The smallest drafter of a kind; only its heads are used."""
    heads = {
        "dflash": {},
        "dflash2": {
            "conv_kernel_size": 2,
            "conv_group_size": _HIDDEN,
            "selector_rank": _RANK,
            "selector_top_k": min(case.num_candidates, case.vocab),
        },
        "dspark": {"markov_rank": _RANK, "sample_from_anchor": True},
    }
    return DrafterConfig(
        kind=kind,
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=_HIDDEN,
        vocab_size=case.vocab,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        attention_bias=False,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        num_target_layers=2,
        target_layer_ids=(0,),
        mask_token_id=0,
        block_size=case.num_draft + (kind != "dspark"),
        **heads[kind],
    )


class Row(NamedTuple):
    """One configuration of the suite: its branches and its largest deviations from p."""

    case: str
    policy: str
    acceptance: str
    num_paths: int
    total_variation: float  # of the tokens of two blocks
    worst: float  # also of each token given those before it in its block, and the total weight
    mean_emitted: float

    @property
    def passed(self) -> bool:
        return self.worst <= GATE


def run_enumeration(
    cases: Sequence[Case] = CASES, acceptances: Sequence[str] = ACCEPTANCES
) -> list[Row]:
    """Every policy and acceptance rule in every case, over two blocks: the table of the suite."""
    return [
        enumerate_case(make_world(case), policy, acceptance)
        for case in cases
        for policy in POLICY_KIND
        for acceptance in acceptances
    ]


def enumerate_case(world: World, policy: str, acceptance: str) -> Row:
    """One policy and rule in one world, over two blocks."""
    case = world.case
    law = enumerate_law(
        partial(world.draft, policy),
        partial(world.verify, acceptance),
        world.law,
        num_draft=case.num_draft,
        start=(0,) * case.order,
        order=case.order,
    )
    return Row(
        case.name, policy, acceptance, law.num_paths, law.total_variation, law.worst,
        law.mean_emitted,
    )  # fmt: skip
