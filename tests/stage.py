"""A working folder in which the names that the project's commands print exist, tiny.

Targets and drafters that a command names by a hub id are folders of that path; the default target,
the zoo, the benchmarks and what a target makes up are tiny stand-ins under their own names. So the
commands run as they are printed, with only their sizes changed (`small`).
"""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from drafters import tiny_drafter
from helpers import MASK_ID, tiny_model, tiny_tokenizer
from sample_files import GREEDY, draw_lines, write_lines

from dflash2_lab import figure_commands, figures, prompts, target, verify_decode_commands
from dflash2_lab.bench import timing
from dflash2_lab.cli import main
from dflash2_lab.losslessness import enumeration_cases, mutation
from dflash2_lab.losslessness.verifying import Plan
from dflash2_lab.models import io
from dflash2_lab.sampling import Sampling

ROOT = Path(__file__).parents[1]
SMALLER = {
    "--limit": "2", "--max-new-tokens": "12", "--steps": "2", "--batch-size": "4",
    "--num-anchors": "4", "--shapes": "tiny", "--device": "cpu",
}  # fmt: skip
# For commands that leave their sizes to the defaults.
LESS = {
    "trace": ("--limit 2", "--max-new-tokens 12"),
    "record": ("--limit 2", "--max-new-tokens 12"),
    "decode": ("--limit 2", "--max-new-tokens 12"),
    "verify-replay": ("--limit 2", "--max-new-tokens 12"),
    "reproduce": ("--limit 2", "--max-new-tokens 12"),
    "train": ("--batch-size 4", "--num-anchors 4"),
    "bench cycle": ("--context 12", "--repeats 2", "--inner 1", "--reference-cycles 2"),
    "bench kernels": ("--repeats 1",),
    "bench throughput": ("--max-new-tokens 12", "--concurrency 2", "--repeats 1"),
}
# What a command reads, made by the commands that are printed before it.
MADE_BY = (
    "trace --prompts self:2000 --max-new-tokens 384 --out runs/text",
    "trace --prompts default --limit 24 --max-new-tokens 96 --out runs/traces",
    "trace --prompts gsm8k --limit 512 --out runs/gsm8k",
    "train --kind dflash2 --data runs/text --steps 3000 --out runs/mine",
    "record --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16 --prompts gsm8k "
    "--out runs/qwen3-4b",
    "record --target Qwen/Qwen3-4B --drafter zoo:dflash2 --traces runs/qwen3-4b/traces "
    "--out runs/another",
    "record --drafter zoo:dflash2 --traces runs/traces --out runs/dflash2",
    "record --drafter zoo:dflash2 --prompts default --out runs/decay",
    "record --drafter zoo:dflash2 --prompts prompts.jsonl --out runs/attention",
    "bench cycle --shapes qwen3-4b",
    "verify --drafter zoo:dflash2 --out runs/certificate",
)
# What stands for a folder of the reader's own.
OWN = {
    "TRACES": "runs/text", "RUN_A": "runs/qwen3-4b", "RUN_B": "runs/another",
    "RECORD_RUN": "runs/dflash2", "RUN": "runs/dflash2",
}  # fmt: skip


def small(line: str) -> list[str]:
    """The words of a command, with smaller sizes."""
    words = shlex.split(line)
    kind = " ".join(words[:2]) if words[0] == "bench" else words[0]
    fixed = {"--prompt", "--traces", "self:2000"} & set(words)  # as many as there are
    for index, word in enumerate(words[1:]):
        words[index + 1] = SMALLER.get(words[index], word.replace("self:2000", "self:80"))
    for option in LESS.get(kind, ()):
        name, *values = option.split()
        if name not in words and not (fixed and name == "--limit"):
            words += [name, *values]
    return words


def build(folder: Path) -> None:
    """Make everything that the commands name under `folder`, which has to be the working folder,
    inside `stand_ins`."""
    for name in ("smollm2-135m", "Qwen/Qwen3-4B"):
        model = tiny_model(num_hidden_layers=8, max_position_embeddings=2048)
        model.lm_head.weight *= 0.25  # flat laws, as those of a model with doubts
        model.lm_head.weight[MASK_ID] = 0  # an id that the text never uses, for training
        # weights that are the same in either precision, so that samples of one have both laws
        model.to(torch.bfloat16).float().save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    shape = {"num_target_layers": 8, "max_position_embeddings": 2048, "block_size": 8}
    for name, kind in (
        ("zoo/dflash", "dflash"),
        ("zoo/dflash2", "dflash2"),
        ("z-lab/Qwen3-4B-DFlash-b16", "dflash"),
    ):
        io.save_drafter(tiny_drafter(kind, **shape), folder / name)
    lines = [{"id": name, "turns": [f"tell me {name}"]} for name in "abc"]
    write_lines(folder / "prompts.jsonl", lines)
    for line in MADE_BY:
        assert main(small(line)) == 0, line
    for name, made in OWN.items():
        (folder / name).symlink_to(made)
    shutil.copytree(ROOT / "figures", folder / "figures")
    shutil.copy(ROOT / "dflash2_lab" / "zoo" / "dflash2" / "evaluation.json", folder)
    writer = target.load_target("Qwen/Qwen3-4B")
    for name, law, num, seed in (
        ("vllm", Sampling(0.8, 0.95), 8, 0),
        ("samples", Sampling(0.8, 0.95), 8, 1),
        ("greedy", GREEDY, 1, 0),
        ("a", Sampling(1.0), 8, 0),
        ("b", Sampling(1.0), 8, 1),
    ):
        write_lines(folder / f"{name}.jsonl", draw_lines(writer, law, num, 24, seed))


def stand_ins(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Work in `folder`, with what lies there in place of what the package ships or downloads."""
    patch.chdir(folder)
    patch.setattr(target, "packaged_smollm2", lambda: folder / "smollm2-135m")
    patch.setattr(target, "converted_folder", lambda path: path)
    patch.setattr(io, "ZOO", folder / "zoo")
    patch.setattr(prompts, "benchmark_rows", _benchmark)
    patch.setattr(prompts, "synthesize_prompts", _made_up)
    patch.setattr(figure_commands, "find_folder", lambda: folder / "figures")
    patch.setitem(timing.COPY_BYTES, "cpu", 2**16)
    score = mutation.mutation_score
    few = ("residual-is-p", "correct")
    for module in (mutation, verify_decode_commands):
        patch.setattr(
            module, "mutation_score", lambda seed, progress=None: score(few, 512, seed, progress)
        )
    run, cases = enumeration_cases.run_enumeration, enumeration_cases.CASES[:2]
    patch.setattr(enumeration_cases, "run_enumeration", lambda: run(cases))
    patch.setattr(figures, "render_images", lambda jobs, **_options: [b"picture"] * len(jobs))
    # the levels, and the size of a planted fault, have no option that makes them smaller
    patch.setattr(verify_decode_commands, "plan_of", lambda _level, seed: Plan(90, 3, seed=seed))
    patch.setattr(verify_decode_commands, "QUICK", Plan(60, 2))
    patch.setattr(verify_decode_commands, "FAULTS", {"residual-is-p": None})
    patch.setattr(verify_decode_commands, "CONTROLS", {"correct": None})


def _benchmark(name: str) -> list[prompts.Row]:
    return [(f"{name}/{number}", (f"what is {number}?",), name) for number in range(4)]


def _made_up(_target: object, num: int, seed: int = 0) -> list[prompts.Prompt]:
    return [
        prompts.Prompt(f"self/{n:03d}", (f"{n + seed}, and then?",), "self") for n in range(num)
    ]
