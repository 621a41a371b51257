"""`bench kernels` at tiny sizes on the CPU: every case runs, and its bytes are right."""

import json

import pytest
import torch

from dflash2_lab.bench import timing
from dflash2_lab.bench.kernel_cases import Sizes, all_cases
from dflash2_lab.bench.kernels import bench_kernels, measure, table
from dflash2_lab.bench.timing import Spread
from dflash2_lab.cli import main
from dflash2_lab.errors import LabError
from dflash2_lab.tables import read_run_info

CPU = torch.device("cpu")
KERNELS = [
    *("candidate_topk", "grouped_conv", "select", "row_law, verify", "block_attention"),
    *("linear", "token_rank"),
]


@pytest.fixture(autouse=True)
def _small_copies(monkeypatch):
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**16)


def test_every_case_runs_and_the_run_folder_holds_it(tmp_path):
    out = tmp_path / "run"
    assert main(["bench", "kernels", "--device", "cpu", "--repeats", "1", "--out", str(out)]) == 0
    saved = json.loads((out / "bench.json").read_text())
    assert list(dict.fromkeys(row["kernel"] for row in saved["rows"])) == KERNELS
    assert all(len(row["seconds"]["kernel"]) == 1 for row in saved["rows"])
    assert read_run_info(out)["bench"] == "kernels"
    text = (out / "table.txt").read_text()
    assert "skipped: Triton kernels and CUDA graphs (no GPU used; plain torch instead)" in text
    assert "bar:" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_both_ways_of_a_case_agree():
    cases = {(case.kernel, case.shape): case for case in all_cases(Sizes.tiny(), CPU)}
    for key in (
        ("candidate_topk", "3 x 300"),
        ("linear", "qkv 64 x 32"),
        ("token_rank", "5 x 300"),
    ):
        work = cases[key].make(0)
        ours, other = work.kernel(), work.other()
        ours, other = (o[0] if isinstance(o, tuple) else o for o in (ours, other))
        if key[0] == "token_rank":  # the other way leaves ties out
            assert (ours >= other).all()
            assert ours.float().mean() == pytest.approx(other.float().mean().item(), rel=0.1)
        else:
            assert torch.equal(ours, other)


def test_calls_are_timed_from_a_graph_where_there_is_a_gpu(device):
    speed = Spread(1e9, 1e9, 1e9)
    for case in all_cases(Sizes.tiny(), device):
        if case.kernel in ("candidate_topk", "token_rank", "select"):
            row = measure(case, device, 2, speed)
            assert row["graph"] == (device.type == "cuda")
            assert min(row["seconds"]["kernel"]) > 0


def test_bytes_of_the_full_cases_by_hand():
    cases = {(case.kernel, case.shape): case for case in all_cases(Sizes(), torch.device("meta"))}
    assert cases["candidate_topk", "512 x 151936"].num_bytes == 512 * 151936 * 2
    conv = 8192 * 8 * 2560 * 2
    kernels = 8192 * 8 * 2 * 160 * 2
    assert cases["grouped_conv", "8192 x 8 x 2560"].num_bytes == 2 * conv + kernels
    backward = cases["grouped_conv", "backward, 8192 x 8 x 2560"]
    assert backward.num_bytes == 3 * conv + 2 * kernels
    assert cases["linear", "gate-up 19456 x 2560"].num_bytes == 19456 * 2560 * 2
    assert cases["block_attention", "Qwen3-4B, 2048"].num_bytes == 2 * 8 * 2048 * 128 * 2
    assert cases["select", "7 slots, K = 16, T = 0"].num_bytes == (1 + 13 * 16) * 256 * 2


def test_a_figure_is_that_of_one_call():
    case = next(c for c in all_cases(Sizes.tiny(), CPU) if c.kernel == "linear")
    row = measure(case, CPU, 2, Spread(1e9, 1e9, 1e9))
    assert row["calls"] == 2
    assert row["floor_seconds"] == 64 * 32 * 2 / 1e9
    assert row["share"] == pytest.approx(row["floor_seconds"] / row["call"].median)
    assert len(row["seconds"]["kernel"]) == len(row["seconds"]["other"]) == 2


def test_bars_of_full_shapes_on_a_gpu():
    def row(kernel, us, bars, times=None):
        spread = Spread(us / 1e6, us / 1e6, us / 1e6)
        faster = None if times is None else Spread(times, times, times)
        return {
            "kernel": kernel, "shape": "s", "call": spread, "floor_seconds": 5e-6,
            "share": 5 / us, "other": faster and spread, "other_name": "o",
            "times_faster": faster, "bars": bars,
        }  # fmt: skip

    rows = [
        row("select", 9.0, {"us": 10.0}),
        row("select", 11.0, {"us": 10.0}),
        row("conv", 6.0, {"share": 80.0}),
        row("conv", 7.0, {"share": 80.0}),
        row("topk", 10.0, {"times": 3.0, "share": 60.0}, times=3.5),
    ]
    speed = {"copy": Spread(4e12, 4e12, 4e12), "read": Spread(4e12, 4e12, 4e12)}
    result = {"shapes": "full", "device": "gpu", "repeats": 9, "bandwidth": speed, "rows": rows}
    lines = [line for line in table(result | {"skipped": []}).splitlines() if "bar:" in line]
    assert [line.endswith("met)") for line in lines] == [True, False, True, False, True, False]


def test_unknown_kernels_and_shapes_are_refused(tmp_path):
    with pytest.raises(LabError, match=r"kernel: found topk, expected some of candidate_topk"):
        bench_kernels("tiny", CPU, 1, ["topk"], tmp_path)
    with pytest.raises(LabError, match="expected one of full, tiny"):
        bench_kernels("huge", CPU, 1, [], tmp_path)
    with pytest.raises(LabError, match="repeats: found 0"):
        bench_kernels("tiny", CPU, 0, [], tmp_path)
