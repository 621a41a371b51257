"""Traces of random tokens, and what a recording of them must say: one block a call, plain loops."""

import numpy as np
import pandas as pd
import torch

from dflash2_lab.models.layers import embed_rows
from dflash2_lab.sampling import filter_logits
from dflash2_lab.tables import Run
from dflash2_lab.target import features

SLOT = ["prompt_id", "turn", "sample", "anchor", "slot"]
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
HOT = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
LENGTHS = ((5, 12), (9, 2), (1, 7), (20, 1), (4, 0), (3, 30))  # prompt, response


def some_traces(sampling=GREEDY, lengths=LENGTHS, vocab=264):
    """Traces of random tokens (what was traced does not matter to a recording)."""
    rng = np.random.default_rng(0)
    rows = []
    for number, (prompt, response) in enumerate(lengths):
        logprob = np.zeros(response) if sampling is GREEDY else -rng.random(response)
        rows.append(
            {
                "prompt_id": f"p{number}",
                "turn": 0,
                "sample": number % 2,
                "dataset": "set",
                "prompt_ids": rng.integers(4, vocab, prompt).tolist(),
                "response_ids": rng.integers(4, vocab, response).tolist(),
                "logprob": logprob.tolist(),
                "logprob_unfiltered": logprob.tolist(),
                "finish": "length",
                "on_policy": True,
            }
        )
    info = {"kind": "trace", "sampling": dict(sampling), "seed": 0, "prompt_set_hash": "abc"}
    return Run.in_memory(info, {"traces": pd.DataFrame(rows)})


def greedy_trace(target, tokens=24, prompts=3):
    """The target's own greedy continuations."""
    rows = some_traces(lengths=[(4 + 3 * n, 0) for n in range(prompts)]).traces
    responses = []
    for prompt in rows["prompt_ids"]:
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        responses.append(ids[len(prompt) :])
    frame = rows.assign(response_ids=responses)
    frame["logprob"] = frame["logprob_unfiltered"] = [[0.0] * tokens] * prompts
    info = {"kind": "trace", "sampling": dict(GREEDY), "seed": 0}
    return Run.in_memory(info, {"traces": frame})


@torch.no_grad()
def block_outputs(target, drafter, row, anchor):
    """Hidden states and logits [P, ...] of the one block at `anchor`, without any packing."""
    ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
    at = len(row.prompt_ids) + anchor
    context, _ = features(target, ids[:, :at], drafter.settings.target_layer_ids)
    block = drafter.block_ids(ids[:, at : at + 1])
    table = drafter.input_embedding(target.embed_weight)
    embeds = embed_rows(table, block, drafter.settings.input_embedding_scale)
    hidden = drafter(embeds, drafter.context_keys(context), torch.tensor([[at]]))
    hidden = drafter.slot_rows(hidden)[0, 0]
    return hidden, drafter.logits(hidden, target.head).double()


def selector_score(drafter, hidden, logits, previous, token):
    selector = drafter.candidate_selector
    before = selector.predecessor_codebook[previous].double()
    gate = selector.hidden_projection(hidden).double()
    return float(logits[token] + (before * gate * selector.successor_codebook[token]).sum())


def softmax(scores, temperature):
    weights = np.exp((np.array(scores) - max(scores)) / temperature)
    return weights / weights.sum()


def law_of(drafter, policy, sampling, hidden, logits, previous):
    """{token: q} of one slot after the token `previous`, in float64."""
    ranked = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))
    greedy = sampling["temperature"] == 0 or policy.endswith("_greedy") or policy == "top1"
    temperature = 1.0 if greedy else sampling["temperature"]
    if policy in ("top1", "sampled"):
        tokens, scores = ranked, [float(logits[token]) for token in ranked]
    elif policy.startswith("selector"):
        tokens = ranked[: drafter.settings.selector_top_k]
        scores = [selector_score(drafter, hidden, logits, previous, token) for token in tokens]
    else:
        bias = drafter.to_target_vocab(drafter.markov_head(torch.tensor(previous))).double()
        tokens, scores = range(len(logits)), (logits + bias).tolist()
    if greedy:
        return {tokens[int(np.argmax(scores))]: 1.0}
    if policy == "sampled":
        law = filter_logits(logits, **sampling)
        return {token: float(law[token]) for token in tokens if law[token] > 0}
    return dict(zip(tokens, softmax(scores, temperature).tolist(), strict=True))


def brute_slots(target, drafter, traces, policies, sampling):
    """Every slot of every anchor: key -> (rank, {policy: (greedy path token, q of the target)})."""
    slots = {}
    for row in traces.traces.itertuples(index=False):
        response = list(row.response_ids)
        for anchor in range(len(response) - 1):
            hidden, logits = block_outputs(target, drafter, row, anchor)
            path = dict.fromkeys(policies, response[anchor])
            for slot in range(1, min(drafter.settings.num_draft, len(response) - 1 - anchor) + 1):
                token, before = response[anchor + slot], response[anchor + slot - 1]
                here = hidden[slot - 1], logits[slot - 1]
                rank = int((here[1] > here[1][token]).sum())
                rank = 264 if here[1][token] == -np.inf else rank  # no draft token: never found
                found = {}
                for policy in policies:
                    forced = law_of(drafter, policy, sampling, *here, before)
                    own = law_of(drafter, policy, sampling, *here, path[policy])
                    path[policy] = max(own, key=own.get)
                    found[policy] = path[policy], forced.get(token, 0.0)
                key = row.prompt_id, row.turn, row.sample, anchor, slot
                slots[key] = token, rank, found
    return slots


def path_of(run, policy):
    return run.paths[run.paths["policy"] == policy]


def same_tables(first, second, tables=("anchors", "slots", "paths", "attention"), exact=False):
    for name in tables:
        if exact:
            pd.testing.assert_frame_equal(first.table(name), second.table(name))
        else:
            pd.testing.assert_frame_equal(
                first.table(name), second.table(name), rtol=1e-4, atol=1e-5
            )
