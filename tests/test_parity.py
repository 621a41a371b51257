"""The published package `dflash` 0.1.0 says the same at every anchor: hidden states, candidates,
greedy path, and the law at T > 0 (fp32)."""

import pytest
import torch
from dflash.model import DFlash2DraftModel, _sampling_probs
from drafters import tiny_drafter
from helpers import tiny_target
from reference import assert_close, live_steps, whole

from dflash2_lab.models.io import load_drafter
from dflash2_lab.policies import Block, candidates, propose
from dflash2_lab.prompts import Prompt, load_prompts
from dflash2_lab.published import PublishedDecoder, published_model
from dflash2_lab.recording import draft_tile, record
from dflash2_lab.sampling import Sampling, filter_logits
from dflash2_lab.target import features
from dflash2_lab.tracing import trace

WORDS = ["hi", "what is this?", "tell me of the sea and of the sky"]
CASES = [(family, kind) for family in ("qwen3", "llama") for kind in ("dflash", "dflash2")]


def make_case(target, drafter, prompts, max_new_tokens):
    """Traces, and for each our block of every anchor and the package's cycles."""
    traces = trace(target, prompts, max_new_tokens=max_new_tokens)
    model = published_model(drafter, target.embed_weight)
    rows = []
    for row in traces.traces.itertuples():
        ids, start = whole(row), len(row.prompt_ids)
        anchors = torch.arange(start, len(ids) - 1)
        with torch.inference_mode():
            context, _ = features(target, ids[None], drafter.settings.target_layer_ids)
            tile = draft_tile(target, drafter, ids, drafter.context_keys(context), anchors.numpy())
        decoder = PublishedDecoder(model, target, ids, start)
        rows.append((row, tile, [decoder.cycle() for _ in anchors]))
    return target, drafter, model, traces, rows


def as_block(drafter, tile, temperature=0.0, **changes):
    uniforms = {"selector": torch.zeros(tile["before"].shape)}
    sampling = Sampling(temperature, 1.0, 0)
    return Block(drafter=drafter, sampling=sampling, uniforms=uniforms, **(tile | changes))


def check_hidden_candidates_and_path(case):
    _, drafter, model, _, rows = case
    policy = "selector" if isinstance(model, DFlash2DraftModel) else "top1"
    for _, tile, cycles in rows:
        assert_close(tile["hidden"], torch.stack([cycle.hidden for cycle in cycles]))
        with torch.inference_mode():
            block = as_block(drafter, tile)
            found = candidates(block)
            path = propose(block, found, policy).tokens
        assert torch.equal(path, torch.stack([cycle.tokens for cycle in cycles]))
        if policy == "selector":
            theirs = torch.stack([cycle.ids for cycle in cycles])
            assert torch.equal(found.ids.sort(-1).values, theirs.sort(-1).values)


def check_selector_law(case, temperature=0.7):
    target, drafter, model, _, rows = case
    for row, tile, _ in rows:
        decoder = PublishedDecoder(model, target, whole(row), len(row.prompt_ids))
        cycles = [decoder.cycle(temperature) for _ in range(len(tile["hidden"]))]
        drawn = torch.stack([cycle.tokens for cycle in cycles])
        # Their law follows their own draws, so the walk here is forced along those.
        before = torch.cat([tile["before"][:, :1], drawn[:, :-1]], dim=1)
        theirs = torch.stack([cycle.ids for cycle in cycles])
        law = torch.zeros(theirs.shape, dtype=torch.double)
        with torch.inference_mode():
            for place in range(theirs.shape[-1]):
                block = as_block(
                    drafter, tile, temperature, before=before, targets=theirs[..., place]
                )
                law[..., place] = propose(block, candidates(block), "selector").q_target
        assert_close(law, torch.stack([cycle.q for cycle in cycles]).double())
        torch.testing.assert_close(law.sum(-1), torch.ones_like(law[..., 0]))


