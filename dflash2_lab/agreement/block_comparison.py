"""Greedy decodes and the replay of a recording, compared block by block on the text of the traces.

A *trail* is what one way of decoding does along the traces: the token it emits at every index of a
response, and how many drafts it accepts at every anchor it visits. A decode that leaves the trace
by a numeric tie is taken up again behind the trace's token; after a bug nothing can be learned from
the rest of that response. Of two trails

    target  says that the emitted tokens differ,
    draft   that the tokens agree and the accepted counts do not,
    table   that these agree, and other columns of the steps table do not (always a bug).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from dflash2_lab.agreement.margins import Subject
from dflash2_lab.agreement.noise_band import Judge, key_of
from dflash2_lab.blocks import REQUEST_KEY
from dflash2_lab.decoding.requests import Decoded, Request, request_keys, steps_frame
from dflash2_lab.replaying import expected_walk, replay
from dflash2_lab.sampling import Sampling
from dflash2_lab.tables import Run

REPLAY = "replay"
COLUMNS = ("context_len", "num_offered", "num_emitted", "terminal")


class Engine(Protocol):
    """What both engines can do."""

    num_draft: int
    policy: str | None

    def run(
        self,
        requests: Sequence[Request],
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> list[Decoded]: ...


class Step(NamedTuple):
    """One block on the trace's text: drafts accepted (None: a prefill, which has no draft), tokens
    emitted up to the first that leaves the trace, and the other `COLUMNS` where they are known."""

    accepted: int | None
    tokens: tuple[int, ...]
    columns: tuple[Any, ...] | None = None


@dataclass(frozen=True, eq=False)
class Trail:
    """`steps` by (response, anchor), `tokens` by (response, index); a first token's anchor is -1.

    `num_equal` responses are the trace's, token by token, without having been taken up again.
    """

    way: str
    steps: dict[tuple[int, int], Step] = field(default_factory=dict)
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    num_equal: int = 0

    def add(self, response: int, anchor: int, step: Step) -> None:
        self.steps[response, anchor] = step
        for place, token in enumerate(step.tokens, start=anchor + 1):
            self.tokens[response, place] = token


@dataclass(frozen=True)
class Difference:
    """The first difference in a block: two tokens at `position` of the response (kind target), or
    two accepted counts, when `position` is that of the first draft that only one side accepts."""

    ways: tuple[str, str]
    kind: str
    prompt_id: str
    turn: int
    sample: int
    anchor: int
    position: int
    found: tuple[Any, Any]
    gap: float | None
    verdict: str  # "tie" | "bug"


@dataclass(frozen=True)
class Comparison:
    """Blocks of the first trail held against the second, first tokens included. At `num_unshared`
    anchors only the first trail had a block, so tokens alone were compared."""

    ways: tuple[str, str]
    num_blocks: int
    num_equal: int
    num_ties: int
    num_bugs: int
    num_unshared: int
    differences: tuple[Difference, ...]


def trace_requests(
    subject: Subject, rows: Sequence[Any], limits: Mapping[str, Any]
) -> list[Request]:
    """The requests that greedy traces answer, with the limits (`max_new_tokens`, `max_total`) that
    they were made with."""
    target = subject.target
    total = min(n for n in (limits["max_total"], target.max_positions, 2**31) if n is not None)
    requests = []
    for row in rows:
        prompt = tuple(map(int, row.prompt_ids))
        room = min(limits["max_new_tokens"], total - len(prompt))
        keys = request_keys(0, *key_of(row).values(), subject.policy)  # greedy: never read
        requests.append(Request(prompt, room, Sampling(), keys, target.eos_token_ids))
    return requests


def replayed_trail(run: Run, rows: Sequence[Any], policy: str, num_draft: int) -> Trail:
    """The replay: the trace's tokens, and the accepted count of every recorded anchor."""
    trail = Trail(REPLAY, num_equal=len(rows))
    numbers = {tuple(key_of(row).values()): number for number, row in enumerate(rows)}
    table = replay(run, policy, num_draft).steps
    keys = zip(*(table[name].tolist() for name in (*REQUEST_KEY, "anchor")), strict=True)
    walked = dict(zip(keys, table[list(COLUMNS)].itertuples(index=False, name=None), strict=True))
    walk = expected_walk(run, policy, num_draft)
    owners = list(walk.blocks.requests[REQUEST_KEY].itertuples(index=False, name=None))
    for number, row in enumerate(rows):
        for index, token in enumerate(row.response_ids):
            trail.tokens[number, index] = int(token)
    places = zip(walk.blocks.request, walk.blocks.anchor, walk.law.argmax(axis=1), strict=True)
    for request, anchor, accepted in places:
        owner = owners[request]
        tokens = rows[numbers[owner]].response_ids[anchor + 1 :][: accepted + 1]
        columns = walked.get((*owner, int(anchor)))
        step = Step(int(accepted), tuple(map(int, tokens)), columns)
        trail.steps[numbers[owner], int(anchor)] = step
    return trail


