"""Draft, verify, accept, commit, roll back, each alone (cases A1, A3, A6, A8, A9, C15, H1-H3)."""

import itertools

import numpy as np
import pytest
import torch
from brute import block_outputs, law_of, some_traces
from decode_helpers import ALL_POLICIES, HOT, hybrid_target
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.decoding import steps
from dflash2_lab.decoding.steps import (
    ACCEPTANCES,
    DrafterRow,
    Proposal,
    TargetRow,
    accept,
    block_weights,
    check_row,
    draws,
    residual,
    target_law,
)
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.losslessness.enumeration import enumerate_law
from dflash2_lab.sampling import Sampling, filter_logits

# In quarters, so that ratios p / q and residuals are multiples of 1/12 and a sum over a grid of 12
# uniform numbers is an integral, exactly.
P_LAWS = torch.tensor([[2, 1, 1, 0], [0, 2, 1, 1], [1, 1, 0, 2]]) / 4
Q_LAWS = torch.tensor([[1, 0, 3, 0], [1, 1, 1, 1]]) / 4
GRID = (torch.arange(12, dtype=torch.float64) + 0.5) / 12
OVER_IDS = torch.tensor([[2, 0, 3, 1], [1, 3, 0, 2]])
FORMS = {
    "vocabulary": lambda tokens: Proposal(tokens, Q_LAWS),
    "ids": lambda tokens: Proposal(tokens, Q_LAWS.gather(-1, OVER_IDS), OVER_IDS),
}


def emitted_law(proposal_of, rule=accept, drafts=Q_LAWS):
    """Joint law of the first two tokens that leave a step of two drafts, drawn from `drafts`.

    Where one leaves, the second comes from a later step, whose law is p.
    """
    law = np.zeros((4, 4))
    for tokens in itertools.product(range(4), range(4)):
        weight = float(drafts[0, tokens[0]] * drafts[1, tokens[1]]) / 12**3
        if weight == 0:
            continue
        proposal = proposal_of(torch.tensor(tokens))
        tests = [torch.stack(pair) for pair in itertools.product(GRID, GRID)]
        counts = [rule(P_LAWS, proposal, test, GRID[0]).num for test in tests]
        for num in set(counts):
            test = tests[counts.index(num)]
            for final in GRID:
                emitted = [*tokens[:num], rule(P_LAWS, proposal, test, final).token]
                share = weight * counts.count(num)
                if num > 0:
                    law[emitted[0], emitted[1]] += share
                else:
                    law[emitted[0]] += share * P_LAWS[1].numpy()
    return law


TARGET_LAW = np.outer(P_LAWS[0], P_LAWS[1])
ONE_HOT = torch.tensor([[0, 0, 1, 0], [0, 1, 0, 0]])


@pytest.mark.parametrize("form", FORMS)
def test_emitted_tokens_have_the_target_law(form):
    np.testing.assert_allclose(emitted_law(FORMS[form]), TARGET_LAW, atol=1e-12)


@pytest.mark.parametrize("drafts", [ONE_HOT, Q_LAWS], ids=["fixed", "drawn"])
def test_emitted_tokens_have_the_target_law_when_q_is_one_hot(drafts):
    # Case A6: that is the q of fixed drafts; for drawn ones it costs acceptance and nothing else.
    np.testing.assert_allclose(emitted_law(Proposal, drafts=drafts), TARGET_LAW, atol=1e-12)


@pytest.mark.parametrize("fault", ["softmax q of fixed drafts", "another q", "p for the residual"])
def test_a_wrong_rule_changes_the_law(fault, monkeypatch):
    options = {}
    if fault == "softmax q of fixed drafts":
        options["drafts"] = ONE_HOT
    proposal_of = FORMS["vocabulary"]
    if fault == "another q":
        proposal_of = lambda tokens: Proposal(tokens, torch.full((2, 4), 0.25))  # noqa: E731
    if fault == "p for the residual":
        monkeypatch.setattr(steps, "residual", lambda p, _q: p)
    assert np.abs(emitted_law(proposal_of, **options) - TARGET_LAW).sum() / 2 > 0.02


