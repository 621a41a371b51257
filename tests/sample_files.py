"""Lines of sample files, drawn from a target, for the tests of audits."""

import json

from dflash2_lab.generate import Request, generate
from dflash2_lab.prompts import Prompt, render
from dflash2_lab.sampling import Sampling, row_key

PROMPTS = ("hi", "go on", "why?", "and then?")


def draw_lines(target, sampling, num_samples=8, max_new_tokens=32, seed=0, prompts=PROMPTS):
    """Samples of the target's own law; the batch ends none of them early."""
    keys = [(prompt, sample) for prompt in prompts for sample in range(num_samples)]
    requests = [
        Request(
            render(target, Prompt("p", (prompt,), "set")),
            row_key(seed, prompt, sample),
            max_new_tokens,
        )
        for prompt, sample in keys
    ]
    answers = generate(target, requests, sampling, len(requests))
    return [
        {"prompt": prompt, "output_ids": answer.response_ids, "seed": sample}
        for (prompt, sample), answer in zip(keys, answers, strict=True)
    ]


def write_lines(path, lines):
    """Write a sample file; a line that is text is written as it is."""
    words = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{word}\n" for word in words))
    return path


WARM = Sampling(0.8, 0.95, 50)
GREEDY = Sampling()
