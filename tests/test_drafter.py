"""Drafter modules: what starts as what, what reaches what, and what the heads say."""

import dataclasses

import pytest
import torch
from drafters import drafted, random_blocks, tiny_config, tiny_drafter
from helpers import MASK_ID, tiny_target

from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import walk
from dflash2_lab.models.attention import merged_attention
from dflash2_lab.models.drafter import build_drafter
from dflash2_lab.policies import Block, candidates
from dflash2_lab.sampling import Sampling

KINDS = ("dflash", "dflash2", "dspark")


def merged(_layer, *arguments):
    return merged_attention(*arguments)[0]


def test_a_fresh_dflash2_is_the_dflash_of_the_same_seed_bit_for_bit():
    plain = build_drafter(tiny_config("dflash"), seed=3)
    second = build_drafter(tiny_config("dflash2"), seed=3)
    blocks = random_blocks(plain, [[4, 9, 20]])
    assert torch.equal(drafted(plain, *blocks), drafted(second, *blocks))


def test_the_conv_of_a_drafter_that_is_not_fresh_changes_its_hidden_states():
    plain, second = tiny_drafter("dflash"), tiny_drafter("dflash2")
    own = set(plain.state_dict())
    second.load_state_dict(plain.state_dict(), strict=False)
    assert own < set(second.state_dict())
    blocks = random_blocks(plain, [[4, 9, 20]])
    assert not torch.allclose(drafted(plain, *blocks), drafted(second, *blocks), atol=1e-2)


@pytest.mark.parametrize("attend", [None, merged])
@pytest.mark.parametrize("kind", KINDS)
def test_one_block_never_touches_another(kind, attend):
    drafter = tiny_drafter(kind)
    features, embeds, anchors = random_blocks(drafter, [[4, 9, 20]])
    before = drafted(drafter, features, embeds, anchors, attend=attend)
    embeds = embeds.clone()
    embeds[:, 1] += 5.0
    after = drafted(drafter, features, embeds, anchors, attend=attend)
    same = (before == after).flatten(2).all(-1)
    assert same.tolist() == [[True, False, True]]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_blocks_equal_one_block_a_call(kind):
    drafter = tiny_drafter(kind)
    features, embeds, anchors = random_blocks(drafter, [[4, 9, 20], [1, 6, 7]])
    packed = drafted(drafter, features, embeds, anchors)
    torch.testing.assert_close(
        drafted(drafter, features, embeds, anchors, attend=merged), packed, rtol=1e-4, atol=1e-5
    )
    for row in range(2):
        for block in range(3):
            at = int(anchors[row, block])
            alone = drafted(
                drafter,
                features[row : row + 1, :at],
                embeds[row : row + 1, block : block + 1],
                anchors[row : row + 1, block : block + 1],
            )
            torch.testing.assert_close(alone[0, 0], packed[row, block], rtol=1e-4, atol=1e-5)


def test_context_from_the_anchor_on_has_no_influence():
    drafter = tiny_drafter()
    features, embeds, anchors = random_blocks(drafter, [[9]])
    before = drafted(drafter, features, embeds, anchors)
    features[:, 9:] = 50.0
    assert torch.equal(drafted(drafter, features, embeds, anchors), before)
    features[:, 8] += 1.0
    assert not torch.equal(drafted(drafter, features, embeds, anchors), before)


def test_context_keys_in_two_parts_equal_those_in_one():
    drafter = tiny_drafter()
    features, _, _ = random_blocks(drafter, [[9]])
    with torch.no_grad():
        whole = drafter.context_keys(features)
        parts = drafter.context_keys(features[:, :8]), drafter.context_keys(features[:, 8:], 8)
    for layer, (keys, values) in enumerate(whole):
        joined = [torch.cat([part[layer][i] for part in parts], dim=2) for i in range(2)]
        torch.testing.assert_close(joined, [keys, values])


