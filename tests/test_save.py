"""Saving drafters: exact, atomic, and readable by the published package (and the other way)."""

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from checkpoints import (
    PROJECTED,
    assert_same,
    deepspec,
    nested,
    random_tensors,
    shards,
    without,
    write,
    zlab,
)
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file
from transformers import Qwen3Config

from dflash2_lab.errors import LabError
from dflash2_lab.models.config import read_config
from dflash2_lab.models.drafter import DFlash2Drafter
from dflash2_lab.models.io import drafter_identity, load_drafter, save_drafter


@pytest.mark.parametrize("raw", [zlab("dflash"), zlab(), PROJECTED, deepspec()])
def test_save_and_load_round_trip_exactly(tmp_path, raw):
    drafter = load_drafter(write(tmp_path / "a", raw))
    save_drafter(drafter, tmp_path / "deep" / "b")
    again = load_drafter(tmp_path / "deep" / "b")
    assert vars(again.settings) | {"layout": drafter.settings.layout} == vars(drafter.settings)
    assert_same(again.state_dict(), drafter.state_dict())


def test_saved_files_are_the_published_layout(tmp_path):
    save_drafter(load_drafter(write(tmp_path / "a", zlab())), tmp_path / "b", dtype="bfloat16")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "candidate_selector.predecessor_codebook" in tensors
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"]
    assert raw["dtype"] == "bfloat16"
    assert raw["dflash_config"] == zlab()["dflash_config"]


def test_saving_over_a_drafter_keeps_its_model_card(tmp_path):
    shards(tmp_path / "d", zlab("dflash"))
    (tmp_path / "d" / "README.md").write_text("card")
    save_drafter(load_drafter(write(tmp_path / "a", zlab())), tmp_path / "d")
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert type(load_drafter(tmp_path / "d")) is DFlash2Drafter
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d"]


def test_saving_new_weights_of_the_same_config_replaces_only_the_weights(tmp_path):
    save_drafter(load_drafter(write(tmp_path / "a", zlab())), tmp_path / "d")
    (tmp_path / "d" / "README.md").write_text("card")
    other = random_tensors(zlab(), seed=1)
    save_drafter(load_drafter(write(tmp_path / "a", zlab(), other)), tmp_path / "d")
    assert_same(load_drafter(tmp_path / "d").state_dict(), other)
    assert (tmp_path / "d" / "README.md").read_text() == "card"


def test_next_save_removes_what_a_killed_one_left(tmp_path):
    drafter = load_drafter(write(tmp_path / "a", zlab()))
    (tmp_path / ".d.save-x1" / "new").mkdir(parents=True)
    save_drafter(drafter, tmp_path / "d")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "d"]


def test_weights_are_as_readable_as_the_config(tmp_path):
    save_drafter(load_drafter(write(tmp_path / "a", zlab())), tmp_path / "d")
    modes = {path.stat().st_mode for path in (tmp_path / "d").iterdir()}
    assert len(modes) == 1


def test_swap_that_fails_puts_the_old_drafter_back(tmp_path, monkeypatch):
    folder = write(tmp_path / "d", zlab("dflash"))
    drafter = load_drafter(write(tmp_path / "a", zlab()))
    rename = Path.replace

    def refuse(path, goal):
        if path.name == "new":
            raise OSError(5, "Input/output error")
        return rename(path, goal)

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(LabError, match=r"cannot write drafter .*Input/output error"):
        save_drafter(drafter, folder)
    assert_same(load_drafter(folder).state_dict(), random_tensors(zlab("dflash")))


def test_loader_says_where_embedding_and_head_come_from(tmp_path, caplog):
    folder = write(tmp_path, deepspec(), random_tensors(deepspec(), own_head=True))
    with caplog.at_level(logging.INFO):
        load_drafter(folder)
    assert "input embedding the target's, output head the checkpoint's" in caplog.text


def test_failed_save_leaves_the_old_drafter_and_no_scrap(tmp_path, monkeypatch):
    folder = write(tmp_path / "d", zlab())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    drafter = load_drafter(folder)

    def full_disk(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    for goal in (folder, tmp_path / "new"):
        with pytest.raises(LabError, match=r"cannot write drafter .*No space left on device"):
            save_drafter(drafter, goal)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_saving_where_a_file_is_in_the_way_is_an_error(tmp_path):
    drafter = load_drafter(write(tmp_path / "a", zlab()))
    (tmp_path / "file").write_text("x")
    for goal in (tmp_path / "file", tmp_path / "file" / "b"):
        with pytest.raises(LabError, match=f"cannot write drafter {goal}"):
            save_drafter(drafter, goal)
    assert (tmp_path / "file").read_text() == "x"


def test_identity_changes_with_the_weights(tmp_path):
    first = drafter_identity(write(tmp_path / "d", zlab()))
    assert set(first["files"]) == {"config.json", "model.safetensors"}
    write(tmp_path / "d", zlab(), random_tensors(zlab(), seed=1))
    second = drafter_identity(tmp_path / "d")
    assert first["files"]["config.json"] == second["files"]["config.json"]
    assert first["files"]["model.safetensors"] != second["files"]["model.safetensors"]


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("raw", "published"),
    [
        (zlab(), DFlash2DraftModel),
        (zlab("dflash"), DFlashDraftModel),
        (zlab(**SLIDING), DFlash2DraftModel),
        (without(zlab("dflash", **SLIDING), "is_causal"), DFlashDraftModel),
        (nested(zlab(), output_multiplier=0.5), DFlash2DraftModel),
    ],
)
def test_published_package_loads_what_we_save(tmp_path, raw, published, caplog):
    ours = load_drafter(write(tmp_path / "a", raw))
    save_drafter(ours, tmp_path / "b")
    with caplog.at_level(logging.WARNING):
        theirs, info = published.from_pretrained(
            tmp_path / "b", output_loading_info=True, local_files_only=True
        )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = {
        name.replace("codebook.weight", "codebook"): t for name, t in theirs.state_dict().items()
    }
    assert_same(state, ours.state_dict())
    config = ours.settings
    attention = [layer.self_attn for layer in theirs.layers]
    assert tuple(layer.sliding_window for layer in attention) == config.windows
    assert tuple(layer.is_causal for layer in attention) == config.causal
    assert (theirs.block_size, theirs.mask_token_id) == (config.block_size, config.mask_token_id)
    assert tuple(theirs.target_layer_ids) == config.target_layer_ids
    torch.testing.assert_close(theirs.rotary_emb.inv_freq, ours.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("raw", "published"), [(zlab(), DFlash2DraftModel), (zlab("dflash"), DFlashDraftModel)]
)
def test_we_load_what_the_published_package_saves(tmp_path, raw, published):
    torch.manual_seed(0)
    theirs = published(Qwen3Config(**raw))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    theirs.save_pretrained(tmp_path)
    ours = load_drafter(tmp_path)
    state = {
        name.replace("codebook.weight", "codebook"): t for name, t in theirs.state_dict().items()
    }
    assert_same(ours.state_dict(), state)
    assert vars(ours.settings) == vars(read_config(raw, "x"))
