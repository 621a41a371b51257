"""What a block's rows see, and which of them are drafts, in every family of drafters."""

import pytest
import torch
from checkpoints import deepspec, nested, write, zlab
from dflash.model import DFlash2DraftModel

from dflash2_lab.models.attention import block_visible, context_visible
from dflash2_lab.models.io import load_drafter, save_drafter

WINDOW = 5


@pytest.mark.parametrize(
    ("window", "causal", "expected"),
    [
        (None, False, ["111111", "111111", "111111"]),
        (None, True, ["111100", "111110", "111111"]),
        (3, False, ["011111", "001111", "000111"]),
        (3, True, ["011100", "001110", "000111"]),
    ],
)
def test_mask_table_of_three_rows_after_three_context_keys(window, causal, expected):
    anchors = torch.tensor([[3]])
    context = context_visible(anchors, 3, 3, window)[0, 0]
    block = block_visible(3, window, causal, torch.device("cpu"))
    rows = torch.cat([context, block], dim=-1).int().tolist()
    assert ["".join(map(str, row)) for row in rows] == expected


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_hidden_states_equal_the_published_package_past_the_window(tmp_path, window, causal):
    kind = "full_attention" if window is None else "sliding_attention"
    raw = zlab(layer_types=[kind] * 2, sliding_window=window, is_causal=causal)
    ours = load_drafter(write(tmp_path / "a", raw))
    save_drafter(ours, tmp_path / "b")
    theirs = DFlash2DraftModel.from_pretrained(tmp_path / "b", local_files_only=True).eval()
    torch.manual_seed(0)
    length, rows = 2 * WINDOW + 3, 4
    features, block = torch.randn(1, length, 64), torch.randn(1, rows, 32)
    with torch.no_grad():
        expected = theirs(
            position_ids=torch.arange(length + rows)[None],
            noise_embedding=block,
            target_hidden=features,
        )
        anchors = torch.tensor([[length]])
        found = ours(block[:, None], ours.context_keys(features), anchors)[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_context_older_than_the_window_has_no_influence_at_all(tmp_path):
    raw = zlab(layer_types=["sliding_attention"] * 2, sliding_window=WINDOW)
    drafter = load_drafter(write(tmp_path, raw))
    torch.manual_seed(0)
    length = 2 * WINDOW
    features, block = torch.randn(1, length, 64), torch.randn(1, 1, 4, 32)
    changed = features.clone()
    changed[:, : length - WINDOW + 1] += 100.0
    anchors = torch.tensor([[length]])
    with torch.no_grad():
        first, second = (
            drafter(block, drafter.context_keys(rows), anchors) for rows in (features, changed)
        )
    assert torch.equal(first, second)


def test_a_block_is_the_anchor_and_masks(tmp_path):
    drafter = load_drafter(write(tmp_path, zlab()))
    assert drafter.block_ids(torch.tensor([[7, 9]])).tolist() == [[[7, 3, 3, 3], [9, 3, 3, 3]]]


@pytest.mark.parametrize(
    ("raw", "rows"),
    [(zlab(), [1, 2, 3]), (deepspec(), [0, 1, 2, 3])],
)
def test_drafted_rows_leave_the_anchor_out_unless_it_is_anchor_first(tmp_path, raw, rows):
    drafter = load_drafter(write(tmp_path, raw))
    hidden = torch.arange(4.0)[:, None].expand(4, 32)
    assert drafter.slot_rows(hidden)[:, 0].tolist() == rows
    assert drafter.settings.num_draft == len(rows)


@pytest.mark.parametrize("sample_from_anchor", [True, False])
def test_an_echo_of_the_position_is_right_under_one_layout_only(tmp_path, sample_from_anchor):
    # Row i says "position i after the anchor", which the drafted slots 1, 2, .. want to hear only
    # when row 0 is the anchor's own.
    raw = nested(zlab("dflash"), sample_from_anchor=sample_from_anchor)
    drafter = load_drafter(write(tmp_path, raw))
    echo = torch.arange(4.0)[:, None]
    slots = torch.arange(1.0, drafter.settings.num_draft + 1)
    right = (drafter.slot_rows(echo)[:, 0] == slots).float().mean()
    assert right == (0.0 if sample_from_anchor else 1.0)


def test_scale_multiplier_and_cap_act_on_the_logits(tmp_path):
    scales = {"output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    drafter = load_drafter(write(tmp_path, nested(zlab(), **scales)))
    head = torch.nn.Linear(32, 64, bias=False)
    torch.manual_seed(0)
    hidden = torch.randn(3, 32) * 10
    with torch.no_grad():
        found, raw = drafter.logits(hidden, head), head(hidden)
    torch.testing.assert_close(found, 2.0 * torch.tanh(raw * 0.5 / 2.0))
    assert torch.equal(found.argsort(), raw.argsort())


def test_head_is_called_as_a_module_so_a_packed_one_works(tmp_path):
    class PackedHead(torch.nn.Module):
        def forward(self, hidden):
            return hidden.repeat(1, 2)

    drafter = load_drafter(write(tmp_path, zlab()))
    assert drafter.logits(torch.ones(2, 32), PackedHead()).shape == (2, 64)