@pytest.mark.parametrize("kind", KINDS)
def test_block_ids_are_the_anchor_and_masks(kind):
    ids = tiny_drafter(kind).block_ids(torch.tensor([[7, 8], [9, 10]]))
    mask = [MASK_ID] * 3
    assert ids.tolist() == [[[7, *mask], [8, *mask]], [[9, *mask], [10, *mask]]]


def test_output_multiplier_and_cap_are_applied_in_that_order():
    drafter = tiny_drafter(output_multiplier=0.5, final_logit_softcapping=3.0)
    head, hidden = torch.nn.Linear(32, 264, bias=False), 4 * torch.randn(6, 32)
    with torch.no_grad():
        raw = head(hidden)
        capped = drafter.logits(hidden, head)
        plain = tiny_drafter().logits(hidden, head)
    torch.testing.assert_close(capped, 3.0 * torch.tanh(0.5 * raw / 3.0))
    assert torch.equal(plain, raw)
    assert torch.equal(capped.argsort(-1), plain.argsort(-1))
    assert not torch.allclose(capped.softmax(-1), plain.softmax(-1), atol=1e-3)


def reduced():
    """A drafter over four draft tokens that stand for the target tokens 5, 6, 9 and 263."""
    drafter = tiny_drafter("dflash", own_head=True, draft_vocab_size=4)
    drafter.d2t.copy_(torch.tensor([5, 6, 9, 263]) - torch.arange(4))
    return drafter


def test_reduced_vocabulary_is_scattered_and_the_rest_is_impossible():
    drafter, hidden = reduced(), torch.randn(7, 32)
    logits = drafter.logits(hidden, torch.nn.Linear(32, 264))
    law = logits.softmax(-1)
    assert logits.shape == (7, 264)
    torch.testing.assert_close(logits[:, [5, 6, 9, 263]], drafter.lm_head(hidden))
    torch.testing.assert_close(law.sum(-1), torch.ones(7))
    others = [token for token in range(264) if token not in (5, 6, 9, 263)]
    assert not law[:, others].any()


def test_offsets_of_zero_are_the_identity():
    drafter = tiny_drafter("dflash", own_head=True, draft_vocab_size=4)
    logits = drafter.to_target_vocab(torch.arange(4.0)[None])
    assert logits[0, :5].tolist() == [0.0, 1.0, 2.0, 3.0, -torch.inf]


@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("own_embedding", [False, True])
def test_own_embedding_and_head_are_used_when_there_are_any(own_embedding, own_head):
    drafter = tiny_drafter("dflash", own_embedding=own_embedding, own_head=own_head)
    table, head = torch.randn(264, 32), torch.nn.Linear(32, 264, bias=False)
    hidden = torch.randn(3, 32)
    expected = drafter.embed_tokens.weight if own_embedding else table
    assert drafter.input_embedding(table) is expected
    with torch.no_grad():
        expected = hidden @ (drafter.lm_head if own_head else head).weight.T
        torch.testing.assert_close(drafter.logits(hidden, head), expected)


def selector_block(drafter, embedding, num_blocks=30):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_blocks, 3, 32, generator=generator)
    tokens = torch.randint(264, (num_blocks, 4), generator=generator)
    logits = hidden @ embedding.T
    return Block(
        drafter, embedding, hidden, logits, tokens[:, :-1], tokens[:, 1:], Sampling(), uniforms={}
    )


