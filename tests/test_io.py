"""Loading and saving drafters: what loads, what must not, and what the published package says."""

import pytest
import torch
from checkpoints import (
    PROJECTED,
    assert_same,
    deepspec,
    random_tensors,
    shards,
    speculators,
    target_like,
    without,
    write,
    zlab,
)
from safetensors.torch import load_file, save_file

from dflash2_lab.errors import LabError
from dflash2_lab.models.config import read_config
from dflash2_lab.models.drafter import DFlash2Drafter, DFlashDrafter, DSparkDrafter, build_drafter
from dflash2_lab.models.io import load_drafter, map_problems
from dflash2_lab.models.tensors import expected_tensors


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (zlab("dflash"), DFlashDrafter),
        (zlab(), DFlash2Drafter),
        (PROJECTED, DFlash2Drafter),
        (deepspec(), DSparkDrafter),
        (speculators("dspark"), DSparkDrafter),
        (zlab("dflash", attention_bias=True), DFlashDrafter),
    ],
)
def test_every_layout_loads_with_all_tensors_in_place(tmp_path, raw, expected):
    drafter = load_drafter(write(tmp_path, raw))
    assert type(drafter) is expected
    assert not drafter.training
    assert_same(drafter.state_dict(), random_tensors(raw))


REDUCED = speculators("dspark", draft_vocab_size=16)


@pytest.mark.parametrize("kind", [zlab("dflash"), zlab(), PROJECTED, deepspec(), REDUCED])
@pytest.mark.parametrize("own", [(False, False), (True, False), (False, True), (True, True)])
def test_expected_tensors_are_those_of_the_module(kind, own):
    config = read_config(kind, "x")
    with torch.device("meta"):
        state = build_drafter(config, *own).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == expected_tensors(config, *own)


