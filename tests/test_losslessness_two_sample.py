"""Two samples against each other: one law passes, two laws do not, p-values are exact."""

import itertools
import math

import numpy as np
import pytest

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness import two_sample
from dflash2_lab.losslessness.two_sample import compare_outputs, hamming_kernel

V = 12


def outputs(rng, num, length, law, repeat=0.0):
    """Strings over the law's tokens; each repeats the one before it with some probability. The
    last token of the vocabulary ends a string."""
    found = []
    for _ in range(num):
        ids = []
        while len(ids) < length and (not ids or ids[-1] != V - 1):
            again = ids and rng.random() < repeat
            ids.append(ids[-1] if again else int(rng.choice(V, p=law)))
        found.append(ids)
    return found


def law(seed):
    return np.random.default_rng(seed).dirichlet(np.full(V, 0.6))


def sides(seed, num=20, length=12, prompts=4, first=law, second=law, **changed):
    rng = np.random.default_rng(100 + seed)
    return (
        {prompt: outputs(rng, num, length, first(prompt)) for prompt in range(prompts)},
        {prompt: outputs(rng, num, length, second(prompt), **changed) for prompt in range(prompts)},
    )


def test_two_samples_of_one_law_show_no_difference():
    test = compare_outputs(*sides(0))
    assert test.verdict(1e-3) == "no difference"
    assert min(test.p_mmd, test.p_first_token) > 0.01
    assert test.num_outputs == (80, 80)
    assert test.smallest_p == 1e-4


def mixed(prompt):
    return 0.6 * law(prompt) + 0.4 / V


def test_two_laws_differ_in_both_tests():
    test = compare_outputs(*sides(1, num=120, second=mixed))
    assert test.verdict(1e-3) == "differ"
    assert max(test.p_mmd, test.p_first_token) <= 5e-4


def test_dependence_behind_equal_first_tokens_is_found_by_the_strings_alone():
    test = compare_outputs(*sides(2, num=60, second=law, repeat=0.5))
    assert test.p_mmd <= 5e-4
    assert test.p_first_token > 0.01


def test_a_stop_that_never_comes_is_a_difference():
    def endless(prompt):
        kept = law(prompt) * (np.arange(V) < V - 1)
        return kept / kept.sum()

    def ends(prompt):
        return 0.9 * endless(prompt) + 0.1 * (np.arange(V) == V - 1)

    assert compare_outputs(*sides(3, num=60, first=ends, second=endless)).p_mmd <= 5e-4


def test_p_values_of_one_law_are_uniform_enough():
    # 200 pairs of samples: 5 % of 200 is 10, and 22 or more come in 1 of 2,000 such tests.
    found = [
        compare_outputs(*sides(seed, num=8, length=6, prompts=2), permutations=199)
        for seed in range(200)
    ]
    assert 1 <= sum(test.p_mmd <= 0.05 for test in found) <= 21
    assert 60 <= sum(test.p_mmd <= 0.5 for test in found) <= 140


def test_first_tokens_have_the_chi_squared_law():
    one = {"num": 60, "length": 1, "prompts": 2}
    found = [compare_outputs(*sides(seed, **one), permutations=1) for seed in range(100)]
    assert all(test.df > 2 for test in found)
    assert sum(test.p_first_token <= 0.05 for test in found) <= 14
    assert 30 <= sum(test.p_first_token <= 0.5 for test in found) <= 70


def test_the_exchange_is_that_of_all_permutations():
    rng = np.random.default_rng(5)
    first, second = outputs(rng, 3, 4, law(0)), outputs(rng, 3, 4, mixed(3))
    codes = np.array([row + [-1] * (4 - len(row)) for row in first + second])
    kernel = hamming_kernel(codes)

    def mmd(chosen):
        weights = np.array([1 / 3 if place in chosen else -1 / 3 for place in range(6)])
        return weights @ kernel @ weights

    every = [mmd(chosen) for chosen in itertools.combinations(range(6), 3)]
    exact = np.mean([value >= mmd((0, 1, 2)) - 1e-9 for value in every])
    test = compare_outputs({"x": first}, {"x": second}, permutations=20_000)
    assert test.mmd == pytest.approx(mmd((0, 1, 2)))
    assert test.p_mmd == pytest.approx(exact, abs=0.015)
    assert test.smallest_p == pytest.approx(2 / math.comb(6, 3))


def test_slices_of_the_permutations_give_the_same_law(monkeypatch):
    whole = compare_outputs(*sides(1, num=10))
    monkeypatch.setattr(two_sample, "_SLICE", 1000)
    pieces = compare_outputs(*sides(1, num=10))
    assert pieces.p_mmd == pytest.approx(whole.p_mmd, abs=0.02)
    assert pieces.mmd == whole.mmd


def test_too_few_outputs_are_inconclusive():
    test = compare_outputs({"x": [[1, 2], [1, 3]]}, {"x": [[4, 2], [5, 5]]})
    assert test.verdict(1e-3) == "inconclusive"
    assert test.smallest_p == pytest.approx(1 / 3)
    assert test.df == 0


def test_places_beyond_the_shorter_limit_are_left_out():
    rng = np.random.default_rng(7)
    first = {"x": outputs(rng, 30, 8, law(1))}
    second = {"x": outputs(rng, 30, 20, law(1))}
    test = compare_outputs(first, second)
    assert test.horizon == max(map(len, first["x"])) == 8
    assert test.verdict(1e-3) == "no difference"
    assert test.num_tokens[1] <= 30 * 8


def test_characters_are_compared_like_tokens():
    one, other = {"x": ["a cat", "a dog"] * 30}, {"x": ["a cat", "the dog"] * 30}
    assert compare_outputs(one, one).p_mmd > 0.5
    assert compare_outputs(one, other).p_mmd <= 5e-4


def test_other_prompts_are_an_error():
    with pytest.raises(LabError, match="found 1 and 1 prompts, 0 of them shared"):
        compare_outputs({"x": [[1]]}, {"y": [[1]]})
    with pytest.raises(LabError, match="found 0 and 0 prompts"):
        compare_outputs({}, {})
