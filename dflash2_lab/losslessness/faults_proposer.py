"""Faults of the proposer: the law drawn from and the law reported part ways."""

import numpy as np

from dflash2_lab.losslessness.fault import Fault
from dflash2_lab.losslessness.toy import softmax, top_p_law
from dflash2_lab.losslessness.toy_decoding import Rules, Walk, drawn_law

_TOP_P = 0.9


def _uniform(walk: Walk):
    return np.full(walk.ids.shape, 1 / walk.ids.shape[1])


def _unary_only(walk: Walk):
    return walk.law(walk.unary())


def _argmax(walk: Walk):
    scores = walk.scores()
    return (scores.argmax(-1)[:, None] == np.arange(scores.shape[1])).astype(float)


def _astray(walk: Walk):
    return walk.law(walk.scores(walk.astray))


def _untempered(walk: Walk):
    return softmax(walk.scores())


def _filtered(walk: Walk):
    return top_p_law(drawn_law(walk), _TOP_P)


def _bfloat16(walk: Walk):
    """Round half to even to the upper 16 bits of float32."""
    bits = drawn_law(walk).astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(float)


PROPOSER_FAULTS = (
    Fault(
        "q-reported-uniform",
        "reported q",
        "q is reported as 1/K on the K candidates",
        "the walk returns ids alone and the caller fills in a law",
        128,
        Rules(reported=_uniform),
    ),
    Fault(
        "q-unary-only",
        "reported q",
        "q is reported without the pairwise term of the selector",
        "the law is formed from the draft head's logits, the draw from the selector's scores",
        256,
        Rules(reported=_unary_only),
    ),
    Fault(
        "argmax-draw-soft-q",
        "draft",
        "x = argmax q, reported with the softmax q",
        "greedy drafts meet a verifier for sampled ones (speculative-sampling #3, #4; ds4 #482; "
        "xLLM #2175)",
        256,
        Rules(drawn=_argmax, reported=drawn_law),
    ),
    Fault(
        "wrong-anchor-draw",
        "draft",
        "the first slot draws after the token before the anchor, q is reported after the anchor",
        "the walk starts from the context's last feature, one token behind the anchor",
        4096,
        Rules(drawn=_astray, reported=drawn_law),
    ),
    Fault(
        "q-untempered",
        "reported q",
        "x is drawn at T, q reported as softmax(scores)",
        "raw scores are handed to the acceptance test (transformers #47932, #47961)",
        8192,
        Rules(reported=_untempered),
    ),
    Fault(
        "draft-untempered",
        "draft",
        "x is drawn at T = 1, q reported at T",
        "the temperature reaches the verifier and not the drafter's walk",
        8192,
        Rules(drawn=_untempered, reported=drawn_law),
    ),
    Fault(
        "q-unfiltered",
        "reported q",
        "x is drawn from q cut to top-p 0.9, q reported whole",
        "candidates come from processed logits, q from raw ones (transformers #47932)",
        16384,
        Rules(drawn=_filtered, reported=drawn_law),
    ),
    Fault(
        "q-bfloat16",
        "reported q",
        "q is reported in bfloat16, x drawn from float32",
        "draw and stored law differ in precision (DeepSpec #31)",
        None,
        Rules(reported=_bfloat16),
    ),
)

PROPOSER_CONTROLS = (
    Fault(
        "one-hot-consistent",
        "reported q",
        "x is drawn from the walk, q reported one-hot on x: accept with p(x), else p without x",
        "said to be biased (z-lab/dflash #74); any x independent of the test is lossless",
        None,
        Rules(one_hot=True),
    ),
    Fault(
        "wrong-anchor-consistent",
        "draft",
        "the first slot is drawn and reported after the token before the anchor",
        "the walk starts one token behind: q is what was drawn from, only acceptance falls",
        None,
        Rules(drawn=_astray),
    ),
    Fault(
        "stale-features-consistent",
        "draft",
        "the drafter's context keeps the feature of the draft that was refused last",
        "drafter state is not rolled back: q follows the same input, only acceptance falls",
        None,
        Rules(
            features=lambda toy, state: np.where(
                state.refused >= 0,
                state.refused * toy.config.vocab + state.context % toy.config.vocab,
                state.context,
            )
        ),
    ),
    Fault(
        "filtered-q-consistent",
        "draft",
        "q is cut to top-p 0.9, drawn from and reported",
        "filters on drafts alone are lossless (local-inference-lab/vllm #573)",
        None,
        Rules(drawn=_filtered),
    ),
)