@pytest.mark.parametrize("own", [(False, False), (True, False), (False, True), (True, True)])
def test_own_and_shared_embedding_and_head_in_every_combination(tmp_path, own):
    tensors = random_tensors(deepspec(), *own)
    drafter = load_drafter(write(tmp_path, deepspec(), tensors), target=target_like())
    assert (drafter.embed_tokens is not None, drafter.lm_head is not None) == own
    assert_same(drafter.state_dict(), tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_cast_and_rotary_frequencies_stay_fp32(tmp_path, dtype):
    drafter = load_drafter(write(tmp_path, zlab()), dtype=dtype)
    assert {str(p.dtype) for p in drafter.parameters()} == {f"torch.{dtype}"}
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32
    assert drafter.rotary_emb.inv_freq.device.type == "cpu"


def test_unknown_device_is_an_error(tmp_path):
    with pytest.raises(LabError, match="device gpu: cannot be used here"):
        load_drafter(write(tmp_path, zlab()), device="gpu")


def test_unknown_dtype_is_an_error(tmp_path):
    with pytest.raises(LabError, match=r"dtype is 'int4', expected one of float32"):
        load_drafter(write(tmp_path, zlab()), dtype="int4")


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_codebooks_load_with_and_without_weight_suffix(tmp_path, suffix):
    tensors = random_tensors(zlab())
    names = [name for name in tensors if name.endswith("codebook")]
    renamed = {name + suffix if name in names else name: t for name, t in tensors.items()}
    drafter = load_drafter(write(tmp_path, zlab(), renamed))
    assert_same(drafter.state_dict(), tensors)


def test_codebook_stored_under_both_names_is_an_error(tmp_path):
    tensors = random_tensors(zlab())
    name = "candidate_selector.successor_codebook"
    tensors[name + ".weight"] = tensors[name].clone()
    with pytest.raises(LabError, match="successor_codebook is stored twice"):
        load_drafter(write(tmp_path, zlab(), tensors))


def test_missing_codebook_is_an_error_and_not_plain_dflash(tmp_path):
    tensors = without(random_tensors(zlab()), "candidate_selector.predecessor_codebook")
    with pytest.raises(LabError, match=r"missing tensors \(1\): .*predecessor_codebook"):
        load_drafter(write(tmp_path, zlab(), tensors))


def test_v2_tensors_under_a_v1_config_are_an_error_listing_them(tmp_path):
    with pytest.raises(LabError, match=r"unused tensors \(11\): .*candidate_selector") as info:
        load_drafter(write(tmp_path, zlab("dflash"), random_tensors(zlab())))
    assert "layers.1.mlp_conv.base_kernel" in str(info.value)


def test_extra_tensor_is_an_error(tmp_path):
    tensors = random_tensors(zlab()) | {"layers.2.mlp.up_proj.weight": torch.zeros(48, 32)}
    with pytest.raises(LabError, match=r"unused tensors \(1\): layers.2.mlp.up_proj.weight"):
        load_drafter(write(tmp_path, zlab(), tensors))


def test_wrong_shapes_name_tensor_found_and_expected(tmp_path):
    tensors = random_tensors(zlab())
    tensors["fc.weight"] = torch.zeros(32, 96)
    with pytest.raises(LabError, match=r"fc.weight has shape \(32, 96\), expected \(32, 64\)"):
        load_drafter(write(tmp_path, zlab(), tensors))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_an_error_naming_all_tensors(tmp_path, value):
    tensors = random_tensors(zlab())
    for name in ("norm.weight", "layers.1.mlp.up_proj.weight"):
        tensors[name].view(-1)[-1] = value
    with pytest.raises(LabError, match=r"NaN or infinite values in (?=.*norm)(?=.*up_proj)"):
        load_drafter(write(tmp_path, zlab(), tensors))


def test_values_beyond_fp16_are_an_error_instead_of_infinity(tmp_path):
    tensors = random_tensors(zlab())
    tensors["norm.weight"][0] = 1e6
    folder = write(tmp_path, zlab(), tensors)
    assert load_drafter(folder, dtype="bfloat16").norm.weight[0] == torch.tensor(1e6).bfloat16()
    with pytest.raises(LabError, match=r"beyond the range of float16: norm.weight"):
        load_drafter(folder, dtype="float16")


def test_integer_weights_are_an_error(tmp_path):
    tensors = random_tensors(zlab())
    tensors["fc.weight"] = torch.zeros(32, 64, dtype=torch.int8)
    with pytest.raises(LabError, match=r"fc.weight has dtype I8, expected one of F64"):
        load_drafter(write(tmp_path, zlab(), tensors))


def test_mixed_float_types_load(tmp_path):
    tensors = random_tensors(zlab())
    tensors["fc.weight"] = tensors["fc.weight"].double()
    tensors["norm.weight"] = tensors["norm.weight"].half()
    assert_same(load_drafter(write(tmp_path, zlab(), tensors)).state_dict(), tensors)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_weights_are_an_error(tmp_path, keep):
    file = write(tmp_path, zlab()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(LabError, match=r"model.safetensors is no readable safetensors file"):
        load_drafter(tmp_path)


def test_sharded_weights_load(tmp_path):
    shards(tmp_path / "d", zlab())
    assert_same(load_drafter(tmp_path / "d").state_dict(), random_tensors(zlab()))


def test_missing_shard_is_an_error_that_names_it(tmp_path):
    shards(tmp_path / "d", zlab()).unlink()
    with pytest.raises(LabError, match=r"missing shard model-00001-of-00002.safetensors"):
        load_drafter(tmp_path / "d")


def test_shard_without_its_tensors_is_an_error(tmp_path):
    shard = shards(tmp_path / "d", zlab())
    kept = load_file(shard)
    lost = sorted(kept)[-1]
    save_file(without(kept, lost), shard)
    with pytest.raises(LabError, match=rf"lacks tensors that .*index.json places there: {lost}"):
        load_drafter(tmp_path / "d")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_malformed_index_is_an_error(tmp_path, text):
    shards(tmp_path / "d", zlab())
    (tmp_path / "d" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LabError, match=r"index.json is malformed"):
        load_drafter(tmp_path / "d")


def test_folder_with_pickled_weights_says_what_was_found(tmp_path):
    write(tmp_path, zlab())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(LabError, match=r"no model.safetensors .*found \['pytorch_model.bin'\]"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "no valid JSON"), ("[1]", "holds a list, expected a JSON object")]
)
def test_malformed_config_is_an_error(tmp_path, text, message):
    (write(tmp_path, zlab()) / "config.json").write_text(text)
    with pytest.raises(LabError, match=f"config.json.*{message}"):
        load_drafter(tmp_path)


def test_missing_config_is_an_error(tmp_path):
    with pytest.raises(LabError, match=r"config.json cannot be read: No such file"):
        load_drafter(tmp_path)


@pytest.mark.parametrize("name", ["./nowhere", "nowhere", "/no/such/folder", "zoo:nothing"])
def test_unknown_names_are_errors(name):
    with pytest.raises(LabError, match=name):
        load_drafter(name)


def test_a_file_is_no_drafter(tmp_path):
    write(tmp_path, zlab())
    with pytest.raises(LabError, match=r"is a file, expected a folder"):
        load_drafter(tmp_path / "model.safetensors")


def test_unreachable_hub_id_is_one_clear_line(monkeypatch, tmp_path):
    import huggingface_hub

    def refuse(*_args, **_kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(
        LabError, match=r"'owner/name' is no folder and no reachable hub id: no net"
    ):
        load_drafter("owner/name")


def test_hub_id_loads_the_downloaded_folder(monkeypatch, tmp_path):
    import huggingface_hub

    folder = write(tmp_path, zlab())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_args, **_kwargs: str(folder))
    assert load_drafter("owner/name").name_or_path == "owner/name"


