"""Graphs before and after the pass, as text.

Inductor's decompositions drift with torch. The graph before is held for one version, so
that drift shows as drift; the graph after must be the same for all of them. Regenerate
with EXPECTTEST_ACCEPT=1.
"""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from tests.formulations import spelling as sp
from tests.formulations.cases import Context
from tests.formulations.tracing import DYNAMIC, STATIC
from tests.fx.sketch import HEADS_PER_RANK, partials, rewrite, sketch, traced

_PINNED = "2.13."


def expect_pinned(text: str, expected: str) -> None:
    """Hold text that depends on torch's decompositions, in one version of torch."""
    if torch.__version__.startswith(_PINNED):
        assert_expected_inline(text, expected, skip=1)
    else:
        # Another version may spell it differently, but not without an exchange.
        assert "wait_tensor" in text or "a2a_lse_reduce" in text


def merge(ctx: Context, partial_output: Tensor, partial_lse: Tensor) -> Tensor:
    """Gather the LSEs, weight the own partial, scatter the sum by heads."""
    lses = sp.ag(ctx, partial_lse).view(ctx.world_size, *partial_lse.shape)
    top = lses.amax(0)
    lse = top + torch.exp(lses - top).sum(0).log()
    return sp.rs(ctx, partial_output * torch.exp(partial_lse - lse)[..., None])


def gather(ctx: Context, query: Tensor) -> Tensor:
    """All ranks' query heads, joined on dim 1."""
    return sp.ag(ctx, query, 1) * 2


def query(tokens: int) -> list[Tensor]:
    return [torch.zeros(tokens, HEADS_PER_RANK, 8)]


# With one token the size is a constant, whatever was asked for.
@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
def test_merge_of_one_token(form: str) -> None:
    after = rewrite(traced(merge, partials(2, 1)[1], form=form))
    expect_pinned(
        after.before,
        """\
arg: float32[1, 4]
arg_1: float32[1, 4, 8]
all_gather_into_tensor = all_gather_into_tensor(arg, 2, GROUP)
wait_tensor = wait_tensor(all_gather_into_tensor)
reshape = reshape(wait_tensor, [2, 1, 4])
amax = amax(reshape, [0])
sub = sub(reshape, amax)
exp = exp(sub)
sum = sum(exp, [0])
log = log(sum)
add = add(amax, log)
sub_1 = sub(arg, add)
exp_1 = exp(sub_1)
unsqueeze = unsqueeze(exp_1, 2)
mul = mul(arg_1, unsqueeze)
split = split(mul, 2, 1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
cat = cat([getitem, getitem_1])
reduce_scatter_tensor = reduce_scatter_tensor(cat, sum, 2, GROUP)
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)
return [wait_tensor_1]
""",
    )
    assert_expected_inline(
        sketch(after.graph),
        """\
arg: float32[1, 4]
arg_1: float32[1, 4, 8]
empty = empty([0], dtype=uint8, device=cpu)
a2a_lse_reduce = a2a_lse_reduce(arg_1, arg, empty, GROUP, output_dtype=float32)
getitem = getitem(a2a_lse_reduce, 0)
return [getitem]
""",
    )


def test_merge_of_static_tokens() -> None:
    after = rewrite(traced(merge, partials(2, 3)[1]))
    expect_pinned(
        after.before,
        """\
arg: float32[3, 4]
arg_1: float32[3, 4, 8]
all_gather_into_tensor = all_gather_into_tensor(arg, 2, GROUP)
wait_tensor = wait_tensor(all_gather_into_tensor)
reshape = reshape(wait_tensor, [2, 3, 4])
amax = amax(reshape, [0])
sub = sub(reshape, amax)
exp = exp(sub)
sum = sum(exp, [0])
log = log(sum)
add = add(amax, log)
sub_1 = sub(arg, add)
exp_1 = exp(sub_1)
unsqueeze = unsqueeze(exp_1, 2)
mul = mul(arg_1, unsqueeze)
split = split(mul, 2, 1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
cat = cat([getitem, getitem_1])
reduce_scatter_tensor = reduce_scatter_tensor(cat, sum, 2, GROUP)
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)
return [wait_tensor_1]
""",
    )
    assert_expected_inline(
        sketch(after.graph),
        """\
arg: float32[3, 4]
arg_1: float32[3, 4, 8]
empty = empty([0], dtype=uint8, device=cpu)
a2a_lse_reduce = a2a_lse_reduce(arg_1, arg, empty, GROUP, output_dtype=float32)
getitem = getitem(a2a_lse_reduce, 0)
return [getitem]
""",
    )


