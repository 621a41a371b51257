"""Inspecting checkpoints: what is shown, and that no problem hides another."""

import json

import pytest
import torch
from checkpoints import (
    deepspec,
    nested,
    random_tensors,
    speculators,
    target_like,
    without,
    write,
    zlab,
)

from dflash2_lab.errors import LabError
from dflash2_lab.models.inspect import inspect_checkpoint
from dflash2_lab.models.io import load_drafter


def has(problems, *parts):
    """Every part is in exactly one of the problems."""
    return all(sum(part in problem for problem in problems) == 1 for part in parts)


def test_a_good_checkpoint_is_described_without_problems(tmp_path):
    found = inspect_checkpoint(write(tmp_path, zlab()), target=target_like())
    assert found.problems == ()
    assert found.config["num_draft"] == 3
    tensors = random_tensors(zlab())
    assert {t.key: (t.shape, t.dtype) for t in found.tensors} == {
        name: (tuple(tensor.shape), "BF16") for name, tensor in tensors.items()
    }
    assert found.parameters["selector"] == 2 * 64 * 6 + 6 * 32
    assert found.parameters["context fusion"] == 32 * 64
    assert sum(found.parameters.values()) == sum(tensor.numel() for tensor in tensors.values())
    assert found.shared["output head"] == "the target's"
    assert found.shared["context features"] == "outputs of target layers [1, 3]"


def test_own_embedding_and_head_are_told_from_shared_ones(tmp_path):
    tensors = random_tensors(deepspec(), own_embedding=True)
    found = inspect_checkpoint(write(tmp_path, deepspec(), tensors))
    assert found.problems == ()
    assert found.shared["input embedding"] == "its own, in the checkpoint, scale 1.0"
    assert found.shared["output head"] == "the target's"
    assert found.parameters["embedding"] == 64 * 32


def test_vocabulary_map_is_no_parameter(tmp_path):
    raw = speculators(draft_vocab_size=3)
    tensors = random_tensors(raw, own_head=True) | {"d2t": torch.tensor([5, 5, 7])}
    found = inspect_checkpoint(write(tmp_path, raw, tensors))
    assert found.problems == ()
    assert "vocabulary map" not in found.parameters


def test_every_problem_of_config_tensors_and_target_is_listed(tmp_path):
    raw = nested(zlab(rope_parameters=None), mask_token_id=None) | {"block_size": 9}
    tensors = without(random_tensors(zlab()), "candidate_selector.successor_codebook")
    tensors["norm.weight"][0] = float("nan")
    tensors["layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    tensors["fc.weight"] = torch.zeros(32, 64, dtype=torch.int8)
    tensors["stray.weight"] = torch.zeros(2)
    target = target_like(hidden_size=40, vocab_size=65, num_layers=2)
    problems = inspect_checkpoint(write(tmp_path, raw, tensors), target=target).problems
    assert has(
        problems,
        "rope_theta is missing",
        "dflash_config.mask_token_id is missing",
        "dflash_config.block_size = 4 and top-level block_size = 9",
        "missing tensors (1): candidate_selector.successor_codebook",
        "unused tensors (1): stray.weight",
        "q_norm.weight has shape (16,), expected (8,)",
        "fc.weight has dtype I8",
        "NaN or infinite values in norm.weight",
        "hidden_size 32 does not fit target tiny-target: hidden size 40",
        "embedding rows 65",
        "num_target_layers 6 does not fit target tiny-target: layers 2",
        "target_layer_ids [3] do not exist in tiny-target",
    )
    assert len(problems) == 12


def test_tensors_are_compared_even_when_the_layer_ids_are_missing(tmp_path):
    tensors = without(random_tensors(zlab()), "norm.weight")
    folder = write(tmp_path, nested(zlab(), target_layer_ids=None), tensors)
    problems = inspect_checkpoint(folder).problems
    assert has(problems, "target_layer_ids is missing", "missing tensors (1): norm.weight")
    assert len(problems) == 2


@pytest.mark.parametrize("changes", [{"hidden_size": None}, {"architectures": ["Other"]}])
def test_unreadable_sizes_are_said_and_the_tensors_still_checked(tmp_path, changes):
    tensors = random_tensors(zlab())
    tensors["norm.weight"][0] = float("inf")
    problems = inspect_checkpoint(write(tmp_path, zlab(**changes), tensors)).problems
    assert has(problems, "tensors not compared with the config", "NaN or infinite values in norm")


def test_zero_group_size_is_a_problem_and_no_crash(tmp_path):
    folder = write(tmp_path, nested(zlab(), conv_group_size=0), random_tensors(zlab()))
    assert has(inspect_checkpoint(folder).problems, "conv_group_size is 0")


def test_broken_files_are_listed_together(tmp_path):
    folder = write(tmp_path, zlab())
    (folder / "config.json").write_text("{")
    (folder / "model.safetensors").write_bytes(b"truncated")
    problems = inspect_checkpoint(folder).problems
    assert has(problems, "config.json is no valid JSON", "no readable safetensors file")


def test_truncated_weights_are_not_called_missing_tensors(tmp_path):
    file = write(tmp_path, zlab()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    problems = inspect_checkpoint(tmp_path).problems
    assert len(problems) == 1
    assert "truncated?" in problems[0]


def test_absent_checkpoint_is_an_error():
    with pytest.raises(LabError, match=r"drafter './nowhere' not found"):
        inspect_checkpoint("./nowhere")


@pytest.mark.parametrize("break_it", [None, "norm.weight", "d2t"])
def test_no_problems_exactly_when_the_drafter_loads(tmp_path, break_it):
    raw = speculators(draft_vocab_size=3)
    tensors = random_tensors(raw, own_head=True) | {"d2t": torch.tensor([5, 5, 7])}
    if break_it is not None:
        tensors[break_it] = tensors[break_it] + 1000
        tensors[break_it][0] = -1 if break_it == "d2t" else float("nan")
    folder = write(tmp_path, raw, tensors)
    problems = inspect_checkpoint(folder).problems
    if break_it is None:
        load_drafter(folder)
        assert problems == ()
        return
    with pytest.raises(LabError) as info:
        load_drafter(folder)
    assert len(problems) == 1
    assert problems[0] in str(info.value)


def test_text_and_dict_hold_the_findings(tmp_path):
    raw = zlab(rope_theta=5.0)
    tensors = random_tensors(zlab()) | {"stray.weight": torch.zeros(2)}
    found = inspect_checkpoint(write(tmp_path, raw, tensors))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["loads"] is False
    assert plain["problems"] == ["unused tensors (1): stray.weight"]
    assert plain["config"]["target_layer_ids"] == [1, 3]
    assert plain["parameters"]["total"] == sum(found.parameters.values())
    assert {"name": "fc.weight", "shape": [32, 64], "dtype": "BF16"} in plain["tensors"]
    text = found.to_text()
    for part in (
        "problems (1)\n  - unused tensors (1): stray.weight",
        "warnings (1)\n  - rope_parameters.rope_theta = 10000.0 wins over rope_theta = 5.0",
        "fc.weight",
        "BF16  [32, 64]",
        "num_draft",
        "shared with the target",
    ):
        assert part in text


def test_training_leftovers_of_speculators_are_no_problem(tmp_path):
    spare = {"verifier_lm_head.weight": torch.full((64, 32), float("nan"))}
    found = inspect_checkpoint(
        write(tmp_path, speculators(), random_tensors(speculators()) | spare)
    )
    assert found.problems == ()
