"""The plan of fragments: every one in its turn, never two under way, and none at the end of a round."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from manyhands.strategies.local.fragments import FragmentPlan, cut


@st.composite
def plans(draw: st.DrawFn) -> FragmentPlan:
    steps = draw(st.integers(1, 200))
    fragments = draw(st.integers(1, steps))
    overlap = draw(st.integers(0, FragmentPlan(steps=steps, fragments=fragments).most_overlap))
    return FragmentPlan(steps=steps, fragments=fragments, overlap=overlap)


@given(plans())
def test_each_is_sent_before_it_is_merged_and_nothing_is_under_way_at_the_end_of_a_round(
    plan: FragmentPlan,
) -> None:
    under_way: tuple[int, int] | None = None
    order = []
    for step in range(1, 3 * plan.steps + 1):
        merged, sent = plan.merged(step), plan.sent(step)
        if plan.overlap and merged is not None:
            assert under_way == (merged, step - plan.overlap)
            under_way = None
        if sent is not None:
            assert under_way is None
            under_way = (sent, step)
        if not plan.overlap and merged is not None:
            assert under_way == (merged, step)
            under_way = None
        if merged is not None:
            order.append(merged)
        if step % plan.steps == 0:
            assert under_way is None
    assert order == list(range(plan.fragments)) * 3


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_a_cut_has_every_tensor_once_in_order_and_no_piece_is_empty(
    sizes: list[int], data: st.DataObject
) -> None:
    fragments = data.draw(st.integers(1, len(sizes)))
    pieces = cut(sizes, fragments)
    assert len(pieces) == fragments
    assert all(len(piece) for piece in pieces)
    assert [number for piece in pieces for number in piece] == list(range(len(sizes)))
