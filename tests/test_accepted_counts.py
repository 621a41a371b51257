"""Accepted counts as two samples: honest p-values, power, live decode against coupled replay
(case A4)."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from decode_helpers import two_word_target
from drafters import tiny_drafter
from helpers import END_ID
from scipy.stats import chi2_contingency

from dflash2_lab.agreement import accepted_counts
from dflash2_lab.agreement.accepted_counts import chi_squared, compare_counts
from dflash2_lab.decoding import cycle as cycles
from dflash2_lab.decoding.api import decode
from dflash2_lab.errors import LabError
from dflash2_lab.prompts import Prompt
from dflash2_lab.recording import record
from dflash2_lab.replaying import replay
from dflash2_lab.tracing import trace


def counts_frame(histories):
    """A steps table of [prompts, samples, steps] accepted counts."""
    index = np.indices(histories.shape)
    return pd.DataFrame(
        {
            "prompt_id": [f"p{n}" for n in index[0].ravel()],
            "sample": index[1].ravel(),
            "num_accepted": histories.ravel(),
            "terminal": "",
        }
    )


def dependent(rng, prompts=8, samples=8, steps=12, shift=0.0):
    """Counts 0..3 whose rate is a matter of the prompt and, more, of the conversation."""
    rate = 0.5 + shift + np.linspace(-0.2, 0.2, prompts)[:, None, None]
    rate = rate + 0.25 * rng.standard_normal((prompts, samples, 1))
    return rng.binomial(3, np.clip(rate, 0.02, 0.98) * np.ones(steps))


def test_the_statistic_is_that_of_scipy():
    table = np.array([[30, 12, 9], [21, 20, 30]])
    expected = chi2_contingency(table, correction=False).statistic
    assert chi_squared(table[0], table.sum(axis=0)) == pytest.approx(expected)


def test_exchanging_conversations_gives_honest_p_values_where_independence_does_not(monkeypatch):
    monkeypatch.setattr(accepted_counts, "PERMUTATIONS", 199)
    exchanged, naive = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        test = compare_counts(
            *(counts_frame(dependent(rng)) for _ in range(2)),
            [f"p{n}" for n in range(8)],
            8,
            3,
            seed,
        )
        exchanged.append(test.p_value)
        naive.append(test.p_value_independent)
    assert np.mean(np.array(naive) < 0.05) > 0.3
    assert np.mean(np.array(exchanged) < 0.05) < 0.15
    assert 0.3 < np.mean(exchanged) < 0.7


def test_a_difference_of_the_detectable_size_is_found_and_half_of_it_seldom():
    ids, found = [f"p{n}" for n in range(8)], {}
    for share in (0.5, 1.5):
        verdicts = []
        for seed in range(8):
            rng = np.random.default_rng(seed)
            second = dependent(rng)
            null = compare_counts(counts_frame(dependent(rng)), counts_frame(second), ids, 8, 3)
            shift = share * null.detectable / 3
            first = counts_frame(dependent(rng, shift=shift))
            verdicts.append(compare_counts(first, counts_frame(second), ids, 8, 3).verdict)
        found[share] = verdicts.count("differ")
    assert found[1.5] >= 5
    assert found[0.5] <= 3


def test_few_conversations_are_inconclusive_whatever_they_say():
    frames = [counts_frame(np.full((3, 2, 20), count)) for count in (0, 2)]
    test = compare_counts(*frames, ["p0", "p1", "p2"], 2, 3)
    assert test.verdict == "inconclusive"
    assert test.p_value_independent < 1e-20
    assert test.smallest_p == pytest.approx(2 / 6**3)
    more = [counts_frame(np.full((8, 2, 20), count)) for count in (0, 2)]
    assert compare_counts(*more, [f"p{n}" for n in range(8)], 2, 3).verdict == "differ"


def test_only_steps_that_the_end_of_a_response_did_not_cut_are_counted():
    frame = counts_frame(dependent(np.random.default_rng(0)))
    cut = frame.assign(terminal=np.where(frame["num_accepted"] == 3, "length", ""))
    test = compare_counts(cut, frame, [f"p{n}" for n in range(8)], 8, 3)
    assert test.counts[0][3] == 0 < test.counts[1][3]
    assert test.num_cut == (test.counts[1][3], 0)
    everything = frame.assign(terminal="eos")
    with pytest.raises(LabError, match="the second sample has no step"):
        compare_counts(frame, everything, [f"p{n}" for n in range(8)], 8, 3)


SAMPLES = 10
IDS = ["one", "two", "three", "four"]


@pytest.fixture(scope="module")
def sampled():
    """A recording of sampled traces, and live decodes of five times as many conversations."""
    words = replace(two_word_target(), eos_token_ids=frozenset([END_ID]))  # it never stops
    prompts = [Prompt(name, (name,), "set") for name in IDS]
    drafter = tiny_drafter("dflash")
    options = {"max_new_tokens": 24, "temperature": 1.0}
    traces = trace(words, prompts, samples=SAMPLES, batch_size=40, **options)
    run = record(words, drafter, traces, ("sampled",), attention=False)
    options |= {"policy": "sampled", "engine": "graph", "batch_size": 100}

    def live(**changes):
        return decode(words, drafter, prompts, **(options | changes)).steps

    return run, live, live(samples=5 * SAMPLES)


def subset(steps, number):
    """The conversations number * SAMPLES ... of a decode."""
    chosen = steps[steps["sample"] // SAMPLES == number]
    return chosen.assign(sample=chosen["sample"] % SAMPLES)


def test_live_decode_and_coupled_replay_agree_for_twenty_seeds(sampled):
    # Case A4.
    run, _, steps = sampled
    for seed in range(20):
        drawn = replay(run, "sampled", seed=seed).steps
        test = compare_counts(subset(steps, seed % 5), drawn, IDS, SAMPLES, 3, seed)
        assert test.verdict == "agree"
    assert min(test.num_steps) > 200


def test_planted_faults_of_a_live_decode_are_found(sampled, monkeypatch):
    run, live, steps = sampled
    drawn = replay(run, "sampled").steps
    right = subset(steps, 0)

    def verdict(live_steps):
        return compare_counts(live_steps, drawn, IDS, SAMPLES, 3).verdict

    assert verdict(right) == "agree"
    assert verdict(right.assign(num_accepted=(right["num_accepted"] + 1).clip(upper=3))) == "differ"
    assert verdict(live(samples=SAMPLES, temperature=3.0)) == "differ"

    def lenient(logits, law, draft, q, temperature, accept_keys, *rest, **options):
        return verify_rows(logits, law, draft, None, temperature, accept_keys, *rest, **options)

    verify_rows = cycles.verify
    monkeypatch.setattr(cycles, "verify", lenient)  # one-hot q for drafts that were sampled
    assert verdict(live(samples=SAMPLES)) == "differ"
