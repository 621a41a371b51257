"""Rules that people shipped or doubted, each on 8 tokens with one p and one q: the lossless ones
pass the battery, the others do not.

Drafts, tests and final draws are those of `kernels.verify`, 10,000 steps of one draft side by side.
Of each step the first token is judged: the draft if it was kept, else the one that replaced it.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from drafters import tiny_drafter
from helpers import tiny_target
from laws import scored

from dflash2_lab.decoding import steps
from dflash2_lab.decoding.steps import propose, residual
from dflash2_lab.kernels.candidate_selector import inverse_cdf
from dflash2_lab.kernels.row_law import row_law_reference
from dflash2_lab.kernels.tools import uniforms
from dflash2_lab.kernels.verify import CandidateLaw, verify_reference
from dflash2_lab.losslessness.battery import Emitted, holm, pit_tests, smallest_tv
from dflash2_lab.losslessness.certificate import as_json
from dflash2_lab.losslessness.statistics import CellTest, cell_test
from dflash2_lab.losslessness.verifying import Plan, verify
from dflash2_lab.policies import Block
from dflash2_lab.prompts import Prompt
from dflash2_lab.sampling import Sampling, filter_logits

STEPS, ALPHA = 10_000, 1e-6
P = torch.tensor([0.08, 0.21, 0.04, 0.14, 0.16, 0.19, 0.13, 0.05])
Q = torch.tensor([0.09, 0.15, 0.34, 0.00, 0.09, 0.14, 0.00, 0.19])
BEST_FOUR = torch.where(Q.sort().values[-4] <= Q, Q, 0.0)
BEST_FOUR = BEST_FOUR / BEST_FOUR.sum()
DRAFT, TEST, FINAL, OTHER = range(4)  # what a random number is for


def numbers(role, seed=0, num=STEPS):
    keys = torch.full((num,), 1_000_003 * seed + role)
    return keys, torch.arange(num)


def drawn(law, role, seed=0, num=STEPS):
    """One token a step by the inverse cdf."""
    return inverse_cdf(law.expand(num, -1), uniforms(*numbers(role, seed, num)))


def verified(drafts, q, logits=None, temperature=1.0, top_k=0, top_p=1.0, seed=0):
    """Which drafts are kept, and the tokens that follow: q None is one-hot."""
    num = len(drafts)
    rows = (P.log() if logits is None else logits).expand(2 * num, -1).contiguous()
    every = torch.full((2 * num,), temperature)
    law = row_law_reference(rows, every, torch.full((2 * num,), top_k), 0 * every + top_p)
    if q is not None:
        ids = torch.arange(len(q)).expand(num, 1, -1).contiguous()
        q = CandidateLaw(ids, q.expand(num, 1, -1).contiguous())
    kept, following = verify_reference(
        *(rows.view(num, 2, -1), law, drafts[:, None], q, every[:num]),
        *(*numbers(TEST, seed, num), *numbers(FINAL, seed, num), torch.ones(num).int()),
    )
    return kept == 1, following


def emitted(drafts, q, **options):
    kept, following = verified(drafts, q, **options)
    return torch.where(kept, drafts, following)


class Report(NamedTuple):
    rejected: list[str]
    cells: CellTest
    smallest_tv: float


def judge(tokens, p=P, q=Q, alpha=ALPHA, seed=0):
    """The battery on tokens that are claimed to have the law p."""
    num = len(tokens)
    p, q = (law.double().expand(num, -1).numpy() for law in (p / p.sum(), q / q.sum()))
    place = np.arange(num)
    tokens = tokens.numpy()
    run = Emitted(scored(tokens, p, q), place % 8, place // 8, 0 * place)
    found = pit_tests(run, np.random.default_rng([seed, 9]))
    cells = cell_test(p, tokens)
    found["cells"] = cells.p_value
    return Report(holm(found, alpha), cells, smallest_tv(num, alpha / len(found)))


def distance(law, other=P):
    return float((law.double() - other.double()).abs().sum()) / 2


def gumbel(seed):
    noise = torch.rand(STEPS, 8, generator=torch.Generator().manual_seed(seed))
    return -(-noise.clamp_min(1e-30).log()).log()


def by_gumbel(shared, seed=0):
    """The draft is argmax(log q + g), its replacement argmax(log (p - q)+ + g)."""
    first = gumbel(2 * seed)
    second = first if shared else gumbel(2 * seed + 1)
    drafts = (Q.log() + first).argmax(-1)
    kept, _ = verified(drafts, Q, seed=seed)
    return torch.where(kept, drafts, (residual(P, Q).log() + second).argmax(-1))


def cut_drafts(reported, seed=0):
    return emitted(drawn(BEST_FOUR, DRAFT, seed), reported, seed=seed)


def argmax_drafts(reported, seed=0):
    return emitted(torch.full((STEPS,), int(Q.argmax())), reported, seed=seed)


def drawn_anew_from_p(seed=0):
    """After a refusal a fresh draw of the target in the place of the residual."""
    drafts = drawn(Q, DRAFT, seed)
    kept, _ = verified(drafts, Q, seed=seed)
    return torch.where(kept, drafts, drawn(P, OTHER, seed))


def test_drafts_of_a_cut_law_reported_whole_are_caught_and_reported_cut_pass():
    assert judge(cut_drafts(Q)).rejected
    right = judge(cut_drafts(BEST_FOUR), q=BEST_FOUR)
    assert right.rejected == []
    assert right.cells.df == 7 and right.cells.tv < 0.02


def test_noise_of_the_draft_in_its_replacement_is_caught_and_fresh_noise_passes():
    assert judge(by_gumbel(shared=True)).rejected
    assert judge(by_gumbel(shared=False)).rejected == []


def test_a_bfloat16_drafter_draws_from_the_float32_law_that_it_reports(monkeypatch):
    seen = []

    def spy(law, uniform):
        seen.append(law)
        return inverse_cdf(law, uniform)

    monkeypatch.setattr(steps, "inverse_cdf", spy)
    logits = (4 * torch.randn(1, 7, 50_000)).bfloat16()
    none = torch.zeros(1, 7, dtype=torch.long)
    block = Block(
        *(None, None, logits[..., :1], logits, none, none, Sampling(0.7)),
        {"sampled": torch.rand(1, 7, dtype=torch.float64)},
    )
    proposal = propose(block, "sampled")
    assert len(seen) == 1 and seen[0] is proposal.law
    assert proposal.law.dtype == torch.float32
    # Rounding of a float32 softmax of so many tokens; a bfloat16 one is off by 1e-3.
    assert (proposal.law.double().sum(-1) - 1).abs().max() < 1e-6
    assert (proposal.law.bfloat16().double().sum(-1) - 1).abs().max() > 1e-4


def test_right_rules_pass_for_twenty_seeds_and_four_wrong_ones_never_do():
    for seed in range(20):
        report = judge(emitted(drawn(Q, DRAFT, seed), Q, seed=seed), seed=seed)
        assert report.rejected == []
    # What it says: size, degrees of freedom, statistic, p-value, distance and the least visible.
    assert (report.cells.num, report.cells.df) == (STEPS, 7)
    assert report.cells.statistic > 0 and report.cells.p_value > ALPHA
    assert report.cells.tv < report.smallest_tv < 0.05
    wrong = {
        "cut drafts, whole q": partial(cut_drafts, Q),
        "shared noise": partial(by_gumbel, True),
        "argmax drafts, soft q": partial(argmax_drafts, Q),
        "p for the residual": drawn_anew_from_p,
    }
    for name, tokens in wrong.items():
        for seed in range(3):
            report = judge(tokens(seed=seed), seed=seed)
            assert report.rejected and report.cells.p_value < ALPHA, name
            assert report.cells.tv > report.smallest_tv, name


def test_argmax_drafts_with_a_softmax_q_are_caught_and_with_a_one_hot_q_pass():
    assert judge(argmax_drafts(Q)).rejected
    right = judge(argmax_drafts(None))
    assert right.rejected == [] and right.cells.tv < 0.02
    # Drafts that were sampled may be reported one-hot too: it costs acceptance and nothing else.
    drafts = drawn(Q, DRAFT)
    assert judge(emitted(drafts, None)).rejected == []
    assert verified(drafts, None)[0].float().mean() < 0.5 * verified(drafts, Q)[0].float().mean()


@pytest.mark.parametrize("policy", ["top1", "sampled"])
def test_both_policies_of_a_block_drafter_pass_at_temperature_one(policy):
    prompts = [Prompt(f"p{index}", ("go on" + "!" * index,), "set") for index in range(5)]
    plan = Plan(100, 10, ("realistic",))
    found = verify(
        tiny_target(), tiny_drafter("dflash"), prompts,
        policy=policy, sampling=Sampling(1.0), plan=plan,
    )  # fmt: skip
    assert found.passed
    record = as_json(found)
    assert record["configuration"]["policy"] == policy
    assert record["arms"][0]["acceptance_length"] >= 1


def test_filters_of_the_target_hold_where_drafts_ignore_them():
    logits = 2 * torch.randn(50)
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 20}
    p, q = filter_logits(logits, **options), (logits + torch.randn(50)).softmax(-1)
    drafts = drawn(q, DRAFT, num=100_000)
    assert (p[drafts] == 0).float().mean() > 0.1
    tokens = emitted(drafts, q, logits=logits, **options)
    assert (p[tokens] > 0).all()
    assert judge(tokens[:STEPS], p, q).rejected == []


def test_a_second_target_draw_is_caught_and_emitting_the_first_either_way_passes():
    drafts, own = drawn(Q, DRAFT), drawn(P, TEST)
    assert judge(torch.where(own == drafts, drafts, drawn(P, FINAL))).rejected
    assert judge(torch.where(own == drafts, drafts, own)).rejected == []


def test_a_draw_from_p_after_a_refusal_is_caught_at_its_distance():
    both = torch.minimum(P, Q)
    report = judge(drawn_anew_from_p())
    assert report.rejected
    assert report.cells.tv == pytest.approx(distance(both + (1 - both.sum()) * P), abs=0.015)
    assert report.cells.tv > 0.1


def test_tokens_of_another_temperature_are_caught():
    logits = P.log()
    laws = {temperature: filter_logits(logits, temperature) for temperature in (0.1, 1.0)}
    tokens = {t: emitted(drawn(Q, DRAFT), Q, temperature=t) for t in laws}
    for temperature, claimed in laws.items():
        for other, found in tokens.items():
            assert bool(judge(found, claimed).rejected) == (other != temperature)
