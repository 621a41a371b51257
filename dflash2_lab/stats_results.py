"""Tidy tables from the results of benchmarks, of the battery's score and of the monitor's paths.

Intervals of times are those the benchmark stored: order statistics that enclose the median of its
rounds, whatever the law of the noise.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dflash2_lab.errors import LabError

_OVERHEADS = {
    "selector": "selector",
    "conv": "conv",
    "both": "selector and conv",
    "dspark": "DSpark head",
}
BAND = (0.1, 0.9)  # of the runs of the monitor


def cycle_times(bench: Mapping[str, Any], cell: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the cycles and the overheads of one cell of a `bench cycle` result, microseconds.

    Returns:
        Frame of cycles: cycle, value, low, high, floor (weight bytes over the copy bandwidth); and
        of what is added to the dflash cycle: part, value, low, high, share (of that cycle).

    Raises:
        LabError: results of another kind; the same holds for the other functions here.
    """
    _require(bench, "cells", "a result of bench cycle")
    found = bench["cells"][cell]
    cycles = [
        {"cycle": name, **_spread(side["cycle"], 1e6), "floor": 1e6 * side["floor_seconds"]}
        for name, side in found["sides"].items()
    ]
    deep = f"{bench['layers']['deep']} layers, not {bench['layers']['dflash']}"
    overheads = [
        {
            "part": label,
            **_spread(found["overheads"][name]["extra"], 1e6),
            "share": found["overheads"][name]["share"]["median"],
        }
        for name, label in {**_OVERHEADS, "deep": deep}.items()
        if name in found["overheads"]
    ]
    return pd.DataFrame(cycles), pd.DataFrame(overheads)


def throughput(bench: Mapping[str, Any]) -> pd.DataFrame:
    """Return decode tokens per second of a `bench throughput` result, prefill not included.

    Returns:
        Frame with the columns temperature, concurrency, side, forced (drafts whose acceptance was
        forced, 0: none), value, low, high (tokens/s), speedup (over autoregressive, same
        concurrency), acceptance_length.
    """
    _require(bench, "groups", "a result of bench throughput")
    rows = [
        {
            "temperature": float(group["temperature"]),
            "concurrency": int(group["concurrency"]),
            "side": name,
            "forced": int(side["forced"] or 0),
            **_spread(side["decode_tokens_per_second"]),
            "speedup": side["times_autoregressive"]["median"],
            "acceptance_length": side["acceptance_length"],
        }
        for group in bench["groups"]
        for name, side in group["sides"].items()
    ]
    return pd.DataFrame(rows)


def detections(score: Mapping[str, Any]) -> pd.DataFrame:
    """Return one row per fault of a mutation score, in the order of the catalogue.

    Returns:
        Frame with the columns name, stage, tokens (smallest size at which, and at every larger one
        tried, the fault was found; NaN: it passed), listed (the size of its entry; NaN: none),
        num_tokens (size of its run), found_by ("" when it passed).
    """
    _require(score, "mutants", "a mutation score")
    if not score["mutants"]:
        raise LabError("mutation score: found no fault, expected at least one")
    table = pd.DataFrame(score["mutants"])
    table["tokens"] = table["tokens"].astype(np.float64)
    table["listed"] = table["listed_tokens"].astype(np.float64)
    table["found_by"] = table["found_by"].fillna("")
    return table[["name", "stage", "tokens", "listed", "num_tokens", "found_by"]]


def monitor_quantiles(paths: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the monitor's evidence by decoder, and when its runs were stopped.

    Args:
        paths: table of `monitor_paths`.

    Returns:
        Frame of log10 E over the runs: decoder, tokens, value (median), low, high (10 % and 90 %
        points); and of the runs: decoder, num_runs, num_stopped, stopped_at (median tokens of those
        stopped, NaN: none), highest (log10 E at the drawn sizes), level (log10 of the stopping
        level).
    """
    _require(paths, "log_e", "a table of monitor_paths")
    log10 = paths.assign(log10=paths["log_e"] / np.log(10))
    groups = log10.groupby(["decoder", "tokens"], sort=False)["log10"]
    curves = groups.median().rename("value").reset_index()
    for name, point in zip(("low", "high"), BAND, strict=True):
        curves[name] = groups.quantile(point).to_numpy()
    stops = []
    for decoder, rows in log10.groupby("decoder", sort=False):
        at = rows.groupby("run")["stopped_at"].first()
        stopped = at[at > 0]
        stops.append(
            {
                "decoder": decoder,
                "num_runs": len(at),
                "num_stopped": len(stopped),
                "stopped_at": float(stopped.median()) if len(stopped) else np.nan,
                "highest": float(rows["log10"].max()),
                "level": float(rows["log_level"].iloc[0] / np.log(10)),
            }
        )
    return curves, pd.DataFrame(stops)


def _require(values: Any, key: str, what: str) -> None:
    if key not in values:
        names = ", ".join(sorted(map(str, values))[:8])
        raise LabError(f"results: found {names}, expected {what} with {key!r}")


def _spread(stored: Mapping[str, float], factor: float = 1.0) -> dict[str, float]:
    names = {"value": "median", "low": "low", "high": "high"}
    return {name: factor * stored[key] for name, key in names.items()}
