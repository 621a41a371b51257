"""Drafter configs as a whole: odd values, every problem at once, round trips, targets."""

import json
import subprocess
import sys

import pytest
from checkpoints import (
    SELECTOR,
    deepspec,
    nested,
    speculators,
    target_like,
    without,
    zlab,
)

from dflash2_lab.errors import LabError
from dflash2_lab.models.config import (
    DrafterConfig,
    check_against_target,
    component,
    read_config,
    resolve_config,
    to_zlab,
)


def check(config, **sizes):
    target = target_like(**sizes)
    size = (target.hidden_size, target.vocab_size, target.num_layers)
    check_against_target(config, *size, target.name)


ODD = [None, 0, -1, 2.5, "x", True, [], [[1]], ["a"], {}, {"a": 1}, float("nan"), 10**9]


def odd_variants(raw):
    """The config with each value in turn, nested ones too, replaced by each odd one."""
    for key, value in raw.items():
        for odd in ODD:
            yield raw | {key: odd}
        if isinstance(value, dict):
            yield from (raw | {key: inner} for inner in odd_variants(value))


@pytest.mark.parametrize(
    "raw",
    [
        zlab(sliding_window=8, use_sliding_window=True, rope_theta=1e4, rope_scaling={"type": "x"}),
        deepspec(layer_types=["sliding_attention", "full_attention"], sliding_window=8),
        speculators("dspark", is_causal=True, sliding_window_non_causal=True),
    ],
)
def test_no_odd_value_crashes_the_reader(raw):
    for variant in odd_variants(raw):
        resolved = resolve_config(variant, "x")
        assert (resolved.config is None) == bool(resolved.problems)
        if resolved.config is not None:
            to_zlab(resolved.config)


def test_every_problem_is_collected():
    raw = nested(zlab(rope_parameters=None), mask_token_id=None, conv_group_size=5)
    problems = resolve_config(raw | {"block_size": 9}, "x").problems
    for part in ("rope_theta", "mask_token_id", "conv_group_size", "block_size = 9"):
        assert sum(part in problem for problem in problems) == 1


@pytest.mark.parametrize(
    "raw",
    [
        zlab(),
        zlab("dflash"),
        nested(zlab(), selector_parametrization="projected", output_multiplier=0.5),
        zlab(layer_types=["sliding_attention", "full_attention"], sliding_window=8),
        without(
            zlab(layer_types=["sliding_attention", "full_attention"], sliding_window=8), "is_causal"
        ),
        zlab(is_causal=True),
        nested(zlab("dflash"), sample_from_anchor=True),
    ],
)
def test_zlab_round_trip_keeps_every_value(raw):
    config = read_config(raw, "x")
    written = json.loads(json.dumps(to_zlab(config)))
    assert read_config(written, "y") == config


@pytest.mark.parametrize(
    "raw", [deepspec(), deepspec(markov_rank=0, confidence_head_with_markov=False), speculators()]
)
def test_other_layouts_are_written_as_zlab(raw):
    config = read_config(raw, "x")
    again = read_config(to_zlab(config), "y")
    assert again.layout == "z-lab"
    assert vars(again) | {"layout": config.layout} == vars(config)


def test_masks_that_the_published_form_cannot_say_are_an_error():
    values = vars(read_config(zlab(), "x"))
    with pytest.raises(LabError, match="one sliding_window"):
        to_zlab(DrafterConfig(**values | {"windows": (8, 16)}))
    with pytest.raises(LabError, match="is_causal per layer"):
        to_zlab(DrafterConfig(**values | {"causal": (True, False)}))


def test_building_a_config_by_hand_is_checked_too():
    values = vars(read_config(zlab(), "x"))
    with pytest.raises(LabError, match="selector_rank is missing"):
        DrafterConfig(**values | {"selector_rank": None})
    with pytest.raises(LabError, match="kind is 'eagle3'"):
        DrafterConfig(**values | {"kind": "eagle3"} | dict.fromkeys(SELECTOR))


def test_drafter_heads_may_differ_from_the_target_s():
    check(read_config(zlab(head_dim=16, num_attention_heads=2), "x"))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 40}, "hidden_size 32 does not fit target tiny-target: hidden size 40"),
        ({"vocab_size": 65}, "vocab_size 64 does not fit target tiny-target: embedding rows 65"),
        ({"num_layers": 8}, "num_target_layers 6 does not fit target tiny-target: layers 8"),
        ({"num_layers": 3}, r"target_layer_ids \[3\] do not exist in tiny-target \(3 layers\)"),
    ],
)
def test_wrong_target_is_an_error_before_any_forward(sizes, message):
    with pytest.raises(LabError, match=message):
        check(read_config(zlab(), "x"), **sizes)


def test_components_cover_every_part():
    names = {
        "layers.0.self_attn.q_proj.weight": "attention",
        "layers.1.mlp.up_proj.weight": "mlp",
        "layers.0.mlp_conv.base_kernel": "conv",
        "layers.0.input_layernorm.weight": "norms",
        "hidden_norm.weight": "norms",
        "fc.weight": "context fusion",
        "candidate_selector.hidden_projection.weight": "selector",
        "lm_head.weight": "output head",
    }
    assert {name: component(name) for name in names} == names


def test_config_reading_does_not_import_torch():
    code = "import sys, dflash2_lab.models.config as c; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
