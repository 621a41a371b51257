"""End of a draft-verify cycle: what each sequence emits, and where its next block starts.

Of the accepted drafts and the token after them, up to the length limit and the first stop token
leave the step. Then the block moves: start and anchor go past the accepted drafts. A sequence that
has ended, or whose logits were not finite, stays where it is until the host gives its place away.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from .tools import jit, next_power_of_2, on_gpu, tl

RUNNING, STOPPED, FULL, BROKEN = 0, 1, 2, 3  # status of a sequence; FULL: at its length limit


@dataclass(frozen=True, eq=False)
class Progress:
    """Where every sequence stands, on the device.

    `anchor` is the last committed token and `start` its position; `length` counts the response's
    tokens, `steps` its verify steps; `offered` slots may be accepted in the next step;
    `draft_counter` and `final_counter` index random numbers.
    """

    anchor: Int[Tensor, " B"]
    start: Int[Tensor, " B"]
    length: Int[Tensor, " B"]
    limit: Int[Tensor, " B"]
    steps: Int[Tensor, " B"]
    status: Int[Tensor, " B"]
    offered: Int[Tensor, " B"]
    draft_counter: Int[Tensor, " B"]
    final_counter: Int[Tensor, " B"]
    stops: Int[Tensor, "B num_stops"]
    tokens: Int[Tensor, "B max_tokens"]
    accepted: Int[Tensor, "B max_tokens"]


def make_progress(batch: int, max_tokens: int, num_stops: int, device: torch.device) -> Progress:
    """Empty places, all ended."""

    def full(value: int, *more: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full((batch, *more), value, dtype=dtype, device=device)

    return Progress(
        anchor=full(0), start=full(0), length=full(1), limit=full(1), steps=full(0),
        status=full(FULL), offered=full(0, dtype=torch.int32), draft_counter=full(0),
        final_counter=full(0), stops=full(-1, num_stops), tokens=full(0, max_tokens),
        accepted=full(0, max_tokens, dtype=torch.int32),
    )  # fmt: skip


def commit_reference(
    progress: Progress,
    draft: Int[Tensor, "B P"],
    num_accepted: Int[Tensor, " B"],
    next_token: Int[Tensor, " B"],
    finite: Bool[Tensor, "B G"],
    slots: int,
) -> None:
    """See `commit`, one sequence after another."""
    num_draft = draft.shape[1]
    for row in range(len(draft)):
        if int(progress.status[row]) != RUNNING:
            continue
        if not bool(finite[row].all()):
            progress.status[row] = BROKEN
            continue
        count, length = int(num_accepted[row]), int(progress.length[row])
        emitted = [*draft[row, :count].tolist(), int(next_token[row])]
        emitted = emitted[: int(progress.limit[row]) - length]
        stops = [token in progress.stops[row].tolist() for token in emitted]
        if any(stops):
            emitted = emitted[: stops.index(True) + 1]
        progress.tokens[row, length : length + len(emitted)] = torch.tensor(
            emitted, device=draft.device
        )
        progress.accepted[row, int(progress.steps[row])] = count
        progress.steps[row] += 1
        progress.length[row] += len(emitted)
        length += len(emitted)
        if any(stops):
            progress.status[row] = STOPPED
        elif length == int(progress.limit[row]):
            progress.status[row] = FULL
        else:
            progress.start[row] += count + 1
            progress.anchor[row] = next_token[row]
            progress.offered[row] = min(num_draft, int(progress.limit[row]) - length)
            progress.draft_counter[row] = (length - 1) * slots
            progress.final_counter[row] = length - 1


@jit
def _commit_kernel(
    anchor_ptr, start_ptr, length_ptr, limit_ptr, steps_ptr, status_ptr, offered_ptr,
    draft_counter_ptr, final_counter_ptr, stops_ptr, tokens_ptr, accepted_ptr,
    draft_ptr, num_accepted_ptr, next_ptr, finite_ptr, stride_tokens, stride_draft, slots,
    P: tl.constexpr, F: tl.constexpr, NUM_STOPS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_STOPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(status_ptr + row) != 0:
        return
    lines = tl.arange(0, BLOCK_F)
    finite = tl.load(finite_ptr + row * F + lines, mask=lines < F, other=1)
    if tl.min(finite.to(tl.int32), 0) == 0:
        tl.store(status_ptr + row, 3)
        return
    count = tl.load(num_accepted_ptr + row)
    length = tl.load(length_ptr + row)
    limit = tl.load(limit_ptr + row)
    steps = tl.load(steps_ptr + row)
    after = tl.load(next_ptr + row)
    drafted = tl.arange(0, BLOCK_P)
    tokens = tl.load(draft_ptr + row * stride_draft + drafted, mask=drafted < count, other=-2)
    tokens = tl.where(drafted == count, after, tokens)
    places = tl.arange(0, BLOCK_STOPS)
    stops = tl.load(stops_ptr + row * NUM_STOPS + places, mask=places < NUM_STOPS, other=-1)
    is_stop = tl.max((tokens[:, None] == stops[None, :]).to(tl.int32), 1)
    first_stop = tl.min(tl.where((is_stop == 1) & (drafted <= count), drafted, BLOCK_P), 0)
    room = tl.minimum(count + 1, limit - length)
    emitted = tl.minimum(room, first_stop + 1)
    stopped = first_stop < room
    p_tokens = tokens_ptr + row * stride_tokens + length + drafted
    tl.store(p_tokens, tokens, mask=drafted < emitted)
    tl.store(accepted_ptr + row * stride_tokens + steps, count.to(tl.int32))
    tl.store(steps_ptr + row, steps + 1)
    length += emitted
    tl.store(length_ptr + row, length)
    if stopped:
        tl.store(status_ptr + row, 1)
    elif length == limit:
        tl.store(status_ptr + row, 2)
    else:
        tl.store(start_ptr + row, tl.load(start_ptr + row) + count + 1)
        tl.store(anchor_ptr + row, after)
        tl.store(offered_ptr + row, tl.minimum(limit - length, P).to(tl.int32))
        tl.store(draft_counter_ptr + row, (length - 1) * slots)
        tl.store(final_counter_ptr + row, length - 1)


def commit_triton(
    progress: Progress,
    draft: Int[Tensor, "B P"],
    num_accepted: Int[Tensor, " B"],
    next_token: Int[Tensor, " B"],
    finite: Bool[Tensor, "B G"],
    slots: int,
) -> None:
    """See `commit`, one program a sequence."""
    batch, num_draft = draft.shape
    num_stops = progress.stops.shape[1]
    _commit_kernel[(batch,)](
        progress.anchor, progress.start, progress.length, progress.limit, progress.steps,
        progress.status, progress.offered, progress.draft_counter, progress.final_counter,
        progress.stops, progress.tokens, progress.accepted, draft, num_accepted, next_token,
        finite, progress.tokens.stride(0), draft.stride(0), slots, P=num_draft,
        F=finite.shape[1], NUM_STOPS=num_stops, BLOCK_F=next_power_of_2(finite.shape[1]),
        BLOCK_P=next_power_of_2(num_draft + 1), BLOCK_STOPS=next_power_of_2(num_stops),
        num_warps=1,
    )  # fmt: skip


def commit(
    progress: Progress,
    draft: Int[Tensor, "B P"],
    num_accepted: Int[Tensor, " B"],
    next_token: Int[Tensor, " B"],
    finite: Bool[Tensor, "B G"],
    slots: int,
) -> None:
    """Emit and move on, in place.

    `finite` is false where a row of a sequence's logits is not; `slots` are those of the trained
    block, each of which has a random number of its own.
    """
    run = commit_triton if on_gpu(draft, next_token) else commit_reference
    run(progress, draft, num_accepted, next_token, finite, slots)
