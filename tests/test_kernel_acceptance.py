"""What both rules of acceptance share, in both forms: greedy rows, forced and broken ones, what is
not offered, views, and shapes that do not fit."""

import pytest
import torch
from test_kernel_row_law import call, to
from test_kernel_verify import KINDS_OF_Q, random_problem

from dflash2_lab.kernels.block_verify import block_verify_reference, block_verify_triton
from dflash2_lab.kernels.draw import draw_reference
from dflash2_lab.kernels.row_law import Law, row_law_reference
from dflash2_lab.kernels.verify import FullLaw, verify_reference, verify_triton

RULES = ((verify_reference, verify_triton), (block_verify_reference, block_verify_triton))
BOTH = pytest.mark.parametrize(("reference", "kernel"), RULES, ids=["token", "block"])
FORMS = pytest.mark.parametrize("form", [form for rule in RULES for form in rule])
KINDS = pytest.mark.parametrize("kind", KINDS_OF_Q)


def pairs(found):
    return list(zip(*(part.tolist() for part in found), strict=True))


@KINDS
@FORMS
def test_greedy_rows_accept_the_argmax_and_end_with_it(form, kind, device):
    arguments = random_problem(rows=4, kind=kind)
    arguments["temperature"] = torch.zeros(4)
    arguments["law"] = row_law_reference(arguments["logits"].flatten(0, 1), torch.zeros(16))
    best = arguments["logits"].argmax(-1)
    draft = best[:, :3].clone()
    draft[0, 0] = (draft[0, 0] + 1) % 100
    draft[1, 2] = (draft[1, 2] + 1) % 100
    arguments["draft"] = draft
    arguments["num_offered"] = torch.tensor([3, 3, 3, 1], dtype=torch.int32)
    accepted, following = call(form, device, {"block": 64}, **arguments)
    assert accepted.tolist() == [0, 2, 3, 1]
    assert following.tolist() == best[range(4), [0, 2, 3, 1]].tolist()


@FORMS
def test_where_nothing_is_offered_the_first_row_is_drawn_from(form, device):
    arguments = random_problem(rows=6, slots=1, kind="one-hot")
    arguments["num_offered"] = torch.zeros(6, dtype=torch.int32)
    # The laws of both rows of a request stand one behind the other.
    first = type(arguments["law"])(*(part[::2].contiguous() for part in arguments["law"]))
    accepted, following = call(form, device, {"block": 64}, **arguments)
    rest = (arguments[name] for name in ("temperature", "final_keys", "final_counters"))
    assert not accepted.any()
    expected = draw_reference(arguments["logits"][:, 0], first, *rest)
    assert following.tolist() == expected.tolist()


@BOTH
@pytest.mark.parametrize("kind", ["candidates", "full"])
def test_a_forced_number_is_accepted_up_to_what_is_offered(reference, kernel, kind, device):
    arguments = random_problem(rows=6, kind=kind)
    arguments["num_offered"] = torch.tensor([3, 3, 3, 2, 2, 3], dtype=torch.int32)
    real, _ = reference(**arguments)
    arguments["forced"] = torch.tensor([0, 1, 3, 3, 0, -1], dtype=torch.int32)
    for form in (reference, kernel):
        accepted, following = call(form, device, {"block": 128}, **arguments)
        assert accepted.tolist() == [0, 1, 3, 2, 0, int(real[5])]
        assert ((following >= 0) & (following < 100)).all()


@BOTH
@KINDS
def test_broken_rows_end_with_a_token_and_leave_the_others_alone(reference, kernel, kind, device):
    arguments = random_problem(rows=6, kind=kind)
    expected = pairs(reference(**arguments))
    arguments["logits"][1] = torch.nan
    arguments["logits"][4] = torch.inf
    per_row = arguments["temperature"].repeat_interleave(4)
    filters = (torch.full((24,), 40, dtype=torch.int32), torch.full((24,), 0.9))
    law = row_law_reference(arguments["logits"].flatten(0, 1), per_row, *filters)
    for form in (reference, kernel):
        found = call(form, device, {"block": 128}, **arguments | {"law": law})
        assert ((found[1] >= 0) & (found[1] < 100)).all()
        assert [pairs(found)[row] for row in (0, 2, 3, 5)] == [expected[i] for i in (0, 2, 3, 5)]


@BOTH
def test_views_with_gaps_are_read_right_and_arrivals_end_at_zero(reference, kernel, device):
    arguments = random_problem(rows=3)
    expected = pairs(reference(**arguments))
    wide = torch.cat([arguments["logits"], torch.full((3, 4, 28), torch.nan)], -1)
    block = torch.cat([torch.full((3, 1), -5), arguments["draft"]], 1)
    q_wide = torch.cat([torch.full((3, 1, 100), torch.nan), arguments["q"].logits], 1)
    moved = to(device, arguments | {"q": None})
    moved |= {"logits": wide.to(device)[..., :100], "draft": block.to(device)[:, 1:]}
    law = Law(*(part.to(device) for part in arguments["q"].law))
    moved["q"] = FullLaw(q_wide.to(device)[:, 1:], law)
    arrivals = torch.zeros(3, dtype=torch.int32, device=device)
    for _ in range(2):
        assert pairs(kernel(**moved, arrivals=arrivals, block=64)) == expected
        assert not arrivals.any()


@BOTH
def test_a_launch_without_a_drafted_slot_is_refused(reference, kernel, device):
    arguments = random_problem(rows=2, slots=0, kind="one-hot")
    with pytest.raises(ValueError, match="for 0 slots"):
        call(kernel, device, {"block": 64}, **arguments)


@BOTH
@pytest.mark.parametrize("name", ["draft", "accept_keys", "num_offered"])
def test_shapes_that_do_not_fit_are_named(reference, kernel, name, device):
    arguments = random_problem(rows=3)
    arguments[name] = arguments[name][1:]
    with pytest.raises(ValueError, match="found"):
        call(kernel, device, **arguments)
