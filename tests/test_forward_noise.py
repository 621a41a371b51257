"""Passes over given text, one token, a block or several rows at a time, and how far they differ."""

import numpy as np
import pytest
import torch
from decode_helpers import plain_greedy, request
from drafters import tiny_drafter
from helpers import tiny_target

from dflash2_lab.agreement import forward_noise as noise
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.errors import LabError

PROMPTS = [(23, 24, 25, 26), tuple(range(40, 51)), (100, 101)]
TEXTS = [[7, 8, 9, 10, 11, 12, 13], [50, 51, 52], [5, 90, 91, 92, 93]]


@pytest.fixture(scope="module")
def wide():
    target = tiny_target()
    target.model.double()
    return target


@pytest.fixture(scope="module")
def singles(wide):
    with torch.inference_mode():
        return [noise.one_by_one(wide, *pair)[1] for pair in zip(PROMPTS, TEXTS, strict=True)]


def same(found, expected, atol=1e-10):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_blocks_alone_and_padded_give_the_logits_of_one_token_passes(wide, singles, width):
    with torch.inference_mode():
        pairs = zip(PROMPTS, TEXTS, strict=True)
        same([noise.in_blocks(wide, *pair, width) for pair in pairs], singles)
        same(noise.in_padded_blocks(wide, PROMPTS, TEXTS, width), singles)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_windows_and_padding_of_other_families(family):
    target = tiny_target(family, **({"sliding_window": 4} if family == "mistral" else {}))
    target.model.double()
    with torch.inference_mode():
        expected = [noise.one_by_one(target, *pair)[1] for pair in zip(PROMPTS, TEXTS, strict=True)]
        same(noise.in_padded_blocks(target, PROMPTS, TEXTS, 3), expected)
        pairs = zip(PROMPTS, TEXTS, strict=True)
        same(
            [noise.in_blocks(target, *pair, 3, range(len(pair[1]) - 1)) for pair in pairs], expected
        )


@pytest.mark.parametrize("anchors", [[0, 1, 2, 3, 4, 5], [0, 3, 4], [0, 4]])
def test_blocks_from_given_anchors_take_back_what_they_repeat(wide, singles, anchors):
    with torch.inference_mode():
        same([noise.in_blocks(wide, PROMPTS[0], TEXTS[0], 4, anchors)], singles[:1])


def test_blocks_of_the_graph_engine(wide, singles):
    engine = GraphEngine(wide, tiny_drafter().double(), "selector", 4, 40)
    asked = [
        request("selector", prompt, len(text)) for prompt, text in zip(PROMPTS, TEXTS, strict=True)
    ]
    with torch.inference_mode():
        found = noise.in_graph_blocks(engine, asked, TEXTS)
    assert all(one[0].isnan().all() for one in found)
    # Its kernels add in float32.
    same([one[1:] for one in found], [one[1:] for one in singles], atol=2e-5)


def test_a_number_of_tokens_is_the_targets_own_greedy_response():
    target = tiny_target()
    with torch.inference_mode():
        tokens, logits = noise.one_by_one(target, PROMPTS[0], 9)
    assert tokens == plain_greedy(target, PROMPTS[0], 9) == logits.argmax(-1).tolist()


def test_logits_that_are_not_finite_are_told():
    target = tiny_target()
    target.head.weight[3] = torch.nan
    with pytest.raises(LabError, match="tiny-qwen3: its logits are not finite"):
        noise.one_by_one(target, PROMPTS[0], 2)


def test_choices_by_hand():
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [0.0, 1.0, 2.0, 4.0], [3.0, -torch.inf, 2.0, 1.0]])
    found = noise.choices([2, 1, 0], logits)
    assert found.best.tolist() == [1, 3, 0]  # of equal ones the lowest id
    assert found.gap.tolist() == [0.0, 2.0, 1.0]
    assert found.regret.tolist() == [0.0, 3.0, 0.0]


def test_delta_by_hand():
    single = torch.tensor([[1.0, 5.0, 4.0], [3.0, 2.0, -torch.inf], [1.0, 2.0, 3.0]])
    block = torch.tensor([[1.5, 4.0, 4.5], [3.0, 2.5, -torch.inf], [torch.nan] * 3])
    found = noise.delta(single, block)
    assert found.largest.tolist() == [1.0, 0.5]
    assert found.pair.tolist() == [-1.5, -0.5]
    assert found.changed.tolist() == [True, False]


def test_a_way_much_noisier_than_the_ones_before_it_is_no_rounding():
    def part(size):
        return noise.Delta(np.full(5, size), np.zeros(5), np.zeros(5, bool))

    found = {"graph": [part(1e-3)], "blocks": [part(1e-5), part(2e-5)]}
    made = noise.joined(found, {"graph": 8, "blocks": 1}, 20.0, torch.float32)
    assert [(one.way, one.batch, one.largest) for one in made] == [
        ("blocks", 1, 2e-5),
        ("graph", 8, 1e-3),
    ]
    assert made[0].largest <= made[0].limit < 0.01
    assert made[1].limit == pytest.approx(8e-5)
    assert len(made[0].delta.largest) == 10