def check_recorded_tokens_and_lengths(case, max_new_tokens):
    target, drafter, model, traces, _ = case
    run = record(target, drafter, traces)
    policy = "selector" if isinstance(model, DFlash2DraftModel) else "top1"
    paths = run.paths[run.paths["policy"] == policy]
    for row, _, cycles in case[-1]:
        response, _ = live_steps(model, target, row, max_new_tokens)
        assert response == list(row.response_ids)
        own = paths[paths["prompt_id"] == row.prompt_id].sort_values(["anchor", "slot"])
        drafted = own.groupby("anchor")["token"].agg(list)
        hits = own.groupby("anchor")["hit"].agg(lambda hit: int(hit.cumprod().sum()))
        for anchor, cycle in enumerate(cycles):
            offered = len(drafted[anchor])
            assert drafted[anchor] == cycle.tokens[:offered].tolist()
            assert hits[anchor] == min(cycle.num_accepted, offered)


def check_sampled_law(case):
    for _, tile, _ in case[-1]:
        for settings in [(1.0, 1.0, 0), (0.7, 1.0, 20), (1.3, 0.9, 0), (0.8, 0.8, 30)]:
            # Theirs adds the vocabulary up in float32, which moves p, and now and then which token
            # is the last one of top-p, by some 1e-5.
            expected = _sampling_probs(tile["logits"], *settings)
            assert_close(filter_logits(tile["logits"], *settings).float(), expected, 1e-4)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def tiny_case(request):
    family, kind = request.param
    target = tiny_target(family)
    drafter = tiny_drafter(kind)
    prompts = [Prompt(f"p{i}", (text,), "set") for i, text in enumerate(WORDS)]
    return make_case(target, drafter, prompts, 20)


def test_hidden_states_candidates_and_greedy_path(tiny_case):
    check_hidden_candidates_and_path(tiny_case)


def test_law_at_temperature(tiny_case):
    if isinstance(tiny_case[2], DFlash2DraftModel):
        check_selector_law(tiny_case)
    else:
        check_sampled_law(tiny_case)


def test_generated_tokens_and_recorded_drafts(tiny_case):
    check_recorded_tokens_and_lengths(tiny_case, 20)


def test_every_part_of_the_random_drafter_matters():
    target = tiny_target()
    drafter = tiny_drafter("dflash2")
    prompts = [Prompt("p", (WORDS[1],), "set")]
    case = make_case(target, drafter, prompts, 12)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("_codebook") or "_projection" in name or "conv" in name:
                kept = parameter.clone()
                parameter.neg_()
                spoiled = (*case[:2], case[2], case[3], again(target, drafter, case))
                with pytest.raises(AssertionError):
                    check_hidden_candidates_and_path(spoiled)
                    check_selector_law(spoiled)
                parameter.copy_(kept)
    check_hidden_candidates_and_path(case)


def again(target, drafter, case):
    """The case's rows with our side drafted anew."""
    rows = []
    for row, _, cycles in case[-1]:
        ids, start = whole(row), len(row.prompt_ids)
        with torch.inference_mode():
            context, _ = features(target, ids[None], drafter.settings.target_layer_ids)
            keys = drafter.context_keys(context)
            anchors = torch.arange(start, len(ids) - 1).numpy()
            rows.append((row, draft_tile(target, drafter, ids, keys, anchors), cycles))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zoo:dflash", "zoo:dflash2"])
def test_zoo_drafters_on_smollm2(smollm2, name):
    drafter = load_drafter(name, target=smollm2)
    case = make_case(smollm2, drafter, load_prompts("default", limit=2), 24)
    check_hidden_candidates_and_path(case)
    check_recorded_tokens_and_lengths(case, 24)
    if name == "zoo:dflash2":
        assert drafter.settings.selector_parametrization == "projected"
        check_selector_law(case)
    else:
        check_sampled_law(case)
