"""The package as it is imported and shipped."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_transformers_imports_from_the_repository_root():
    # the folder kernels/ there must not be taken for the package `kernels` of transformers
    code = (
        "import transformers; from transformers import Qwen3ForCausalLM, Qwen3Config; "
        "import dflash2_lab.kernels.candidate_topk"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_public_names_are_listed_before_their_first_use():
    code = (
        "import sys; import dflash2_lab as lab; assert {*lab.__all__} <= {*dir(lab)}; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_every_folder_with_modules_is_a_listed_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "dflash2_lab").rglob("*.py")}
    found = {".".join(folder.parts) for folder in folders}
    assert sorted(listed) == sorted(found | {"dflash2_lab.kernels"})


def test_constraints_pin_every_dependency_but_triton():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    extras = [need for needs in project["optional-dependencies"].values() for need in needs]
    names = {re.match(r"[\w-]+", need)[0] for need in project["dependencies"] + extras}
    assert names - pinned == {"triton", "dflash2-lab"}
    assert "torch==2.13.0" in lines


CHECK = """
from pathlib import Path
import dflash2_lab.kernels.candidate_topk as kernel
from dflash2_lab.models.io import load_drafter
from dflash2_lab.prompts import load_prompts
assert Path(kernel.__file__).is_relative_to({prefix!r}), kernel.__file__
assert len(load_prompts("default")) == 48
assert [load_drafter(f"zoo:{{kind}}").settings.kind for kind in ("dflash", "dflash2")] == [
    "dflash",
    "dflash2",
]
"""


@pytest.mark.slow
def test_wheel_holds_kernels_zoo_and_prompts_and_runs(tmp_path):
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command, env=bare):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=env
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    # built from a copy: setuptools would leave build/ here, and read what an older build left
    source = tmp_path / "source"
    for name in ("dflash2_lab", "kernels"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("*.whl")
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", str(venv))
    python = str(venv / "bin" / "python")
    run(python, "-m", "pip", "install", "-q", "--no-deps", str(wheel))
    # the dependencies of this environment, without its own dflash2_lab: links to a clone
    # (.pth files) count in site folders only
    env = bare | {"PYTHONPATH": sysconfig.get_paths()["purelib"]}
    run(python, "-c", CHECK.format(prefix=str(venv)), env=env)
    script = str(venv / "bin" / "dflash2-lab")
    assert "reproduce" in run(script, "--help", env=env)
