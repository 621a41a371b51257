"""What the decode command does: streams responses to standard output, then sums acceptance up."""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from transformers import PreTrainedTokenizerBase

from dflash2_lab.commands import (
    Result,
    device_of,
    refuse_beside,
    target_of,
    template_options,
)
from dflash2_lab.decoding.api import DecodeResult
from dflash2_lab.decoding.api import decode as decode_prompts
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import Estimate
from dflash2_lab.models.io import load_drafter
from dflash2_lab.prompts import Prompt, load_prompts
from dflash2_lab.report import estimate_json, number, text_table
from dflash2_lab.target import Target
from dflash2_lab.tracing import Turn

CLOCK = "wall clock from each response's first token to its last"


def decode(arguments: argparse.Namespace) -> Result:
    """Decode prompts; without --json the responses are streamed as they are made."""
    target = target_of(arguments)
    drafter = None
    if arguments.drafter != "none":
        drafter = load_drafter(
            arguments.drafter, target=target, dtype=arguments.dtype, device=device_of(arguments)
        )
    prompts = _prompts(arguments, target)
    num_responses = arguments.samples * sum(len(prompt.turns) for prompt in prompts)
    stream = None
    if not arguments.json:
        stream = Stream(target, sys.stdout, headed=num_responses > 1)
    options = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "policy", "engine")
    options += ("batch_size", "out", "num_draft", "samples", "max_total", "acceptance")
    result = decode_prompts(
        target,
        drafter,
        prompts,
        on_tokens=stream,
        **{name: getattr(arguments, name) for name in options},
    )
    name = "none" if drafter is None else drafter.name
    folder = {} if arguments.out is None else {"folder": str(arguments.out)}
    text = summary_text(result, name) + "".join(f"\nrun folder: {f}" for f in folder.values())
    return {"text": text, "json": summary(result, name) | folder}


def _prompts(arguments: argparse.Namespace, target: Target) -> list[Prompt]:
    options = template_options(arguments.template_option)
    if arguments.prompt is not None:
        refuse_beside(arguments, "prompt", "prompts")
        if not arguments.prompt.strip():
            raise LabError("--prompt: found no text")
        way = (arguments.system, tuple(sorted(options.items())))
        return [Prompt("prompt", (arguments.prompt,), "prompt", *way)]
    return load_prompts(
        arguments.prompts or "default",
        limit=arguments.limit,
        system=arguments.system,
        template_options=options,
        target=target,
        seed=arguments.seed,
    )


