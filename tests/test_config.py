"""Reading published drafter configs: layouts, precedence, and what must be an error."""

import logging

import pytest
from checkpoints import (
    SELECTOR,
    deepspec,
    nested,
    speculators,
    without,
    zlab,
)

from dflash2_lab.errors import LabError
from dflash2_lab.models.config import (
    read_config,
)


def flat(raw, *keys):
    """Move keys of dflash_config to the top level, as older files have them."""
    moved = {key: raw["dflash_config"][key] for key in keys}
    return nested(raw, **dict.fromkeys(keys)) | moved


def test_zlab_dflash2_reads_every_value():
    config = read_config(zlab(), "x")
    assert config.kind == "dflash2"
    assert (config.block_size, config.num_draft, config.mask_token_id) == (4, 3, 3)
    assert config.target_layer_ids == (1, 3)
    assert {key: getattr(config, key) for key in SELECTOR} == SELECTOR
    assert config.windows == (None, None)
    assert config.causal == (False, False)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_published_v1_file_with_old_keys_reads():
    # The shape of z-lab/Qwen3-4B-DFlash-b16: block_size and rope_theta at the top, null scaling.
    raw = flat(without(zlab("dflash"), "rope_parameters", "is_causal"), "block_size")
    raw |= {"rope_theta": 1000000, "rope_scaling": None, "max_window_layers": 5}
    config = read_config(raw | {"tie_word_embeddings": True, "use_sliding_window": False}, "x")
    assert config.kind == "dflash"
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert config.windows == (None, None)


@pytest.mark.parametrize(
    "key", ["block_size", "mask_token_id", "target_layer_ids", "selector_rank"]
)
def test_key_nested_top_level_and_both_equal_agree(key):
    raw = zlab()
    value = raw["dflash_config"][key]
    expected = read_config(raw, "x")
    assert read_config(flat(raw, key), "x") == expected
    assert read_config(raw | {key: value}, "x") == expected


@pytest.mark.parametrize(
    ("key", "other"), [("block_size", 8), ("mask_token_id", 5), ("target_layer_ids", [0, 2])]
)
def test_key_that_differs_between_the_two_places_is_an_error_naming_both(key, other):
    with pytest.raises(LabError, match=rf"dflash_config\.{key} = .* top-level {key} = .*") as info:
        read_config(zlab() | {key: other}, "file.json")
    assert str(other) in str(info.value)
    assert "file.json" in str(info.value)


@pytest.mark.parametrize(
    "key", ["block_size", "mask_token_id", "target_layer_ids", "conv_kernel_size", "selector_top_k"]
)
def test_missing_method_key_is_an_error_and_never_a_default(key):
    with pytest.raises(LabError, match=rf"dflash_config\.{key} is missing"):
        read_config(nested(zlab(pad_token_id=0), **{key: None}), "x")


@pytest.mark.parametrize("mask", [64, 1000, -1])
def test_mask_outside_the_embedding_is_an_error(mask):
    with pytest.raises(LabError, match=f"mask_token_id {mask} is not a row of the 64"):
        read_config(nested(zlab(), mask_token_id=mask), "x")


def test_absent_layer_types_and_window_mean_full_attention():
    config = read_config(without(zlab(), "layer_types", "sliding_window"), "x")
    assert config.windows == (None, None)


def test_layer_types_with_a_window_give_windowed_layers():
    types = ["sliding_attention"] * 4 + ["full_attention"]
    raw = zlab(num_hidden_layers=5, layer_types=types, sliding_window=2048)
    config = read_config(raw, "x")
    assert config.windows == (2048, 2048, 2048, 2048, None)
    assert config.causal == (False,) * 5


@pytest.mark.parametrize(
    ("is_causal", "expected"),
    [(None, (True, False)), (False, (False, False)), (True, (True, True))],
)
def test_in_block_causality_follows_is_causal_or_the_layer_type(is_causal, expected):
    types = ["sliding_attention", "full_attention"]
    raw = zlab(layer_types=types, sliding_window=8, is_causal=is_causal)
    assert read_config(raw, "x").causal == expected
    assert read_config(raw, "x").windows == (8, None)


def test_sliding_layer_without_a_window_is_an_error():
    with pytest.raises(LabError, match="sliding_window is null"):
        read_config(zlab(layer_types=["sliding_attention", "full_attention"]), "x")


def test_use_sliding_window_false_beside_sliding_layers_is_an_error():
    types = ["sliding_attention", "full_attention"]
    raw = zlab(layer_types=types, sliding_window=8, use_sliding_window=False)
    with pytest.raises(LabError, match="use_sliding_window is false"):
        read_config(raw, "x")


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ("sliding_attention", "layer_types is 'sliding_attention'"),
        (["full_attention"], "1 entries for 2 layers"),
        (["full_attention", "chunked_attention"], "chunked_attention"),
    ],
)
def test_bad_layer_types_are_an_error(types, message):
    with pytest.raises(LabError, match=message):
        read_config(zlab(layer_types=types), "x")