def test_the_residual_is_normalised_and_falls_back_to_p():
    p = torch.tensor([0.5, 0.2, 0.3])
    left = residual(p, torch.tensor([0.2, 0.6, 0.2]))
    np.testing.assert_allclose(left, [0.75, 0.0, 0.25], atol=1e-7)
    np.testing.assert_array_equal(residual(p, p), p.double())


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_a_ratio_of_one_is_always_accepted_and_zero_never(acceptance):
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    top = torch.tensor([1 - 2.0**-48], dtype=torch.float64)
    for uniform in (top, 0 * top):
        right = Proposal(torch.tensor([1]), p[:1])
        assert accept(p, right, uniform, top[0], acceptance).num == 1
        assert accept(p, Proposal(torch.tensor([0])), uniform, top[0], acceptance) == (0, 1)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("form", [*FORMS, "one-hot"])
def test_each_rule_has_the_target_law_for_each_form_of_q(form, acceptance):
    # All thresholds, not a grid of numbers: those of the block rule lie anywhere.
    def draft(_context, noise):
        tokens = inverse_cdf(Q_LAWS.double(), noise.draft)
        return Proposal(tokens) if form == "one-hot" else FORMS[form](tokens)

    law = enumerate_law(
        draft,
        lambda _c, proposal, noise: accept(
            P_LAWS.double(), proposal, noise.accept, noise.final, acceptance
        ),
        lambda context: P_LAWS[len(context) - 1].double().numpy(),
        num_blocks=1,
        num_draft=2,
    )
    assert law.worst < 1e-15


def test_weights_of_the_block_rule_by_hand():
    # p / q of the drafts 2, 0: 1/3 and 0; of 0, 2: 2 and 1; of 2, 1: 1/3 and 2.
    proposals = [FORMS["vocabulary"](torch.tensor(path)) for path in ((2, 0), (0, 2), (2, 1))]
    expected = [([1, 1 / 3, 0], [0, 0]), ([1, 1, 1], [1 / 4, 1]), ([1, 1 / 3, 2 / 3], [0, 2 / 3])]
    for proposal, (weights, left) in zip(proposals, expected, strict=True):
        found = block_weights(P_LAWS, proposal)
        np.testing.assert_allclose(found[0], weights, atol=1e-12)
        np.testing.assert_allclose(found[1], left, atol=1e-12)
        assert found[0].dtype == found[1].dtype == torch.float64


def test_the_last_test_of_the_block_rule_that_passes_counts():
    # One-hot q: w = 1, 0.4, 0.2, s = 0.4 * (1 - 0.5), w_2, so h = 0.2 / 0.8, 0.2.
    p = torch.tensor([[0.6, 0.4], [0.5, 0.5], [0.0, 1.0]], dtype=torch.float64)
    proposal = Proposal(torch.tensor([1, 0]))
    for first, second, num, token in (
        (0.26, 0.21, 0, 0),
        (0.24, 0.21, 1, 1),
        (0.26, 0.19, 2, 1),  # although the first test fails
        (0.24, 0.19, 2, 1),
    ):
        uniform = torch.tensor([first, second], dtype=torch.float64)
        assert accept(p, proposal, uniform, uniform[0], "block") == (num, token)


def test_the_rules_are_one_for_one_hot_laws_and_for_one_draft():
    for seed in range(200):
        uniform = draws(seed, 0, 5, P_LAWS.device)
        drafts, right = (torch.randint(3, (4 + more,)) for more in (0, 1))
        p = torch.eye(3)[right]
        found = [accept(p, Proposal(drafts), uniform[:4], uniform[4], r) for r in ACCEPTANCES]
        hits = (drafts == right[:4]).cumprod(0).sum()
        assert found == [(hits, right[hits])] * 2
        law = torch.softmax(torch.randn(3, 6), dim=-1)
        one = Proposal(inverse_cdf(law[:1], uniform[1:2]), law[:1])
        found = [accept(law[1:], one, uniform[:1], uniform[4], r) for r in ACCEPTANCES]
        assert found[0] == found[1]


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_without_drafts_the_next_token_is_a_draw_from_p(acceptance):
    empty = torch.empty(0)
    for final in GRID:
        found = accept(P_LAWS[:1], Proposal(empty.long()), empty.double(), final, acceptance)
        assert found == (0, inverse_cdf(P_LAWS[0], final))


