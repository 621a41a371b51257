"""`bench throughput` on a tiny target: rates of the same work, forced DSpark, a run folder."""

import json

import pytest
from drafters import tiny_drafter
from helpers import save_tiny, tiny_target

from dflash2_lab.bench.metered import MeteredEngine, Pass
from dflash2_lab.bench.reference import decode_prompts, published_or_reason
from dflash2_lab.bench.sampler import bench_sampler
from dflash2_lab.bench.throughput import (
    DSPARK,
    PLAIN,
    ThroughputOptions,
    _mean_accepted,
    bench_throughput,
)
from dflash2_lab.bench.throughput_table import table
from dflash2_lab.bench.timing import Spread
from dflash2_lab.cli import main
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.requests import Decoded, Request, request_keys
from dflash2_lab.errors import LabError
from dflash2_lab.models.io import save_drafter
from dflash2_lab.prompts import Prompt
from dflash2_lab.sampling import Sampling
from dflash2_lab.tables import read_run_info


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafters")
    for kind in ("dflash", "dflash2"):
        save_drafter(tiny_drafter(kind), folder / kind)
    return [str(folder / kind) for kind in ("dflash", "dflash2")]


@pytest.fixture(scope="module")
def run(tmp_path_factory, drafters):
    """The command, seen from outside."""
    folder = tmp_path_factory.mktemp("throughput")
    save_tiny(folder / "target")
    lines = [json.dumps({"id": str(n), "turns": ["hi" * n]}) for n in (1, 2, 3)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    options = ["--target", str(folder / "target"), "--dtype", "float32", "--device", "cpu"]
    options += [word for name in drafters for word in ("--drafter", name)]
    options += ["--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "5"]
    options += ["--concurrency", "2", "--repeats", "1", "--out", str(folder / "run")]
    assert main(["bench", "throughput", *options]) == 0
    return folder / "run", json.loads((folder / "run" / "bench.json").read_text())


def requests(policy, limits, stop_ids=()):
    keys = request_keys(0, "p", 0, 0, policy)
    return [Request((5, 6, 7), n, Sampling(), keys, frozenset(stop_ids)) for n in limits]


def test_every_side_runs_at_every_temperature(run, drafters):
    out, saved = run
    groups = [(group["concurrency"], group["temperature"]) for group in saved["groups"]]
    assert groups == [(2, 0.0), (2, 1.0)]
    for group in saved["groups"]:
        assert set(group["sides"]) == {PLAIN, *drafters, DSPARK}
        for name, side in group["sides"].items():
            (one,) = side["passes"]
            rate = one["num_later"] / one["decode_seconds"]
            assert side["decode_tokens_per_second"]["median"] == pytest.approx(rate)
            assert one["num_later"] == one["num_tokens"] - 3
            assert one["prefill_seconds"] + one["decode_seconds"] <= one["wall_seconds"]
            assert (side["forced"] is not None) == (name == DSPARK)
    assert read_run_info(out)["bench"] == "throughput"
    assert "prompt_set_hash" in saved


def test_greedy_sides_give_as_many_tokens_and_dspark_as_many_as_dflash2(run, drafters):
    for group in run[1]["groups"]:
        tokens = {n: side["passes"][0]["num_tokens"] for n, side in group["sides"].items()}
        assert tokens[DSPARK] == tokens[drafters[1]]
        if group["temperature"] == 0:
            assert len(set(tokens.values())) == 1


def test_the_table_says_what_is_forced_and_what_was_skipped(run):
    text = (run[0] / "table.txt").read_text()
    assert text.count("acceptance forced,") == 2
    assert "skipped: the published package (its clock needs a CUDA device)" in text
    assert "bar:" not in text


def test_a_pass_counts_tokens_steps_and_cycles(target):
    engine = MeteredEngine(target, None, None, 2, 12)
    answers, one = engine.metered(requests(None, (4, 2, 3)))
    assert [len(answer.response_ids) for answer in answers] == [4, 2, 3]
    assert (one.num_tokens, one.num_later, one.num_steps) == (9, 6, 6)
    assert one.num_cycles >= 3 + 2  # two places: 4 tokens beside 2 and then 3
    again, _ = engine.metered(requests(None, (4, 2, 3)))
    assert again == answers


def test_rates_leave_prefills_out_or_in():
    one = Pass(12, 10, 5, 8, wall_seconds=4.0, prefill_seconds=2.0, decode_seconds=2.0)
    assert (one.decode_rate, one.end_to_end_rate, one.cycle_seconds) == (5.0, 3.0, 0.25)


def test_forced_acceptance_holds_through_a_run_and_can_be_lifted(target):
    drafter = tiny_drafter("dspark")
    engine = MeteredEngine(target, drafter, "markov", 1, 24)
    engine.forced = 2
    answers, _ = engine.metered(requests("markov", (10, 7)))
    assert [answer.accepted_raw for answer in answers] == [[2, 2, 2], [2, 2]]
    engine.forced = -1
    real = GraphEngine(target, drafter, "markov", 1, 24).run(requests("markov", (10,)))
    assert engine.metered(requests("markov", (10,)))[0] == real


@pytest.mark.parametrize(("counts", "mean"), [([[3, 2], [4]], 3), ([[0, 1], []], 0), ([[]], 0)])
def test_mean_accepted_is_over_steps_and_rounded(counts, mean):
    assert _mean_accepted([Decoded([1], found, "length") for found in counts]) == mean


def test_plain_decoding_alone_needs_no_drafter(target, tmp_path):
    options = ThroughputOptions(4, [1, 2], [0.0], repeats=1, sampler_batch=3)
    prompts = [Prompt("a", ("hi",), "set"), Prompt("b", ("hello",), "set")]
    result = bench_throughput(target, [], prompts, options, tmp_path / "run")
    assert [group["concurrency"] for group in result["json"]["groups"]] == [1, 2]
    assert {name for group in result["json"]["groups"] for name in group["sides"]} == {PLAIN}
    assert result["json"]["sampler"]["batch"] == 3
    assert "plain sampling at T = 1, batch 3" in result["text"]


def test_sampling_gives_rows_of_one_length_on_both_sides(target):
    stops = tiny_target(eos_token_id=list(range(200)))  # nearly every token ends a text
    found = bench_sampler(stops, [[5, 6], [7, 8, 9]], 3, 5, repeats=2)
    assert [one["num_tokens"] for one in found["passes"]] == [15, 15]
    assert len(found["transformers_seconds"]) == 2
    assert found["tokens_per_second"].median > 0


def test_sampling_fewer_tokens_than_it_warms_up_with(target):
    assert bench_sampler(target, [[5, 6]], 2, 2, repeats=1)["num_tokens"] == 2


def test_the_package_is_timed_by_its_own_numbers(monkeypatch, target):
    import time

    monkeypatch.setattr("dflash.model._cuda_time", time.perf_counter)
    model, _ = published_or_reason(tiny_drafter("dflash2", own_head=False), target)
    found = decode_prompts(model, target, [[5, 6, 7], [8, 9]], 6, 0.0)
    assert [one.num_tokens for one in found] == [6, 6]
    assert all(one.seconds > 0 and one.acceptance_length >= 1 for one in found)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"concurrency": [0]}, r"concurrency: found \[0\]"),
        ({"max_new_tokens": 0}, "max_new_tokens: found 0"),
        ({"max_new_tokens": 1}, "max_new_tokens: found 1, expected 2"),
        ({"temperatures": [-1.0]}, "temperature"),
        ({"sampler_batch": -1}, "sampler_batch: found -1"),
        ({"repeats": 0}, "repeats: found 0"),
    ],
)
def test_bad_options_are_refused(changes, match):
    with pytest.raises(LabError, match=match):
        ThroughputOptions(**changes)


