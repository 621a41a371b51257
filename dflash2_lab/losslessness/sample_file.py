"""Sample files: what any engine answered to prompts, one JSON object a line.

    prompt | prompt_ids     one of them: the text of one user turn or a list of chat messages
                            ({"role", "content"}), which the target's template renders; or token
                            ids, taken as they are
    output_ids | output     one of them: token ids as they were sampled, a stop token included; or
                            text, which is tokenised anew
    seed                    an integer: a prompt and a seed are one sample
    temperature, top_p, top_k   on every line or on none (1 and 0 switch the last two off)
    finish_reason           "stop" or "length"; needed with `output`
    prompt_hash             sha256 of the rendered prompt, `prompt_hash(ids)`

Other keys are not read, but one of an option that changes the law (`OTHER_OPTIONS`) is refused.
"""

import hashlib
import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash2_lab.errors import LabError
from dflash2_lab.sampling import Sampling

FINISHES = ("stop", "length")
OTHER_OPTIONS = {  # options of engines that change the law, and the values that switch them off
    "min_p": (0,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
MAX_SHOWN = 60  # characters of a value in an error


@dataclass(frozen=True)
class Sample:
    """One line of a file, its values checked as far as that goes without the target."""

    where: str  # file:line
    prompt: str | tuple[tuple[str, str], ...] | None  # text, or (role, content) of each message
    prompt_ids: tuple[int, ...] | None
    output: str | None
    output_ids: tuple[int, ...] | None
    seed: int
    sampling: Sampling | None
    finish_reason: str | None
    prompt_hash: str | None


def prompt_hash(ids: Sequence[int]) -> str:
    """sha256 of a rendered prompt: of its token ids as a JSON list, "[1, 2, 3]"."""
    return hashlib.sha256(json.dumps([int(token) for token in ids]).encode()).hexdigest()


def read_samples(path: str | Path) -> list[Sample]:
    """Read a sample file.

    Raises:
        LabError: a file that cannot be read or holds no sample, a malformed line (with file, line,
            what was found and what was expected), a prompt with a seed that comes twice, or
            sampling options on some lines only.
    """
    path = Path(path)
    try:
        # Not splitlines: JSON may hold U+2028 as it is.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"samples {path}: cannot be read ({error})") from error
    samples = [
        _sample(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not samples:
        raise LabError(f"samples {path}: found no sample, expected one JSON object a line")
    given = [sample.sampling is not None for sample in samples]
    if any(given) and not all(given):
        mute, loud = samples[given.index(False)], samples[given.index(True)]
        raise LabError(
            f"{mute.where}: found no temperature, but {loud.where} has its own; expected "
            "temperature (and top_p, top_k) on every line or on none"
        )
    check_seeds(samples, [sample.prompt_ids or sample.prompt for sample in samples])
    return samples


def assume_sampling(samples: Sequence[Sample], sampling: Sampling | None) -> list[Sample]:
    """Give samples that do not say theirs these sampling options; LabError when there are none."""
    for sample in samples:
        if sample.sampling is None and sampling is None:
            raise LabError(
                f"{sample.where}: found no temperature, and --temperature is not given either; "
                "expected the options that the samples were made with (0 is greedy)"
            )
    return [replace(sample, sampling=sample.sampling or sampling) for sample in samples]


def check_seeds(samples: Sequence[Sample], prompts: Sequence[Hashable]) -> None:
    """Raise LabError where a prompt and a seed come twice: such samples are not independent."""
    seen: dict[Hashable, Sample] = {}
    for sample, prompt in zip(samples, prompts, strict=True):
        first = seen.setdefault((prompt, sample.seed), sample)
        if first is not sample:
            raise LabError(
                f"{sample.where}: found the prompt and the seed {sample.seed} of {first.where} "
                "again, expected another seed: samples of one seed are not independent"
            )


def _sample(line: str, where: str) -> Sample:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LabError(f"{where}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise LabError(f"{where}: found {type(raw).__name__}, expected a JSON object")
    # A key with null is a key that is not there.
    raw = {key: value for key, value in raw.items() if value is not None}
    for pair in (("prompt", "prompt_ids"), ("output_ids", "output")):
        found = [key for key in pair if key in raw]
        if len(found) != 1:
            what = " and ".join(found) or "neither"
            raise LabError(f"{where}: found {what}, expected one of {pair[0]} and {pair[1]}")
    for key, off in OTHER_OPTIONS.items():
        if key in raw and raw[key] not in off:
            raise LabError(
                f"{where}: {key}: found {_short(raw[key])}, expected {off[0]} (off): the law that "
                "is tested has temperature, top_k and top_p alone"
            )

    def get(key: str, kind: str, fits: Callable[[Any], bool]) -> Any:
        if key in raw and not fits(raw[key]):
            raise LabError(f"{where}: {key}: found {_short(raw[key])}, expected {kind}")
        return raw.get(key)

    if "seed" not in raw:
        raise LabError(f"{where}: found no seed, expected the integer that made this sample")
    finish = get("finish_reason", '"stop" or "length"', FINISHES.__contains__)
    if "output" in raw and finish is None:
        raise LabError(
            f'{where}: found output without finish_reason, expected "stop" or "length": text does '
            "not show whether a stop token ended it"
        )
    ids = {
        key: get(key, "a list of at least one token id", _is_ids)
        for key in ("prompt_ids", "output_ids")
    }
    return Sample(
        where=where,
        prompt=None if "prompt" not in raw else _prompt(raw["prompt"], where),
        prompt_ids=ids["prompt_ids"] and tuple(ids["prompt_ids"]),
        output=get("output", "text of at least one character", _is_output),
        output_ids=ids["output_ids"] and tuple(ids["output_ids"]),
        seed=get("seed", "an integer", _is_integer),
        sampling=_sampling(raw, where),
        finish_reason=finish,
        prompt_hash=get("prompt_hash", "a string", lambda value: isinstance(value, str)),
    )


def _prompt(value: Any, where: str) -> str | tuple[tuple[str, str], ...]:
    if _is_text(value):
        return value
    messages = value if isinstance(value, list) else []
    pairs = [(m.get("role"), m.get("content")) if isinstance(m, dict) else () for m in messages]
    asked = pairs[1:] if pairs and pairs[0] and pairs[0][0] == "system" else pairs
    roles = [pair[0] if pair else None for pair in asked]
    turns = ["assistant" if place % 2 else "user" for place in range(len(roles))]
    if roles != turns or len(roles) % 2 == 0 or not all(_is_text(pair[1]) for pair in pairs):
        raise LabError(
            f"{where}: prompt: found {_short(value)}, expected text, or messages of text: system "
            "or not, then user and assistant in turn, user last"
        )
    return tuple(pairs)


def _sampling(raw: dict[str, Any], where: str) -> Sampling | None:
    options = {key: raw[key] for key in ("temperature", "top_p", "top_k") if key in raw}
    if not options:
        return None
    if "temperature" not in options:
        raise LabError(f"{where}: found {next(iter(options))}, expected temperature beside it")
    for key, value in options.items():
        number = _is_integer(value) or (key != "top_k" and isinstance(value, float))
        if not number:
            raise LabError(f"{where}: {key}: found {_short(value)}, expected a number")
    try:
        return Sampling(**options)
    except LabError as error:
        raise LabError(f"{where}: {error}") from error


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(_is_integer, value))


def _is_text(value: Any) -> bool:
    return _is_output(value) and bool(value.strip())


def _is_output(value: Any) -> bool:
    """Text with something in it, and no half of a surrogate pair, which no tokenizer takes."""
    if not isinstance(value, str) or not value:
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
