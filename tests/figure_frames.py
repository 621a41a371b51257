"""Tables as `stats` returns them, made up and seeded, for the tests of the figures; and what is
drawn of a figure."""

import numpy as np
import pandas as pd
from recordings import Request, make_run

from dflash2_lab.stats import SuffixDecay
from dflash2_lab.tables import Run

POLICIES = ("top1", "sampled", "selector", "oracle@16")


def recall_table(seed: int = 0, num_draft: int = 7, ks: tuple[int, ...] = (1, 16)) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = []
    for anchors, easier in (("all", 0.0), ("visited", 0.03)):
        for metric in ("position_recall", "conditional_recall"):
            for k in ks:
                rate = 0.82 if k == 1 else 0.97
                fall = rate if metric == "position_recall" else 0.97
                for slot in range(1, num_draft + 1):
                    value = rate * fall ** (slot - 1) - easier + rng.normal(0, 0.004)
                    half = 0.01 + 0.004 * slot
                    rows.append((anchors, metric, k, slot, value, value - half, value + half, 900))
    columns = ["anchors", "metric", "k", "slot", "value", "low", "high", "num_blocks"]
    return pd.DataFrame(rows, columns=columns)


def acceptance_table(shift: float = 0.0, policies: tuple[str, ...] = POLICIES) -> pd.DataFrame:
    lengths = {"top1": 3.25, "sampled": 3.31, "selector": 3.60, "oracle@16": 6.47}
    rows = []
    for policy in policies:
        for aggregation, move in (("pooled", 0.0), ("per_request", 0.09)):
            for terminal, uncut in (("with", 0.0), ("without", 0.06)):
                value = lengths.get(policy, 3.0) + shift + move + uncut
                rows.append((policy, aggregation, terminal, value, value - 0.14, value + 0.15, 500))
    columns = ["policy", "aggregation", "terminal", "value", "low", "high", "num_steps"]
    return pd.DataFrame(rows, columns=columns)


def headroom_shares(selector: float = 0.11) -> pd.DataFrame:
    """As of `stats.headroom`, for the policies of `acceptance_table`."""
    rows = [("top1", 0.0, 0.0, 0.0), ("selector", selector, selector - 0.04, selector + 0.05)]
    return pd.DataFrame(rows, columns=["policy", "value", "low", "high"])


def decay_tables(rate: float = 0.83, num_draft: int = 7) -> tuple[pd.DataFrame, SuffixDecay]:
    slots = np.arange(1, num_draft + 1)
    value = 0.82 * rate ** (slots - 1)
    curve = pd.DataFrame({"slot": slots, "value": value, "low": value - 0.02, "high": value + 0.02})
    slope, drop = float(np.log(rate)), float(value[0] - value[-1])
    return curve, SuffixDecay(
        slope=slope,
        slope_low=slope - 0.01,
        slope_high=slope + 0.01,
        drop=drop,
        drop_low=drop - 0.03,
        drop_high=drop + 0.03,
    )


def attention_table(
    shares: tuple[float, ...] = (0.333, 0.246, 0.114, 0.049, 0.005), num_draft: int = 7
) -> pd.DataFrame:
    rows = []
    for layer, share in enumerate(shares):
        for slot in range(num_draft + 1):
            whole = share * (1 + 0.05 * (slot - num_draft / 2) if slot else 1)
            split = {"anchor": 0.35 * whole, "drafted": 0.65 * whole, "within_block": whole}
            for group, value in {"context": 1 - whole, **split}.items():
                rows.append((layer, slot, group, value, value * 0.93, value * 1.06, 0.047, 9000))
    columns = ["layer", "slot", "group", "value", "low", "high", "uniform", "count"]
    return pd.DataFrame(rows, columns=columns)


