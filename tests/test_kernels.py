"""The plain torch kernels against loops in float64, element by element."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash2_lab.kernels.candidate_selector import (
    inverse_cdf,
    lattice_scores,
    pairwise_scores,
    walk,
)
from dflash2_lab.kernels.candidate_topk import candidate_topk
from dflash2_lab.kernels.grouped_conv import grouped_conv
from dflash2_lab.kernels.token_rank import token_rank


def conv_by_loops(x, dynamic, base):
    """out[b, i, c] = sum_t (base[t, c] + dynamic[b, i, t, c // width]) * x[b, i - t, c]."""
    x, dynamic, base = (part.double().numpy() for part in (x, dynamic, base))
    blocks, rows, hidden = x.shape
    taps, groups = dynamic.shape[-2:]
    width = hidden // groups
    out = np.zeros_like(x)
    for b in range(blocks):
        for i in range(rows):
            for c in range(hidden):
                for t in range(min(taps, i + 1)):
                    weight = base[t, c] + dynamic[b, i, t, c // width]
                    out[b, i, c] += weight * x[b, i - t, c]
    return out


def conv_inputs(taps=2, dtype=torch.float64, blocks=3, rows=5, hidden=12, groups=4):
    x = torch.randn(blocks, rows, hidden, dtype=dtype)
    return x, torch.randn(blocks, rows, taps, groups, dtype=dtype), torch.randn(taps, hidden)


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_conv_equals_the_loop(taps):
    x, dynamic, base = conv_inputs(taps)
    expected = conv_by_loops(x, dynamic, base)
    np.testing.assert_allclose(grouped_conv(x, dynamic, base), expected, atol=1e-12)


def test_conv_in_bf16_is_the_loop_on_the_rounded_inputs():
    x, dynamic, base = conv_inputs(dtype=torch.bfloat16)
    base = base.bfloat16()
    found = grouped_conv(x, dynamic, base)
    assert found.dtype == torch.bfloat16
    expected = conv_by_loops(x, dynamic, base)
    np.testing.assert_allclose(found.double(), expected, atol=0.06, rtol=0.02)


def test_conv_reads_zero_before_the_first_row_of_a_block():
    x, dynamic, base = conv_inputs()
    dynamic[:, :, 0], base[0] = 0.0, 0.0  # the previous-row tap alone
    out = grouped_conv(x, dynamic, base)
    assert not out[:, 0].any()
    assert out[:, 1].any()


@pytest.mark.parametrize("leading", [(4,), (2, 2)])
def test_conv_of_a_block_never_reads_another_block(leading):
    x, dynamic, base = conv_inputs(blocks=4)
    x, dynamic = x.unflatten(0, leading), dynamic.unflatten(0, leading)
    before = grouped_conv(x, dynamic, base)
    x.flatten(0, -3)[1] += 100.0
    after = grouped_conv(x, dynamic, base)
    same = (before == after).flatten(0, -3).flatten(1).all(-1)
    assert same.tolist() == [True, False, True, True]


def test_conv_never_reads_a_later_row():
    x, dynamic, base = conv_inputs()
    before = grouped_conv(x, dynamic, base)
    x[:, 3] += 1.0
    changed = (grouped_conv(x, dynamic, base) != before).any(-1)
    assert changed.tolist() == [[False, False, False, True, True]] * 3


def test_conv_gradients():
    x, dynamic, base = (part.double().requires_grad_() for part in conv_inputs(rows=3, hidden=8))
    assert torch.autograd.gradcheck(grouped_conv, (x, dynamic, base))


def test_conv_with_unit_base_and_no_dynamics_is_the_identity():
    x = torch.randn(2, 3, 5, 8)
    base = torch.tensor([1.0, 0.0])[:, None].expand(2, 8)
    assert torch.equal(grouped_conv(x, torch.zeros(2, 3, 5, 2, 4), base), x)


def ranking(row):
    """Token ids by (logit descending, id ascending)."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


logit_rows = st.lists(
    st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0]), min_size=7, max_size=7),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=100)
@given(rows=logit_rows, num_candidates=st.integers(1, 9))
def test_topk_and_rank_follow_one_order_through_ties_and_infinities(rows, num_candidates):
    logits = torch.tensor(rows)
    values, ids = candidate_topk(logits, num_candidates)
    expected = [ranking(row)[:num_candidates] for row in rows]
    assert ids.tolist() == expected
    assert torch.equal(values, logits.gather(-1, ids))
    for token in range(7):
        rank = token_rank(logits, torch.full((len(rows),), token))
        assert rank.tolist() == [ranking(row).index(token) for row in rows]


@pytest.mark.parametrize("num_candidates", [1, 4, 16, 299, 300, 1000])
def test_topk_of_rounded_logits_where_almost_all_are_tied(num_candidates):
    logits = torch.randn(20, 300).round().bfloat16()
    values, ids = candidate_topk(logits, num_candidates)
    assert values.dtype == torch.bfloat16
    assert ids.dtype == torch.int64
    assert ids.tolist() == [ranking(row)[:num_candidates] for row in logits.tolist()]


def test_topk_leaves_its_input_alone():
    logits = torch.zeros(2, 6)
    candidate_topk(logits, 3)
    assert not logits.any()


def test_topk_puts_nan_first_so_that_it_can_be_seen():
    values, _ = candidate_topk(torch.tensor([[1.0, float("nan"), 3.0, 2.0]]), 2)
    assert values[0, 0].isnan()


def selector_inputs(rows=6, slots=4, candidates=5, rank=3, vocab=11):
    codes = torch.randn(2, vocab, rank)
    gate = torch.randn(rows, slots, rank)
    unary = torch.randn(rows, slots, candidates)
    ids = torch.stack([torch.randperm(vocab)[:candidates] for _ in range(rows * slots)]).view(
        rows, slots, candidates
    )
    anchors = torch.randint(vocab, (rows,))
    return codes[0], codes[1], gate, unary, ids, anchors


def scored(predecessor, successor, gate, ids, anchors):
    """`first` and `lattice` as `walk` wants them."""
    rows, slots, _ = ids.shape
    first = pairwise_scores(predecessor[anchors], gate[:, 0], successor[ids[:, 0]])
    lattice = lattice_scores(
        predecessor[ids[:, :-1]].flatten(0, 1),
        gate[:, 1:].flatten(0, 1),
        successor[ids[:, 1:]].flatten(0, 1),
    )
    return first, lattice.unflatten(0, (rows, slots - 1))


def walk_by_loops(inputs, choose):
    """Token by token in float64, with the codes looked up anew at each slot."""
    predecessor, successor, gate, unary, ids, anchors = inputs
    predecessor, successor, gate = predecessor.double(), successor.double(), gate.double()
    rows, slots, candidates = ids.shape
    path, laws = np.zeros((rows, slots), int), np.zeros((rows, slots, candidates))
    for row in range(rows):
        previous = int(anchors[row])
        for slot in range(slots):
            scores = np.zeros(candidates)
            for k in range(candidates):
                token = int(ids[row, slot, k])
                scores[k] = float(unary[row, slot, k])
                for r in range(gate.shape[-1]):
                    pair = predecessor[previous, r] * successor[token, r]
                    scores[k] += float(pair * gate[row, slot, r])
            choice, laws[row, slot] = choose(scores, row, slot)
            path[row, slot] = previous = int(ids[row, slot, choice])
    return path, laws


def test_greedy_walk_equals_the_loop():
    inputs = selector_inputs()

    def best(scores, _row, _slot):
        return scores.argmax(), np.eye(len(scores))[scores.argmax()]

    path, laws = walk_by_loops(inputs, best)
    _, _, _, unary, ids, _ = inputs
    tokens, found = walk(unary, ids, *scored(*inputs[:3], *inputs[4:]), temperature=0.0)
    assert tokens.tolist() == path.tolist()
    assert found.numpy().tolist() == laws.tolist()


def test_sampled_walk_equals_the_loop_with_the_same_uniforms():
    inputs, uniforms = selector_inputs(rows=40), torch.rand(40, 4, dtype=torch.float64)

    def drawn(scores, row, slot):
        law = np.exp(scores / 0.7)
        law /= law.sum()
        return int((law.cumsum() <= float(uniforms[row, slot])).sum()), law

    path, laws = walk_by_loops(inputs, drawn)
    _, _, _, unary, ids, _ = inputs
    tokens, found = walk(unary, ids, *scored(*inputs[:3], *inputs[4:]), 0.7, uniforms)
    assert tokens.tolist() == path.tolist()
    np.testing.assert_allclose(found, laws, atol=1e-6)
    assert len({tuple(row) for row in path.tolist()}) > 1


def test_scores_are_formed_in_fp32_from_bf16_codes():
    codes = torch.randn(3, 4, 6).bfloat16()
    found = pairwise_scores(codes[0], codes[1], codes[2][:, None])
    assert found.dtype == torch.float32
    expected = (codes[0].double() * codes[1].double() * codes[2].double()).sum(-1)
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-6, atol=1e-6)


def test_lattice_row_is_the_pairwise_score_of_that_predecessor():
    predecessor, successor, gate, _, ids, _ = selector_inputs()
    before, after, gate = predecessor[ids[:, 0]], successor[ids[:, 1]], gate[:, 1]
    lattice = lattice_scores(before, gate, after)
    for k in range(ids.shape[-1]):
        torch.testing.assert_close(lattice[:, k], pairwise_scores(before[:, k], gate, after))


def test_walk_breaks_ties_by_the_order_of_the_candidates():
    zeros = torch.zeros(1, 2, 3)
    ids = torch.tensor([[[4, 7, 9], [8, 1, 2]]])
    tokens, _ = walk(zeros, ids, torch.zeros(1, 3), torch.zeros(1, 1, 3, 3), 0.0)
    assert tokens.tolist() == [[4, 8]]


def test_walk_of_a_single_slot():
    unary = torch.tensor([[[1.0, 0.0]]])
    first = torch.tensor([[0.0, 2.0]])
    tokens, _ = walk(unary, torch.tensor([[[5, 6]]]), first, torch.zeros(1, 0, 2, 2), 0.0)
    assert tokens.tolist() == [[6]]


def test_a_candidate_of_minus_infinity_is_never_walked_to():
    unary = torch.tensor([[[0.0, -1.0, -torch.inf]]]).repeat(500, 1, 1)
    ids = torch.arange(3).expand(500, 1, 3)
    uniforms = torch.linspace(0, 1 - 2.0**-48, 500, dtype=torch.float64)[:, None]
    first, lattice = torch.full((500, 3), 5.0), torch.zeros(500, 0, 3, 3)
    tokens, laws = walk(unary, ids, first, lattice, 1.0, uniforms)
    assert set(tokens.flatten().tolist()) == {0, 1}
    assert not laws[..., 2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_never_draws_a_zero(dtype):
    probs = torch.tensor([0.0, 0.3, 0.0, 0.0, 0.5, 0.2, 0.0], dtype=dtype)
    edge = torch.tensor([0.0, 0.3, 0.8, 1.0], dtype=torch.float64)
    levels = [edge, (edge - 1e-9).clamp_min(0), edge + 1e-9, torch.tensor([1 - 2.0**-48])]
    uniform = torch.cat([*levels, torch.rand(2000)]).clamp_max(1 - 2.0**-48)
    drawn = inverse_cdf(probs.expand(len(uniform), -1), uniform)
    assert set(drawn.tolist()) == {1, 4, 5}


def test_inverse_cdf_draws_with_the_given_probabilities():
    probs = torch.tensor([0.1, 0.0, 0.6, 0.3])
    uniform = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = inverse_cdf(probs.expand(10_000, -1), uniform).bincount(minlength=4)
    assert (counts - torch.tensor([1000, 0, 6000, 3000])).abs().max() <= 1