class Detokenizer:
    """Text of a growing list of tokens, held back while its last character is not complete.

    Only the tokens since the last piece are decoded, with that piece before them as their left
    context: some tokenizers write a token otherwise where a text begins.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.context, self.shown = 0, 0

    def add(self, ids: Sequence[int], last: bool) -> str:
        """The text that `ids` complete; all that is left when they are the last."""
        done = "".join(self._grow(token) for token in ids)
        return done + self._piece() if last else done

    def _grow(self, token: int) -> str:
        self.ids.append(token)
        piece = self._piece()
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.context, self.shown = self.shown, len(self.ids)
        return piece

    def _piece(self) -> str:
        """Text of the tokens that are not yet shown."""
        before = self._text(self.ids[self.context : self.shown])
        return self._text(self.ids[self.context :])[len(before) :]

    def _text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


@dataclass
class _Row:
    detokenizer: Detokenizer
    left: int
    pending: str
    done: bool = False


class Stream:
    """Writes responses one below the other, each as it grows.

    Rows that are decoded together wait for the first of them. Each has a header when there are
    several.
    """

    def __init__(self, target: Target, out: TextIO, headed: bool):
        self.target, self.out, self.headed = target, out, headed
        self.rows: dict[tuple[Any, ...], _Row] = {}  # not yet written whole, by their beginning

    def __call__(self, turn: Turn, tokens: list[int]) -> None:
        """Take the next tokens of a response."""
        key = tuple(turn.key.values())
        if key not in self.rows:
            detokenizer = Detokenizer(self.target.tokenizer)
            header = _header(turn) if self.headed else ""
            self.rows[key] = _Row(detokenizer, turn.max_new_tokens, header)
        row = self.rows[key]
        row.left -= len(tokens)
        row.done = row.left == 0 or tokens[-1] in self.target.eos_token_ids
        row.pending += row.detokenizer.add(tokens, row.done) + ("\n\n" if row.done else "")
        for key, row in list(self.rows.items()):
            self.out.write(row.pending)
            row.pending = ""
            if not row.done:
                break
            del self.rows[key]
        self.out.flush()


def _header(turn: Turn) -> str:
    parts = [turn.prompt.id]
    parts += [f"turn {turn.turn}"] if len(turn.prompt.turns) > 1 else []
    parts += [f"sample {turn.sample}"] if turn.sample else []
    return f"== {', '.join(parts)}\n"


def summary(result: DecodeResult, drafter: str) -> dict[str, Any]:
    """A decode in plain JSON values, under the keys of a report."""
    requests, acceptance = result.requests, result.acceptance
    responses = requests.drop(columns="seconds").assign(text=result.texts)
    lengths = ("pooled", "per_request", "pooled_uncut", "per_request_uncut")
    values: dict[str, Any] = {
        "drafter": drafter,
        "policy": result.policy,
        "num_draft": result.num_draft,
        "engine": result.engine,
        "acceptance": result.acceptance_rule,
        "acceptance_length": None,
    }
    if acceptance is not None:
        values |= {
            "acceptance_length": {
                name: estimate_json(getattr(acceptance, name)) for name in lengths
            },
            "accepted_drafts_per_step": float(result.steps["num_accepted"].mean()),
            "tokens_per_step": number(acceptance.pooled.value),
            "survival": [number(slot.value) for slot in acceptance.survival],
            "conditional_acceptance": [
                number(slot.value) for slot in acceptance.conditional_acceptance
            ],
            "num_requests": acceptance.num_requests,
            "num_requests_dropped": acceptance.num_requests_dropped,
        }
    return values | {
        "num_tokens": int(requests["num_tokens"].sum()),
        "finish": requests["finish"].value_counts().sort_index().to_dict(),
        "eos_token_ids": list(result.stop_ids),
        "tokens_per_second": result.tokens_per_second,
        "clock": CLOCK,
        "responses": responses.to_dict("records"),
    }


def summary_text(result: DecodeResult, drafter: str) -> str:
    """What stands below the streamed responses: acceptance, survival, time."""
    parts = []
    if result.acceptance is not None:
        parts += _acceptance_text(result, drafter)
    elif result.policy is not None:
        parts.append("no verify step: every response ended with its first token")
    lengths, finish = result.requests["num_tokens"], result.requests["finish"]
    stopped, stops = (finish == "eos").sum(), " or ".join(map(str, result.stop_ids))
    line = (
        f"{lengths.sum()} tokens in {_count(len(lengths), 'response')}: {stopped} ended by stop id "
        f"{stops}, {len(lengths) - stopped} by length"
    )
    if result.tokens_per_second is not None:
        line += f"\n{result.tokens_per_second:.1f} tokens/s, {result.engine} engine, {CLOCK}"
    return "\n\n".join([*parts, line])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _acceptance_text(result: DecodeResult, drafter: str) -> list[str]:
    acceptance = result.acceptance
    lengths = text_table(
        ["drafter", "policy", "pooled", "per request", "uncut", "accepted", "steps"],
        [
            [
                drafter,
                result.policy,
                _with_interval(acceptance.pooled),
                _with_interval(acceptance.per_request),
                _plain(acceptance.pooled_uncut.value, 2),
                _plain(result.steps["num_accepted"].mean(), 2),
                str(len(result.steps)),
            ]
        ],
        keys=2,
    )
    slots = text_table(
        ["slot", *map(str, range(1, result.num_draft + 1))],
        [
            ["survival", *(_plain(slot.value, 3) for slot in acceptance.survival)],
            ["conditional", *(_plain(slot.value, 3) for slot in acceptance.conditional_acceptance)],
        ],
    )
    return [
        "acceptance length: tokens per verify step, bonus counted [95 % interval over prompts]",
        lengths + "\nuncut: pooled, without the steps that a stop token or the length limit cut; "
        "accepted:\ndrafts per step",
        "survival: share of the steps that accept slots 1..j; conditional: of those that accept\n"
        "slots 1..j-1",
        slots,
    ]


def _with_interval(estimate: Estimate) -> str:
    text = _plain(estimate.value, 2)
    if not math.isfinite(estimate.low):
        return text
    return f"{text} [{estimate.low:.2f}, {estimate.high:.2f}]"


def _plain(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "-"
