"""The training loop: resumption, divergence, validation, and a text that can be learnt."""

import dataclasses
import itertools
import json
import os

import numpy as np
import pandas as pd
import pytest
import torch
from corpora import a_corpus, write_traces
from drafters import tiny_drafter
from helpers import MASK_ID, tiny_target
from torch.nn import functional as F

from dflash2_lab.errors import LabError
from dflash2_lab.models.io import load_drafter
from dflash2_lab.recording import record
from dflash2_lab.tables import Run
from dflash2_lab.training import loop
from dflash2_lab.training.data import load_corpus, make_batch
from dflash2_lab.training.loop import TrainConfig, schedule, step_losses, train, validate
from dflash2_lab.training.setup import new_drafter

SMALL = TrainConfig(
    steps=8,
    batch_size=4,
    num_anchors=4,
    max_length=48,
    held_out=4,
    report_every=1,
    checkpoint_every=3,
    learning_rate=3e-3,
)


def fresh(target, kind="dflash2"):
    return new_drafter(
        target, kind, MASK_ID, num_layers=1, intermediate_size=32, block_size=4, selector_rank=4
    )


def state(drafter):
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_ends_bit_for_bit_where_the_unbroken_one_does(tmp_path, monkeypatch, dtype):
    target, data = tiny_target(), a_corpus(tmp_path)
    target.model.to(dtype)
    unbroken, resumed = fresh(target), fresh(target)
    report = train(target, unbroken, *data, SMALL, tmp_path / "a")

    calls = itertools.count()

    def dies(*arguments):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return step_losses(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "step_losses", dies)
        with pytest.raises(KeyboardInterrupt):
            train(target, resumed, *data, SMALL, tmp_path / "b")
    lines = (tmp_path / "b" / "train.jsonl").read_text().splitlines()
    assert len(lines) == 5  # two of them past the checkpoint of step 3
    again = train(target, fresh(target), *data, SMALL, tmp_path / "b")
    timing = "steps_per_second"
    reports = [
        [
            {k: v for k, v in json.loads(line).items() if k != timing}
            for line in (tmp_path / run / "train.jsonl").read_text().splitlines()
        ]
        for run in "ab"
    ]
    assert reports[0] == reports[1]
    assert [line["step"] for line in reports[0]] == list(range(1, 9))
    assert again["recall@1"] == report["recall@1"]
    saved = [load_drafter(tmp_path / run / "drafter", target=target) for run in "ab"]
    for name, tensor in saved[0].state_dict().items():
        assert torch.equal(tensor, saved[1].state_dict()[name])
    assert train(target, fresh(target), *data, SMALL, tmp_path / "b") == again


def test_training_does_not_touch_the_target(tmp_path):
    target, data = tiny_target(), a_corpus(tmp_path)
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    train(target, fresh(target), *data, SMALL, tmp_path / "a")
    for name, tensor in target.model.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_every_weight_of_the_drafter_is_trained(tmp_path, kind):
    target, data = tiny_target(), a_corpus(tmp_path)
    drafter = fresh(target, kind)
    before = state(drafter)
    train(target, drafter, *data, SMALL, tmp_path / "a")
    for name, tensor in drafter.state_dict().items():
        assert not torch.equal(tensor, before[name]), name


def test_a_selector_of_weight_zero_is_not_trained(tmp_path):
    target, data = tiny_target(), a_corpus(tmp_path)
    drafter = fresh(target)
    config = dataclasses.replace(SMALL, selector_weight=0.0)
    train(target, drafter, *data, config, tmp_path / "a")
    assert not drafter.candidate_selector.successor_projection.weight.any()


def counting(number):
    """Text that counts up: the token after t is t + 1."""
    start = 10 + 7 * number % 100
    return list(range(start, start + 24))


@pytest.mark.slow
def test_loss_falls_and_a_simple_text_is_learnt(tmp_path):
    target = tiny_target()
    path = write_traces(tmp_path / "t.parquet", [(3, 24)] * 100, text=counting)
    data = load_corpus([path], 48, 8)
    config = dataclasses.replace(
        SMALL, steps=200, batch_size=8, held_out=8, learning_rate=1e-2, soft_labels=0.0
    )
    config = dataclasses.replace(config, report_every=50, checkpoint_every=200)
    train(target, fresh(target), *data, config, tmp_path / "a")
    lines = (tmp_path / "a" / "train.jsonl").read_text().splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert last["backbone"] < 0.7 * first["backbone"]
    assert last["selector"] < 0.8 * first["selector"]
    # Chance is about 0.01 for the first choice and 0.15 for sixteen.
    assert last["recall@1"][0] > 0.45
    assert last["recall@16"][0] > 0.7
    assert last["selector_accuracy"][0] > 0.5