def test_theta_is_found_in_every_place():
    bare = without(zlab(), "rope_parameters")
    places = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
        {"rope_theta": 10000000},
        {"rope_scaling": {"type": "default", "rope_theta": 1e7}},
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_theta": 1e7}},
    ]
    found = [read_config(bare | place, "x").rope_parameters for place in places]
    assert found == [{"rope_type": "default", "rope_theta": 1e7}] * 4


def test_missing_theta_is_an_error():
    with pytest.raises(LabError, match="rope_theta is missing"):
        read_config(zlab(rope_parameters={"rope_type": "default"}), "x")


def test_rope_parameters_win_over_a_stale_theta_with_a_warning(caplog):
    raw = zlab(rope_theta=1e6, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    with caplog.at_level(logging.WARNING):
        config = read_config(raw, "x")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    assert "rope_parameters.rope_theta = 10000.0 wins over rope_theta = 1000000.0" in caplog.text
    assert "wins over rope_scaling.rope_type = 'yarn'" in caplog.text


def test_scaled_rope_types_are_passed_on_whole():
    raw = without(zlab(), "rope_parameters") | {"rope_theta": 1e4}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_config(raw | {"rope_scaling": yarn}, "x").rope_parameters == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_theta": 1e4,
    }


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "spiral", "rope_theta": 1e4}, "rope_type is 'spiral', expected one of"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "factor is missing .* 'yarn'"),
        ({"rope_type": "default", "rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"full_attention": {"rope_theta": 1e4}}, "per layer type"),
        ("yarn", "rope_parameters is 'yarn', expected an object"),
    ],
)
def test_bad_rope_parameters_are_an_error(rope, message):
    with pytest.raises(LabError, match=message):
        read_config(zlab(rope_parameters=rope), "x")


def test_partial_rotary_and_mrope_keys_are_dropped_with_a_warning(caplog):
    rope = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    with caplog.at_level(logging.WARNING):
        config = read_config(zlab(rope_parameters=rope, partial_rotary_factor=0.25), "x")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e4}
    for key in ("partial_rotary_factor", "mrope_section", "top-level partial_rotary_factor"):
        assert key in caplog.text


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_speculators_layout_shifts_layer_ids_and_reads_the_nested_body(kind):
    config = read_config(speculators(kind), "x")
    assert config.kind == kind
    assert config.layout == "speculators"
    assert config.target_layer_ids == (1, 3)
    assert config.hidden_size == 32
    assert config.draft_vocab_size is None
    assert config.sample_from_anchor == (kind == "dspark")
    assert config.num_draft == (4 if kind == "dspark" else 3)


def test_speculators_id_of_the_last_output_is_dropped_with_a_warning(caplog):
    raw = speculators(aux_hidden_state_layer_ids=[2, 4, 6])
    assert read_config(raw, "x").target_layer_ids == (1, 3, 5)
    with caplog.at_level(logging.WARNING):
        assert read_config(raw, "x", num_target_layers=6).target_layer_ids == (1, 3)
    assert "last output (6): dropped" in caplog.text


def test_speculators_without_layer_ids_is_an_error():
    with pytest.raises(LabError, match="aux_hidden_state_layer_ids is missing"):
        read_config(speculators(aux_hidden_state_layer_ids=None), "x")


@pytest.mark.parametrize(("kind", "free"), [("dflash", False), ("dflash2", True)])
def test_speculators_sliding_layers_follow_sliding_window_non_causal(kind, free):
    raw = speculators(kind)
    raw["transformer_layer_config"] |= {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    }
    assert read_config(raw, "x").causal == (not free, False)
    assert read_config(raw | {"sliding_window_non_causal": True}, "x").causal == (False, False)


def test_speculators_reduced_vocabulary_is_kept():
    assert read_config(speculators(draft_vocab_size=16), "x").draft_vocab_size == 16


@pytest.mark.parametrize("size", [0, 65])
def test_draft_vocabulary_larger_than_the_target_s_is_an_error(size):
    with pytest.raises(LabError, match=f"draft_vocab_size {size}"):
        read_config(speculators(draft_vocab_size=size), "x")


def test_selector_with_a_reduced_vocabulary_is_an_error():
    with pytest.raises(LabError, match="needs the full vocabulary"):
        read_config(speculators("dflash2", draft_vocab_size=16), "x")


def test_wider_target_than_drafter_is_an_error():
    with pytest.raises(LabError, match="target_hidden_size 4096 differs from hidden_size 32"):
        read_config(speculators(target_hidden_size=4096), "x")


def test_deepspec_layout_is_anchor_first():
    config = read_config(deepspec(), "x")
    assert (config.kind, config.layout) == ("dspark", "deepspec")
    assert config.sample_from_anchor
    assert config.num_draft == config.block_size == 4
    assert (config.markov_rank, config.markov_head_type) == (6, "vanilla")
    assert config.confidence_head and config.confidence_head_with_markov


