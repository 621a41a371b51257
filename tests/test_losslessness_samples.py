"""Audit of samples: the target's own pass, those of another law, or with a wrong token, do not."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import END_ID, tiny_target
from sample_files import GREEDY, PROMPTS, WARM, draw_lines, write_lines

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness import samples
from dflash2_lab.losslessness.battery import smallest_tv
from dflash2_lab.losslessness.edges import law_at
from dflash2_lab.losslessness.sample_file import assume_sampling, prompt_hash, read_samples
from dflash2_lab.losslessness.sample_rows import resolve
from dflash2_lab.losslessness.samples import audit_samples
from dflash2_lab.prompts import Prompt, render
from dflash2_lab.sampling import Sampling, filter_logits


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def lines(target):
    """About 4,100 tokens of the law `WARM`."""
    return draw_lines(target, WARM, num_samples=24, max_new_tokens=64)


@pytest.fixture(autouse=True)
def _short_calibration(monkeypatch):
    monkeypatch.setattr(samples, "_CALIBRATION", 200)


def read(path, lines, sampling=WARM):
    return assume_sampling(read_samples(write_lines(path, lines)), sampling)


def rows_of(target, path, lines, sampling=WARM):
    return resolve(target, read(path / "s.jsonl", lines, sampling))[0]


def test_samples_of_the_targets_law_pass(target, lines, tmp_path):
    result = audit_samples(target, rows_of(target, tmp_path, lines))
    part = result["sampled"]
    assert result["verdict"] == part["verdict"] == "no difference"
    assert (part["rejected"], part["outside"], result["greedy"]) == ([], [], None)
    assert (result["num_samples"], result["num_prompts"]) == (96, 4)
    assert result["num_tokens"] == part["num_tokens"] >= samples.LEVELS["pr"]
    assert min(part["p_values"].values()) > 1e-3
    assert part["sampling"] == [{"temperature": 0.8, "top_p": 0.95, "top_k": 50}]
    assert 0 < result["noise_band"]["band"] < 1e-4
    json.dumps(result, allow_nan=False)


OTHER_LAWS = {
    "drawn hotter": (Sampling(1.0), Sampling(0.8), "heat"),
    "drawn colder": (Sampling(0.6), Sampling(0.8), "heat"),
    "top-p ignored": (Sampling(0.8, 1.0, 50), WARM, "support"),
    "top-k ignored": (Sampling(0.8, 0.95, 0), Sampling(0.8, 0.95, 10), "support"),
    "greedy instead": (GREEDY, WARM, "heat"),
}


@pytest.mark.parametrize("name", OTHER_LAWS)
def test_samples_of_another_law_are_caught(name, target, tmp_path):
    drawn, claimed, test = OTHER_LAWS[name]
    lines = draw_lines(target, drawn, num_samples=6, max_new_tokens=48)
    part = audit_samples(target, rows_of(target, tmp_path, lines, claimed))["sampled"]
    assert part["verdict"] == "differ"
    assert test in part["rejected"]
    assert (part["num_outside"] > 0) == (test == "support")


def test_a_token_outside_the_law_is_named(target, lines, tmp_path):
    wrong = [dict(line) for line in lines[:8]]
    ids = list(wrong[5]["output_ids"])
    law = _law_after(target, lines[5], 7)
    ids[7] = int(law.argmin())
    wrong[5]["output_ids"] = ids[:8]
    part = audit_samples(target, rows_of(target, tmp_path, wrong))["sampled"]
    assert part["rejected"] == ["support"]
    assert part["outside"] == [
        {"where": f"{tmp_path}/s.jsonl:6", "position": 7, "token": int(law.argmin())}
    ]


def _law_after(target, line, num):
    prompt = render(target, Prompt("p", (line["prompt"],), "set"))
    ids = torch.tensor([[*prompt, *line["output_ids"][:num]]])
    return filter_logits(target.model(ids).logits[0, -1], 0.8, 0.95, 50)


def test_an_engine_that_ignores_seeds_is_caught(target, tmp_path):
    lines = draw_lines(target, WARM, num_samples=2, max_new_tokens=64)
    again = [dict(line, seed=line["seed"] + 2) for line in lines]
    part = audit_samples(target, rows_of(target, tmp_path, lines + again))["sampled"]
    assert "streams" in part["rejected"]


def test_few_tokens_are_inconclusive_and_say_what_they_could_have_shown(target, lines, tmp_path):
    few = [dict(lines[0], output_ids=lines[0]["output_ids"][:1]), lines[1]]
    part = audit_samples(target, rows_of(target, tmp_path, few), alpha=0.01, level="nightly")[
        "sampled"
    ]
    assert (part["verdict"], part["level_tokens"]) == ("inconclusive", 32_768)
    n = len(few[1]["output_ids"]) + 1
    assert part["smallest_tv"] == smallest_tv(n, 0.01 / len(part["p_values"]))
    one = audit_samples(target, rows_of(target, tmp_path, few[:1]))["sampled"]
    assert (one["verdict"], one["num_tokens"]) == ("inconclusive", 1)


def test_greedy_samples_are_the_argmax(target, tmp_path):
    lines = draw_lines(target, GREEDY, num_samples=1)
    result = audit_samples(target, rows_of(target, tmp_path, lines, GREEDY))
    part = result["greedy"]
    assert (result["verdict"], result["sampled"]) == ("equal", None)
    assert part["num_argmax"] == part["num_tokens"] == result["num_tokens"]
    assert part["worst_argmax_gap"]["gap"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_wrong_greedy_token_is_a_bug_in_any_precision(dtype, tmp_path):
    target = tiny_target(seed=2)
    target.model.to(getattr(torch, dtype))
    lines = draw_lines(target, GREEDY, num_samples=1)
    ids, token = lines[2]["output_ids"], _rank(target, lines[2], 9, 50)
    ids[9:] = [token]
    result = audit_samples(target, rows_of(target, tmp_path, lines, GREEDY))
    worst = result["greedy"]["worst_argmax_gap"]
    assert result["verdict"] == "bug"
    assert result["greedy"]["num_bugs"] == 1
    assert worst["where"] == f"{tmp_path}/s.jsonl:3"
    assert (worst["position"], worst["token"]) == (9, token)
    assert worst["gap"] > 2 * result["noise_band"]["band"]


def _rank(target, line, num, rank):
    prompt = render(target, Prompt("p", (line["prompt"],), "set"))
    logits = target.model(torch.tensor([[*prompt, *line["output_ids"][:num]]])).logits[0, -1]
    return int(logits.argsort(descending=True)[rank])


def test_other_choices_of_bf16_are_ties(tmp_path):
    target = tiny_target(seed=2)
    target.model.bfloat16()
    lines = draw_lines(target, GREEDY, num_samples=1, prompts=[*PROMPTS, "a", "b", "c", "d"])
    result = audit_samples(target, rows_of(target, tmp_path, lines, GREEDY))
    part, noise = result["greedy"], result["noise_band"]
    assert result["verdict"] == "tie-level"
    assert part["num_ties"] > 0 == part["num_bugs"]
    assert 0 < part["worst_argmax_gap"]["gap"] <= 2 * noise["band"]
    assert set(noise["by_scoring"]) == {"whole", "eager"}
    # The target in float32 knows no such ties.
    target.model.float()
    assert audit_samples(target, rows_of(target, tmp_path, lines, GREEDY))["verdict"] == "bug"


def test_lines_may_have_laws_of_their_own(target, tmp_path):
    greedy = draw_lines(target, GREEDY, num_samples=1)
    warm = draw_lines(target, Sampling(1.2, 1.0, 20), num_samples=2)
    lines = [dict(line, temperature=0, seed=99) for line in greedy]
    lines += [dict(line, temperature=1.2, top_k=20) for line in warm]
    result = audit_samples(target, rows_of(target, tmp_path, lines, None))
    assert result["greedy"]["num_samples"] == 4
    assert result["sampled"]["num_samples"] == 8
    assert result["verdict"] == "inconclusive"  # the worse one of equal and this


def test_pieces_of_laws_and_logits_change_nothing(target, lines, tmp_path, monkeypatch):
    rows = rows_of(target, tmp_path, lines[:4])
    greedy = rows_of(target, tmp_path, draw_lines(target, GREEDY, num_samples=1), GREEDY)
    whole = audit_samples(target, rows + greedy)
    monkeypatch.setattr(samples, "_LOGIT_BYTES", 4 * target.vocab_size * 13)
    monkeypatch.setattr(samples, "_LAW_BYTES", 8 * target.vocab_size * 5)
    pieces = audit_samples(target, rows + greedy)
    assert pieces["sampled"]["p_values"] == pytest.approx(whole["sampled"]["p_values"], rel=1e-3)
    assert pieces["greedy"]["num_argmax"] == whole["greedy"]["num_argmax"]


def test_a_token_at_the_edge_of_a_cut_is_kept_and_one_beyond_is_not():
    logits = torch.tensor([[2.0, 1.0, 0.999, -3.0], [2.0, 1.0, 0.999, -3.0]]).double()
    tokens = torch.tensor([2, 3])
    top_k = Sampling(1.0, 1.0, 2)
    law, num_edge = law_at(logits, tokens, top_k, band=1e-3)
    assert num_edge == 1
    assert law[0, :3].tolist() == pytest.approx(logits[0, :3].softmax(0).tolist())
    assert law[1].tolist() == filter_logits(logits[1], 1.0, 1.0, 2).tolist()
    assert law_at(logits, tokens, top_k, band=4e-4)[1] == 0
    # Two tokens hold 0.9 of the mass but for 1e-4, or 1e-4 more than that.
    for mass, expected in ((0.9001, 1), (0.92, 0)):
        probs = torch.tensor([[0.6, mass - 0.6, (1 - mass) * 0.7, (1 - mass) * 0.3]]).double()
        law, num_edge = law_at(probs.log() * 0.5, torch.tensor([2]), Sampling(0.5, 0.9), 1e-3)
        assert num_edge == expected
        assert float(law.sum()) == pytest.approx(1)
        assert (float(law[0, 2]) > 0) == bool(expected)
        assert law[0, 3] == 0


def test_what_bf16_cuts_elsewhere_is_at_the_edge(tmp_path):
    sampling = Sampling(0.8, 0.9)
    target = tiny_target()
    target.model.bfloat16()
    lines = draw_lines(target, sampling, num_samples=8, max_new_tokens=48)
    part = audit_samples(target, rows_of(target, tmp_path, lines, sampling))["sampled"]
    assert (part["rejected"], part["num_outside"]) == ([], 0)
    assert part["num_edge"] > 0
    # An engine that claims float32 has no such excuse.
    target.model.float()
    exact = audit_samples(target, rows_of(target, tmp_path, lines, sampling))["sampled"]
    assert exact["rejected"] == ["support"]
    assert exact["num_outside"] == part["num_edge"]


def test_scores_that_depend_on_the_cache_are_an_error(target, lines, tmp_path, monkeypatch):
    class Shifted(samples.TargetRow):
        def extend(self, *arguments):
            logits, context = super().extend(*arguments)
            return logits * 1.5, context

    monkeypatch.setattr(samples, "TargetRow", Shifted)
    with pytest.raises(LabError, match=r"scores \(eager\) are .* off those of one pass"):
        audit_samples(target, rows_of(target, tmp_path, lines[:2]))


def test_weights_that_are_not_finite_are_an_error(lines, tmp_path):
    broken = tiny_target()
    broken.head.weight[5] = float("nan")
    with pytest.raises(LabError, match="logits are not finite"):
        audit_samples(broken, rows_of(broken, tmp_path, lines[:2], Sampling(1.0)))


def test_ways_to_give_a_prompt_are_the_same_prompt(target, tmp_path):
    ids = render(target, Prompt("p", ("hi",), "set"))
    ways = [
        {"prompt": "hi"},
        {"prompt": [{"role": "user", "content": "hi"}]},
        {"prompt_ids": ids},
        {"prompt": "hi", "prompt_hash": prompt_hash(ids)},
    ]
    lines = [
        dict(way, output_ids=[9, 8], seed=seed, min_p=0, engine="x", finish_reason=None)
        for seed, way in enumerate(ways)
    ]
    rows = rows_of(target, tmp_path, lines)
    assert {row.prompt_ids for row in rows} == {tuple(ids)}


def test_a_conversation_is_rendered_with_its_answers_and_its_own_system_message(target, tmp_path):
    turns = [("system", "be brief"), ("user", "hi"), ("assistant", "yes?"), ("user", "go on")]
    messages = [{"role": role, "content": text} for role, text in turns]
    line = {"prompt": messages, "output_ids": [9], "seed": 0}
    lines = [line, {"prompt": "hi", "output_ids": [9], "seed": 0}]
    rows, _ = resolve(target, read(tmp_path / "s.jsonl", lines), "be long", {"shout": True})
    options = (("shout", True),)
    expected = render(target, Prompt("p", ("hi", "go on"), "s", "be brief", options), ["yes?"])
    assert rows[0].prompt_ids == tuple(expected)
    assert rows[1].prompt_ids == tuple(
        render(target, Prompt("p", ("hi",), "s", "be long", options))
    )


def test_text_is_tokenised_anew_with_its_stop_token_and_a_note(target, tmp_path):
    line = {"prompt": "hi", "output": " ok\u2028 a\u20acb", "seed": 0}
    lines = [dict(line, finish_reason="stop"), dict(line, finish_reason="length", seed=1)]
    lines = [json.dumps(line, ensure_ascii=False) for line in lines]
    rows, notes = resolve(target, read(tmp_path / "s.jsonl", lines))
    ids = target.tokenizer(line["output"])["input_ids"]
    assert [row.output_ids for row in rows] == [(*ids, END_ID), tuple(ids)]
    assert len(notes) == 1
    assert "2 of 2 outputs are text" in notes[0]


def test_stop_tokens_that_seem_to_be_left_out_are_noted(target, tmp_path):
    def notes_of(*outputs, **options):
        lines = [
            dict(options, prompt="hi", output_ids=output, seed=seed)
            for seed, output in enumerate(outputs)
        ]
        return resolve(target, read(tmp_path / "s.jsonl", lines))[1]

    assert "no output ends with a stop token [2]" in notes_of([5, 6], [5])[0]
    assert notes_of([5, 6], [5, 7]) == notes_of([5, 6], [5, END_ID, *()]) == []
    assert notes_of([5, 6], [5], finish_reason="length") == []


def test_outputs_that_end_at_once_are_normal(target, tmp_path):
    lines = [{"prompt": "hi", "output_ids": [END_ID], "seed": 0}]
    result = audit_samples(target, rows_of(target, tmp_path, lines, Sampling(1.0)))
    assert result["num_stopped"] == result["num_tokens"] == 1


def test_a_target_with_other_stop_ids_takes_them_from_its_set(target, tmp_path):
    other = replace(target, eos_token_ids=frozenset([END_ID, 77]))
    lines = [{"prompt": "hi", "output_ids": [5, 77], "seed": 0, "finish_reason": "stop"}]
    assert rows_of(other, tmp_path, lines)[0].output_ids == (5, 77)
    with pytest.raises(LabError, match=r"77 as last token, expected one of the stop tokens \[2\]"):
        rows_of(target, tmp_path, lines)


@pytest.mark.slow
def test_smollm2_audits_its_own_samples_and_finds_a_wrong_temperature(smollm2, tmp_path):
    prompts = [f"Tell me about the number {number}." for number in range(8)]
    sampling = Sampling(0.8, 0.95, 50)
    lines = draw_lines(smollm2, sampling, num_samples=1, max_new_tokens=48, prompts=prompts)
    part = audit_samples(smollm2, rows_of(smollm2, tmp_path, lines, sampling))["sampled"]
    assert part["verdict"] == "inconclusive"  # a tenth of the tokens that the level asks for
    assert part["num_outside"] == 0
    part = audit_samples(smollm2, rows_of(smollm2, tmp_path, lines, Sampling(0.4, 0.95, 50)))[
        "sampled"
    ]
    assert part["verdict"] == "differ"
    greedy = draw_lines(smollm2, GREEDY, num_samples=1, max_new_tokens=16, prompts=prompts[:2])
    result = audit_samples(smollm2, rows_of(smollm2, tmp_path, greedy, GREEDY))
    assert result["verdict"] in ("equal", "tie-level")
    assert np.isfinite(result["noise_band"]["band"])
