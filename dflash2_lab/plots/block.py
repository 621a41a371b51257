"""One block: candidates of each slot with their scores, the walk through them, the target's tokens,
and below it what each slot attends to. The still form of the block viewer.
"""

import html
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash2_lab.errors import LabError
from dflash2_lab.plots.parts import LEFT, RIGHT, frame, key, panel_title
from dflash2_lab.plots.template import PALETTE, SMALL, WIDTH, colour_scale

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

WALK, TARGET = PALETTE[1], PALETTE[2]
CELL = 23  # px, height of a row of either panel
HALF = 0.43  # half the width of a candidate's cell, in slots; the walk crosses what is left
CHAR = 7.5  # px a character at CELL_FONT
CELL_FONT, KEY_FONT = 12, 11
TOP = 66  # px of tick labels above the candidates: slot, target's token, verdict
GAP = 50  # px between the candidates and the title of the attention panel
KEYS = 86  # px of tick labels below the attention


def draw_block(
    view: Mapping[str, Any],
    texts: Mapping[int, str] | None = None,
    policy: str | None = None,
    layer: int | None = None,
    title: str | None = None,
) -> "Figure":
    """The figure of one block from `viewer_block.block_view`; pure.

    `texts` says what to show for a token id (default: the id); `policy` whose walk is drawn
    (default: the drafter's own), `layer` whose attention (default: the mean over layers).
    LabError for a policy or layer that the view does not have.
    """
    from plotly.subplots import make_subplots

    policy = policy or view["policies"][0]
    if policy not in view["policies"]:
        raise LabError(f"policy: found {policy!r}, expected one of {', '.join(view['policies'])}")
    shares = mean_attention(view, layer)
    num_rows = len(view["slots"][0]["ids"]) + 1
    sizes = [CELL * num_rows, *([CELL * len(shares)] if shares else [])]
    height = sum(sizes) + (GAP if shares else 0)
    fig = make_subplots(
        rows=len(sizes),
        cols=1,
        row_heights=[size / sum(sizes) for size in sizes],
        vertical_spacing=GAP / height if shares else 0,
    )
    shown = _Shown(texts)
    _candidates(fig, view, policy, shown)
    if shares:
        _attention(fig, view, shares, shown)
        which = "mean over layers" if layer is None else f"layer {layer}"
        panel_title(fig, f"share of each slot's attention by key, %; {which}, mean over heads", 2)
    matched, offered = view["matched"][policy], len(view["slots"])
    words = "accepted" if view["temperature"] == 0 else "equal to the target's"
    request = f"{view['prompt_id']}, turn {view['turn']}, sample {view['sample']}"
    keys = "Below: older context as one sum, the nearest positions, the anchor, the drafted rows. "
    frame(
        fig,
        title=title or f"One block of {view['drafter']}: {request}, anchor {view['anchor']}",
        name="block",
        plot_height=height,
        head=TOP,
        foot=KEYS if shares else 20,
        note=f"{matched} of {offered} drafts of {policy} {words}. Above: candidates by unary logit "
        "with the score that the policy sees on its own walk; shade: softmax of that score. "
        f"{keys if shares else ''}Target {view['target']}, T = {view['temperature']:g}.",
        caption=f"Candidates, walk and targets of the block at anchor {view['anchor']} of "
        f"{request}: {matched} of {offered} drafts of {policy} {words}.",
    )
    return fig


def mean_attention(view: Mapping[str, Any], layer: int | None) -> list[list[float]]:
    """Attention rows by slot of one layer, or the mean over layers; [] where none was kept."""
    layers = [part["rows"] for part in view["attention"] if layer in (None, part["layer"])]
    if layer is not None and view["attention"] and not layers:
        known = ", ".join(str(part["layer"]) for part in view["attention"])
        raise LabError(f"layer: found {layer}, expected one of {known}")
    return [
        [sum(column) / len(layers) for column in zip(*rows, strict=True)]
        for rows in zip(*layers, strict=True)
    ]


class _Shown:
    """Escaped, shortened token texts."""

    def __init__(self, texts: Mapping[int, str] | None) -> None:
        self.texts = texts

    def __call__(self, token: int | None, room: int) -> str:
        if token is None:
            return ""
        text = f"#{token}" if self.texts is None else self.texts[token]
        return html.escape(text if len(text) <= room else f"{text[: room - 1]}…", quote=False)


