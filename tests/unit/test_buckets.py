import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.wire.flat_layout import lay_out

MIB = 1 << 20


def test_reverse_order_doubled_from_a_small_bucket_to_the_cap_and_small_again() -> None:
    quarter = MIB // 4  # float32 items: one MiB each
    layout = lay_out([(quarter, torch.float32)] * 12, cap_bytes=3 * MIB)
    expected = [[11], [10, 9], [8, 7, 6], [5, 4, 3], [2], [1, 0]]
    assert [[slot.parameter for slot in bucket.slots] for bucket in layout] == expected
    assert [bucket.count for bucket in layout] == [len(bucket) * quarter for bucket in expected]


def test_the_first_layer_is_alone_in_the_last_bucket() -> None:
    """Backward reaches its weight and its bias together, so they leave together."""
    layer = [(512 * 512, torch.float32), (512, torch.float32)]
    layout = lay_out(layer * 16, cap_bytes=4 * MIB)
    assert [len(bucket.slots) // 2 for bucket in layout] == [1, 2, 4, 4, 4, 1]
    assert sorted(slot.parameter for slot in layout[-1].slots) == [0, 1]


def test_a_small_model_is_one_bucket() -> None:
    assert len(lay_out([(1000, torch.float32)] * 9, cap_bytes=4 * MIB)) == 1


def test_one_dtype_per_bucket() -> None:
    layout = lay_out([(10, torch.float32), (10, torch.float64), (10, torch.float32)], cap_bytes=MIB)
    assert {bucket.dtype: [slot.parameter for slot in bucket.slots] for bucket in layout} == {
        torch.float32: [2, 0],
        torch.float64: [1],
    }


def test_no_parameters_no_buckets() -> None:
    assert lay_out([], cap_bytes=MIB) == ()


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    ),
    st.integers(1, 20_000),
)
def test_every_parameter_once_aligned_and_apart(parameters: list[tuple[int, torch.dtype]], cap: int) -> None:
    layout = lay_out(parameters, cap_bytes=cap, first_bytes=1000)
    seen = [slot.parameter for bucket in layout for slot in bucket.slots]
    assert sorted(seen) == list(range(len(parameters)))
    for bucket in layout:
        end = 0
        for slot in bucket.slots:
            assert (slot.count, bucket.dtype) == parameters[slot.parameter]
            assert slot.offset >= end
            assert slot.offset * bucket.dtype.itemsize % 64 == 0
            end = slot.offset + slot.count
        assert end <= bucket.count
