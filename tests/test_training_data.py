"""What training starts from: losses against plain autograd, batches, corpora, fresh drafters."""

import dataclasses
import itertools
import threading

import numpy as np
import pandas as pd
import pytest
import torch
from corpora import a_corpus, write_traces
from drafters import tiny_drafter
from helpers import END_ID, MASK_ID, PAD_ID, START_ID, tiny_target

from dflash2_lab.errors import LabError
from dflash2_lab.models.config import DrafterConfig
from dflash2_lab.models.layers import softcap
from dflash2_lab.training import loop
from dflash2_lab.training.data import batches, load_corpus, make_batch, prefetch
from dflash2_lab.training.losses import backbone_loss, selector_loss, slot_weights
from dflash2_lab.training.setup import choose_mask_token, new_drafter, spread_layers

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
