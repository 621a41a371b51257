"""The published package `dflash` against our recordings: its models, its decode by blocks."""

import time
from dataclasses import dataclass
from unittest import mock

import torch
from dflash.model import dflash_generate

from dflash2_lab.published import published_model
from dflash2_lab.replaying import replay


@dataclass(frozen=True)
class LiveStep:
    """One draft-verify step of the package's decode: where it started, what it emitted."""

    anchor: int
    num_emitted: int


def whole(trace_row):
    """Prompt and response of one trace as a tensor of ids."""
    return torch.tensor([*trace_row.prompt_ids, *trace_row.response_ids])


def live_steps(model, target, trace_row, max_new_tokens):
    """The package's greedy decode of one prompt: (response ids, its steps)."""
    # Its clock asks for a GPU; nothing here reads the times.
    with mock.patch("dflash.model._cuda_time", time.perf_counter):
        out = dflash_generate(
            model,
            target.model,
            torch.tensor([list(trace_row.prompt_ids)]),
            max_new_tokens,
            sorted(target.eos_token_ids),
            return_stats=True,
        )
    anchor, steps = 0, []
    for emitted in out.acceptance_lengths:
        steps.append(LiveStep(anchor, emitted))
        anchor += emitted
    return out.output_ids[0, out.num_input_tokens :].tolist(), steps


def live_ranks(model, target, trace_row, num_draft):
    """Rank of the trace's token at each slot that the package drafts: {(anchor, slot): rank}.

    The limit lies one block beyond the trace, so every block that starts in it has all its rows.
    """
    seen = []
    compute_logits = model.compute_logits

    def watched(*arguments):
        seen.append(compute_logits(*arguments)[0])
        return seen[-1]

    length = len(trace_row.response_ids)
    with mock.patch.object(model, "compute_logits", lambda *args: watched(*args)[None]):
        _, steps = live_steps(model, target, trace_row, length + num_draft + 1)
    ranks = {}
    for step, logits in zip(steps, seen, strict=True):
        for slot in range(1, num_draft + 1):
            if step.anchor + slot < length:
                order = logits[slot - 1].argsort(descending=True, stable=True)
                token = trace_row.response_ids[step.anchor + slot]
                ranks[step.anchor, slot] = int((order == token).nonzero())
    return ranks


def assert_replay_is_the_decode(target, drafter, traces, run, policy, max_new_tokens):
    """Every step of the replay is a step of the package's decode, except in a shrunken last block.

    There the block has fewer rows live than recorded, so its drafts may differ. Returns the number
    of steps compared and of those that accepted something.
    """
    model = published_model(drafter, target.embed_weight)
    steps = replay(run, policy).steps.set_index(["prompt_id", "turn", "sample"])
    num_draft = drafter.settings.num_draft
    compared = accepted = 0
    for row in traces.traces.itertuples():
        response, live = live_steps(model, target, row, max_new_tokens)
        assert response == list(row.response_ids)
        if not live:
            continue
        ours = steps.loc[[(row.prompt_id, row.turn, row.sample)]]
        ours = list(zip(ours["anchor"], ours["num_emitted"], strict=True))
        # Rows of a block live: the anchor and its drafts, cut at the limit.
        full = [step for step in live if step.anchor + num_draft + 1 <= max_new_tokens]
        wanted = [(step.anchor, step.num_emitted) for step in full]
        assert ours[: len(wanted)] == wanted, f"{row.prompt_id}: {ours} {wanted}"
        if len(full) == len(live):
            assert len(ours) == len(live)
        compared += len(wanted)
        accepted += sum(step.num_emitted > 1 for step in full)
    return compared, accepted


def assert_close(found, expected, tolerance=1e-5):
    """Equal to `tolerance`, relative to the largest value where magnitudes are above one."""
    scale = max(1.0, float(expected.abs().max()))
    error = float((found - expected).abs().max())
    assert error <= tolerance * scale, f"largest error {error}, largest value {scale}"
