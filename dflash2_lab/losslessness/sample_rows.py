"""Samples as a target sees them: token ids of prompt and output, or one clear error."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.sample_file import Sample, check_seeds, prompt_hash
from dflash2_lab.prompts import Prompt, render
from dflash2_lab.sampling import Sampling
from dflash2_lab.target import Target


@dataclass(frozen=True)
class Row:
    """A sample as the target sees it."""

    sample: Sample
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]

    @property
    def sampling(self) -> Sampling:
        """The law it claims to have."""
        return self.sample.sampling


def resolve(
    target: Target,
    samples: Sequence[Sample],
    system: str | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> tuple[list[Row], list[str]]:
    """Samples as token ids, and notes on what had to be assumed for that.

    Args:
        samples: their sampling options known (`assume_sampling`).
        system, template_options: how prompts of text are rendered (messages bring their own
            system message).

    Raises:
        LabError: a prompt that cannot be rendered or has another
            hash, an id outside the vocabulary, tokens after a stop token, a stop token that is
            missing, text that is not the text of its own tokens, more tokens than the target has
            positions for, or a prompt with a seed that comes twice.
    """
    options = tuple(sorted((template_options or {}).items()))
    rows = []
    for sample in samples:
        prompt = _prompt_ids(target, sample, system, options)
        rows.append(Row(sample, prompt, _output_ids(target, sample, len(prompt))))
    check_seeds(samples, [row.prompt_ids for row in rows])
    return rows, _notes(target, rows)


def _prompt_ids(
    target: Target, sample: Sample, system: str | None, options: tuple[tuple[str, Any], ...]
) -> tuple[int, ...]:
    if sample.prompt_ids is not None:
        ids = sample.prompt_ids
        _check_vocabulary(target, ids, f"{sample.where}: prompt_ids")
    else:
        turns, history = [sample.prompt], []
        if not isinstance(sample.prompt, str):
            system = next((text for role, text in sample.prompt if role == "system"), None)
            turns = [text for role, text in sample.prompt if role == "user"]
            history = [text for role, text in sample.prompt if role == "assistant"]
        prompt = Prompt(sample.where, tuple(turns), "samples", system, options)
        ids = tuple(render(target, prompt, history))
    found = prompt_hash(ids)
    if sample.prompt_hash is not None and sample.prompt_hash != found:
        raise LabError(
            f"{sample.where}: prompt_hash: found {sample.prompt_hash[:16]}, but the prompt that "
            f"target {target.name} renders has {found[:16]} ({len(ids)} tokens); expected the "
            "template, its options and the system message that the samples were made with"
        )
    return ids


def _output_ids(target: Target, sample: Sample, num_prompt: int) -> tuple[int, ...]:
    stops = sorted(target.eos_token_ids)
    key = "output_ids" if sample.output is None else "output"
    ids = sample.output_ids if sample.output is None else _tokenise(target, sample)
    _check_vocabulary(target, ids, f"{sample.where}: {key}")
    early = [place for place, token in enumerate(ids[:-1]) if token in stops]
    if early:
        raise LabError(
            f"{sample.where}: {key}: found {len(ids) - early[0] - 1} tokens after stop token "
            f"{ids[early[0]]} (position {early[0]}), expected none"
        )
    if sample.finish_reason == "stop" and ids[-1] not in stops:
        raise LabError(
            f'{sample.where}: {key}: found finish_reason "stop" and {ids[-1]} as last token, '
            f"expected one of the stop tokens {stops}: they are part of what was sampled"
        )
    total = num_prompt + len(ids)
    if target.max_positions is not None and total > target.max_positions:
        raise LabError(
            f"{sample.where}: found {total} tokens of prompt and output, but target {target.name} "
            f"has {target.max_positions} positions"
        )
    return tuple(ids)


def _tokenise(target: Target, sample: Sample) -> list[int]:
    """Ids of a text output, with the tokenizer's stop token where it ended by itself."""
    tokenizer = target.tokenizer
    ids = tokenizer(sample.output, add_special_tokens=False)["input_ids"]
    again = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if again != sample.output or "\N{REPLACEMENT CHARACTER}" in sample.output:
        raise LabError(
            f"{sample.where}: output: found text that target {target.name} does not give back "
            "after tokenising it; expected output_ids for such a sample"
        )
    if sample.finish_reason == "stop" and ids[-1] not in target.eos_token_ids:
        ids = [*ids, tokenizer.eos_token_id]
    return ids


def _check_vocabulary(target: Target, ids: Sequence[int], what: str) -> None:
    bad = [place for place, token in enumerate(ids) if not 0 <= token < target.vocab_size]
    if bad:
        raise LabError(
            f"{what}: found {ids[bad[0]]} (position {bad[0]}), expected ids below the "
            f"{target.vocab_size} of target {target.name}"
        )


def _notes(target: Target, rows: Sequence[Row]) -> list[str]:
    notes = []
    texts = sum(row.sample.output is not None for row in rows)
    if texts:
        notes.append(
            f"{texts} of {len(rows)} outputs are text and were tokenised anew: where the engine "
            "sampled other tokens of the same text, a test can fail for no fault of it; output_ids "
            "settle that"
        )
    stopped = any(row.output_ids[-1] in target.eos_token_ids for row in rows)
    unsaid = {len(row.output_ids) for row in rows if row.sample.finish_reason is None}
    if not stopped and len(unsaid) > 1:
        notes.append(
            f"no output ends with a stop token {sorted(target.eos_token_ids)}, though their "
            "lengths differ: if the engine left the stop tokens out, a test can fail for no fault "
            "of it"
        )
    return notes
