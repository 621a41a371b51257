"""What a named fault injection is: one formula, why it happens, and the hooks it replaces."""

from dataclasses import dataclass, field

from dflash2_lab.losslessness.toy_decoding import Rules

STAGES = ("target", "draft", "reported q", "acceptance", "residual", "bonus", "random numbers")


@dataclass(frozen=True)
class Fault:
    """A broken decoder, or a harmless one that looks broken.

    Attributes:
        name: as in `--inject NAME`.
        stage: where it acts, one of `STAGES`.
        formula: what the decoder does, in one line; p, q of the drafted slot i, draft x, uniform u.
        why: how it comes about in practice, with a public thread where there is one.
        num_tokens: emitted tokens at which sampling must catch it on the toy, a power of two; None
            where no such number is known (harmless, or left to a contract on the values).
        rules: the decoder.
    """

    name: str
    stage: str
    formula: str
    why: str
    num_tokens: int | None
    rules: Rules = field(repr=False)
