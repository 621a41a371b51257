"""Two drafters side by side, or a run beside stored reference values.

What must not be compared is refused (no prompt in common, another kind of run, another schema),
what may mislead is a warning (other prompts or template, precision, sampling). Two runs are
compared on the prompts that both have, with paired intervals; a reference by the interval that it
carries, never by a fixed tolerance.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dflash2_lab import stats
from dflash2_lab.conditions import conditions
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import Estimate
from dflash2_lab.recording_figures import why_not_replayable
from dflash2_lab.replaying import check_replayable
from dflash2_lab.report import number, summarise, text_table, wrapped
from dflash2_lab.stats_paired import (
    COLUMNS,
    ORACLE,
    independent_difference,
    paired_differences,
    row_values,
)
from dflash2_lab.tables import Run, assert_comparable

LENGTHS = ("pooled", "per_request")
REFERENCE = ("target.name", "target.dtype", "target.files", "datasets", "num_prompts")


@dataclass(frozen=True, eq=False)
class Comparison:
    """`table` has the columns of `stats_paired.COLUMNS`; difference = b - a.

    `names` are of a and b, `conditions` what their numbers depend on, `num_prompts` the prompts
    behind the differences (of a reference: the smaller number), `paired` whether they are the same
    ones in every draw.
    """

    names: tuple[str, str]
    conditions: tuple[Mapping[str, Any], Mapping[str, Any]]
    table: pd.DataFrame
    warnings: tuple[str, ...]
    num_prompts: int
    paired: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values (NaN is None)."""
        rows = self.table.to_dict("records")
        plain = [{k: number(v) if isinstance(v, float) else v for k, v in r.items()} for r in rows]
        sides = zip("ab", self.names, self.conditions, strict=True)
        return {
            **{side: {"name": name, "conditions": dict(found)} for side, name, found in sides},
            "paired": self.paired,
            "num_prompts": self.num_prompts,
            "differences": [row | {"verdict": verdict(row)} for row in plain],
            "warnings": list(self.warnings),
        }

    def text(self) -> str:
        """Aligned tables of at most 100 columns, warnings last."""
        a, b = self.names
        how = "paired: the same prompts resampled in both" if self.paired else "independent samples"
        parts = [f"A  {a}\nB  {b}\n{self.num_prompts} prompts; B - A [95 % interval], {how}"]
        parts[0] += "\n*: the interval excludes 0"
        if self.table["policy"].str.contains("/").any():
            parts[0] += "; x/y: policy x of A, policy y of B"
        for name, rows in sections(self.table).items():
            header = ["quantity", "policy", "at", "A", "B", "B - A", "*"]
            cells = [
                [
                    row.quantity,
                    row.policy,
                    place(row),
                    with_interval(row.a),
                    with_interval(row.b),
                    with_interval(row.difference, row.low, row.high, signed=True),
                    "*" if verdict(row._asdict()) in ("higher", "lower") else "",
                ]
                for row in rows.itertuples(index=False)
            ]
            parts.append(f"== {name}\n\n{text_table(header, cells, keys=3)}")
        return "\n\n".join([*parts, *wrapped(self.warnings)]) + "\n"


def compare(
    a: Run | Mapping[str, Any],
    b: Run,
    policies: Sequence[str] = (),
    names: tuple[str, str] | None = None,
) -> Comparison:
    """Compare run `b` with run `a`, or with reference values `a` (see `read_reference`).

    Args:
        policies: "x" for policy x of both, "x:y" for x of `a` and y of `b`. Empty: each drafter's
            own, those that both recorded, and oracle@16.
        names: of a and b; by default their drafters'.

    Returns:
        Every difference b - a with its 95 % interval, paired by prompt where both are runs, and
        warnings about what else differs: see `Comparison`.

    Raises:
        LabError: runs of another kind, no prompt in common, a policy that was not recorded, a
            reference without its conditions, n or interval.
    """
    if not isinstance(a, Run):
        return _with_reference(a, b, policies, names)
    for run in (a, b):
        found = run.info.get("kind")
        if found != "record":
            raise LabError(f"compare: found a run of kind {found!r}, expected two of 'record'")
    called = names or _names(a, b)
    table = paired_differences(a, b, _pairs(a, b, policies))
    found = tuple(map(conditions, (a, b)))
    num = int(table["num_prompts"].max())
    notes = [*_differing(called, found), *_left_out((a, b), called, found, num)]
    return Comparison(called, found, table, tuple(notes), num, True)


