"""The end of a cycle: what leaves a step, and where the next one starts."""

import dataclasses

import pytest
import torch

from dflash2_lab.kernels.commit import (
    BROKEN,
    FULL,
    RUNNING,
    STOPPED,
    Progress,
    commit_reference,
    commit_triton,
    make_progress,
)

STOP = 9
RUNS = [commit_reference, commit_triton]


def one(device, length=3, limit=20, start=50) -> Progress:
    """A single running sequence with the stop token 9."""
    progress = make_progress(1, 30, 4, device)
    for name, value in {
        "length": length,
        "limit": limit,
        "start": start,
        "status": RUNNING,
    }.items():
        getattr(progress, name).fill_(value)
    progress.stops[0, 1] = STOP
    return progress


def step(run, progress, draft, accepted, following, finite=True):
    device = progress.start.device
    run(
        progress,
        torch.tensor([draft], device=device),
        torch.tensor([accepted], device=device),
        torch.tensor([following], device=device),
        torch.tensor([[True] * len(draft) + [finite]], device=device),
        slots=7,
    )


@pytest.mark.parametrize("run", RUNS)
def test_accepted_drafts_and_the_token_after_them_are_emitted(device, run):
    progress = one(device)
    step(run, progress, [11, 12, 13, 14], 2, 21)
    assert progress.tokens[0, 3:7].tolist() == [11, 12, 21, 0]
    assert [int(x) for x in (progress.length, progress.start, progress.anchor)] == [6, 53, 21]
    assert int(progress.accepted[0, 0]) == 2 and int(progress.steps) == 1
    assert [int(x) for x in (progress.draft_counter, progress.final_counter)] == [35, 5]
    assert int(progress.offered) == 4 and int(progress.status) == RUNNING


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("draft", "following", "emitted"),
    [
        ([9, 12, 13, 14], 21, [9]),
        ([11, 9, 13, 14], 21, [11, 9]),
        ([11, 12, 13, 9], 21, [11, 12, 13, 9]),
        ([11, 12, 13, 14], 9, [11, 12, 13, 14, 9]),
    ],
)
def test_a_stop_token_ends_the_step_and_the_sequence(device, run, draft, following, emitted):
    progress = one(device)
    step(run, progress, draft, 4, following)
    assert progress.tokens[0, 3 : int(progress.length)].tolist() == emitted
    assert int(progress.status) == STOPPED
    assert int(progress.accepted[0, 0]) == 4  # as the verifier had it, beyond the stop too
    assert int(progress.start) == 50


@pytest.mark.parametrize("run", RUNS)
def test_a_refused_stop_token_does_not_end_anything(device, run):
    progress = one(device)
    step(run, progress, [11, 9, 13, 14], 1, 21)
    assert int(progress.status) == RUNNING and int(progress.length) == 5


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 6])
def test_a_step_never_passes_the_length_limit(device, run, room):
    progress = one(device, limit=3 + room)
    step(run, progress, [11, 12, 13, 14], 4, 21)
    assert int(progress.length) == 3 + min(room, 5)
    assert int(progress.status) == (FULL if room <= 5 else RUNNING)
    if room == 6:
        assert int(progress.offered) == 1


@pytest.mark.parametrize("run", RUNS)
def test_a_stop_within_the_limit_wins_over_the_limit(device, run):
    # [a, b, stop, c, d] with room for 2, 3, 4: length, stop, stop
    for room, status, length in ((2, FULL, 5), (3, STOPPED, 6), (4, STOPPED, 6)):
        progress = one(device, limit=3 + room)
        step(run, progress, [11, 12, STOP, 14], 4, 21)
        assert (int(progress.status), int(progress.length)) == (status, length)


@pytest.mark.parametrize("run", RUNS)
def test_logits_that_are_not_finite_break_the_sequence_off(device, run):
    progress = one(device)
    step(run, progress, [11, 12, 13, 14], 2, 21, finite=False)
    assert int(progress.status) == BROKEN and int(progress.length) == 3
    step(run, progress, [11, 12, 13, 14], 2, 21)
    assert int(progress.length) == 3 and int(progress.steps) == 0


def test_both_forms_agree_on_a_batch_in_every_state(device):
    for trial in range(30):
        torch.manual_seed(trial)
        progress = make_progress(6, 30, 3, device)
        progress.status.copy_(torch.tensor([0, 0, 0, 0, 2, 1]))
        progress.length.copy_(torch.randint(1, 10, (6,)))
        progress.limit.copy_(progress.length + torch.randint(1, 8, (6,)).to(device))
        progress.stops[:, 0] = 3
        other = Progress(*(getattr(progress, f.name).clone() for f in dataclasses.fields(Progress)))
        draft, following = torch.randint(12, (6, 4)), torch.randint(12, (6,))
        accepted, finite = torch.randint(5, (6,)), torch.rand(6, 5) > 0.03
        inputs = [part.to(device) for part in (draft, accepted, following, finite)]
        commit_reference(progress, *inputs, slots=5)
        commit_triton(other, *inputs, slots=5)
        for name in (f.name for f in dataclasses.fields(Progress)):
            assert torch.equal(getattr(progress, name), getattr(other, name)), name
