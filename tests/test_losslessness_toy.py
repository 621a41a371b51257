"""The toy, and the proof that each fault of the catalogue is one and that each control is none.

One block is decoded on every branch of its choices: `EveryBranch` takes the place of the random
numbers, a row is a branch and carries its probability. The law of the emitted tokens, extended by
the target to P + 1 tokens, must be the target's. Faults that use one number in two roles have the
right laws and are shown by low-discrepancy points in place of the numbers.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import qmc

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.faults import CONTROLS, FAULTS
from dflash2_lab.losslessness.toy import (
    ARMS,
    ToyConfig,
    candidate_scores,
    filtered_law,
    make_toy,
    top_p_law,
)
from dflash2_lab.losslessness.toy_decoding import Rules, State, decode, decode_block
from dflash2_lab.losslessness.toy_noise import Noise, ReseededNoise, inverse_cdf
from dflash2_lab.losslessness.toy_observing import (
    observe_drafts,
    observe_runs,
    observe_tokens,
    streams,
)
from dflash2_lab.sampling import filter_logits

SMALL = ToyConfig(vocab=4, num_candidates=3, num_draft=2, top_k=3, top_p=0.9, seed=0)
NOISE_FAULTS = [name for name, fault in FAULTS.items() if fault.stage == "random numbers"]
LAW_FAULTS = [name for name in FAULTS if name not in (*NOISE_FAULTS, "rows-swapped")]


class EveryBranch:
    """All branches of a block's 2 P + 1 choices: row n takes the digits of n to base V."""

    def __init__(self, num_draft, vocab, repeats=1):
        branches = np.arange(vocab ** (2 * num_draft + 1))
        powers = vocab ** np.arange(2 * num_draft + 1)
        self.digits = np.repeat(branches[:, None] // powers % vocab, repeats, axis=0)
        self.num_draft = num_draft
        self.weight = np.ones(len(self.digits))

    def next_block(self):
        pass

    def _choose(self, digit, law):
        rows, within = np.arange(len(law)), digit < law.shape[1]
        digit = np.where(within, digit, 0)
        self.weight *= np.where(within, law[rows, digit], 0.0)
        return digit

    def draw_draft(self, slot, ids, law):
        return ids[np.arange(len(ids)), self._choose(self.digits[:, slot], law)]

    def draw_target(self, slot, law):
        return self._choose(self.digits[:, self.num_draft + slot], law)

    def test(self, probability):
        digits = self.digits[:, self.num_draft : 2 * self.num_draft]
        chance = np.nan_to_num(np.clip(probability, 0, 1))
        self.weight *= np.where(digits == 1, chance, np.where(digits == 0, 1 - chance, 0)).prod(1)
        return digits == 1

    def draw_final(self, num, law):
        return self._choose(self.digits[:, -1], law)


def extended(toy, start, tokens, emitted, weight):
    """Law of the P + 1 tokens after a context, [V] * (P + 1), from weighted blocks."""
    V, length = toy.config.vocab, toy.config.num_draft + 1
    law = np.zeros((V,) * length)
    for row in np.flatnonzero(weight):
        prefix, context, part = tuple(tokens[row, : emitted[row]]), start, weight[row]
        for token in prefix:
            context = context % V * V + token
        law[prefix] += part * target_law(toy, context, length - len(prefix))
    return law


def target_law(toy, context, length):
    """p of the next tokens, [V] * length."""
    V = toy.config.vocab
    if length == 0:
        return np.array(1.0)
    rest = [target_law(toy, context % V * V + token, length - 1) for token in range(V)]
    return np.stack([p * later for p, later in zip(toy.p[context], rest, strict=True)])


def total_variation(toy, rules, start, refused=2):
    """TV of one block's law, extended, to the target's."""
    branches = EveryBranch(toy.config.num_draft, toy.config.vocab)
    rows = np.ones(len(branches.weight), dtype=int)
    block, _, _ = decode_block(toy, rules, State(start * rows, refused * rows), branches)
    assert branches.weight.sum() == pytest.approx(1, abs=1e-12)
    law = extended(toy, start, block[0], block[1], branches.weight)
    return 0.5 * np.abs(law - target_law(toy, start, toy.config.num_draft + 1)).sum()


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", CONTROLS)
def test_every_harmless_control_has_the_targets_law(name, arm):
    toy = make_toy(replace(SMALL, arm=arm))
    for start in (0, 6, 11):
        assert total_variation(toy, CONTROLS[name].rules, start) <= 1e-12


def test_controls_have_the_targets_law_over_three_drafted_slots_and_without_filters():
    toy = make_toy(ToyConfig(vocab=3, num_candidates=2, num_draft=3, top_k=0, top_p=1.0))
    for name in ("correct", "block-verification", "token-matching"):
        assert total_variation(toy, CONTROLS[name].rules, 4, refused=1) <= 1e-12


@pytest.mark.parametrize("name", LAW_FAULTS)
def test_every_fault_of_a_law_has_another_law_than_the_target(name):
    toy = make_toy(SMALL)
    found = max(total_variation(toy, FAULTS[name].rules, start) for start in (0, 6, 11))
    assert found > (1e-5 if name == "q-bfloat16" else 1e-3)


def test_keeping_a_draft_that_equals_a_target_draw_and_else_drawing_anew_is_no_token_matching():
    toy, rules = make_toy(SMALL), CONTROLS["one-hot-consistent"].rules
    anew = replace(rules, residual=lambda v, slot: v.p(slot))
    assert total_variation(toy, rules, 6) <= 1e-12
    assert total_variation(toy, anew, 6) > 1e-2


def test_swapped_rows_have_the_law_of_the_neighbour():
    toy = make_toy(SMALL)
    other, swapped = 6, 0  # of two rows side by side, the second gets the laws of the first
    branches = EveryBranch(2, 4, repeats=2)
    starts = np.tile([other, swapped], len(branches.weight) // 2)
    state = State(starts, np.full(len(starts), -1))
    block, _, _ = decode_block(toy, FAULTS["rows-swapped"].rules, state, branches)
    first = np.zeros(4)
    np.add.at(first, block[0][1::2, 0], branches.weight[1::2])
    np.testing.assert_allclose(first, toy.p[other], atol=1e-12)
    assert np.abs(toy.p[other] - toy.p[swapped]).sum() > 0.2


class Points:
    """Stands for a generator: gives the next columns of a set of low-discrepancy points."""

    def __init__(self, columns):
        self.columns = columns

    def random(self, shape):
        return self.columns[:, : np.prod(shape[1:], dtype=int)].reshape(shape)


def spread_out(toy, rules, start, size=2**14):
    """TV as `total_variation`, for one drafted slot, by points in place of random numbers."""
    V = toy.config.vocab
    points = qmc.Sobol(V + 2, seed=0).random(size)
    noise = rules.noise(0, size, 1, V)
    columns = points[:, :V], points[:, V : V + 1], points[:, V + 1 :]
    noise.of_draft, noise.of_test, noise.of_final = (Points(part) for part in columns)
    noise.of_final.random = lambda shape: points[:, V + 1]
    state = State(np.full(size, start), np.full(size, -1))
    block, _, _ = decode_block(toy, rules, state, noise)
    law = np.zeros(V)
    np.add.at(law, block[0][:, 0], 1 / size)
    return 0.5 * np.abs(law - toy.p[start]).sum()


def test_numbers_used_in_two_roles_have_another_law_though_every_law_is_right():
    toy = make_toy(replace(SMALL, num_draft=1))
    assert max(spread_out(toy, Rules(), start) for start in (0, 6, 11)) < 2e-3
    for name in NOISE_FAULTS:
        if name != "reseed-every-block":
            rules = FAULTS[name].rules
            assert max(spread_out(toy, rules, start) for start in (0, 6, 11)) > 1e-2, name


def test_reseeding_gives_every_block_from_one_context_the_same_tokens():
    toy = make_toy(SMALL)
    state = State(np.full(64, 5), np.full(64, -1))
    for kind, same in ((ReseededNoise, True), (Noise, False)):
        noise = kind(3, 64, 2, 4)
        first, second = (decode_block(toy, Rules(), state, noise)[0][0] for _ in range(2))
        assert np.array_equal(first, second) == same
        # Over rows the one block has the right law all the same.
        assert len(np.unique(first, axis=0)) > 4


def test_the_filtered_law_is_that_of_the_decoder():
    logits = np.random.default_rng(0).normal(size=(50, 40)) * 2
    logits[:, 7] = logits[:, 3]  # ties
    for top_k, top_p in ((24, 0.95), (0, 0.8), (5, 1.0), (0, 1.0)):
        expected = filter_logits(torch.from_numpy(logits), 0.8, top_p, top_k).numpy()
        found = filtered_law(logits, 0.8, top_k, top_p)
        np.testing.assert_allclose(found, expected, atol=1e-14)
        np.testing.assert_array_equal(found > 0, expected > 0)


def test_top_p_keeps_the_token_that_crosses_and_the_lowest_id_of_a_tie():
    np.testing.assert_allclose(top_p_law(np.array([0.2, 0.4, 0.4]), 0.4), [0, 1, 0])
    np.testing.assert_allclose(top_p_law(np.array([0.2, 0.4, 0.4]), 0.5), [0, 0.5, 0.5])


def test_inverse_cdf_never_draws_a_token_without_mass():
    law = np.array([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for uniform, token in ((0.0, 1), (0.499, 1), (0.5, 3), (1 - 2**-53, 3)):
        assert inverse_cdf(law, np.array([uniform]))[0] == token


def test_the_toy_is_the_one_described():
    toy = make_toy()
    decoded = decode(toy, Rules(), 1024, num_runs=16, seed=1)
    p = toy.p[streams(toy, decoded, 1024).context.ravel()]
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1).mean()
    assert (p > 0).sum(-1).mean() == pytest.approx(8.9, abs=0.4)
    assert entropy == pytest.approx(1.39, abs=0.08)
    assert decoded.acceptance_length == pytest.approx(2.46, abs=0.12)


def test_arms_refuse_most_drafts_or_next_to_none():
    refused = {}
    for arm in ARMS:
        decoded = decode(make_toy(ToyConfig(arm=arm)), Rules(), 512)
        refused[arm] = (decoded.num == 0).mean()
    assert refused["near-perfect"] < 0.1 < refused["realistic"] < 0.5 < refused["opposite"]


def test_the_score_of_a_candidate_depends_on_the_token_before_it():
    toy = make_toy()
    context = np.array([17, 17])
    ids, unary, scores = candidate_scores(toy, 1, context, np.array([3, 4]))
    assert np.array_equal(ids[0], ids[1]) and np.array_equal(unary[0], unary[1])
    assert not np.allclose(scores[0], scores[1])


def test_harmless_faults_of_the_drafter_cost_acceptance():
    toy = make_toy()
    length = {
        name: decode(toy, CONTROLS[name].rules, 1024, seed=2).acceptance_length
        for name in ("correct", "one-hot-consistent", "wrong-anchor-consistent")
    }
    assert length["one-hot-consistent"] < 2 < length["correct"]
    assert length["wrong-anchor-consistent"] < length["correct"] - 0.3


def test_decodes_repeat_with_their_seed():
    toy = make_toy()
    first, again, other = (decode(toy, Rules(), 256, seed=seed) for seed in (5, 5, 6))
    assert np.array_equal(first.tokens, again.tokens)
    assert first.tokens.shape != other.tokens.shape or (first.tokens != other.tokens).any()


def test_observed_tokens_are_the_first_of_each_stream_with_the_laws_of_their_own_prefix():
    toy = make_toy()
    decoded = decode(toy, Rules(), 64, num_runs=2, seed=3)
    emitted = observe_tokens(toy, decoded, 64)
    assert np.array_equal(np.bincount(emitted.stream), np.full(16, 8))
    row, V = 11, toy.config.vocab
    blocks = zip(decoded.tokens[:, row], decoded.emitted[:, row], strict=True)
    tokens = np.concatenate([tokens[:num] for tokens, num in blocks])[:8]
    context = decoded.start[row]
    for place, token in enumerate(tokens):
        chosen = (emitted.stream == row) & (emitted.order == place)
        assert emitted.scores.p[chosen] == toy.p[context, token]
        context = context % V * V + token


@pytest.mark.parametrize("arm", ARMS)
def test_the_log_is_that_of_the_blocks_that_the_tokens_came_from(arm):
    toy = make_toy(ToyConfig(arm=arm))
    P = toy.config.num_draft
    decoded = decode(toy, Rules(), 1024, seed=6)
    found, drafted = streams(toy, decoded, 256), observe_drafts(toy, decoded, 256)
    blocks = [(row, block) for row in range(8) for block in np.unique(found.block[row])]
    assert len(drafted.reached) == P * len(blocks)
    num = np.array([decoded.num[block, row] for row, block in blocks])
    assert np.array_equal(drafted.accepted.reshape(-1, P).sum(1), num)
    assert np.array_equal(drafted.reached.reshape(-1, P).sum(1), np.minimum(num + 1, P))
    assert (len(drafted.residual_mass), len(drafted.bonus_mass)) == (
        (num < P).sum(),
        (num == P).sum(),
    )


@pytest.mark.parametrize("arm", ARMS)
def test_a_draft_is_scored_under_its_q_and_tested_with_p_over_q(arm):
    toy = make_toy(ToyConfig(arm=arm))
    decoded = decode(toy, Rules(), 8, seed=7)
    drafted = observe_drafts(toy, decoded, 8)  # one block of each row
    path, context, q = decoded.path[0, :, 0], decoded.start, np.zeros((8, toy.config.vocab))
    np.put_along_axis(q, decoded.ids[0, :, 0], decoded.law[0, :, 0], axis=-1)
    own = q[np.arange(8), path]
    first = slice(None, None, toy.config.num_draft)
    np.testing.assert_allclose(drafted.mass[first], own)
    np.testing.assert_allclose(drafted.below[first], (q * (q > own[:, None])).sum(-1), atol=1e-12)
    chance = np.minimum(1, toy.p[context, path] / own)
    np.testing.assert_allclose(drafted.accept_probability[first], chance)
    entropy = -(q * np.log(np.where(q > 0, q, 1))).sum(-1)
    np.testing.assert_allclose(drafted.heat_score[first], np.log(own) + entropy, atol=1e-12)


def test_runs_side_by_side_are_observed_as_they_are_alone():
    toy = make_toy()
    decoded = decode(toy, Rules(), 64, num_runs=3, seed=8)
    together = list(observe_runs(toy, decoded, 64))
    assert len(together) == 3
    for index, (emitted, drafted) in enumerate(together):
        run = decoded.run(index)
        alone = observe_tokens(toy, run, 64)
        for found, expected in zip(emitted.scores, alone.scores, strict=True):
            np.testing.assert_array_equal(found, expected)
        assert np.array_equal(emitted.stream, alone.stream + 8 * index)
        assert np.array_equal(emitted.slot, alone.slot)
        for found, expected in zip(drafted, observe_drafts(toy, run, 64), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-15)


def test_bad_requests_name_what_was_found():
    toy = make_toy(SMALL)
    with pytest.raises(LabError, match="found 12, expected a multiple of 8"):
        decode(toy, Rules(), 12)
    with pytest.raises(LabError, match="arm: found 'odd'"):
        ToyConfig(arm="odd")
    with pytest.raises(LabError, match="num_candidates: found 9"):
        ToyConfig(vocab=8, num_candidates=9)


def test_a_drafter_that_proposes_nothing_is_an_error_and_no_acceptance_of_one():
    with pytest.raises(LabError, match="none proposed"):
        decode(make_toy(SMALL), Rules(offers=False), 64)
    with pytest.raises(LabError, match="none proposed"):
        decode(make_toy(replace(SMALL, num_draft=0)), Rules(), 64)
