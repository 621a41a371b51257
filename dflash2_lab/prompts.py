"""Prompts: conversations of user turns, where they come from and how a target renders them.

A prompt of several turns is several requests: each turn follows the target's own answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from dflash2_lab.benchmarks import BENCHMARKS, Row, benchmark_rows
from dflash2_lab.errors import LabError

if TYPE_CHECKING:
    from dflash2_lab.target import Target

DEFAULT_PROMPTS = "default"
OWN_DATASET = "self"  # written by the target itself: no text of anybody else


@dataclass(frozen=True)
class Prompt:
    """User turns of one conversation and how they are rendered.

    `system` is the system message (None: whatever the chat template does without one), and
    `template_options` are keyword arguments of the template, for example `enable_thinking`.
    """

    id: str
    turns: tuple[str, ...]
    dataset: str
    system: str | None = None
    template_options: tuple[tuple[str, Any], ...] = ()


def load_prompts(
    spec: str | Path,
    limit: int | None = None,
    system: str | None = None,
    template_options: Mapping[str, Any] | None = None,
    target: Target | None = None,
    seed: int = 0,
) -> list[Prompt]:
    """Load prompts, in the order of their source.

    Args:
        spec: a JSON-lines file ({"id", "turns": [str, ...], "dataset"?} a line); `default`, the
            project's own prompts; `self:N`, N prompts that `target` makes up (`seed`); or a
            benchmark: gsm8k, math500, humaneval, mbpp, mt_bench (downloads it).
        limit: keep the first so many.
        system, template_options: see `Prompt`.

    Raises:
        LabError: no such source, a malformed line (with file and line), an empty prompt, an id
            that comes twice, or no prompt at all.
    """
    spec = str(spec)
    options = tuple(sorted((template_options or {}).items()))
    if limit is not None and limit < 1:
        raise LabError(f"limit of prompts: found {limit}, expected a positive number")
    if spec == DEFAULT_PROMPTS:
        rows = _read_lines(Path(__file__).parent / "zoo" / "prompts.jsonl")
    elif spec.startswith("self:"):
        rows = _self_rows(spec, target, seed)
    elif spec in BENCHMARKS:
        rows = benchmark_rows(spec)
    elif Path(spec).is_file():
        rows = _read_lines(Path(spec))
    else:
        raise LabError(
            f"prompts {spec}: neither a file, nor {DEFAULT_PROMPTS}, nor self:N, nor one of "
            f"{', '.join(BENCHMARKS)}"
        )
    if not rows:
        raise LabError(f"prompts {spec}: found no prompt")
    return [Prompt(name, turns, data, system, options) for name, turns, data in rows[:limit]]


def render(target: Target, prompt: Prompt, history: Sequence[str] = ()) -> list[int]:
    """Token ids of the conversation up to where the target answers turn `len(history)`.

    Args:
        history: the target's answers to the turns before, as text.

    Raises:
        LabError: no such turn, a target without chat template, or more tokens than it has
            positions for.
    """
    if len(history) >= len(prompt.turns):
        raise LabError(
            f"prompt {prompt.id}: turn {len(history)} asked for, it has {len(prompt.turns)}"
        )
    messages = _messages(prompt, history)
    ids = _apply_template(target, messages, dict(prompt.template_options), tokenize=True)
    if not ids:
        raise LabError(
            f"prompt {prompt.id}, turn {len(history)}: no token is left of it (has target "
            f"{target.name} its tokenizer files?)"
        )
    if target.max_positions is not None and len(ids) >= target.max_positions:
        raise LabError(
            f"prompt {prompt.id}, turn {len(history)}: {len(ids)} tokens, but target "
            f"{target.name} has {target.max_positions} positions"
        )
    return [int(token) for token in ids]


def prompt_set_hash(target: Target, prompts: Sequence[Prompt]) -> str:
    """Hash of a prompt set as this target sees it: rendered first turns, later turns, options.

    Two runs with different hashes did not answer the same questions. Order does not matter.
    """
    rows = sorted(
        [
            p.id,
            render(target, p),
            list(p.turns[1:]),
            p.system,
            [list(o) for o in p.template_options],
        ]
        for p in prompts
    )
    return hashlib.sha256(json.dumps(rows, default=str).encode()).hexdigest()


def synthesize_prompts(
    target: Target,
    num: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 0.95,
    max_new_tokens: int = 96,
    batch_size: int | None = None,
) -> list[Prompt]:
    """User turns that the target itself makes up from its bare template (Magpie, Xu et al. 2024).

    The template is cut where a user's text would begin, and the target goes on from there. A turn
    is kept when it ended by itself, has at least four words, is English as far as its characters
    tell, and was not made before. Ids are `self/000`, `self/001`, ...

    Raises:
        LabError: a target whose template has no user turn, or one that makes too few usable turns.
    """
    from dflash2_lab.generate import Request, generate
    from dflash2_lab.sampling import Sampling, row_key

    head = user_prefix(target)
    sampling = Sampling(temperature, top_p)
    kept: dict[str, str] = {}
    made = 0
    batch_size = batch_size or min(1024, max(64, num))
    while len(kept) < num:
        if made >= 50 * max(num, 20):
            raise LabError(
                f"target {target.name}: {made} made-up user turns gave {len(kept)} usable ones, "
                f"expected {num}"
            )
        keys = [row_key(seed, "self", made + row) for row in range(batch_size)]
        requests = [Request(head, key, max_new_tokens) for key in keys]
        for answer in generate(target, requests, sampling, batch_size):
            text = target.tokenizer.decode(answer.response_ids, skip_special_tokens=True).strip()
            if answer.finish == "eos" and is_usable_turn(text):
                kept.setdefault(" ".join(text.lower().split()), text)
        made += batch_size
    texts = list(kept.values())[:num]
    return [Prompt(f"self/{i:03d}", (text,), OWN_DATASET) for i, text in enumerate(texts)]


def user_prefix(target: Target) -> list[int]:
    """Token ids of the target's chat template up to where a first user turn's text begins."""
    marker = "\N{BLACK STAR}marker\N{BLACK STAR}"
    text = _apply_template(target, [{"role": "user", "content": marker}], {}, tokenize=False)
    if text.count(marker) != 1:
        raise LabError(f"target {target.name}: its chat template does not show the user's text")
    head = text[: text.index(marker)]
    return target.tokenizer(head, add_special_tokens=False)["input_ids"]


def is_usable_turn(text: str) -> bool:
    """Whether a made-up user turn is worth asking: four words or more, mostly plain letters."""
    plain = sum(c.isascii() and (c.isalnum() or c.isspace()) for c in text)
    return len(text.split()) >= 4 and plain >= 0.8 * len(text)


def _messages(prompt: Prompt, history: Sequence[str]) -> list[dict[str, str]]:
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    for turn, answer in zip(prompt.turns, history, strict=False):
        messages.append({"role": "user", "content": turn})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": prompt.turns[len(history)]}]


def _apply_template(
    target: Target, messages: list[dict[str, str]], options: Mapping[str, Any], tokenize: bool
) -> Any:
    if not target.tokenizer.chat_template and "chat_template" not in options:
        raise LabError(
            f"target {target.name}: its tokenizer has no chat template; give one as the template "
            "option chat_template"
        )
    own = {"add_generation_prompt": True, "tokenize": tokenize, "return_dict": False}
    taken = sorted(own.keys() & options)
    if taken:
        raise LabError(
            f"template option {taken[0]}: is set here, expected an option of the template"
        )
    try:
        return target.tokenizer.apply_chat_template(messages, **own, **options)
    except (TemplateError, TypeError) as error:  # a template of bad syntax, or one that refuses
        raise LabError(f"target {target.name}: its chat template fails: {error}") from error


def _read_lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    seen: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"prompts {path}: cannot read it: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            raw = json.loads(line)
        except ValueError as error:
            raise LabError(f"{where}: not JSON: {error}") from error
        row = _checked_row(raw, path.stem, where)
        if row[0] in seen:
            raise LabError(f"{where}: id {row[0]!r} came before, on line {seen[row[0]]}")
        seen[row[0]] = number
        rows.append(row)
    return rows


def _checked_row(raw: Any, dataset: str, where: str) -> Row:
    if not isinstance(raw, dict):
        raise LabError(f"{where}: found {type(raw).__name__}, expected an object with id and turns")
    name, turns, dataset = raw.get("id"), raw.get("turns"), raw.get("dataset", dataset)
    if not isinstance(name, str) or not name:
        raise LabError(f"{where}: id: found {name!r}, expected a non-empty string")
    if not isinstance(dataset, str) or not dataset:
        raise LabError(f"{where}: dataset: found {dataset!r}, expected a non-empty string")
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise LabError(f"{where}: turns: found {turns!r}, expected a list of strings")
    if not turns or not all(turn.strip() for turn in turns):
        raise LabError(f"{where}: prompt {name!r} is empty, or one of its turns is")
    for text in (name, dataset, *turns):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise LabError(f"{where}: {text!r} holds half of a surrogate pair, which is no text")
    return name, tuple(turns), dataset


def _self_rows(spec: str, target: Target | None, seed: int) -> list[Row]:
    count = spec.removeprefix("self:")
    if not count.isdecimal() or int(count) < 1:
        raise LabError(f"prompts {spec}: expected self:N with a positive number N")
    if target is None:
        raise LabError(f"prompts {spec}: needs the target that makes them up")
    made = synthesize_prompts(target, int(count), seed)
    return [(prompt.id, prompt.turns, prompt.dataset) for prompt in made]
