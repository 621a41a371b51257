"""The table of `bench throughput`.

Text only: `throughput` has measured everything in it, and `bench.json` holds it.
"""

from collections.abc import Mapping
from typing import Any

from dflash2_lab.bench.report import at_least, interval_text
from dflash2_lab.bench.timing import Spread, coverage, order_statistic
from dflash2_lab.report import text_table

# SmolLM2 with the zoo's DFlash 2 on GSM8K prompts at T = 0, one sequence at a time.
PLAIN_BAR, PUBLISHED_BAR = 2.0, 25.0
BARRED = ("smollm2-135m", "zoo:dflash2")
SAMPLER_BATCH, SAMPLER_BAR = 1024, 10.0  # the same target's plain sampling


def table(result: Mapping[str, Any]) -> str:
    """One block of rows for each concurrency and temperature, then the published package."""
    repeats = result["repeats"]
    level = 100 * coverage(repeats, order_statistic(repeats))
    passes = f"median of {repeats} interleaved passes over all of them [{level:.0f} % interval]"
    if repeats == 1:
        passes = "one pass over all of them, which gives no interval"
    parts = [
        f"{result['target']}, {result['dtype']}, on {result['device']}: {result['num_prompts']} "
        f"prompts of {', '.join(result['datasets'])},\nat most {result['max_new_tokens']} new "
        f"tokens; {passes}",
        "tokens/s: of decode, without prefills and without the tokens that they give; end to end: "
        "all\ntokens over all time; accept: tokens a verify step, bonus counted (AR: "
        "autoregressive)",
    ]
    for group in result["groups"]:
        heading = f"== concurrency {group['concurrency']}, temperature {group['temperature']:g}"
        parts += [heading, _rows(group)]
    parts += _published(result) + _sampler(result)
    return "\n\n".join([*parts, *result["skipped"]])


def _rows(group: Mapping[str, Any]) -> str:
    header = ["side", "tokens/s", "interval", "x AR", "end to end", "accept", "ms/cycle"]
    rows, notes = [], []
    for name, row in group["sides"].items():
        rate: Spread = row["decode_tokens_per_second"]
        rows.append(
            [
                name,
                f"{rate.median:.0f}",
                f"[{rate.low:.0f}, {rate.high:.0f}]" if rate.low < rate.high else "-",
                f"{row['times_autoregressive'].median:.2f}",
                f"{row['end_to_end_tokens_per_second'].median:.0f}",
                "-" if row["policy"] is None else f"{row['acceptance_length']:.2f}",
                f"{1e3 * row['seconds_per_cycle'].median:.3f}",
            ]
        )
        if row["forced"] is not None:
            notes.append(f"{name}: acceptance forced, {row['forced']} drafts a cycle")
    return "\n".join([text_table(header, rows), *notes])


def _published(result: Mapping[str, Any]) -> list[str]:
    single = {g["temperature"]: g["sides"] for g in result["groups"] if g["concurrency"] == 1}
    lines = []
    for row in result["published"]:
        value, rate = row["tokens_per_second"]["value"], interval_text(row["tokens_per_second"], 1)
        line = f"{row['drafter']}, T = {row['temperature']:g}: {rate} tokens/s"
        if row["temperature"] in single:
            ours = single[row["temperature"]][row["drafter"]]["decode_tokens_per_second"].median
            line += f"; this engine {ours / value:.1f} times as many"
        lines.append(line)
    if lines:
        head = "published package, speculative decode alone, one sequence [95 % over prompts]"
        lines = ["\n".join([head, *lines])]
    bars = _bars(result, single)
    return [*lines, *(["\n".join(bars)] if bars else [])]


def _bars(result: Mapping[str, Any], single: Mapping[float, Any]) -> list[str]:
    target, drafter = BARRED
    sides = single.get(0.0, {})
    if result["target"] != target or drafter not in sides or result["device"] == "cpu":
        return []
    row = sides[drafter]
    value = row["times_autoregressive"].median
    lines = [f"{drafter}, T = 0: {value:.2f} x autoregressive ({at_least(value, PLAIN_BAR)})"]
    for other in result["published"]:
        if other["drafter"] == drafter and other["temperature"] == 0:
            value = row["decode_tokens_per_second"].median / other["tokens_per_second"]["value"]
            bar = at_least(value, PUBLISHED_BAR)
            lines.append(f"{drafter}, T = 0: {value:.1f} x the published package ({bar})")
    return lines


def _sampler(result: Mapping[str, Any]) -> list[str]:
    sampler = result["sampler"]
    if sampler is None:
        return []
    ratio: Spread = sampler["ratio"]
    ours, theirs = sampler["tokens_per_second"], sampler["transformers_tokens_per_second"]
    line = f"{ratio.text()} times as many"
    barred = result["target"] == BARRED[0] and sampler["batch"] == SAMPLER_BATCH
    if barred and result["device"] != "cpu":
        line += f" ({at_least(ratio.median, SAMPLER_BAR)})"
    return [
        f"== plain sampling at T = 1, batch {sampler['batch']}, {sampler['num_tokens']} tokens a "
        "row, prefill included",
        f"graph engine {ours.text(4)} tokens/s (decode alone "
        f"{sampler['decode_tokens_per_second'].text(4)})\n"
        f"transformers generate {theirs.text(4)} tokens/s\n{line}",
    ]
