"""Audit of any engine's output: has every emitted token the target's law?

The target is teacher-forced over each sample and gives the law p of every emitted token (weights
in float32 at least, softmax and filters in float64). Samples at T > 0 go through the tests of
`battery` that need p alone, samples at T = 0 through the regret gate: no emitted token may lie
further below the best one than twice a noise band.

The band is how far rounding moves a margin of the target itself: of its own dtype, in one pass and
in blocks on a cache, from the reference, over the text of the samples. It comes from the target's
logits alone, so an engine under test cannot widen it. It also says where an engine's rounding may
have put a token on the other side of a top-k or top-p cut: such a token is at the edge, and its
row's law is the one with the cut moved just beyond the band. A token beyond that has p = 0.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from dflash2_lab.agreement.margins import margins
from dflash2_lab.agreement.noise_band import Noise, _noise
from dflash2_lab.decoding.steps import TargetRow, check_logits, check_row
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.battery import Emitted, holm, pit_tests, smallest_tv
from dflash2_lab.losslessness.edges import law_at
from dflash2_lab.losslessness.sample_rows import Row
from dflash2_lab.losslessness.scoring import concat, score
from dflash2_lab.losslessness.verifying import LEVELS
from dflash2_lab.target import Target

VERDICTS = ("equal", "tie-level", "no difference", "inconclusive", "differ", "bug")  # best first
_LOGIT_BYTES = 2**28  # of one pass, in float32
_LAW_BYTES = 2**25  # of the laws that are scored at once, which makes some more of that size
_LISTED = 5  # tokens outside the law that are named
_BLOCK = 16  # tokens of a block on a cache
_CALIBRATION = 2_048  # tokens that the noise band is measured on, when there are as many


@torch.inference_mode()
def audit_samples(
    target: Target, rows: Sequence[Row], alpha: float = 1e-3, level: str = "pr", seed: int = 0
) -> dict[str, Any]:
    """Test samples against the law of the target.

    Args:
        alpha: chance of rejecting samples at T > 0 that have exactly that law (Holm over the
            tests).
        level: of `verifying.LEVELS`, how many tokens at T > 0 are asked for.
        seed: of the uniform numbers that place a token within its own share of the law.

    Returns:
        Plain JSON values: `verdict`, the worse one of the two parts; `sampled` and `greedy`, None
        where there are no such samples; `noise_band`, None where it plays no role. The verdict is
        "no difference", "inconclusive" (fewer tokens than the level asks for) or "differ" for
        samples at T > 0, and "equal", "tie-level" or "bug" for greedy ones. "differ" and "bug" are
        failed checks.

    Raises:
        LabError: logits that are not finite, or that depend on how they are computed by more than
            rounding explains; a target without a cache, where the band is needed.
    """
    reference = target
    if target.dtype.itemsize < 4:
        reference = replace(target, model=copy.deepcopy(target.model).float())
    greedy = [row for row in rows if row.sampling.greedy]
    sampled = [row for row in rows if not row.sampling.greedy]
    filtered = [row for row in sampled if row.sampling.top_k or row.sampling.top_p < 1]
    noise = _measure(target, reference, greedy + filtered) if greedy or filtered else {}
    band = max((part.largest for part in noise.values()), default=0.0)
    parts = {
        "sampled": _sampled(reference, sampled, band, alpha, level, seed) if sampled else None,
        "greedy": _greedy(reference, greedy, band) if greedy else None,
    }
    scorings = {way: asdict(part) for way, part in noise.items()}
    return {
        "verdict": max((part["verdict"] for part in parts.values() if part), key=VERDICTS.index),
        "num_samples": len(rows),
        "num_prompts": len({row.prompt_ids for row in rows}),
        "num_tokens": sum(len(row.output_ids) for row in rows),
        "num_stopped": sum(row.output_ids[-1] in target.eos_token_ids for row in rows),
        **parts,
        "noise_band": {"band": band, "by_scoring": scorings} if noise else None,
    }


def _measure(target: Target, reference: Target, rows: Sequence[Row]) -> dict[str, Noise]:
    """Noise of the target's margins at the tokens of some samples."""
    check_row(target, (), rolls_back=False)
    found: dict[str, list[np.ndarray]] = {"reference": [], "eager": []}
    if reference is not target:
        found["whole"] = []
    size, count = 0.0, 0
    for row in tqdm(rows, desc="noise band", unit="sample", delay=2.0):
        wide, largest = _margins(_one_pass(reference, row), row)
        found["reference"].append(wide)
        found["eager"].append(_margins(_in_blocks(target, row), row)[0])
        if "whole" in found:
            found["whole"].append(_margins(_one_pass(target, row), row)[0])
        size, count = max(size, largest), count + len(row.output_ids)
        if count >= _CALIBRATION:
            break
    joined = {way: np.concatenate(parts) for way, parts in found.items()}
    noise = _noise(joined.pop("reference"), joined, torch.finfo(target.dtype).eps, size)
    for way, part in noise.items():
        if not part.is_rounding:
            raise LabError(
                f"target {target.name}: its scores ({way}) are {part.largest:.3g} off those of one "
                f"pass in {reference.dtype}, rounding explains {part.limit:.3g}; expected a target "
                "whose logits do not depend on how they are computed"
            )
    return noise