def read_reference(path: Path) -> dict[str, Any]:
    """Reference values with their conditions, n and intervals: what `replay --json` printed, an
    evaluation.json of the zoo, or what `compare --json` printed, of which B is the reference.

    Raises:
        LabError: no such file, no JSON object, one without `conditions` or `policies`, or a
            comparison over a part of B's prompts.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: cannot be read as reference values ({error})") from error
    if not isinstance(found, dict):
        raise LabError(f"{path}: found {type(found).__name__}, expected a JSON object")
    if "policies" not in found and "policy" in found:  # one policy's object alone
        found["policies"] = {found["policy"]: found}
    if "differences" in found:
        found = _compared(found, path)
    missing = [key for key in ("conditions", "policies") if not isinstance(found.get(key), dict)]
    if missing:
        raise LabError(
            f"{path}: {missing[0]} not found, expected what `dflash2-lab replay RUN --json` prints"
        )
    return found


def _compared(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """B of a stored comparison, as reference values; n of a length is its number of prompts."""
    side, num = found["b"], found["num_prompts"]
    own = side["conditions"]["num_prompts"]
    if found["paired"] and num < own:
        raise LabError(
            f"{path}: compared over {num} of the {own} prompts of {side['name']}, expected all of "
            "them: give its run folder"
        )
    policies: dict[str, Any] = {}
    for row in found["differences"]:
        quantity, _, name = row["quantity"].partition(" ")
        if quantity == "acceptance_length":
            entry = {"value": row["b"], "interval": [row["b_low"], row["b_high"]]}
            policy = policies.setdefault(
                row["policy"].rpartition("/")[2], {"acceptance_length": {}, "by_dataset": {}}
            )
            lengths = policy["acceptance_length"]
            if row["dataset"]:
                lengths = policy["by_dataset"].setdefault(row["dataset"], {})
            lengths[name] = entry | {"num": row["num_prompts"]}
    return {"drafter": side["name"], "conditions": side["conditions"], "policies": policies}


def sections(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows under their headings: all shared prompts, then each dataset."""
    titles = {"": "all prompts"} | {name: f"dataset {name}" for name in table["dataset"] if name}
    return {title: table[table["dataset"] == name] for name, title in titles.items()}


def verdict(row: Mapping[str, Any]) -> str:
    """ "higher" or "lower" (b, where the interval excludes 0), "no difference shown", or
    "unknown" without an interval."""
    low, high = row["low"], row["high"]
    if low is None or high is None or not math.isfinite(low + high):
        return "unknown"
    if low > 0 or high < 0:
        return "higher" if low > 0 else "lower"
    return "no difference shown"


def place(row: Any) -> str:
    """Where in a series a row is, as in "slot 3"; "" for a row of its own."""
    if row.position < 0:
        return ""
    return f"{'layer' if row.quantity.startswith('within_block') else 'slot'} {row.position}"


def with_interval(
    value: float, low: float = math.nan, high: float = math.nan, *, signed: bool = False
) -> str:
    """As in "+0.253 [+0.183, +0.331]"; "-" for what is not known."""
    if not math.isfinite(value):
        return "-"
    form = "{:+.3f}" if signed else "{:.3f}"
    texts = [form.format(round(part, 3) + 0.0) for part in (value, low, high)]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]" if math.isfinite(low + high) else texts[0]


def _names(a: Run, b: Run) -> tuple[str, str]:
    first, second = (str(run.info["drafter"]["name"]) for run in (a, b))
    if first != second:
        return first, second
    folders = [run.folder.name if run.folder else "" for run in (a, b)]
    marks = folders if len(set(folders)) == 2 and all(folders) else ["A", "B"]
    return f"{first} ({marks[0]})", f"{second} ({marks[1]})"


def _pairs(a: Run, b: Run, policies: Sequence[str]) -> list[tuple[str, str]]:
    if policies:
        split = [(text.partition(":")[0], text.rpartition(":")[2]) for text in policies]
        for run in (a, b):
            check_replayable(run)
        return split
    if any(map(why_not_replayable, (a, b))):
        return []
    own = tuple(map(stats.default_policy, (a, b)))
    pairs = [own] if own[0] in a.policies and own[1] in b.policies else []
    pairs += [(name, name) for name in a.policies if name in b.policies]
    return list(dict.fromkeys([*pairs, (ORACLE, ORACLE)]))


