"""Plain sampling at T = 1 of a large batch: the graph engine against transformers' `generate`.

This is how training text is made. Both sides answer the same prompts (repeated until they fill the
batch) with the same number of tokens, ends of text left out; times include the prefill.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice
from typing import Any

from dflash2_lab.bench.metered import MeteredEngine
from dflash2_lab.bench.timing import Spread, order, ratios, wait
from dflash2_lab.decoding.requests import Request, request_keys
from dflash2_lab.generate import pad_left
from dflash2_lab.sampling import Sampling
from dflash2_lab.target import Target

log = logging.getLogger(__name__)

WARM_UP = 4  # tokens of an uncounted call of each side


def bench_sampler(
    target: Target, prompts: Sequence[Sequence[int]], batch: int, num_tokens: int, repeats: int
) -> dict[str, Any]:
    """Tokens a second of both sides in each round, and their ratio."""
    rows = list(islice(cycle(prompts), batch))
    log.info("sampling %d rows of %d tokens", batch, num_tokens)
    longest = max(map(len, rows)) + max(num_tokens, WARM_UP)
    engine = MeteredEngine(target, None, None, batch, longest)
    _transformers_seconds(target, rows, WARM_UP)
    engine.metered(_requests(rows, WARM_UP))
    passes, other = [], []
    for turn in range(repeats):
        for side in order(["graph", "transformers"], turn):
            if side == "graph":
                passes.append(engine.metered(_requests(rows, num_tokens))[1])
            else:
                other.append(_transformers_seconds(target, rows, num_tokens))
    total = batch * num_tokens
    ours = [one.end_to_end_rate for one in passes]
    theirs = [total / value for value in other]
    return {
        "batch": batch,
        "num_tokens": num_tokens,
        "passes": [asdict(one) for one in passes],
        "transformers_seconds": other,
        "tokens_per_second": Spread.of(ours),
        "decode_tokens_per_second": Spread.of([one.decode_rate for one in passes]),
        "transformers_tokens_per_second": Spread.of(theirs),
        "ratio": Spread.of(ratios(ours, theirs)),
    }


def _requests(rows: Sequence[Sequence[int]], num_tokens: int) -> list[Request]:
    """Row by row with random numbers of its own; no token ends a row."""
    return [
        Request(
            tuple(ids), num_tokens, Sampling(1.0), request_keys(0, str(n), 0, 0, None), frozenset()
        )
        for n, ids in enumerate(rows)
    ]


def _transformers_seconds(target: Target, rows: Sequence[Sequence[int]], num_tokens: int) -> float:
    pad = min(target.eos_token_ids)
    ids, attention_mask = pad_left(rows, pad, target.device)
    wait(target.device)
    started = time.perf_counter()
    target.model.generate(
        input_ids=ids,
        attention_mask=attention_mask.long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        pad_token_id=pad,
    )
    wait(target.device)
    return time.perf_counter() - started