def test_folded_selector_has_the_same_scores_and_greedy_path():
    drafter = tiny_drafter(selector_parametrization="projected")
    embedding = torch.randn(264, 32)
    folded = drafter.fold(embedding)
    assert folded.settings == dataclasses.replace(drafter.settings, selector_parametrization="free")
    found, expected = (candidates(selector_block(model, embedding)) for model in (folded, drafter))
    assert expected.first.std() > 0.1
    for name in ("ids", "unary", "first", "lattice"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    paths = [walk(c.unary, c.ids, c.first, c.lattice, 0.0)[0] for c in (found, expected)]
    assert torch.equal(*paths)
    assert not torch.equal(paths[0], found.ids[..., 0])  # the selector does override the argmax


def test_folding_keeps_the_backbone_and_what_the_checkpoint_brought():
    own = {"own_embedding": True, "own_head": True}
    drafter = tiny_drafter(selector_parametrization="projected", **own)
    folded = drafter.fold(drafter.embed_tokens.weight)
    blocks = random_blocks(drafter, [[4, 9]])
    assert torch.equal(drafted(drafter, *blocks), drafted(folded, *blocks))
    assert torch.equal(folded.embed_tokens.weight, drafter.embed_tokens.weight)
    assert torch.equal(folded.lm_head.weight, drafter.lm_head.weight)


def test_a_fresh_selector_scores_zero_so_the_path_is_the_argmax():
    for form in ("free", "projected"):
        drafter = build_drafter(tiny_config(selector_parametrization=form), seed=1)
        found = candidates(selector_block(drafter, torch.randn(264, 32)))
        assert not found.first.any()
        assert not found.lattice.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casting_the_model_keeps_the_rotary_frequencies_in_fp32(dtype):
    drafter = tiny_drafter()
    exact = drafter.rotary_emb.inv_freq.clone()
    drafter.to(dtype)
    assert drafter.dtype == dtype
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(drafter.rotary_emb.inv_freq, exact)


def test_a_seed_and_a_name_decide_a_tensor():
    first, again, other = (build_drafter(tiny_config(), seed=seed) for seed in (1, 1, 2))
    for name, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    weights = [model.layers[0].mlp.up_proj.weight for model in (first, other)]
    assert not torch.equal(*weights)
    assert not torch.equal(first.layers[0].mlp.up_proj.weight, first.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ("fc.weight", "context projection"),
        ("layers.0.self_attn.o_proj.weight", "layers.0"),
        ("layers.1.mlp.down_proj.weight", "layers.1"),
        ("norm.weight", "norm"),
    ],
)
def test_the_first_part_that_is_not_finite_is_named(broken, named):
    drafter = tiny_drafter()
    features, embeds, anchors = random_blocks(drafter, [[4, 9]])
    drafter.get_parameter(broken).fill_(float("nan"))
    with torch.no_grad():
        assert named in drafter.first_bad_layer(embeds, drafter.context_keys(features), anchors)
        embeds[0, 0, 0, 0] = float("inf")
        found = drafter.first_bad_layer(embeds, drafter.context_keys(features), anchors)
    assert found == "the input embedding"


def test_markov_bias_reads_target_ids_and_speaks_draft_ids():
    drafter = tiny_drafter("dspark", own_head=True, draft_vocab_size=4)
    bias = drafter.markov_head(torch.tensor([200, 263]))
    expected = drafter.markov_head.markov_w1.weight[[200, 263]] @ (
        drafter.markov_head.markov_w2.weight.T
    )
    torch.testing.assert_close(bias, expected)
    assert drafter.to_target_vocab(bias).shape == (2, 264)


def test_confidence_is_a_probability():
    drafter = tiny_drafter("dspark", confidence_head=True, confidence_head_with_markov=True)
    found = drafter.confidence_head(torch.randn(5, 38))
    assert found.shape == (5,)
    assert ((found > 0) & (found < 1)).all()


def test_a_selector_works_on_the_embedding_of_a_target_in_another_dtype():
    drafter = tiny_drafter(selector_parametrization="projected")
    target = tiny_target()
    wide = drafter.candidate_selector.predecessor(torch.tensor([5, 9]), target.embed_weight)
    narrow = drafter.candidate_selector.predecessor(
        torch.tensor([5, 9]), target.embed_weight.bfloat16()
    )
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow, wide, rtol=0.05, atol=0.05)


def test_a_drafter_that_cannot_be_built_says_why():
    with pytest.raises(LabError, match="conv_group_size"):
        tiny_config(conv_group_size=7)