def _differing(
    names: tuple[str, str], found: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> list[str]:
    """A warning for each condition, apart from the drafter, that is not the same."""
    a, b = found
    named = zip(names, found, strict=True)
    notes = list(assert_comparable({name: Run(info=dict(side)) for name, side in named}))
    if a["template"] != b["template"]:
        texts = " and ".join(json.dumps(side["template"], sort_keys=True) for side in found)
        notes.append(f"the chat template was rendered with other options: {texts}")
    if a["drafter"].get("dtype") != b["drafter"].get("dtype"):
        dtypes = " and ".join(str(side["drafter"].get("dtype")) for side in found)
        notes.append(f"the drafters ran in other precisions: {dtypes}")
    if _weights(a) != _weights(b):
        notes.append("the targets have other weights: another revision, quantisation or model")
    tokens = a["token_hash"], b["token_hash"]
    same_prompts = a["prompt_set_hash"] == b["prompt_set_hash"]
    if same_prompts and None not in tokens and tokens[0] != tokens[1]:
        notes.append("the traces differ: other responses to the same prompts")
    if a["datasets"].keys() != b["datasets"].keys():
        sets = " and ".join(", ".join(side["datasets"]) for side in found)
        notes.append(f"the runs are over other datasets: {sets}")
    return notes


def _weights(found: Mapping[str, Any]) -> Any:
    files = found["target"].get("files") or {}
    return {name: value for name, value in files.items() if "tensors" in name}


def _left_out(
    runs: tuple[Run, Run],
    names: tuple[str, str],
    found: tuple[Mapping[str, Any], Mapping[str, Any]],
    shared: int,
) -> list[str]:
    notes = []
    for run, name, side in zip(runs, names, found, strict=True):
        if side["num_prompts"] > shared:
            notes.append(f"{name}: {shared} of its {side['num_prompts']} prompts are in both runs")
        if why_not_replayable(run):
            notes.append(f"{name}: acceptance cannot be replayed, so neither run's is compared")
        if not run.has_table("attention"):
            notes.append(f"{name}: attention was not recorded, so its shares are not compared")
    windows = [run.num_draft for run in runs]
    if windows[0] != windows[1]:
        notes.append(
            f"num_draft is {windows[0]} and {windows[1]}: series by slot and suffix decay end at "
            f"slot {min(windows)}, acceptance lengths are over all slots of each"
        )
    return notes


def _with_reference(
    reference: Mapping[str, Any],
    run: Run,
    policies: Sequence[str],
    names: tuple[str, str] | None,
) -> Comparison:
    found = reference["conditions"]
    for dotted in REFERENCE:
        key, _, inner = dotted.partition(".")
        value = found.get(key)
        value = value.get(inner) if inner and isinstance(value, Mapping) else value
        if not value:
            raise LabError(f"reference values: conditions.{dotted} not found, expected it beside n")
    known = reference["policies"]
    asked = list(policies) or [name for name in known if name in (*run.policies, ORACLE)]
    missing = [name for name in asked if name not in known]
    if missing or not asked:
        what = repr(missing[0]) if missing else "none that the run recorded"
        raise LabError(f"reference values: policy {what}: found {', '.join(known)}")
    measured = summarise(run, asked)
    rows = []
    for policy in asked:
        for dataset, sides in _length_entries(known[policy], measured["policies"][policy]).items():
            for name in LENGTHS:
                a, b = (_estimate(side, name, policy) for side in sides)
                values = row_values(a, b, independent_difference(a, b))
                rows.append((dataset, f"acceptance_length {name}", policy, -1, *values))
    table = pd.DataFrame(rows, columns=list(COLUMNS)).sort_values("dataset", kind="stable")
    both = (found, measured["conditions"])
    num = int(min(side["num_prompts"] for side in both))
    table["num_prompts"] = float(num)
    called = names or (f"reference {reference.get('drafter')}", str(measured["drafter"]))
    notes = [*_differing(called, both), *measured["warnings"]]
    drafters = [side["drafter"] for side in both]
    # the hash is of the weights in their precision, so that across precisions only the name tells
    same_dtype = drafters[0].get("dtype") == drafters[1].get("dtype")
    key = "weights_hash" if same_dtype else "name"
    if drafters[0].get(key) != drafters[1].get(key):
        notes.append("the reference values are of another drafter")
    return Comparison(called, both, table.reset_index(drop=True), tuple(notes), num, False)


def _length_entries(
    reference: Mapping[str, Any], measured: Mapping[str, Any]
) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Acceptance lengths of both, over everything (""), and by dataset where both have it."""
    found = {"": tuple(side["acceptance_length"] for side in (reference, measured))}
    sets = [side.get("by_dataset", {}) for side in (reference, measured)]
    names = [name for name in sets[0] if name in sets[1]]
    if max(map(len, sets)) > 1:
        found |= {name: (sets[0][name], sets[1][name]) for name in names}
    return found


def _estimate(lengths: Mapping[str, Any], name: str, policy: str) -> Estimate:
    entry = lengths.get(name, {})
    values = [entry.get("value"), *(entry.get("interval") or [None, None]), entry.get("num")]
    if None in values:
        raise LabError(
            f"acceptance_length.{name} of policy {policy!r}: value, interval or num not found, "
            "expected all of them: a comparison uses the interval"
        )
    return Estimate(*map(float, values))