def recorded_run(
    name: str = "dflash2",
    seed: int = 0,
    num_draft: int = 4,
    datasets: tuple[str, ...] = ("gsm8k",),
    attention: bool = True,
    num_prompts: int = 5,
    **info: object,
) -> Run:
    """A small greedy recording with every table the figures and the report read."""
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(num_prompts):
        length = int(rng.integers(12, 24))
        rank = rng.choice([0, 1, 20], size=(length - 1, num_draft), p=[0.6, 0.3, 0.1])
        top1 = np.where((rank == 0).all(axis=1), num_draft, (rank != 0).argmax(axis=1))
        within = np.where((rank < 16).all(axis=1), num_draft, (rank >= 16).argmax(axis=1))
        better = np.minimum(within, top1 + rng.integers(0, 2, length - 1))
        requests.append(
            Request(
                response_len=length,
                accept={"top1": top1, "selector": better},
                rank=rank,
                prompt_id=f"p{index}",
                dataset=datasets[index % len(datasets)],
                finish="eos",
            )
        )
    run = make_run(requests, num_draft, target={"name": "smollm2-135m"}, **info)
    run.info["drafter"]["name"] = name
    if not attention:
        return run
    grid = [
        (f"p{p}", layer, slot)
        for p in range(num_prompts)
        for layer in range(3)
        for slot in range(1, num_draft + 1)
    ]
    table = pd.DataFrame(grid, columns=["prompt_id", "layer", "slot"])
    table = table.assign(turn=0, sample=0, head=0, context_bin="0-255", count=10, sum_uniform=0.5)
    table["sum_anchor"] = 1.0 / (1 + table["layer"])
    table["sum_drafted"] = 0.5 * table["slot"] / (1 + table["layer"])
    table["sum_context"] = 10 - table["sum_anchor"] - table["sum_drafted"]
    table["sumsq_within"] = (table["sum_anchor"] + table["sum_drafted"]) ** 2 / 10
    return Run.in_memory(run.info, {**run.frames, "attention": table})


def attention_map_table(num_layers: int = 2, num_heads: int = 3, num_draft: int = 4):
    grid = pd.MultiIndex.from_product(
        [range(num_layers), range(num_heads), range(1, num_draft + 1)],
        names=["layer", "head", "slot"],
    ).to_frame(index=False)
    value = 0.1 + 0.2 * grid["layer"] + 0.05 * grid["head"] + 0.01 * grid["slot"]
    return grid.assign(value=value, low=value - 0.01, high=value + 0.02, uniform=0.08, count=900)


def share_recall_table(bins: tuple[str, ...] = ("all", "0-127", "128-255"), num_draft: int = 5):
    rows = []
    for index, name in enumerate(bins):
        for slot in range(1, num_draft + 1):
            share, recall = 0.1 + 0.01 * slot - 0.01 * index, 0.8 - 0.1 * slot
            bounds = (share - 0.004, share + 0.005, 0.08, recall, recall - 0.03, recall + 0.04)
            rows.append((name, slot, share, *bounds, 300 - 100 * index))
    columns = ["context_bin", "slot", "share", "share_low", "share_high", "uniform"]
    return pd.DataFrame(
        rows, columns=[*columns, "recall", "recall_low", "recall_high", "num_blocks"]
    )


def headroom_tables(max_k: int = 64) -> tuple[pd.DataFrame, pd.DataFrame, int]:
    k = np.arange(1, max_k + 1)
    value = 3.25 + np.log2(k)
    curve = {"k": k, "value": value, "low": value - 0.2, "high": value + 0.25, "num_steps": 500.0}
    levels = acceptance_table(policies=("top1", "selector"))
    return pd.DataFrame(curve), levels, 16


def recovery_table(num_draft: int = 4) -> pd.DataFrame:
    slot = np.arange(1, num_draft + 1)
    shares = {"helped": 0.04 * slot, "hurt": 0.01 * slot, "net": 0.03 * slot}
    shares |= {"within": 0.3 - 0.02 * slot, "beyond": 0.05 + 0.0 * slot}
    parts = [
        pd.DataFrame({"slot": slot, "value": v, "low": v - 0.01, "high": v + 0.02}).assign(
            quantity=name, num_blocks=1000.0 / slot
        )
        for name, v in shares.items()
    ]
    return pd.concat(parts, ignore_index=True)


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.99 * median, "high": 1.02 * median}


