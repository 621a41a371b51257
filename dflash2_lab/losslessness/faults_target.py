"""Faults of the target's laws and of the random numbers, as replacements of a decoder's hooks.

`faults` joins them with those of the proposer and of the verifier to the catalogue.
"""

import numpy as np

from dflash2_lab.losslessness.fault import Fault
from dflash2_lab.losslessness.toy import Toy, filtered_law
from dflash2_lab.losslessness.toy_decoding import Rules, State, Verification
from dflash2_lab.losslessness.toy_noise import (
    DraftInTestNoise,
    ReseededNoise,
    SharedGumbelNoise,
    TestInResidualNoise,
)

_SWAPPED = 20  # one row in so many gets its neighbour's laws


def _later_rows(toy: Toy, contexts, state: State):
    return toy.p, np.concatenate([contexts[:, 1:], contexts[:, -1:]], axis=1)


def _stale_slot(toy: Toy, contexts, state: State):
    """The anchor's place in the cache still holds the draft that was refused there."""
    V = toy.config.vocab
    seen, stale = contexts.copy(), state.refused >= 0
    seen[stale, 0] = (contexts[:, 0] // V * V + state.refused)[stale]
    seen[stale, 1] = (state.refused * V + contexts[:, 1] % V)[stale]
    return toy.p, seen


def _untempered(toy: Toy, contexts, state: State):
    return filtered_law(toy.logits, 1.0, toy.config.top_k, toy.config.top_p), contexts


def _unfiltered(toy: Toy, contexts, state: State):
    return filtered_law(toy.logits, toy.config.temperature), contexts


def _swapped_rows(toy: Toy, contexts, state: State):
    """Which rows: a hash of the context, so that the fault has a law of its own and no draws."""
    swapped = (contexts[:, 0] * 2654435761 >> 7) % _SWAPPED == 0
    return toy.p, np.where(swapped[:, None], np.roll(contexts, 1, axis=0), contexts)


def _bonus_before(v: Verification):
    return v.p(np.full(len(v.path), v.num_draft - 1))


TARGET_FAULTS = (
    Fault(
        "target-rows-off-by-one",
        "target",
        "p_i is read from row i + 1 of the target pass",
        "the logits of row i are the law of the token after i: an index shifted once too often",
        64,
        Rules(target=_later_rows),
    ),
    Fault(
        "stale-kv-slot",
        "target",
        "after a refusal the place of the replacement in the cache keeps the refused draft",
        "the cache is not rolled back, or rewritten one place late (mlx-lm #1109, #1486)",
        64,
        Rules(target=_stale_slot),
    ),
    Fault(
        "p-untempered",
        "target",
        "p = filtered softmax(logits) in place of softmax(logits / T)",
        "sampling parameters do not reach the acceptance test (vLLM #10198; lattice #388, #974)",
        128,
        Rules(target=_untempered),
    ),
    Fault(
        "p-unfiltered",
        "target",
        "p = softmax(logits / T) without top-k and top-p",
        "filters are applied to drafts alone (sparkring #161)",
        128,
        Rules(target=_unfiltered),
    ),
    Fault(
        "rows-swapped",
        "target",
        "5 % of the rows are verified with the laws of their neighbour in the batch",
        "writes across rows, seen at batch > 2 alone (flash-attention #2779, 1Cat-vLLM #656)",
        512,
        Rules(target=_swapped_rows),
    ),
    Fault(
        "bonus-off-by-one",
        "bonus",
        "the bonus token is drawn from p of the last drafted slot",
        "the row after the last draft is left out of the target pass or mocked in tests",
        256,
        Rules(bonus=_bonus_before),
    ),
)

NOISE_FAULTS = (
    Fault(
        "reseed-every-block",
        "random numbers",
        "every block of a request draws the uniform numbers of its first block",
        "the counter restarts with each step, or a graph replays one generator state",
        1024,
        Rules(noise=ReseededNoise),
    ),
    Fault(
        "uniform-shared-draft-acceptance",
        "random numbers",
        "the u that picked x by the inverse cdf also tests u < p/q",
        "both come from one counter of the same generator (vLLM #47386)",
        4096,
        Rules(noise=DraftInTestNoise),
    ),
    Fault(
        "uniform-shared-acceptance-residual",
        "random numbers",
        "the u that refused x also picks the residual token by the inverse cdf",
        "both come from one draw of the generator (vLLM #54282)",
        32768,
        Rules(noise=TestInResidualNoise),
    ),
    Fault(
        "gumbel-shared-draft-residual",
        "random numbers",
        "x = argmax(log q + g) and, refused, argmax(log (p - q)+ + g) with the same g",
        "draft and recovery share seed and counter (vLLM #47386, #54282; DFlash 2 walk in "
        "glm53-flash-exl3 #8)",
        32768,
        Rules(noise=SharedGumbelNoise),
    ),
)