def test_merge_of_dynamic_tokens() -> None:
    after = rewrite(traced(merge, partials(2, 3)[1], form=DYNAMIC))
    expect_pinned(
        after.before,
        """\
arg: size
arg_1: float32[T, 4]
arg_2: size
arg_3: float32[T, 4, 8]
all_gather_into_tensor = all_gather_into_tensor(arg_1, 2, GROUP)
wait_tensor = wait_tensor(all_gather_into_tensor)
reshape = reshape(wait_tensor, [2, arg_2, 4])
amax = amax(reshape, [0])
sub = sub(reshape, amax)
exp = exp(sub)
sum = sum(exp, [0])
log = log(sum)
add = add(amax, log)
sub_1 = sub(arg_1, add)
exp_1 = exp(sub_1)
unsqueeze = unsqueeze(exp_1, 2)
mul = mul(arg_3, unsqueeze)
split = split(mul, 2, 1)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
cat = cat([getitem, getitem_1])
reduce_scatter_tensor = reduce_scatter_tensor(cat, sum, 2, GROUP)
wait_tensor_1 = wait_tensor(reduce_scatter_tensor)
return [wait_tensor_1]
""",
    )
    assert_expected_inline(
        sketch(after.graph),
        """\
arg: size
arg_1: float32[T, 4]
arg_2: size
arg_3: float32[T, 4, 8]
empty = empty([0], dtype=uint8, device=cpu)
a2a_lse_reduce = a2a_lse_reduce(arg_3, arg_1, empty, GROUP, output_dtype=float32)
getitem = getitem(a2a_lse_reduce, 0)
return [getitem]
""",
    )


@pytest.mark.parametrize("form", [STATIC, DYNAMIC])
def test_gather_of_one_token(form: str) -> None:
    after = rewrite(traced(gather, query(1), form=form))
    expect_pinned(
        after.before,
        """\
arg: float32[1, 2, 8]
all_gather_into_tensor = all_gather_into_tensor(arg, 2, GROUP)
wait_tensor = wait_tensor(all_gather_into_tensor)
reshape = reshape(wait_tensor, [1, 4, 8])
mul = mul(reshape, 2)
return [mul]
""",
    )
    assert_expected_inline(
        sketch(after.graph),
        """\
arg: float32[1, 2, 8]
empty = empty([0], dtype=uint8, device=cpu)
kv_gather = kv_gather(arg, empty, GROUP)
getitem = getitem(kv_gather, 0)
reshape = reshape(getitem, [2, 1, 2, 8])
permute = permute(reshape, [1, 0, 2, 3])
reshape_1 = reshape(permute, [1, 4, 8])
mul = mul(reshape_1, 2)
return [mul]
""",
    )


def test_gather_of_static_tokens() -> None:
    after = rewrite(traced(gather, query(3)))
    expect_pinned(
        after.before,
        """\
arg: float32[3, 2, 8]
all_gather_into_tensor = all_gather_into_tensor(arg, 2, GROUP)
wait_tensor = wait_tensor(all_gather_into_tensor)
split = split(wait_tensor, 3)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
cat = cat([getitem, getitem_1], 1)
mul = mul(cat, 2)
return [mul]
""",
    )
    assert_expected_inline(
        sketch(after.graph),
        """\
arg: float32[3, 2, 8]
empty = empty([0], dtype=uint8, device=cpu)
q_gather = q_gather(arg, empty, GROUP)
getitem = getitem(q_gather, 0)
reshape = reshape(getitem, [3, 2, 2, 8])
reshape_1 = reshape(reshape, [3, 4, 8])
mul = mul(reshape_1, 2)
return [mul]
""",
    )


def test_gather_of_dynamic_tokens() -> None:
    after = rewrite(traced(gather, query(3), form=DYNAMIC))
    expect_pinned(
        after.before,
        """\
arg: size
arg_1: float32[T, 2, 8]
all_gather_into_tensor = all_gather_into_tensor(arg_1, 2, GROUP)
wait_tensor = wait_tensor(all_gather_into_tensor)
split = split(wait_tensor, arg)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
cat = cat([getitem, getitem_1], 1)
mul = mul(cat, 2)
return [mul]
""",
    )
    assert_expected_inline(
        sketch(after.graph),
        """\
arg: size
arg_1: float32[T, 2, 8]
empty = empty([0], dtype=uint8, device=cpu)
q_gather = q_gather(arg_1, empty, GROUP)
getitem = getitem(q_gather, 0)
reshape = reshape(getitem, [-1, 2, 2, 8])
reshape_1 = reshape(reshape, [-1, 4, 8])
mul = mul(reshape_1, 2)
return [mul]
""",
    )