def decoded_trail(
    way: str, engine: Engine, rows: Sequence[Any], requests: Sequence[Request], judge: Judge
) -> Trail:
    """Decode every request, and again behind each tie, until the ends of the traces."""
    trail, num_equal = Trail(way), 0
    pending = [(number, 0) for number in range(len(rows))]
    while pending:
        following = [
            behind(requests[number], rows[number].response_ids[:offset])
            for number, offset in pending
        ]
        later = []
        answers = run_engine(f"decode {way}", engine, following)
        for (number, offset), answer in zip(pending, answers, strict=True):
            text = [int(token) for token in rows[number].response_ids[offset:]]
            pairs = zip(text, answer.response_ids, strict=False)
            same = next((at for at, (own, found) in enumerate(pairs) if own != found), len(text))
            table = _columns(engine, rows[number], offset, answer) if same == len(text) else None
            for anchor, step in _steps(answer, same, table):
                trail.add(number, offset + anchor, step)
            num_equal += same == len(text) and offset == 0
            left = offset + same
            if same < len(text) and left + 1 < len(rows[number].response_ids):
                gap = judge.token_gap(number, left, [text[same], answer.response_ids[same]])
                if judge.verdict("target", gap) == "tie":
                    later.append((number, left + 1))
        pending = later
    return replace(trail, num_equal=num_equal)


def run_engine(what: str, engine: Engine, requests: Sequence[Request]) -> list[Decoded]:
    """Decode all requests behind a progress bar of their tokens."""
    total = sum(request.max_new_tokens for request in requests)
    with tqdm(total=total, desc=what, unit="token", delay=2.0) as bar:
        return engine.run(requests, lambda _row, tokens: bar.update(len(tokens)))


def behind(request: Request, given: Sequence[int]) -> Request:
    """The request with the first tokens of its response given."""
    room = request.max_new_tokens - len(given)
    prompt = request.prompt_ids + tuple(map(int, given))
    return replace(request, prompt_ids=prompt, max_new_tokens=room)


def _columns(engine: Engine, row: Any, offset: int, answer: Decoded) -> list[tuple[Any, ...]]:
    """The other columns of the steps table of a response, one tuple a step."""
    answered = (key_of(row), len(row.prompt_ids) + offset, answer)
    table = steps_frame([answered], engine.num_draft, engine.policy, 0.0)
    return list(table[list(COLUMNS)].itertuples(index=False, name=None))


def _steps(
    answer: Decoded, same: int, table: Sequence[tuple[Any, ...]] | None
) -> list[tuple[int, Step]]:
    """The blocks of a response whose anchors lie in its first `same` tokens, which are the trace's;
    the first token as a block with the anchor -1."""
    ids = answer.response_ids
    found, anchor = [(-1, Step(None, (ids[0],)))], 0
    for number, raw in enumerate(answer.accepted_raw):
        if anchor >= same:
            break
        emitted = ids[anchor + 1 : anchor + 2 + raw]
        # Of what stands behind a token that leaves the trace nothing can be said.
        agreed = same - anchor - 1
        accepted = min(raw, len(emitted), agreed)
        columns = None if table is None else table[number]
        found.append((anchor, Step(accepted, tuple(emitted[: agreed + 1]), columns)))
        anchor += len(emitted)
    return found


def compare_trails(first: Trail, second: Trail, rows: Sequence[Any], judge: Judge) -> Comparison:
    """Every block of `first` against what `second` does there."""
    counts = {"equal": 0, "tie": 0, "bug": 0}
    unshared, differences = 0, []
    for (number, anchor), step in first.steps.items():
        places = [(number, anchor + 1 + at) for at in range(len(step.tokens))]
        other = [second.tokens[place] for place in places if place in second.tokens]
        if not other:  # behind a bug of the second
            continue
        theirs = second.steps.get((number, anchor))
        found = _block_differences(step, theirs, other)
        judged = [_judged(judge, rows, first, second, number, anchor, *one) for one in found]
        verdicts = [difference.verdict for difference in judged] or ["equal"]
        counts[min(verdicts)] += 1  # "bug" comes before "tie"
        unshared += theirs is None and step.accepted is not None
        differences += judged
    return Comparison(
        ways=(first.way, second.way),
        num_blocks=sum(counts.values()),
        num_equal=counts["equal"],
        num_ties=counts["tie"],
        num_bugs=counts["bug"],
        num_unshared=unshared,
        differences=tuple(differences),
    )


def _block_differences(
    step: Step, theirs: Step | None, other: Sequence[int]
) -> list[tuple[str, int, tuple[Any, Any]]]:
    """(kind, place in the block, what was found) of the differences in a block; `other` are the
    second trail's tokens."""
    pairs = list(zip(step.tokens, other, strict=False))
    place = next((at for at, (mine, its) in enumerate(pairs) if mine != its), None)
    found: list[tuple[str, int, tuple[Any, Any]]] = []
    if theirs is not None and None not in (step.accepted, theirs.accepted):
        # Drafts behind the first token that differs are judged against different texts.
        counts = step.accepted, theirs.accepted
        if place is not None:
            counts = min(counts[0], place), min(counts[1], place)
        if counts[0] != counts[1]:
            found.append(("draft", min(counts), counts))
        elif place is None and None not in (columns := (step.columns, theirs.columns)):
            found += [("table", 0, columns)] if columns[0] != columns[1] else []
    if place is not None:
        found.append(("target", place, pairs[place]))
    return found


def _judged(
    judge: Judge,
    rows: Sequence[Any],
    first: Trail,
    second: Trail,
    number: int,
    anchor: int,
    kind: str,
    place: int,
    found: tuple[Any, Any],
) -> Difference:
    position = anchor + 1 + place
    gap = None
    if kind == "target":
        gap = judge.token_gap(number, position, found)
    elif kind == "draft":
        gap = judge.draft_gap(number, anchor, place + 1)
    verdict = "bug" if gap is None else judge.verdict(kind, gap)
    return Difference(
        ways=(first.way, second.way),
        kind=kind,
        **key_of(rows[number]),
        anchor=anchor,
        position=position,
        found=tuple(found),
        gap=gap,
        verdict=verdict,
    )