@pytest.mark.parametrize(
    ("plain", "package", "missed"), [(2.1, 10.0, 0), (1.9, 10.0, 1), (1.9, 50.0, 2)]
)
def test_bars_hold_for_smollm2_with_the_zoo_alone_and_greedy(plain, package, missed):
    side = {
        "policy": "selector", "forced": None, "acceptance_length": 4.5,
        "decode_tokens_per_second": Spread(1000.0, 990.0, 1010.0),
        "end_to_end_tokens_per_second": Spread(500.0, 490.0, 510.0),
        "seconds_per_cycle": Spread(1e-3, 1e-3, 1e-3),
        "times_autoregressive": Spread(plain, plain, plain),
    }  # fmt: skip
    group = {"concurrency": 1, "temperature": 0.0, "sides": {"zoo:dflash2": side}}
    rate = {"value": package, "interval": None}
    row = {"drafter": "zoo:dflash2", "temperature": 0.0, "tokens_per_second": rate}
    result = {
        "target": "smollm2-135m", "dtype": "bfloat16", "device": "gpu", "num_prompts": 4,
        "datasets": ["set"], "max_new_tokens": 8, "repeats": 5, "groups": [group],
        "published": [row], "sampler": None, "skipped": [],
    }  # fmt: skip
    assert table(result).count("MISSED") == missed
    assert "bar:" not in table(result | {"target": "other"})