def cycle_result() -> dict:
    """A `bench cycle` result with one cell, as bench.json has it."""
    sides = {
        name: {"cycle": spread(seconds), "floor_seconds": seconds / 1.4}
        for name, seconds in (("autoregressive", 2.6e-3), ("dflash", 3.2e-3))
    }
    overheads = {
        name: {"extra": spread(seconds), "share": spread(seconds / 3.2e-3)}
        for name, seconds in (("selector", 7e-6), ("both", 7e-5), ("deep", 7e-4))
    }
    cell = {"batch": 1, "context": 512, "num_draft": 7, "sides": sides, "overheads": overheads}
    layers = {"dflash": 5, "deep": 15}
    shared = {"dtype": "bfloat16", "repeats": 40, "inner": 8, "layers": layers}
    return shared | {"cells": [cell]}


def throughput_result() -> dict:
    """A `bench throughput` result with a forced side, as bench.json has it."""
    groups = [
        {
            "temperature": temperature,
            "concurrency": concurrency,
            "sides": {
                name: {
                    "forced": forced,
                    "decode_tokens_per_second": spread(1000.0 * concurrency * speed),
                    "times_autoregressive": spread(speed),
                    "acceptance_length": speed,
                }
                for name, forced, speed in (
                    ("autoregressive", None, 1.0),
                    ("dspark, random weights", 3, 2.5),
                    ("zoo:dflash2", None, 2.7),
                )
            },
        }
        for temperature in (0.0, 1.0)
        for concurrency in (1, 8, 16)
    ]
    shared = {"num_prompts": 16, "datasets": ["own"], "max_new_tokens": 128, "repeats": 6}
    return shared | {"dtype": "bfloat16", "groups": groups}


def mutation_result() -> dict:
    """A mutation score as verify.json has it: three faults found, one that passed."""
    mutants = [
        ("rows-swapped", "target", 512, 1024, 64, "support"),
        ("residual-is-p", "residual", 512, 1024, 128, "residual_ad"),
        ("q-bfloat16", "reported q", None, 128, 8, "draw_contract"),
        ("ratio-times-1.05", "acceptance", 4096, 8192, None, None),
    ]
    names = ("name", "stage", "listed_tokens", "num_tokens", "tokens", "found_by")
    entries = [dict(zip(names, mutant, strict=True)) for mutant in mutants]
    return {"killed": 3, "total": 4, "false_alarms": 0, "mutants": entries, "controls": [{}] * 8}


def monitor_frame() -> pd.DataFrame:
    """Paths as of `monitor_paths`: a right decoder that drifts down, a fault found by every run."""
    tokens = np.array([8, 16, 32, 64, 128])
    parts = []
    for run in range(10):
        for decoder, slope, stopped in (("correct", -0.01, 0), ("broken", 0.2, 43 + run)):
            part = {"decoder": decoder, "run": run, "tokens": tokens, "stopped_at": stopped}
            log_e = slope * tokens * (1 + run / 10)
            parts.append(pd.DataFrame(part | {"log_e": log_e, "log_level": np.log(5000.0)}))
    return pd.concat(parts, ignore_index=True)


def traces_of(fig, **wanted):
    """Drawn traces whose attributes have these values, without legend keys and bands."""
    return [
        t
        for t in fig.data
        if t.legend != "legend2"
        and getattr(t, "fill", None) != "toself"
        and all(getattr(t, name) == value for name, value in wanted.items())
    ]


def panel(fig, row, columns):
    """Axis names (xaxis, yaxis) of a panel in a full grid, column by column from 1."""
    return [f"{'' if n == 1 else n}" for n in range((row - 1) * columns + 1, row * columns + 1)]


def texts(fig):
    return [a.text for a in fig.layout.annotations]


def luminance(color):
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
