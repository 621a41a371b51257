"""The interactive block viewer: recorded blocks with pickers for prompt, anchor, policy and layer.

One HTML output that holds the blocks as JSON, the hand-written `viewer.js`, and a still picture
that the script replaces. So it needs no widget extension, no network and no kernel: it works in
JupyterLab, goes on working in exported HTML, and where scripts are removed (a code host, a notebook
that is not trusted) the picture, drawn by `plots.draw_block`, stays.
"""

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from dflash2_lab.browser import ImageExportError, render_images, script_json
from dflash2_lab.errors import LabError
from dflash2_lab.figures import figure_json
from dflash2_lab.plots.block import draw_block
from dflash2_lab.tables import Run
from dflash2_lab.viewer_block import NO_CANDIDATES, block_view, token_ids, token_texts

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from dflash2_lab.target import Target

PAGE = """<div class="dflash2-block">
<style>{style}</style>
<div class="still">{still}</div>
<script type="application/json">{data}</script>
<script>{script}</script>
</div>"""


@dataclass(frozen=True)
class BlockViewer:
    """Blocks to look at; the last expression of a notebook cell, it shows itself.

    `views` are blocks as `viewer_block.block_view` gives them, `texts` what to show for token ids.
    """

    views: tuple[Mapping[str, Any], ...]
    texts: Mapping[int, str]

    def figure(
        self, index: int = 0, policy: str | None = None, layer: int | None = None
    ) -> "Figure":
        """The still figure of view number `index` (plotly)."""
        return draw_block(self.views[index], self.texts, policy, layer)

    def html(self) -> str:
        """The viewer as a piece of HTML that needs nothing else."""
        files = resources.files("dflash2_lab")
        return PAGE.format(
            style=files.joinpath("viewer.css").read_text("utf-8"),
            still=self._still(),
            data=script_json({"views": self.views, "texts": self.texts}),
            script=files.joinpath("viewer.js").read_text("utf-8"),
        )

    def _still(self) -> str:
        figure = json.loads(figure_json(self.figure()))
        caption = html.escape(figure["layout"]["meta"]["caption"])
        try:
            (png,) = render_images([(figure, "png")], scale=1.5)
        except ImageExportError as error:
            return f"<p>{caption}</p><p>No still picture: {html.escape(str(error))}</p>"
        return f'<img alt="{caption}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        prompts = {view["prompt_id"] for view in self.views}
        return f"BlockViewer({len(self.views)} blocks of {len(prompts)} prompts)"


def block_viewer(
    run: Run,
    target: "Target | None" = None,
    traces: Run | None = None,
    prompts: Sequence[str] | None = None,
    anchors: Sequence[int] | None = None,
    max_blocks: int = 48,
) -> BlockViewer:
    """A viewer of a recording's blocks, made with `keep_candidates=True`.

    `target` gives the texts of tokens (without it their ids are shown), `traces` the prompts'
    tokens. `prompts` (ids; default: all) and `anchors` (default: those where `attention_sample`
    kept attention, else all) choose blocks; of more than `max_blocks` so many, evenly spread, are
    taken (a block is about 16 kB of the notebook). Raises LabError where nothing is chosen, and as
    `block_view`.
    """
    if max_blocks < 1:
        raise LabError(f"max_blocks: found {max_blocks}, expected 1 or more")
    if not run.has_table("candidates"):
        raise LabError(NO_CANDIDATES)
    key = ["prompt_id", "turn", "sample", "anchor"]
    source = run.anchors
    if anchors is None and run.has_table("block_attention"):
        source = run.table("block_attention").drop_duplicates(key)
    chosen = source[key]
    if prompts is not None:
        chosen = chosen[chosen["prompt_id"].isin(list(prompts))]
    if anchors is not None:
        chosen = chosen[chosen["anchor"].isin(list(anchors))]
    if chosen.empty:
        raise LabError(
            f"block viewer: found no recorded block of prompts {prompts} at anchors {anchors}"
        )
    count = min(max_blocks, len(chosen))
    rows = chosen.iloc[[n * len(chosen) // count for n in range(count)]]
    # the few prompts that are shown, so that a large run is searched once
    kept = set(rows["prompt_id"])
    tables = ("anchors", "slots", "paths", "candidates", "block_attention")
    few = Run(
        run.info,
        frames={
            name: run.table(name)[run.table(name)["prompt_id"].isin(kept)]
            for name in tables
            if run.has_table(name)
        },
    )
    views = tuple(
        block_view(few, *map(_plain, row), traces=traces) for row in rows.itertuples(index=False)
    )
    return BlockViewer(views, token_texts(target, token_ids(views)))


def _plain(value: object) -> Any:
    return value if isinstance(value, str) else int(value)
