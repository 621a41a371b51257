"""Training: losses against plain autograd, batches, the loop and its resumption."""

import dataclasses
import itertools
import json
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from drafters import tiny_drafter
from helpers import END_ID, MASK_ID, PAD_ID, START_ID, tiny_target
from torch.nn import functional as F

from dflash2_lab.errors import LabError
from dflash2_lab.models.config import DrafterConfig
from dflash2_lab.models.io import load_drafter
from dflash2_lab.models.layers import softcap
from dflash2_lab.record import record
from dflash2_lab.tables import Run
from dflash2_lab.training import loop
from dflash2_lab.training.data import batches, load_corpus, make_batch, prefetch
from dflash2_lab.training.loop import TrainConfig, schedule, step_losses, train, validate
from dflash2_lab.training.losses import backbone_loss, selector_loss, slot_weights
from dflash2_lab.training.setup import choose_mask_token, new_drafter, spread_layers


def write_traces(path, lengths, seed=0, text=None):
    """A Parquet file of prompts and responses; `text(n)` gives response n when not random."""
    rng = np.random.default_rng(seed)
    rows = [
        {
            "prompt_ids": rng.integers(4, 264, prompt).tolist(),
            "response_ids": text(n) if text else rng.integers(4, 264, response).tolist(),
        }
        for n, (prompt, response) in enumerate(lengths)
    ]
    pd.DataFrame(rows).to_parquet(path)
    return path


def a_corpus(tmp_path, num=40, held_out=4, max_length=48, seed=0):
    rng = np.random.default_rng(seed)
    lengths = list(zip(rng.integers(2, 9, num), rng.integers(2, 40, num), strict=True))
    path = write_traces(tmp_path / f"traces-{seed}.parquet", lengths, seed)
    return load_corpus([path], max_length, held_out)


# --- losses


def loss_inputs(num=11, hidden=6, vocab=19):
    drawn = torch.randn(num, hidden), torch.randn(vocab, hidden), torch.randn(num, hidden)
    labels, weights = torch.randint(vocab, (num,)), torch.rand(num)
    return *drawn, labels, weights


@pytest.mark.parametrize(
    ("soft", "scale", "cap"), [(0.0, 1.0, None), (0.5, 1.0, None), (1.0, 0.7, 3.0)]
)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunked_loss_and_gradient_equal_plain_autograd(soft, scale, cap, chunk):
    hidden, head, teacher, labels, weights = loss_inputs()
    drafter = tiny_drafter("dflash", output_multiplier=scale, final_logit_softcapping=cap)
    plain = hidden.clone().requires_grad_()
    logits = softcap(plain @ head.T * scale, cap)
    log_q = logits.log_softmax(-1)
    law = (teacher @ head.T).softmax(-1)
    hard, distilled = -log_q.gather(-1, labels[:, None])[:, 0], -(law * log_q).sum(-1)
    expected = (((1 - soft) * hard + soft * distilled) * weights).sum()
    (3 * expected).backward()
    ours = hidden.clone().requires_grad_()
    loss, ids = backbone_loss(drafter, ours, head, labels, weights, teacher, soft, chunk)
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(ours.grad, plain.grad)
    best = logits.topk(16).indices
    assert torch.equal(ids.sort(-1).values, best.sort(-1).values)


def selector_inputs(num=40):
    drafter = tiny_drafter().requires_grad_()
    hidden, embedding = torch.randn(num, 32), torch.randn(264, 32)
    logits = hidden @ embedding.T
    ids = logits.topk(5).indices
    before = torch.randint(264, (num,))
    return drafter, hidden.requires_grad_(), embedding, ids, before


def test_selector_loss_is_the_mean_over_rows_whose_target_is_a_candidate():
    drafter, hidden, embedding, ids, before = selector_inputs()
    labels = ids[:, 2].clone()
    labels[::3] = (ids[::3].max(-1).values + 1) % 264
    covered = (ids == labels[:, None]).any(-1)
    weights = torch.rand(len(labels))
    weights = weights / weights.sum()
    found = selector_loss(drafter, hidden, embedding, embedding, ids, before, labels, weights)
    selector, total = drafter.candidate_selector, 0.0
    for row in covered.nonzero()[:, 0].tolist():
        gate = selector.predecessor_codebook[before[row]]
        gate = gate * selector.hidden_projection(hidden[row])
        scores = [
            embedding[t] @ hidden[row] + gate @ selector.successor_codebook[t] for t in ids[row]
        ]
        place = ids[row].tolist().index(int(labels[row]))
        total = total - torch.stack(scores).log_softmax(0)[place] * weights[row]
    torch.testing.assert_close(found, total / weights[covered].sum())
    gradients = torch.autograd.grad(
        found, [hidden, selector.hidden_projection.weight], retain_graph=True
    )
    expected = torch.autograd.grad(
        total / weights[covered].sum(), [hidden, selector.hidden_projection.weight]
    )
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert not gradients[0][~covered].any()