def draft_once(target, drafter, policy, sampling, context=9, anchor_id=77, key=5):
    """A proposal after `context` random tokens, and the uniform numbers it was drawn with."""
    row = DrafterRow(drafter, target)
    trace = next(some_traces(lengths=[(context, 4)]).traces.itertuples(index=False))
    _, features = TargetRow(target, drafter.settings.target_layer_ids).extend(trace.prompt_ids)
    row.commit(features)
    uniform = draws(key, 0, drafter.settings.num_draft, target.device)
    return row.draft(anchor_id, policy, sampling, uniform), uniform, trace


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize(("kind", "policy"), ALL_POLICIES)
@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_drafts_and_their_q_follow_the_table_of_policies(target, kind, policy, sampling):
    drafter = tiny_drafter(kind)
    proposal, uniform, trace = draft_once(target, drafter, policy, sampling)
    trace = trace._replace(response_ids=[77, *trace.response_ids])
    hidden, logits = block_outputs(target, drafter, trace, 0)
    previous = 77
    for slot, token in enumerate(proposal.tokens.tolist()):
        law = law_of(drafter, policy, vars(sampling), hidden[slot], logits[slot], previous)
        dense = proposal.dense(slot, target.vocab_size)
        expected = torch.zeros_like(dense)
        expected[list(law)] = torch.tensor(list(law.values()), dtype=torch.float64)
        torch.testing.assert_close(dense, expected, atol=1e-5, rtol=0)
        assert float(proposal.mass()[slot]) == pytest.approx(law[token], abs=1e-5)
        if proposal.law is not None:
            choice = int(inverse_cdf(proposal.law[slot], uniform[slot]))
            chosen = choice if proposal.ids is None else int(proposal.ids[slot, choice])
            assert token == chosen
        previous = token
    drawn = policy in ("sampled", "selector", "markov") and not sampling.greedy
    assert (proposal.law is not None) == drawn


@pytest.mark.parametrize(
    ("kind", "policy"), [("dflash", "sampled"), ("dflash2", "selector"), ("dspark", "markov")]
)
def test_the_drawn_law_is_the_kept_law(kind, policy, monkeypatch):
    # Case A3: not a second softmax in another precision.
    drawn = []

    def spy(law, uniform):
        drawn.append(law)
        return inverse_cdf(law, uniform)

    monkeypatch.setattr(steps, "inverse_cdf", spy)
    monkeypatch.setattr("dflash2_lab.kernels.candidate_selector.inverse_cdf", spy)
    target = tiny_target()
    target.model.bfloat16()
    drafter = tiny_drafter(kind).bfloat16()
    proposal, _, _ = draft_once(target, drafter, policy, Sampling(0.7))
    assert proposal.law.dtype == torch.float32
    assert torch.equal(torch.cat([law.reshape(-1, law.shape[-1]) for law in drawn]), proposal.law)
    assert (proposal.law.double().sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_no_token_outside_the_truncated_law_is_ever_emitted(acceptance):
    # Case A8: drafts from anywhere, p cut to few tokens.
    logits = torch.randn(3, 50) * 3
    p = filter_logits(logits, 0.8, 0.9, 20)
    for seed in range(500):
        law = torch.softmax(torch.randn(2, 50), dim=-1)
        proposal = Proposal(inverse_cdf(law, draws(seed, 0, 2, law.device)), law)
        uniform = draws(seed, 2, 3, law.device)
        num, token = accept(p, proposal, uniform[:2], uniform[2], acceptance)
        for slot, emitted in enumerate([*proposal.tokens[:num].tolist(), token]):
            assert p[slot, emitted] > 0


def test_a_cut_proposal_keeps_its_first_slots():
    proposal = FORMS["ids"](torch.tensor([2, 3])).first(1)
    assert proposal.tokens.tolist() == [2]
    assert proposal.mass().tolist() == [0.75]
    assert proposal.dense(0, 4).tolist() == [0.25, 0.0, 0.75, 0.0]


def test_commits_append_and_never_project_a_token_twice(target):
    drafter = tiny_drafter()
    rows = []
    drafter.fc.register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape[1]))
    features = torch.randn(11, drafter.fc.in_features)
    row = DrafterRow(drafter, target)
    for part in features.split([6, 1, 4]):
        row.commit(part)
    assert rows == [6, 1, 4]
    for found, expected in zip(row.keys, drafter.context_keys(features[None]), strict=True):
        torch.testing.assert_close(found, expected)


ROLLED = {
    "qwen3": lambda: tiny_target(),
    "mistral": lambda: tiny_target("mistral", sliding_window=6),
    "gemma3": lambda: hybrid_target("gemma3"),
    "lfm2": lambda: hybrid_target("lfm2"),
}