def test_gather_attention_and_merge() -> None:
    """Both exchanges of one attention, in one order: the token of the first is the
    second's.
    """

    def decode(ctx: Context, query: Tensor, keys: Tensor) -> Tensor:
        whole = sp.ag(ctx, query, 1)
        scores = whole @ keys.t()  # [T, H, K]
        weights = torch.exp(scores)
        total = weights.sum(-1)
        return merge(ctx, weights @ keys / total[..., None], total.log())

    tensors = [torch.zeros(3, HEADS_PER_RANK, 8), torch.zeros(6, 8)]
    after = rewrite(traced(decode, [tensors[0], tensors[1]]))
    expect_pinned(
        after.before,
        """\
arg: float32[3, 2, 8]
arg_1: float32[6, 8]
all_gather_into_tensor = all_gather_into_tensor(arg, 2, GROUP)
wait_tensor = wait_tensor(all_gather_into_tensor)
split = split(wait_tensor, 3)
getitem = getitem(split, 0)
getitem_1 = getitem(split, 1)
cat = cat([getitem, getitem_1], 1)
reshape = reshape(cat, [12, 8])
permute = permute(arg_1, [1, 0])
mm = mm(reshape, permute)
reshape_1 = reshape(mm, [3, 4, 6])
exp = exp(reshape_1)
sum = sum(exp, [-1])
log = log(sum)
all_gather_into_tensor_1 = all_gather_into_tensor(log, 2, GROUP)
reshape_2 = reshape(exp, [12, 6])
mm_1 = mm(reshape_2, arg_1)
reshape_3 = reshape(mm_1, [3, 4, 8])
unsqueeze = unsqueeze(sum, 2)
div = div(reshape_3, unsqueeze)
wait_tensor_1 = wait_tensor(all_gather_into_tensor_1)
reshape_4 = reshape(wait_tensor_1, [2, 3, 4])
amax = amax(reshape_4, [0])
sub = sub(reshape_4, amax)
exp_1 = exp(sub)
sum_1 = sum(exp_1, [0])
log_1 = log(sum_1)
add = add(amax, log_1)
sub_1 = sub(log, add)
exp_2 = exp(sub_1)
unsqueeze_1 = unsqueeze(exp_2, 2)
mul = mul(div, unsqueeze_1)
split_1 = split(mul, 2, 1)
getitem_2 = getitem(split_1, 0)
getitem_3 = getitem(split_1, 1)
cat_1 = cat([getitem_2, getitem_3])
reduce_scatter_tensor = reduce_scatter_tensor(cat_1, sum, 2, GROUP)
wait_tensor_2 = wait_tensor(reduce_scatter_tensor)
return [wait_tensor_2]
""",
    )
    expect_pinned(
        sketch(after.graph),
        """\
arg: float32[3, 2, 8]
arg_1: float32[6, 8]
empty = empty([0], dtype=uint8, device=cpu)
q_gather_view = q_gather_view(arg, empty, GROUP)
getitem = getitem(q_gather_view, 1)
getitem_1 = getitem(q_gather_view, 0)
reshape = reshape(getitem_1, [3, 2, 2, 8])
reshape_1 = reshape(reshape, [12, 8])
permute = permute(arg_1, [1, 0])
mm = mm(reshape_1, permute)
reshape_2 = reshape(mm, [3, 4, 6])
exp = exp(reshape_2)
sum = sum(exp, [-1])
log = log(sum)
reshape_3 = reshape(exp, [12, 6])
mm_1 = mm(reshape_3, arg_1)
reshape_4 = reshape(mm_1, [3, 4, 8])
unsqueeze = unsqueeze(sum, 2)
div = div(reshape_4, unsqueeze)
a2a_lse_reduce = a2a_lse_reduce(div, log, getitem, GROUP, output_dtype=float32)
getitem_2 = getitem(a2a_lse_reduce, 0)
return [getitem_2]
""",
    )
    assert after.calls() == ["q_gather", "a2a_lse_reduce"]