def test_validation_recall_is_what_a_recording_measures(tmp_path):
    # Case F8: labels, masks and anchors of training are those of recording.
    target, drafter = tiny_target(), tiny_drafter()
    lengths = [(5, 12), (4, 9), (6, 14)]
    _, held_out = load_corpus(
        [write_traces(tmp_path / "t.parquet", [(2, 2), *lengths])], max_length=64, held_out=3
    )
    found = validate(target, drafter, held_out, dataclasses.replace(SMALL, num_anchors=16))
    rows = [
        {
            "prompt_id": str(n),
            "turn": 0,
            "sample": 0,
            "dataset": "set",
            "prompt_ids": tokens[:start].tolist(),
            "response_ids": tokens[start:].tolist(),
            "logprob": [0.0] * (len(tokens) - start),
            "logprob_unfiltered": [0.0] * (len(tokens) - start),
            "finish": "length",
            "on_policy": True,
        }
        for n, (tokens, start) in enumerate(
            zip(held_out.tokens, held_out.prompt_lengths, strict=True)
        )
    ]
    info = {"kind": "trace", "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0}}
    run = record(target, drafter, Run.in_memory(info, {"traces": pd.DataFrame(rows)}))
    ranks = run.slots.groupby("slot")["target_rank"]
    assert found["recall@1"] == pytest.approx(ranks.apply(lambda rank: (rank < 1).mean()).tolist())
    assert found["recall@5"] == pytest.approx(ranks.apply(lambda rank: (rank < 5).mean()).tolist())
    paths = run.paths[run.paths["policy"] == "selector"].groupby("slot")["q_target"]
    assert found["selector_accuracy"] == pytest.approx(paths.mean().tolist())
    assert sum(found["recall@5"]) > 0


def test_a_slot_without_labels_has_no_recall(tmp_path):
    target = tiny_target()
    _, held_out = load_corpus([write_traces(tmp_path / "t.parquet", [(3, 2)] * 3)], 48, 2)
    found = validate(target, fresh(target, "dflash"), held_out, SMALL)
    assert found["recall@1"][1:] == [None, None]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_a_diverging_run_stops_with_an_error_and_keeps_no_checkpoint_of_it(tmp_path):
    target, data = tiny_target(), a_corpus(tmp_path)
    config = dataclasses.replace(SMALL, learning_rate=1e30, checkpoint_every=1, report_every=5)
    with pytest.raises(LabError, match="diverged"):
        train(target, fresh(target), *data, config, tmp_path / "a")
    assert not (tmp_path / "a" / "drafter").exists()
    saved = torch.load(tmp_path / "a" / "checkpoint.pt", weights_only=True)
    assert saved["step"] < config.steps


def test_reports_on_a_full_disk_are_an_error_that_names_the_file(tmp_path, monkeypatch):
    target, data = tiny_target(), a_corpus(tmp_path)

    def full_disk(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(LabError, match=r"train\.jsonl: could not be written"):
        train(target, fresh(target), *data, SMALL, tmp_path / "a")
    assert list((tmp_path / "a").iterdir()) == []


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    target, data, out = tiny_target(), a_corpus(tmp_path), tmp_path / "a"
    train(target, fresh(target), *data, SMALL, out)
    with pytest.raises(LabError, match="found config"):
        train(target, fresh(target), *data, dataclasses.replace(SMALL, seed=3), out)
    with pytest.raises(LabError, match="found drafter"):
        train(target, fresh(target, "dflash"), *data, SMALL, out)
    with pytest.raises(LabError, match="found data"):
        train(target, fresh(target), *a_corpus(tmp_path, seed=1), SMALL, out)


@pytest.mark.parametrize(
    "drafter",
    [("dspark", {}), ("dflash", {"own_head": True}), ("dflash", {"own_embedding": True})],
)
def test_a_drafter_that_the_losses_do_not_cover_is_refused(tmp_path, drafter):
    kind, own = drafter
    with pytest.raises(LabError, match="train:"):
        train(tiny_target(), tiny_drafter(kind, **own), *a_corpus(tmp_path), SMALL, tmp_path / "a")


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"batch_size": 0},
        {"held_out": 0},
        {"decay": 0.0},
        {"learning_rate": -1.0},
        {"soft_labels": 1.5},
    ],
)
def test_options_out_of_range_are_named(bad):
    with pytest.raises(LabError, match=next(iter(bad))):
        TrainConfig(**bad)


def test_learning_rate_warms_up_and_falls_to_zero():
    config = dataclasses.replace(SMALL, steps=100, warmup=0.1)
    rates = [schedule(step, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == pytest.approx(1.0)
    assert rates[100] == pytest.approx(0.0)
    assert (np.diff(rates[10:]) < 0).all()


def test_teacher_is_the_targets_law_before_each_label(tmp_path):
    target = tiny_target()
    corpus, _ = a_corpus(tmp_path)
    batch = make_batch(corpus, [0, 1], 4, 3, np.random.default_rng(0))
    _, teacher = loop.forward_batch(target, fresh(target), batch)
    with torch.no_grad():
        logits = target.model(batch.input_ids).logits
    found = F.linear(teacher, target.head.weight)
    for b, a, slot in np.argwhere(batch.valid.numpy()):
        at = int(batch.anchors[b, a]) + slot  # slot counts from 0: the token before its label
        torch.testing.assert_close(found[b, a, slot], logits[b, at], rtol=1e-4, atol=1e-4)