@pytest.mark.parametrize("family", ROLLED)
def test_after_a_rejection_the_row_is_a_fresh_prefill(family):
    # Cases H1 and H3: below, at and beyond the window of 6, every number of rejected drafts.
    target = ROLLED[family]()
    target.model.double()  # so that rounding, which differs between machines, is out of sight
    ids = torch.randint(4, 264, (40,)).tolist()
    junk = torch.randint(4, 264, (4,)).tolist()
    with torch.no_grad():
        fresh = target.model(torch.tensor([ids])).logits[0]
        for prompt, rejected in itertools.product((1, 5, 17), range(5)):
            row = TargetRow(target)
            row.extend(ids[:prompt])
            row.roll_back(0)
            for _ in range(2):
                kept = row.length + 5 - rejected
                row.extend([*ids[row.length : kept], *junk[:rejected]])
                row.roll_back(rejected)
                assert row.length == kept
            logits, _ = row.extend(ids[row.length : row.length + 2])
            torch.testing.assert_close(
                logits, fresh[row.length - 2 : row.length], atol=1e-6, rtol=1e-6
            )


@pytest.mark.parametrize("num", [0, 6, 7, 8])
def test_roll_back_of_nothing_nearly_all_all_and_too_much(target, num):
    # Case H2: what `crop` makes of 0 and of a positive length has changed between versions.
    row = TargetRow(target)
    row.extend([5, 6, 7, 8, 9, 10, 11])
    if num > 7:
        with pytest.raises(LabError, match="roll back: found 8 tokens, expected 0 to 7"):
            row.roll_back(num)
        return
    row.roll_back(num)
    assert row.length == row.cache.get_seq_length() == 7 - num
    assert row.cache.layers[0].keys.shape[2] == 7 - num


def test_features_are_those_of_an_uncached_pass(target):
    ids = list(range(20, 32))
    row = TargetRow(target, (1, 3))
    parts = [row.extend(ids[:7]), row.extend(ids[7:])]
    with steps.layer_outputs(target, (1, 3)) as outputs:
        logits = target.model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), logits)
    expected = torch.cat([outputs[1][0], outputs[3][0]], dim=-1)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), expected)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen3_next", r"qwen3_next.*layers \[0, 2\] keep a recurrent state.*cannot roll back"),
        ("falcon_h1", r"falcon_h1.*layers \[0, 1, 2, 3\] keep a recurrent state"),
        ("mamba", "mamba.*cache"),
    ],
)
def test_a_target_that_cannot_be_rolled_back_is_refused(family, message):
    with pytest.raises(LabError, match=message):
        check_row(hybrid_target(family), (), rolls_back=True)


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_a_target_that_can_be_rolled_back_is_not_refused(family):
    check_row(hybrid_target(family), (1,), rolls_back=True)


def test_a_recurrent_target_can_be_decoded_without_drafts():
    check_row(hybrid_target("qwen3_next"), (), rolls_back=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_target_logits_that_are_not_finite_are_named(target, value):
    logits = torch.zeros(3, 264)
    logits[1, 40] = value
    message = f"target tiny-qwen3: its logits are not finite in torch.float32: found {value}"
    with pytest.raises(LabError, match=message):
        target_law(target, logits, Sampling())


def test_tokens_that_are_ruled_out_are_no_error(target):
    logits = torch.full((1, 264), float("-inf"))
    logits[0, 40] = 0.0
    assert target_law(target, logits, HOT)[0, 40] == 1.0
    with pytest.raises(LabError, match="found -inf as the best of row 0"):
        target_law(target, logits - torch.inf, Sampling())


SELECTOR = "candidate_selector.hidden_projection.weight"
BROKEN = {
    "a layer": ("dflash2", "selector", "layers.1.mlp.up_proj.weight", r"layers\.1 gives"),
    "the context": ("dflash2", "top1", "fc.weight", "context projection"),
    "the head": ("dflash", "sampled", "lm_head.weight", "output head is not finite"),
    "the selector": ("dflash2", "selector", SELECTOR, "selector gives scores"),
    "the Markov head": ("dspark", "markov", "markov_head.markov_w2.weight", "Markov head"),
}


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
@pytest.mark.parametrize("part", BROKEN)
def test_a_drafter_of_broken_weights_is_an_error_that_names_the_part(target, part, sampling):
    kind, policy, name, message = BROKEN[part]
    drafter = tiny_drafter(kind, own_head=name == "lm_head.weight")
    drafter.get_parameter(name)[3, 0] = torch.nan
    with pytest.raises(LabError, match=f"drafter {kind}: .*{message}"):
        draft_once(target, drafter, policy, sampling)