def _candidates(fig: "Figure", view: Mapping[str, Any], policy: str, shown: _Shown) -> None:
    slots = view["slots"]
    num = len(slots[0]["ids"])
    room = int((WIDTH - LEFT - RIGHT) * 2 * HALF / len(slots) / CHAR)
    texts, shades, walk, targets = [], [], [], []
    for slot in slots:
        path = slot["paths"][policy]
        scores = path["scores"] or slot["unary"]
        texts.append([_cell(t, s, room, shown) for t, s in zip(slot["ids"], scores, strict=True)])
        shades.append(_softmax(scores))
        walk.append(_row(slot, path["token"], num))
        targets.append(_row(slot, slot["target"], num))
        if num in (walk[-1], targets[-1]):
            missing = path["token"] if walk[-1] == num else slot["target"]
            texts[-1].append(f"{shown(missing, max(4, room - 8))}")
        else:
            texts[-1].append("")
        shades[-1].append(None)
    numbers = [slot["slot"] for slot in slots]
    fig.add_trace(
        {
            "type": "heatmap",
            "x": numbers,
            "y": list(range(num + 1)),
            "z": [list(row) for row in zip(*shades, strict=True)],
            "zmin": 0,
            "zmax": 1,
            "colorscale": colour_scale(),
            "showscale": False,
            "text": [list(row) for row in zip(*texts, strict=True)],
            "texttemplate": "%{text}",
            "textfont": {"size": CELL_FONT},
            "xgap": (WIDTH - LEFT - RIGHT) * (1 - 2 * HALF) / len(slots),
            "ygap": 2,
            "hovertemplate": "slot %{x}, candidate %{y}: %{z:.1%}<extra></extra>",
        },
        row=1,
        col=1,
    )
    # the walk crosses the gaps only, where it strikes out no text
    steps = zip(numbers, walk, walk[1:], strict=False)
    ends = [((n + HALF, here), (n + 1 - HALF, then), (None, None)) for n, here, then in steps]
    crossing = [point for end in ends for point in end]
    line = {"mode": "lines", "line": {"color": WALK, "width": 2}}
    mark = {"mode": "markers", "marker": {"color": TARGET, "symbol": "diamond", "size": 10}}
    points = list(zip([number - HALF for number in numbers], targets, strict=True))
    for look, places in ((line, crossing), (mark, points)):
        place = {"x": [x for x, _ in places], "y": [y for _, y in places]}
        silent = {"type": "scatter", "showlegend": False, "hoverinfo": "skip"}
        fig.add_trace(silent | place | look, row=1, col=1)
    for number, row in zip(numbers, walk, strict=True):
        sides = {"x0": number - HALF, "x1": number + HALF, "y0": row - 0.46, "y1": row + 0.46}
        fig.add_shape(type="rect", line={"color": WALK, "width": 2}, row=1, col=1, **sides)
    fig.add_trace(key(f"walk of {policy}", **line))
    fig.add_trace(key("target's token", **mark))
    verdicts = _verdicts(view, policy, short=room < 12)
    heads = [
        f"<b>{slot['slot']}</b><br>{shown(slot['target'], room)}<br>{verdict}"
        for slot, verdict in zip(slots, verdicts, strict=True)
    ]
    outside = any(num in rows for rows in (walk, targets))
    fig.update_xaxes(
        side="top",
        tickvals=numbers,
        ticktext=heads,
        range=[numbers[0] - 0.5, numbers[-1] + 0.5],
        showgrid=False,
        showline=False,
        ticks="",
        row=1,
        col=1,
    )
    fig.update_yaxes(
        tickvals=[*range(num), *([num] if outside else [])],
        ticktext=[*(str(rank + 1) for rank in range(num)), *(["none"] if outside else [])],
        range=[num + 0.5, -0.5],
        showgrid=False,
        showline=False,
        ticks="",
        tickfont={"size": CELL_FONT},
        title_text="unary candidate",
        row=1,
        col=1,
    )


def _cell(token: int, score: float | None, room: int, shown: _Shown) -> str:
    """Token and score where there is room for both."""
    number = "" if score is None or room < 12 else f"{score:.1f}"
    text = shown(token, room - len(number) - bool(number))
    return f"{text} {number}" if number else text


def _row(slot: Mapping[str, Any], token: int, outside: int) -> int:
    return slot["ids"].index(token) if token in slot["ids"] else outside


def _softmax(scores: Sequence[float | None]) -> list[float]:
    top = max(score for score in scores if score is not None)
    weights = [0.0 if score is None else math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def _verdicts(view: Mapping[str, Any], policy: str, short: bool) -> list[str]:
    """Word and mark by slot: up to the first that differs, that one, and those behind it."""
    greedy = view["temperature"] == 0
    names = ("accepted", "refused", "not reached") if greedy else ("equal", "differs", "behind")
    marks, matched = ("✓", "✗", "\N{EN DASH}"), view["matched"][policy]
    kinds = [0 if n < matched else 1 if n == matched else 2 for n in range(len(view["slots"]))]
    return [marks[kind] if short else f"{marks[kind]} {names[kind]}" for kind in kinds]


def _attention(
    fig: "Figure", view: Mapping[str, Any], shares: Sequence[Sequence[float]], shown: _Shown
) -> None:
    num_context = len(view["context"])
    older = max(0, view["context_len"] - num_context)
    names = [
        f"older ({older})",
        *(shown(token, 11) or f"-{num_context - n}" for n, token in enumerate(view["context"])),
        f"<b>{shown(view['anchor_token'], 11) or 'anchor'}</b>",
        *(f"row {row}" for row in range(1, len(shares[0]) - num_context - 1)),
    ]
    fig.add_trace(
        {
            "type": "heatmap",
            "x": list(range(len(names))),
            "y": list(range(1, len(shares) + 1)),
            "z": [list(row) for row in shares],
            "zmin": 0,
            # the older context, a sum, would leave nothing of the scale to the single keys
            "zmax": max(max(row[1:]) for row in shares),
            "colorscale": colour_scale(),
            "showscale": False,
            "text": [
                [f"{share:.0%}"[:-1] if share >= 0.005 else "" for share in r] for r in shares
            ],
            "texttemplate": "%{text}",
            "textfont": {"size": KEY_FONT},
            "xgap": 1,
            "ygap": 1,
            "hovertemplate": "slot %{y}, key %{x}: %{z:.1%}<extra></extra>",
        },
        row=2,
        col=1,
    )
    fig.update_xaxes(
        tickvals=list(range(len(names))),
        ticktext=names,
        tickangle=-90,
        tickfont={"size": KEY_FONT},
        showgrid=False,
        showline=False,
        ticks="",
        row=2,
        col=1,
    )
    fig.update_yaxes(
        tickvals=list(range(1, len(shares) + 1)),
        range=[len(shares) + 0.5, 0.5],
        tickfont={"size": SMALL},
        showgrid=False,
        showline=False,
        ticks="",
        title_text="slot",
        row=2,
        col=1,
    )
