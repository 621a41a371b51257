"""The table of `bench cycle`.

Text only: `cycle` has measured everything that stands in it, and `bench.json` holds it.
"""

from collections.abc import Mapping
from typing import Any

from dflash2_lab.bench.report import at_least, at_most, micro, speeds
from dflash2_lab.bench.timing import Spread, coverage, order_statistic
from dflash2_lab.report import text_table

BARS = {  # at batch 1, context 512 and whole blocks: x floor, milliseconds, x the package
    "qwen3-4b": {"floor": 1.4, "ms": 3.25, "published": 14.0},
    "smollm2-135m": {"ms": 1.2, "published": 25.0},
}
START_BAR = 30.0  # seconds, of any engine
OVERHEAD_BARS = {"selector": ("us", 20.0), "conv": ("us", 30.0), "both": ("%", 1.5)}
RESOLUTION = 0.2  # +- % of the cycle to which overheads are to be known
TOP = 12  # kernels shown
NAME = 60  # columns of a kernel's name


def table(result: Mapping[str, Any]) -> str:
    """Every cell with its floors, overheads and bars, then the kernels of one cycle."""
    parts = [
        f"{result['shapes']} shapes, random weights, {result['dtype']}, greedy, on "
        f"{result['device']}\n{speeds(result['bandwidth'])}",
        f"forced acceptance: {result['forced']} drafts a cycle at most; +-: half the interval over "
        "the\nmedian; floor: weight bytes over the copy bandwidth; cache: keys and values of the "
        "context,\nread beside them; start: seconds to start the engine, compiling included",
    ]
    for cell in result["cells"]:
        parts += [_heading(result, cell), _sides(cell), _overheads(result, cell)]
        parts += _published(result, cell)
        parts += _bars(result, cell)
    parts += _kernels(result["cells"][0]["kernels"])
    return "\n\n".join([*parts, *result["skipped"]])


def _heading(result: Mapping[str, Any], cell: Mapping[str, Any]) -> str:
    repeats = result["repeats"]
    level = 100 * coverage(repeats, order_statistic(repeats))
    return (
        f"== batch {cell['batch']}, context {cell['context']}, {cell['num_draft']} drafts "
        f"verified: median of {repeats} interleaved rounds of\n{result['inner']} cycles "
        f"[{level:.0f} % interval]"
    )


def _sides(cell: Mapping[str, Any]) -> str:
    header = ["cycle", "us", "interval", "+-%", "floor us", "x floor", "cache MB", "start"]
    rows = [
        [
            name,
            *micro(side["cycle"]),
            f"{1e6 * side['floor_seconds']:.1f}",
            f"{side['cycle'].median / side['floor_seconds']:.2f}",
            f"{side['cache_bytes'] / 1e6:.0f}",
            f"{side['startup_seconds']:.1f}",
        ]
        for name, side in cell["sides"].items()
    ]
    return text_table(header, rows)


def _overheads(result: Mapping[str, Any], cell: Mapping[str, Any]) -> str:
    labels = {
        "selector": "selector",
        "conv": "conv",
        "both": "selector and conv",
        "dspark": "DSpark: Markov head, no anchor row",
        "deep": f"{result['layers']['deep']} layers instead of {result['layers']['dflash']}",
    }
    rows = []
    for name, entry in cell["overheads"].items():
        extra, share = entry["extra"].scaled(1e6), entry["share"].scaled(100)
        rows.append(
            [
                labels[name],
                f"{extra.median:.1f}",
                f"[{extra.low:.1f}, {extra.high:.1f}]",
                f"{share.median:.2f}",
                f"[{share.low:.2f}, {share.high:.2f}]",
                f"{share.half_width:.2f}",
            ]
        )
    header = ["overhead on the dflash cycle", "us", "interval", "%", "interval", "+-"]
    return text_table(header, rows)


def _published(result: Mapping[str, Any], cell: Mapping[str, Any]) -> list[str]:
    if not _whole(result, cell):
        return []
    rows = []
    for kind, entry in result["published"].items():
        cycle: Spread = entry["cycle"]
        ratio = cycle.scaled(1 / cell["sides"][entry["side"]]["cycle"].median)
        counted = str(len(entry["seconds"]))
        rows.append([kind, counted, cycle.scaled(1e3).text(4), entry["side"], ratio.text()])
    header = ["published package", "cycles", "ms [interval]", "against", "x"]
    return [text_table(header, rows)] if rows else []


def _whole(result: Mapping[str, Any], cell: Mapping[str, Any]) -> bool:
    """Whether a cell is like what the package does: one sequence, whole blocks."""
    return cell["batch"] == 1 and cell["num_draft"] == result["block_size"] - 1


def _bars(result: Mapping[str, Any], cell: Mapping[str, Any]) -> list[str]:
    bars = BARS.get(result["shapes"], {})
    if result["device"] == "cpu" or cell["context"] != 512 or not _whole(result, cell) or not bars:
        return []
    side = cell["sides"]["dflash2 selector"]
    cycle = side["cycle"].median
    lines = []
    if "floor" in bars:
        value = cycle / side["floor_seconds"]
        lines.append(f"full DFlash 2 cycle, x floor: {value:.2f} ({at_most(value, bars['floor'])})")
    lines.append(f"full DFlash 2 cycle: {1e3 * cycle:.3f} ms ({at_most(1e3 * cycle, bars['ms'])})")
    if "dflash2" in result["published"]:
        value = result["published"]["dflash2"]["cycle"].median / cycle
        bar = at_least(value, bars["published"])
        lines.append(f"times faster than the published package: {value:.1f} ({bar})")
    start = max(entry["startup_seconds"] for entry in cell["sides"].values())
    lines.append(f"slowest start of an engine: {start:.1f} s ({at_most(start, START_BAR)})")
    if result["shapes"] == "qwen3-4b":
        lines += _overhead_bars(cell["overheads"])
    return ["\n".join(lines)]


def _overhead_bars(overheads: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, (unit, bar) in OVERHEAD_BARS.items():
        entry = overheads[name]
        us, percent = 1e6 * entry["extra"].median, 100 * entry["share"].median
        value = us if unit == "us" else percent
        lines.append(f"overhead, {name}: {value:.2f} {unit} ({at_most(value, bar)})")
    widest = max(100 * entry["share"].half_width for entry in overheads.values())
    bar = at_most(widest, RESOLUTION)
    return [*lines, f"widest interval of an overhead: +- {widest:.3f} % of the cycle ({bar})"]


def _kernels(kernels: Mapping[str, Any]) -> list[str]:
    rows = kernels.get("dflash2 selector", [])
    if not rows:
        return ["skipped: kernels of a cycle (the profiler saw none)"]
    total = sum(row["us"] for row in rows)
    cells = [
        [row["name"][:NAME], f"{row['count']:g}", f"{row['us']:.1f}", f"{row['us'] / total:.1%}"]
        for row in rows[:TOP]
    ]
    count = sum(row["count"] for row in rows)
    heading = (
        f"== kernels of one dflash2 selector cycle of the first cell: {count:g} launches, "
        f"{total:.0f} us summed up\n(launches that overlap count in full each); the {TOP} longest"
    )
    return [heading, text_table(["kernel", "launches", "us", "share"], cells)]
