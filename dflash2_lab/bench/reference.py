"""The published package `dflash` 0.1.0, timed as it is: its own loop on the same weights."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor, nn

from dflash2_lab.errors import LabError
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.published import published_model
from dflash2_lab.target import Target

INSTALL = "pip install --no-deps dflash==0.1.0"
WARM_UP = 20  # cycles that are not counted


def published_or_reason(drafter: Drafter, target: Target) -> tuple[nn.Module | None, str | None]:
    """The package's model of this drafter, or why there is none."""
    try:
        return published_model(drafter, target.embed_weight), None
    except ImportError:
        return None, INSTALL
    except LabError as error:
        return None, str(error)


@torch.inference_mode()
def cycle_seconds(
    model: nn.Module, target: Target, prompt: Int[Tensor, "1 S"], cycles: int
) -> list[float]:
    """Wall clock of each of `cycles` greedy draft-verify cycles behind a prompt, whole blocks only.

    A cycle is what lies between two starts of the drafter; the package waits for the device in each
    of them, so nothing is left over from one to the next.
    """
    from dflash.model import dflash_generate

    starts: list[float] = []
    wanted = WARM_UP + cycles + 1

    def watch(_module: nn.Module, _args: object, kwargs: dict[str, Tensor]) -> None:
        if kwargs["noise_embedding"].shape[1] == model.block_size:
            starts.append(time.perf_counter())
        if len(starts) == wanted:
            raise _EnoughError

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        # More tokens than so many cycles can accept; the watch ends the loop.
        limit = wanted * model.block_size
        dflash_generate(model, target.model, prompt, limit, stop_token_ids=None)
    except _EnoughError:
        pass
    finally:
        handle.remove()
    counted = starts[WARM_UP:]
    return [last - first for first, last in pairwise(counted)]


class _EnoughError(Exception):
    """Leaves the package's loop."""


@dataclass(frozen=True)
class Decoding:
    """One prompt decoded by the package, in its own numbers: the decode alone, without prefill."""

    num_tokens: int
    seconds: float
    acceptance_length: float


def decode_prompts(
    model: nn.Module,
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
) -> list[Decoding]:
    """Each prompt alone, after a short one that is not counted; the package's clock needs CUDA."""
    from dflash.model import dflash_generate

    found = []
    torch.manual_seed(0)
    for number, prompt in enumerate([prompts[0], *prompts]):
        stats = dflash_generate(
            model,
            target.model,
            torch.tensor([list(prompt)], device=target.device),
            max_new_tokens if number else min(max_new_tokens, 4 * model.block_size),
            stop_token_ids=sorted(target.eos_token_ids),
            temperature=temperature,
            return_stats=True,
        )
        seconds = stats.time_per_output_token * stats.num_output_tokens
        length = statistics.fmean(stats.acceptance_lengths or [1])
        found.append(Decoding(stats.num_output_tokens, seconds, length))
    return found[1:]
