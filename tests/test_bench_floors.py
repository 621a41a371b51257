"""Random models of given shapes, and the bytes that a cycle cannot do without."""

import pytest
import torch

from dflash2_lab.bench import shapes
from dflash2_lab.bench.floors import cache_bytes, draft_bytes, target_bytes
from dflash2_lab.bench.shapes import SHAPES, even_spread, random_drafter, random_target, shape_of
from dflash2_lab.decoding.graph import GraphEngine

CPU = torch.device("cpu")
TINY = SHAPES["tiny"]  # 6 layers, hidden 32, heads 4 and 2 of 8, MLP 48, 264 tokens
LAYER = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48
KIND_POLICY = {"dflash": "top1", "dflash2": "selector", "dspark": "markov"}


@pytest.fixture(scope="module")
def target():
    return random_target(TINY, CPU)


def test_target_bytes_by_hand(target):
    assert target_bytes(target) == {"target layers": 2 * 6 * LAYER, "target head": 2 * 264 * 32}


def test_dflash_bytes_by_hand(target):
    drafter = random_drafter(TINY, "dflash", CPU)  # 2 layers that read 2 target layers
    assert draft_bytes(target, drafter, "top1", 1) == {
        "drafter layers": 2 * 2 * LAYER,
        "draft head": 2 * 264 * 32,
        "context fusion": 2 * 32 * 64,
        "context keys and values": 2 * 2 * 2 * 32 * 16,
    }


def test_dflash2_adds_convs_and_a_selector_whose_rows_count_by_sequence(target):
    plain = draft_bytes(target, random_drafter(TINY, "dflash", CPU), "top1", 2)
    drafter = random_drafter(TINY, "dflash2", CPU)
    top1, both = (draft_bytes(target, drafter, policy, 2) for policy in ("top1", "selector"))
    # a layer has two convs: projections of 2 sides x 2 taps x 4 groups, base kernels of 2 x 2
    convs = 2 * 2 * (16 * 32 + 4 * 32)
    assert top1["drafter layers"] - plain["drafter layers"] == 2 * convs
    # 3 slots, 4 candidates: anchor and 2 slots as predecessors, 3 slots as successors, rank 8
    rows = 2 * (1 + 2 * 4 + 3 * 4)
    assert both == top1 | {"selector": 2 * 8 * 32 + 2 * rows * 8}


def test_dspark_reads_its_table_once_a_slot(target):
    drafter = random_drafter(TINY, "dspark", CPU)
    assert drafter.settings.num_draft == 3
    found = draft_bytes(target, drafter, "markov", 2)["markov head"]
    assert found == 2 * 3 * (264 * 8 + 2 * 8)


def test_cache_bytes_by_hand(target):
    drafter = random_drafter(TINY, "dflash", CPU)
    assert cache_bytes(target, None, 3, 10) == 2 * 2 * 3 * 10 * 6 * 16
    assert cache_bytes(target, drafter, 3, 10) == 2 * 2 * 3 * 10 * (6 + 2) * 16


@pytest.mark.parametrize(
    ("name", "plain", "full"), [("qwen3-4b", 1.88, 2.33), ("smollm2-135m", 0.063, 0.086)]
)
def test_floors_of_published_shapes_in_ms_at_4280_gb_a_second(monkeypatch, name, plain, full):
    monkeypatch.setattr(shapes, "_fill", lambda module, *_rest: module.to(torch.bfloat16))
    meta = torch.device("meta")
    target = random_target(SHAPES[name], meta)
    drafter = random_drafter(SHAPES[name], "dflash2", meta)
    first = target_bytes(target)
    both = first | draft_bytes(target, drafter, "selector", 1)
    assert sum(first.values()) / 4.28e9 == pytest.approx(plain, rel=0.01)
    assert sum(both.values()) / 4.28e9 == pytest.approx(full, rel=0.015)


def test_target_layers_are_spread_as_the_package_does():
    from dflash.model import build_target_layer_ids

    for layers, drafted in ((36, 5), (30, 5), (36, 15), (28, 1)):
        assert list(even_spread(layers, drafted)) == build_target_layer_ids(layers, drafted)
    assert even_spread(4, 5) == (1,)


def test_weights_depend_on_the_seed_alone_and_embeddings_are_tied(target):
    again = random_target(TINY, CPU)
    other = random_target(TINY, CPU, seed=1)
    assert torch.equal(again.embed_weight, target.embed_weight)
    assert not torch.equal(other.embed_weight, target.embed_weight)
    assert target.head.weight.data_ptr() == target.embed_weight.data_ptr()
    assert target.dtype == torch.bfloat16
    logits = target.model(torch.arange(20)[None]).logits
    assert 0.1 < logits.float().std() < 10


@pytest.mark.parametrize("kind", KIND_POLICY)
def test_random_drafters_fit_an_engine_and_every_part_is_awake(target, kind):
    drafter = random_drafter(TINY, kind, CPU)
    assert all(weight.float().std() > 0 for weight in drafter.parameters() if weight.dim() > 1)
    GraphEngine(target, drafter, KIND_POLICY[kind], 1, 16).step()


def test_the_shape_of_a_target_gives_it_a_drafter(target):
    drafter = random_drafter(shape_of(target), "dspark", CPU, dtype=torch.float32)
    assert drafter.dtype == torch.float32
    assert (drafter.settings.num_draft, drafter.settings.hidden_size) == (7, 32)