def test_dspark_with_a_nested_config_equals_the_flat_one():
    raw = deepspec(architectures=["DSparkDraftModel"])
    keys = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    moved = {key: raw[key] for key in keys}
    assert read_config(without(raw, *keys) | {"dflash_config": moved}, "x") == read_config(raw, "x")


def test_markov_rank_zero_alone_is_plain_dflash():
    raw = without(deepspec(markov_rank=0, enable_confidence_head=False), "markov_head_type")
    config = read_config(raw, "x")
    assert (config.kind, config.markov_rank, config.num_draft) == ("dflash", None, 4)


def test_confidence_head_without_its_markov_input_is_an_error():
    with pytest.raises(LabError, match="needs a Markov head, but markov_rank is 0"):
        read_config(deepspec(markov_rank=0), "x")


def test_confidence_head_alone_is_a_dspark_without_markov():
    config = read_config(deepspec(markov_rank=0, confidence_head_with_markov=False), "x")
    assert (config.kind, config.markov_rank, config.confidence_head) == ("dspark", None, True)


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_other_markov_heads_are_an_error(head):
    with pytest.raises(LabError, match=f"markov_head_type '{head}' is not supported"):
        read_config(deepspec(markov_head_type=head), "x")


@pytest.mark.parametrize("key", ["markov_rank", "enable_confidence_head", "target_layer_ids"])
def test_missing_dspark_key_is_an_error(key):
    with pytest.raises(LabError, match=f"{key} is missing"):
        read_config(without(deepspec(), key), "x")


def test_selector_keys_under_a_v1_architecture_are_an_error():
    with pytest.raises(LabError, match=r"says dflash, but conv_kernel_size.* DFlash2DraftModel"):
        read_config(zlab(architectures=["DFlashDraftModel"]), "x")


def test_markov_rank_under_a_v1_architecture_is_an_error():
    with pytest.raises(LabError, match="markov_rank = 6 belongs to DSparkDraftModel"):
        read_config(nested(zlab("dflash"), markov_rank=6), "x")


@pytest.mark.parametrize("names", [None, [], ["Qwen3ForCausalLM"], ["Gemma4DSparkModel"]])
def test_unknown_architecture_is_an_error(names):
    with pytest.raises(LabError, match=r"architectures is .*, expected one of DFlashDraftModel"):
        read_config(zlab(architectures=names), "x")


def test_domino_projector_and_shifted_labels_are_errors():
    with pytest.raises(LabError, match=r"projector_type 'domino'.*shift_label true"):
        read_config(speculators(projector_type="domino", shift_label=True), "x")


def test_unknown_nested_keys_are_reported(caplog):
    with caplog.at_level(logging.WARNING):
        read_config(nested(zlab(), selector_temperature=0.5), "x")
    assert "keys without effect here: selector_temperature" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "32"}, "hidden_size is '32', expected an integer"),
        ({"hidden_size": True}, "hidden_size is True, expected an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide 4"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_act": "mish2"}, "hidden_act is 'mish2', expected one of silu"),
        ({"rms_norm_eps": 0}, r"rms_norm_eps is 0\.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most"),
        ({"is_causal": "false"}, "is_causal is 'false', expected true or false"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"attention_bias": "no"}, "attention_bias is 'no', expected true or false"),
        ({"dflash_config": [1]}, r"dflash_config is \[1\], expected an object"),
    ],
)
def test_wrong_values_are_errors_that_name_them(changes, message):
    with pytest.raises(LabError, match=message):
        read_config(zlab(**changes), "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "the anchor alone"),
        ({"conv_group_size": 5}, "conv_group_size 5 does not divide hidden_size 32"),
        ({"conv_kernel_size": 5}, "conv_kernel_size 5 is larger than block_size 4"),
        ({"selector_top_k": 65}, "selector_top_k 65 is larger than vocab_size 64"),
        ({"selector_rank": 0}, "selector_rank is 0"),
        ({"selector_parametrization": "frozen"}, "expected 'free' or 'projected'"),
        ({"sample_from_anchor": True}, "does not exist for kind dflash2"),
        ({"target_layer_ids": [3, 3]}, "names a layer twice"),
        ({"target_layer_ids": [1, 6]}, r"\[6\] do not exist in a target of 6 layers"),
        ({"target_layer_ids": "1,3"}, "expected a list of integers"),
        ({"target_layer_ids": []}, "expected a list of integers"),
    ],
)
def test_wrong_method_values_are_errors_that_name_them(changes, message):
    with pytest.raises(LabError, match=message):
        read_config(nested(zlab(), **changes), "x")


def test_scales_and_softcap_are_read_and_a_cap_of_zero_is_none():
    raw = nested(zlab(), input_embedding_scale=5.5, output_multiplier=0.5)
    config = read_config(nested(raw, final_logit_softcapping=30.0), "x")
    scales = (config.input_embedding_scale, config.output_multiplier)
    assert scales == (5.5, 0.5)
    assert config.final_logit_softcapping == 30.0
    assert read_config(nested(raw, final_logit_softcapping=0), "x").final_logit_softcapping is None
