"""Targets, test doubles and requests for the tests of decoding."""

import torch
from helpers import END_ID, PAD_ID, tiny_target, tiny_tokenizer
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    Lfm2Config,
    MambaConfig,
    Qwen3NextConfig,
)

from dflash2_lab.decoding.requests import Request, request_keys
from dflash2_lab.policies import POLICIES
from dflash2_lab.sampling import Sampling
from dflash2_lab.target import wrap_target

ALL_POLICIES = [(kind, policy) for kind, policies in POLICIES.items() for policy in policies]
OWN_POLICY = {"dflash": "top1", "dflash2": "selector", "dspark": "markov"}
HOT = Sampling(0.8, 0.9, 40)
_TINY = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": END_ID,
    "pad_token_id": PAD_ID,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
_LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}
HYBRIDS = {
    "gemma3": lambda: Gemma3TextConfig(
        **_TINY,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=8,
        final_logit_softcapping=20.0,
    ),
    "lfm2": lambda: Lfm2Config(
        **_TINY,
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_TINY, **_LINEAR, **_EXPERTS, layer_types=["linear_attention", "full_attention"] * 2
    ),
    "falcon_h1": lambda: FalconH1Config(**_TINY, **_MAMBA, mamba_n_groups=1, mamba_d_state=8),
    "mamba": lambda: MambaConfig(
        vocab_size=264, hidden_size=32, num_hidden_layers=4, state_size=8, eos_token_id=END_ID
    ),
}


def hybrid_target(family):
    """A tiny random target of a family with layers that are not plain attention."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HYBRIDS[family]()).eval().requires_grad_(False)
    return wrap_target(model, tiny_tokenizer(), f"tiny-{family}")


def two_word_target():
    """A target that says 50 or 60, and sometimes stops with 90: a random drafter, which shares
    its head, is often right."""
    target = tiny_target(seed=5, eos_token_id=[END_ID, 90])
    weight = target.head.weight.data
    word, end = weight[50].clone(), weight[90].clone()
    weight.mul_(0.01)  # not zero: among equal logits the candidates would be a matter of taste
    weight[50], weight[60], weight[90] = word, -word, 0.5 * end
    return target


def request(
    policy, prompt=(23, 24, 25, 26), limit=16, sampling=None, stop_ids=(), seed=0, prompt_id="p"
):
    """A request with keys of its own."""
    keys = request_keys(seed, prompt_id, 0, 0, policy)
    return Request(tuple(prompt), limit, sampling or Sampling(), keys, frozenset(stop_ids))


def plain_greedy(target, prompt, limit, stop_ids=()):
    """One full forward pass a token, without a cache."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def oracle(drafter, sequence):
    """Make a drafter's logits point at what follows its anchor in `sequence`, then at token 9."""
    place = {}
    forward, num_draft = drafter.forward, drafter.settings.num_draft
    following = [*sequence, *[9] * num_draft]

    def watched(embeds, context, anchors, attend=None):
        place["anchor"] = int(anchors[0, 0])
        return forward(embeds, context, anchors, attend)

    def logits(hidden, head):
        out = torch.zeros(1, num_draft, drafter.settings.vocab_size)
        tokens = following[place["anchor"] + 1 :][:num_draft]
        return out.scatter_(-1, torch.tensor(tokens)[None, :, None], 1e4)

    drafter.forward, drafter.logits = watched, logits
    return drafter