def _margins(parts: Iterable[Float[Tensor, "n V"]], row: Row) -> tuple[np.ndarray, float]:
    """Margins at the tokens of a sample, from consecutive logits; and the largest logit."""
    found, place, size = [], 0, 0.0
    for logits in parts:
        tokens = torch.tensor(row.output_ids[place : place + len(logits)], device=logits.device)
        found.append(margins(logits, tokens).double().cpu().numpy())
        size = max(size, float(logits[logits.isfinite()].abs().max()))
        place += len(logits)
    return np.concatenate(found), size


def _one_pass(target: Target, row: Row) -> Iterator[Float[Tensor, "n V"]]:
    """Logits at the tokens of a sample: of one pass, or of one a piece where they fill memory."""
    num_prompt, length = len(row.prompt_ids), len(row.output_ids)
    ids = torch.tensor([[*row.prompt_ids, *row.output_ids]], device=target.device)
    size = max(1, _LOGIT_BYTES // (4 * target.vocab_size))
    for first in range(0, length, size):
        last = min(first + size, length)
        seen = ids[:, : num_prompt + last - 1]
        found = target.model(input_ids=seen, use_cache=False, logits_to_keep=last - first)
        what = f"target {target.name}: its logits are not finite in {target.dtype}"
        check_logits(found.logits[0], what)
        yield found.logits[0]


def _in_blocks(target: Target, row: Row) -> Iterator[Float[Tensor, "n V"]]:
    """The same by the passes of an engine: the prompt, then blocks of tokens on a cache."""
    side, read = TargetRow(target, rolls_back=False), row.output_ids[:-1]
    yield side.extend(row.prompt_ids, 1)[0]
    for first in range(0, len(read), _BLOCK):
        yield side.extend(read[first : first + _BLOCK])[0]


def _sampled(
    target: Target, rows: Sequence[Row], band: float, alpha: float, level: str, seed: int
) -> dict[str, Any]:
    scores, num_edge = [], 0
    size = max(1, _LAW_BYTES // (8 * target.vocab_size))
    for row in tqdm(rows, desc="score samples", unit="sample", delay=2.0):
        tokens, place = torch.tensor(row.output_ids, device=target.device), 0
        for logits in _one_pass(target, row):
            for part in logits.split(size):
                chosen = tokens[place : place + len(part)]
                law, edges = law_at(part.double(), chosen, row.sampling, band)
                scores.append(score(chosen, law, None))
                num_edge, place = num_edge + edges, place + len(part)
    lengths = [len(row.output_ids) for row in rows]
    stream = np.repeat(np.arange(len(rows)), lengths)
    order = np.concatenate([np.arange(length) for length in lengths])
    emitted = Emitted(concat(scores), stream, order, np.full(len(stream), -1))
    # A generator of its own: engines may draw from that of the seed itself.
    p_values = pit_tests(emitted, np.random.default_rng([seed, *b"audit"]))
    del p_values["slots"]  # places in a block, which are not known here
    rejected = holm(p_values, alpha)
    laws = list(dict.fromkeys(row.sampling for row in rows))
    outside = np.flatnonzero(emitted.scores.p <= 0)
    verdict = "no difference" if len(stream) >= LEVELS[level] else "inconclusive"
    return {
        "verdict": "differ" if rejected else verdict,
        "num_samples": len(rows),
        "num_tokens": len(stream),
        "sampling": [asdict(one) for one in laws],
        "laws": [one.label for one in laws],
        "level": level,
        "level_tokens": LEVELS[level],
        "alpha": alpha,
        "p_values": p_values,
        "rejected": rejected,
        "smallest_tv": smallest_tv(len(stream), alpha / len(p_values)),
        "num_edge": num_edge,
        "num_outside": len(outside),
        "outside": [
            {"where": rows[stream[place]].sample.where, "position": int(order[place])}
            | {"token": rows[stream[place]].output_ids[order[place]]}
            for place in outside[:_LISTED].tolist()
        ],
    }


def _greedy(target: Target, rows: Sequence[Row], band: float) -> dict[str, Any]:
    gaps, worst = [], {"gap": -1.0}
    for row in tqdm(rows, desc="score samples", unit="sample", delay=2.0):
        place = 0
        for logits in _one_pass(target, row):
            tokens = torch.tensor(row.output_ids[place : place + len(logits)], device=logits.device)
            best = logits.max(dim=-1)
            found = best.values - logits.gather(-1, tokens[:, None])[:, 0]
            gaps.append(found.double().cpu().numpy())
            index = int(found.argmax())
            if found[index] > worst["gap"]:
                worst = {
                    "gap": float(found[index]),
                    "where": row.sample.where,
                    "position": place + index,
                    "token": int(tokens[index]),
                    "best_token": int(best.indices[index]),
                }
            place += len(logits)
    gap = np.concatenate(gaps)
    num_ties, num_bugs = int(((gap > 0) & (gap <= 2 * band)).sum()), int((gap > 2 * band).sum())
    verdict = "bug" if num_bugs else "tie-level" if num_ties else "equal"
    return {
        "verdict": verdict,
        "num_samples": len(rows),
        "num_tokens": len(gap),
        "num_argmax": len(gap) - num_ties - num_bugs,
        "num_ties": num_ties,
        "num_bugs": num_bugs,
        "worst_argmax_gap": worst,
    }
