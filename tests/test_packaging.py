"""The package as it is imported and shipped."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_transformers_imports_from_the_repository_root():
    # the folder kernels/ there must not be taken for the package `kernels` of transformers
    code = (
        "import transformers; from transformers import Qwen3ForCausalLM, Qwen3Config; "
        "import dflash2_lab.kernels.candidate_topk"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