def test_a_batch_without_any_covered_target_has_loss_and_gradient_zero():
    drafter, hidden, embedding, ids, before = selector_inputs()
    labels = torch.stack([torch.arange(264)[~torch.isin(torch.arange(264), row)][0] for row in ids])
    weights = torch.full((len(labels),), 1 / len(labels))
    loss = selector_loss(drafter, hidden, embedding, embedding, ids, before, labels, weights)
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any()
    assert not drafter.candidate_selector.successor_codebook.grad.any()


def test_slot_weights_decay_and_leave_out_what_has_no_label():
    valid = torch.tensor([[[1, 1, 1], [1, 0, 0]], [[0, 0, 0], [1, 1, 0]]]).bool()
    weights = slot_weights(valid, 2.0)
    assert weights.sum().item() == pytest.approx(1.0)
    assert not weights[~valid].any()
    ratios = weights[0, 0, 1:] / weights[0, 0, :-1]
    torch.testing.assert_close(ratios, torch.full((2,), float(np.exp(-0.5))))
    assert not slot_weights(torch.zeros(1, 1, 3).bool(), 2.0).any()


# --- batches


def test_anchors_lie_in_the_response_and_labels_are_the_tokens_after(tmp_path):
    corpus, _ = a_corpus(tmp_path)
    for batch in itertools.islice(batches(corpus, 6, 5, 3, seed=1, first=0), 12):
        rows = [ids.tolist() for ids in batch.input_ids]
        flat = batch.valid.flatten()
        assert batch.labelled.tolist() == flat.nonzero()[:, 0].tolist()
        assert flat.any()
        for ids, anchors, labels, valid in zip(
            rows, batch.anchors, batch.labels, batch.valid, strict=True
        ):
            source = next(n for n, t in enumerate(corpus.tokens) if t.tolist() == ids[: len(t)])
            length, start = len(corpus.tokens[source]), corpus.prompt_lengths[source]
            assert not any(ids[length:])
            used = [int(a) for a, v in zip(anchors, valid, strict=True) if v.any()]
            assert len(used) == len(set(used)) == min(5, length - 1 - start)
            for anchor, label, mask in zip(anchors.tolist(), labels, valid, strict=True):
                assert start <= anchor < length
                if mask.any():
                    expected = [anchor + s < length for s in range(1, 4)]
                    assert mask.tolist() == expected
                    kept = corpus.tokens[source][anchor + 1 : anchor + 4].tolist()
                    assert label[mask].tolist() == kept


def flat(batch):
    return [getattr(batch, field.name).tolist() for field in dataclasses.fields(batch)]


def test_batch_number_n_depends_on_corpus_seed_and_n_alone(tmp_path):
    corpus, _ = a_corpus(tmp_path)
    whole = [flat(b) for b in itertools.islice(batches(corpus, 5, 4, 3, 7, 0), 20)]
    for first in (0, 3, 7, 8, 19):
        rest = itertools.islice(batches(corpus, 5, 4, 3, 7, first), 20 - first)
        assert [flat(b) for b in rest] == whole[first:]
    other = [flat(b) for b in itertools.islice(batches(corpus, 5, 4, 3, 8, 0), 20)]
    assert other != whole


def test_an_epoch_draws_other_anchors_than_the_one_before(tmp_path):
    corpus, _ = a_corpus(tmp_path)
    first, second = itertools.islice(batches(corpus, len(corpus), 3, 3, 0, 0), 2)
    by_text = [
        dict(zip(map(tuple, batch.input_ids.tolist()), batch.anchors.tolist(), strict=True))
        for batch in (first, second)
    ]
    assert by_text[0].keys() == by_text[1].keys()
    assert sum(by_text[0][text] != by_text[1][text] for text in by_text[0]) > len(corpus) / 2


def test_the_token_before_a_slot_is_the_traces(tmp_path):
    corpus, _ = a_corpus(tmp_path)
    batch = make_batch(corpus, [0, 1, 2], 4, 3, np.random.default_rng(0))
    before = loop.previous_tokens(batch)
    for b, a, slot in np.argwhere(batch.valid.numpy()):
        assert before[b, a, slot] == batch.input_ids[b, batch.anchors[b, a] + slot]


