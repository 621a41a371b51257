"""Options of the verify command; like `cli`, it imports nothing heavy."""

import argparse
from pathlib import Path

from dflash2_lab.console import seed_number
from dflash2_lab.shared_options import chat_options, run_later, target_options

DESCRIPTION = """\
Test whether tokens have the target's law. --drafter decodes with one of our engines under three
drafters (the given one, its opposite, one close to the target) and writes a certificate. --samples
audits what any engine wrote (vLLM, SGLang, llama.cpp, transformers, ...): every token against the
law that the target gives it, greedy ones against its argmax. --enumerate runs every branch of our
proposers and verifiers on tiny vocabularies. --mutation-score tests the tests. Exit code 1 says
that the check failed.
"""
EPILOG = """\
a line of FILE is a JSON object:
  {"prompt": "Name a colour.", "output_ids": [3840, 30, 2], "seed": 7}
  prompt         text of a user turn or a list of chat messages, rendered by the target's template;
                 or prompt_ids, taken as they are
  output_ids     as they were sampled, a stop token included; or output, text, which is tokenised
                 anew and needs finish_reason, "stop" or "length"
  seed           an integer, another one for each sample of a prompt
  optional       temperature, top_p, top_k, on every line or on none; finish_reason; prompt_hash,
                 sha256 of json.dumps(prompt_ids), to be sure of the template

examples:
  dflash2-lab verify --drafter zoo:dflash2 --out runs/certificate
  dflash2-lab verify --drafter zoo:dflash2 --device cuda --level release \\
      --also 0.8,0.95,50 --out runs/release
  dflash2-lab verify --drafter zoo:dflash2 --temperature 0 --dtype bfloat16
  dflash2-lab verify --drafter zoo:dflash2 --inject residual-is-p
  dflash2-lab verify --samples vllm.jsonl --target Qwen/Qwen3-4B --dtype bfloat16 \\
      --temperature 0.8 --top-p 0.95 --out runs/audit
  dflash2-lab verify --samples greedy.jsonl --temperature 0
  dflash2-lab verify --samples a.jsonl --against b.jsonl
  dflash2-lab verify --enumerate
  dflash2-lab verify --mutation-score --json
  dflash2-lab verify --drafter zoo:dflash2 --mutation-score --temperature 0.8 --top-p 0.95
"""


def add_verify_options(command: argparse.ArgumentParser) -> None:
    """The options of `verify_lossless_commands.verify`."""
    command.description, command.epilog = DESCRIPTION, EPILOG
    command.add_argument(
        "--drafter", default=None, help="a folder, a hub id, or zoo:dflash, zoo:dflash2"
    )
    command.add_argument("--policy", default=None, help="of the drafter (default: its own)")
    command.add_argument(
        "--acceptance", default="token", choices=("token", "block"), help="verification rule"
    )
    command.add_argument(
        "--engine",
        default=None,
        choices=("eager", "graph"),
        help="eager: any target; graph: dense Llama, Qwen2 and Qwen3, several rows at a time "
        "(default: graph where it fits, but eager when greedy or to plant a fault)",
    )
    command.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="T[,TOP_P[,TOP_K]]",
        help="one more configuration to decode with, such as 0.8,0.95,50; may be repeated",
    )
    command.add_argument(
        "--inject",
        default=None,
        metavar="NAME",
        help="plant a fault of the catalogue, to see it found; a wrong name lists them",
    )
    command.add_argument(
        "--prompts", default=None, metavar="SPEC", help="of the decode (default: the project's own)"
    )
    command.add_argument(
        "--samples", type=Path, default=None, metavar="FILE", help="JSON lines, see below"
    )
    command.add_argument(
        "--against",
        type=Path,
        default=None,
        metavar="FILE",
        help="compare --samples with these samples of the same prompts, without a target; needs 25 "
        "to 125 times the tokens of an audit",
    )
    command.add_argument(
        "--enumerate",
        action="store_true",
        help="run every branch of proposers and verifiers on tiny vocabularies; no sampling",
    )
    command.add_argument(
        "--mutation-score",
        action="store_true",
        help="run the tests on broken decoders of a toy, and count those that they catch; with "
        "--drafter: plant every fault of the catalogue in the real decode",
    )
    target_options(command)
    chat_options(command)
    command.add_argument(
        "--temperature",
        type=float,
        default=None,
        help="of the decode (default: 1), or of samples that do not say theirs; 0 is greedy, which "
        "is held against the target's own one-token passes",
    )
    command.add_argument("--top-p", type=float, default=1.0, help="kept mass; 1 is off")
    command.add_argument("--top-k", type=int, default=0, help="0 is off")
    command.add_argument(
        "--level",
        default="pr",
        choices=("pr", "nightly", "release"),
        help="tokens decoded or asked for: 4,096, 32,768 or 65,536",
    )
    command.add_argument(
        "--alpha", type=float, default=1e-3, help="chance of a false alarm, of all tests together"
    )
    command.add_argument(
        "--seed", type=seed_number, default=0, help="of the random numbers of the tests"
    )
    command.add_argument(
        "--out", type=Path, default=None, help="run folder for the certificate (default: none)"
    )
    command.set_defaults(run=run_later("verify", "verify_lossless_commands"))