def test_wrong_target_is_an_error_before_the_weights_are_read(tmp_path):
    write(tmp_path, zlab())
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LabError, match=r"wrong target for this drafter: hidden_size 32"):
        load_drafter(tmp_path, target=target_like(hidden_size=64))


def test_target_supplies_a_missing_layer_count(tmp_path):
    raw = without(zlab(), "num_target_layers")
    drafter = load_drafter(write(tmp_path, raw), target=target_like(num_layers=6))
    assert drafter.settings.num_target_layers == 6


@pytest.mark.parametrize("places", ["rope_parameters", "rope_theta", "rope_scaling"])
def test_rotary_frequencies_do_not_depend_on_where_theta_is_kept(tmp_path, places):
    values = {"rope_theta": 1e7} if places == "rope_theta" else {places: {"rope_theta": 1e7}}
    raw = without(zlab(), "rope_parameters") | values
    frequencies = load_drafter(write(tmp_path, raw)).rotary_emb.inv_freq
    exponents = torch.arange(0, 8, 2) / 8
    torch.testing.assert_close(frequencies, 1e7**-exponents)


def test_yarn_is_applied_only_when_the_config_asks(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope = {"rope_theta": 1e4, **yarn}
    scaled = load_drafter(write(tmp_path / "yarn", zlab(rope_parameters=rope))).rotary_emb
    plain = load_drafter(write(tmp_path / "plain", zlab(rope_scaling=None))).rotary_emb
    assert not torch.allclose(scaled.inv_freq, plain.inv_freq)
    assert (scaled.attention_scaling > 1.0, plain.attention_scaling) == (True, 1.0)


def reduced(offsets, own_head=True, **spare):
    raw = speculators(draft_vocab_size=len(offsets))
    tensors = random_tensors(raw, own_embedding=True, own_head=own_head)
    return raw, tensors | {"d2t": torch.tensor(offsets)} | spare


def test_d2t_holds_offsets_to_target_ids(tmp_path):
    drafter = load_drafter(write(tmp_path, *reduced([5, 5, 7])))
    logits = drafter.to_target_vocab(torch.tensor([1.0, 2.0, 3.0]))
    assert logits.isfinite().nonzero()[:, 0].tolist() == [5, 6, 9]
    assert logits[[5, 6, 9]].tolist() == [1.0, 2.0, 3.0]


def test_zero_offsets_are_the_identity(tmp_path):
    drafter = load_drafter(write(tmp_path, *reduced([0, 0, 0])))
    assert drafter.to_target_vocab(torch.ones(3)).isfinite().nonzero()[:, 0].tolist() == [0, 1, 2]
    raw = speculators()
    tensors = random_tensors(raw, own_head=True) | {"d2t": torch.zeros(64, dtype=torch.long)}
    assert load_drafter(write(tmp_path / "full", raw, tensors)).settings.draft_vocab_size is None


def test_d2t_with_absolute_ids_is_an_error(tmp_path):
    raw, tensors = reduced([61, 62, 63])
    with pytest.raises(
        LabError, match=r"target ids 61\.\.65, expected 0\.\.63 \(d2t holds offsets"
    ):
        load_drafter(write(tmp_path, raw, tensors))


def test_reduced_vocabulary_without_map_or_head_is_an_error(tmp_path):
    raw, tensors = reduced([5, 5, 7])
    with pytest.raises(LabError, match=r"missing tensors \(1\): d2t"):
        load_drafter(write(tmp_path / "a", raw, without(tensors, "d2t")))
    with pytest.raises(LabError, match=r"lm_head.weight is missing: a draft vocabulary of 3"):
        load_drafter(write(tmp_path / "b", raw, without(tensors, "lm_head.weight")))


def test_vocabulary_maps_must_agree():
    t2d = torch.zeros(8, dtype=torch.bool)
    t2d[[1, 2, 5]] = True
    assert map_problems(torch.tensor([1, 1, 3]), t2d, 8) == []
    assert "disagree" in map_problems(torch.tensor([1, 1, 4]), t2d, 8)[0]
    assert "two draft ids" in map_problems(torch.tensor([1, 0, 4]), None, 8)[0]
    assert "t2d has 8 entries, expected 9" in map_problems(torch.tensor([1, 1, 3]), t2d, 9)
    assert "permutes" in map_problems(torch.tensor([1, -1]), None, 2)[0]


def test_training_leftovers_of_speculators_are_not_loaded(tmp_path):
    raw, tensors = reduced([5, 5, 7])
    spare = {
        "verifier_lm_head.weight": torch.full((3, 32), float("nan")),
        "verifier_norm.weight": torch.ones(32),
        "rotary_emb.inv_freq": torch.ones(4),
    }
    drafter = load_drafter(write(tmp_path, raw, tensors | spare))
    assert_same(drafter.state_dict(), tensors)
