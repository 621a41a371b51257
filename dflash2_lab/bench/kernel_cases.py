"""The cases of `bench kernels`: inputs, calls, bytes and bars of every kernel.

Inputs are random, and different for every call of a case.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash2_lab.kernels.attention_plan import default_splits
from dflash2_lab.kernels.attention_plan import make_workspace as attention_workspace
from dflash2_lab.kernels.block_attention import block_attention
from dflash2_lab.kernels.candidate_selector import select
from dflash2_lab.kernels.candidate_topk import candidate_topk
from dflash2_lab.kernels.conv_project import conv_project
from dflash2_lab.kernels.grouped_conv import grouped_conv
from dflash2_lab.kernels.linear import linear, linear_add
from dflash2_lab.kernels.linear_plan import make_workspace
from dflash2_lab.kernels.row_law import row_law
from dflash2_lab.kernels.stream import Norm, Rows
from dflash2_lab.kernels.token_rank import token_rank
from dflash2_lab.kernels.verify import CandidateLaw, verify

DTYPE = torch.bfloat16
ITEM = 2  # bytes of a value


class Heads(NamedTuple):
    """Attention of one model: its name, query and key-value heads, width of a head."""

    name: str
    query: int
    kv: int
    width: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of all cases: by default those of decoding Qwen3-4B with blocks of 8."""

    vocab: int = 151936
    topk_rows: tuple[int, ...] = (7, 28, 56, 112, 512)
    candidates: int = 16
    rank: int = 256
    conv_blocks: int = 8192
    conv_group: int = 16
    hidden: int = 2560
    intermediate: int = 9728
    block: int = 8
    batches: tuple[int, ...] = (1, 8, 16)
    contexts: tuple[int, ...] = (512, 2048, 8192)
    heads: tuple[Heads, ...] = (Heads("Qwen3-4B", 32, 8, 128), Heads("SmolLM2", 9, 3, 64))
    rank_rows: int = 512

    @classmethod
    def tiny(cls) -> "Sizes":
        return cls(
            vocab=300, topk_rows=(3, 6), candidates=4, rank=8, conv_blocks=6, conv_group=8,
            hidden=32, intermediate=48, block=4, batches=(1, 2), contexts=(20,),
            heads=(Heads("tiny", 4, 2, 8),), rank_rows=5,
        )  # fmt: skip


class Work(NamedTuple):
    """One call, and the same result got another way (None: nothing to compare with)."""

    kernel: Callable[[], object]
    other: Callable[[], object] | None = None


@dataclass(frozen=True)
class Case:
    """`make(number)` allocates the inputs of one more call. `bars`: "us" at most, "share" of the
    copy bandwidth and "times" faster than the other way at least."""

    kernel: str
    shape: str
    num_bytes: int
    make: Callable[[int], Work]
    other_name: str = ""
    bars: Mapping[str, float] = field(default_factory=dict)
    graph: bool = True


def all_cases(sizes: Sizes, device: torch.device) -> list[Case]:
    """Every case; inputs are allocated only when a case is measured."""
    draw = Draw(device)
    return [
        *_topk(sizes, draw),
        *_conv(sizes, draw),
        *_select(sizes, draw),
        *_verify(sizes, draw),
        *_attention(sizes, draw),
        *_products(sizes, draw),
        *_token_rank(sizes, draw),
    ]


@dataclass(frozen=True)
class Draw:
    """Random tensors on a device."""

    device: torch.device

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self.device) * scale

    def ids(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, device=self.device)

    def full(self, value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)