def test_an_epoch_shows_every_sequence_once(tmp_path):
    corpus, _ = a_corpus(tmp_path, num=40, held_out=4)
    names = {tuple(tokens.tolist()): n for n, tokens in enumerate(corpus.tokens)}
    seen = []
    for batch in itertools.islice(batches(corpus, 6, 2, 3, 0, 0), 6):
        for row in batch.input_ids.tolist():
            seen.append(next(n for t, n in names.items() if tuple(row[: len(t)]) == t))
    assert sorted(seen) == list(range(36))


def test_prefetched_batches_are_the_same_and_errors_come_through():
    assert list(itertools.islice(prefetch(iter(range(50))), 50)) == list(range(50))

    def broken():
        yield 1
        raise LabError("source broke")

    source = prefetch(broken())
    assert next(source) == 1
    with pytest.raises(LabError, match="source broke"):
        next(source)
    endless = prefetch(itertools.count())
    next(endless)
    before = threading.active_count()
    endless.close()
    for thread in threading.enumerate():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(timeout=2)
    assert threading.active_count() < before


def test_corpus_cuts_long_text_and_leaves_out_what_has_no_slot_or_no_context(tmp_path):
    lengths = [(3, 5), (0, 5), (3, 1), (3, 0), (10, 9), (30, 5), (11, 4), (4, 4)]
    path = write_traces(tmp_path / "t.parquet", lengths)
    corpus, validation = load_corpus([path], max_length=12, held_out=1)
    assert [len(tokens) for tokens in corpus.tokens] == [8, 12]
    assert corpus.prompt_lengths.tolist() == [3, 10]
    assert corpus.num_response_tokens == 7
    assert [len(tokens) for tokens in validation.tokens] == [8]
    assert corpus.digest() != validation.digest()


def test_data_that_is_missing_or_too_small_is_an_error(tmp_path):
    with pytest.raises(LabError, match="no traces"):
        load_corpus([tmp_path / "nowhere"], 64, 1)
    with pytest.raises(LabError, match="no traces"):
        load_corpus([tmp_path], 64, 1)
    path = write_traces(tmp_path / "few.parquet", [(3, 5)] * 3)
    with pytest.raises(LabError, match="3 usable traces"):
        load_corpus([path], 64, 3)
    (tmp_path / "text.parquet").write_text("not parquet")
    with pytest.raises(LabError, match="no readable traces"):
        load_corpus([tmp_path / "text.parquet"], 64, 1)
    pd.DataFrame({"prompt_ids": [[1]]}).to_parquet(tmp_path / "half.parquet")
    with pytest.raises(LabError, match="no readable traces"):
        load_corpus([tmp_path / "half.parquet"], 64, 1)


def test_a_folder_of_shards_is_read_in_order(tmp_path):
    for shard in (1, 0):
        write_traces(tmp_path / f"traces-0000{shard}.parquet", [(2, 3 + shard)] * 2)
    corpus, validation = load_corpus([tmp_path], 64, 1)
    assert [len(tokens) for tokens in corpus.tokens] == [5, 5, 6]
    assert [len(tokens) for tokens in validation.tokens] == [6]


# --- setting up


def test_context_layers_are_spread_from_the_second_to_the_third_last():
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(30, 1) == (15,)
    with pytest.raises(LabError, match="num_layers"):
        spread_layers(6, 5)


def test_a_new_dflash2_starts_as_the_dflash_of_its_seed():
    target = tiny_target()
    plain, second = (
        new_drafter(target, kind, MASK_ID, num_layers=1) for kind in ("dflash", "dflash2")
    )
    assert isinstance(second.settings, DrafterConfig)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor)
    with pytest.raises(LabError, match="kind"):
        new_drafter(target, "dspark", MASK_ID)


def test_the_mask_is_a_special_token_that_text_never_uses(tmp_path):
    target = tiny_target()
    path = write_traces(tmp_path / "t.parquet", [(3, 5)] * 4)
    corpus, validation = load_corpus([path], 64, 2)
    assert choose_mask_token(target, (corpus, validation)) == MASK_ID
    validation.tokens[0][1] = MASK_ID
    assert choose_mask_token(target, (corpus, validation)) == START_ID
    corpus.tokens[0][1] = START_ID
    assert {PAD_ID, END_ID}.isdisjoint({MASK_ID, START_ID})
    with pytest.raises(LabError, match="no special token is unused"):
        choose_mask_token(target, (corpus, validation))


def test_a_named_mask_must_be_a_token_that_text_never_uses(tmp_path):
    target = tiny_target()
    corpus, validation = a_corpus(tmp_path)
    assert choose_mask_token(target, (corpus, validation), 2) == 2
    for wrong in (-1, 264, int(validation.tokens[0][-1])):
        with pytest.raises(LabError, match=f"mask_token_id: found {wrong}"):
            choose_mask_token(target, (corpus, validation), wrong)


# --- the loop

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