def _topk(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    k = sizes.candidates
    for rows in sizes.topk_rows:

        def make(_number: int, rows: int = rows) -> Work:
            x = draw.normal(rows, sizes.vocab)
            return Work(lambda: candidate_topk(x, k), lambda: torch.topk(x, k))

        bars = {"times": 3.0} | ({"share": 60.0} if rows == sizes.topk_rows[-1] else {})
        size = rows * sizes.vocab * ITEM
        shape = f"{rows} x {sizes.vocab}"
        yield Case("candidate_topk", shape, size, make, f"torch.topk, K = {k}", bars)


def _conv(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    blocks, rows, width = sizes.conv_blocks, sizes.block, sizes.hidden
    groups = width // sizes.conv_group

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        dynamic = draw.normal(blocks, rows, 2, groups, scale=0.1)
        parts = (draw.normal(blocks, rows, width), dynamic, draw.normal(2, width))
        return tuple(part.requires_grad_() for part in parts)

    def forward(_number: int) -> Work:
        parts = [part.detach() for part in inputs()]
        return Work(lambda: grouped_conv(*parts))

    def backward(_number: int) -> Work:
        parts = inputs()
        out = grouped_conv(*parts)
        slope = torch.randn_like(out)
        return Work(lambda: torch.autograd.grad(out, parts, slope, retain_graph=True))

    x, dynamic = blocks * rows * width * ITEM, blocks * rows * 2 * groups * ITEM
    shape = f"{blocks} x {rows} x {width}"
    yield Case("grouped_conv", shape, 2 * x + dynamic, forward, bars={"share": 80.0}, graph=False)
    # Reads d_out, x and the kernels, writes the slopes of the latter two.
    size = 3 * x + 2 * dynamic
    name = f"backward, {shape}"
    yield Case("grouped_conv", name, size, backward, bars={"share": 60.0}, graph=False)


def _select(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    slots, k, rank = sizes.block - 1, sizes.candidates, sizes.rank
    tables = [draw.normal(sizes.vocab, rank, scale=rank**-0.5) for _ in range(2)]
    arrivals = draw.full(0, torch.int32, 1)

    for temperature in (0.0, 1.0):

        def make(number: int, temperature: float = temperature) -> Work:
            unary = draw.normal(1, slots, k, scale=4.0).sort(-1, descending=True)[0]
            ids, anchor = draw.ids(sizes.vocab, 1, slots, k), draw.ids(sizes.vocab, 1)
            hot = draw.full(temperature, torch.float32, 1)
            key, counter = (draw.full(value, torch.int64, 1) for value in (1, number))
            parts = (unary, ids, anchor, draw.normal(1, slots, rank), *tables, hot, key, counter)
            return Work(lambda: select(*parts, arrivals=arrivals))

        touched = (1 + (slots - 1) * k + slots * k) * rank * ITEM
        shape = f"{slots} slots, K = {k}, T = {temperature:g}"
        yield Case("select", shape, touched, make, bars={"us": 10.0})


def _verify(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    rows, slots, k = sizes.block, sizes.block - 1, sizes.candidates
    filters = {"greedy": (0.0, 0, 1.0), "T = 1": (1.0, 0, 1.0), "filtered": (1.0, 50, 0.95)}
    for batch in sizes.batches:
        for name, (temperature, top_k, top_p) in filters.items():

            def make(
                number: int,
                batch: int = batch,
                temperature: float = temperature,
                top_k: int = top_k,
                top_p: float = top_p,
            ) -> Work:
                logits = draw.normal(batch, rows, sizes.vocab, scale=4.0)
                law_parts = (
                    draw.full(temperature, torch.float32, batch * rows),
                    draw.full(top_k, torch.int32, batch * rows),
                    draw.full(top_p, torch.float32, batch * rows),
                )
                ids = draw.ids(sizes.vocab, batch, slots, k)
                q = CandidateLaw(ids, draw.full(1 / k, torch.float32, batch, slots, k))
                hot = draw.full(temperature, torch.float32, batch)
                one, counter = (draw.full(v, torch.int64, batch) for v in (1, number))
                offered = draw.full(slots, torch.int32, batch)
                arrivals = draw.full(0, torch.int32, batch * rows)
                draft = ids[..., 0].contiguous()

                def call() -> object:
                    law = row_law(logits.flatten(0, 1), *law_parts, arrivals=arrivals)
                    tests = (hot, one, counter, one + 1, counter, offered)
                    return verify(logits, law, draft, q, *tests, arrivals=arrivals)

                return Work(call)

            size = batch * rows * sizes.vocab * ITEM
            yield Case("row_law, verify", f"batch {batch}, {name}", size, make)


def _attention(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    G = sizes.block
    for heads in sizes.heads:
        H, KV, D = heads.query, heads.kv, heads.width
        for context in sizes.contexts:

            def make(
                _number: int, H: int = H, KV: int = KV, D: int = D, context: int = context
            ) -> Work:
                S = context + G
                splits = default_splits(1, KV, G, H, S, draw.device)
                scratch = attention_workspace(1, KV, G, H, D, splits, draw.device)
                qkv = draw.normal(1, G, (H + 2 * KV) * D)
                keys, values = (draw.normal(1, KV, S, D) for _ in range(2))
                start = draw.full(context, torch.int64, 1)
                cos, sin = (draw.normal(S, D) for _ in range(2))
                query = draw.normal(1, H, G, D)

                def call() -> object:
                    return block_attention(
                        qkv, keys, values, start, cos, sin, H,
                        causal=False, num_splits=splits, workspace=scratch,
                    )  # fmt: skip

                def other() -> object:
                    return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

                return Work(call, other)

            name = "scaled_dot_product_attention alone, without norms, rotary and store"
            size = 2 * KV * context * D * ITEM
            yield Case("block_attention", f"{heads.name}, {context}", size, make, name)


def _products(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    """The products of a Qwen3-4B layer and the head, over one block of rows."""
    heads, hidden, inner = sizes.heads[0], sizes.hidden, sizes.intermediate
    qkv, mixed = (heads.query + 2 * heads.kv) * heads.width, heads.query * heads.width
    scratch = make_workspace(draw.device)
    norm = Norm(draw.full(1.0, DTYPE, hidden), 1e-6)
    groups = hidden // sizes.conv_group
    shapes = {
        "qkv": (qkv, hidden),
        "out": (hidden, mixed),
        "gate-up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (sizes.vocab, hidden),
        "conv kernels": (4 * groups, hidden),
    }
    for name, (n, k) in shapes.items():

        def make(_number: int, name: str = name, n: int = n, k: int = k) -> Work:
            weight, x = draw.normal(n, k, scale=k**-0.5), draw.normal(sizes.block, k)
            residual, base = draw.normal(sizes.block, hidden), draw.normal(2, 2, hidden)

            def call() -> object:
                if name in ("out", "down"):
                    return linear_add(x, weight, residual, norm, workspace=scratch)
                if name == "conv kernels":
                    return conv_project(Rows(x), weight, base, sizes.block)
                return linear(Rows(x), weight, gated=name == "gate-up")

            return Work(call, lambda: F.linear(x, weight))

        other = "F.linear alone, without what is fused into the product"
        yield Case("linear", f"{name} {n} x {k}", n * k * ITEM, make, other)


def _token_rank(sizes: Sizes, draw: Draw) -> Iterator[Case]:
    rows = sizes.rank_rows

    def make(_number: int) -> Work:
        x, token = draw.normal(rows, sizes.vocab), draw.ids(sizes.vocab, rows)

        def other() -> object:
            return (x > x.gather(-1, token[:, None])).sum(-1)

        return Work(lambda: token_rank(x, token), other)

    shape, size = f"{rows} x {sizes.vocab}", rows * sizes.vocab * ITEM
    yield Case("token_rank", shape, size, make, "(logits > logit).sum(-1), ties left out")
