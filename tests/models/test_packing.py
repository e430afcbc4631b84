import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.packing import INPUT_NAMES, NO_ADAPTER, pack, round_up

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=9)


@given(ROWS)
def test_index_maps_round_trip_between_packed_and_padded(rows: list[list[int]]) -> None:
    batch = pack(rows)
    padded = batch.input_ids[batch.padded_index]
    assert [padded[i, : len(row)].tolist() for i, row in enumerate(rows)] == rows
    assert padded.reshape(-1)[batch.packed_index].tolist() == [
        token for row in rows for token in row
    ]
    assert batch.attention_mask.sum(1).tolist() == [len(row) for row in rows]
    assert batch.rows == len(rows)


@given(ROWS)
def test_token_order_lists_tokens_then_padding_and_lengths_add_up(rows: list[list[int]]) -> None:
    inputs = pack(rows).inputs(("token_order", "cumulative_lengths"))
    assert {array.dtype for array in inputs.values()} == {np.dtype(np.int32)}
    order, ends = inputs.values()
    longest = max(map(len, rows))
    tokens = [i * longest + j for i, row in enumerate(rows) for j in range(len(row))]
    assert order.shape == (len(rows), longest)
    assert order.ravel()[: len(tokens)].tolist() == tokens
    assert sorted(order.ravel()) == list(range(order.size))
    assert ends[0] == 0
    assert np.diff(ends).tolist() == [len(row) for row in rows]


@given(ROWS, st.data())
def test_prompt_tokens_are_attended_to_but_not_pooled(
    rows: list[list[int]], data: st.DataObject
) -> None:
    prompt_tokens = [data.draw(st.integers(0, len(row) - 1)) for row in rows]
    batch = pack(rows, prompt_tokens)
    difference = batch.attention_mask - batch.pooling_mask
    assert difference.sum(1).tolist() == prompt_tokens
    assert all((difference[i, :n] == 1).all() for i, n in enumerate(prompt_tokens))


def test_tokens_have_the_adapter_of_their_row() -> None:
    batch = pack([[5, 6, 7], [8], [9, 9]], adapters=[1, NO_ADAPTER, 0])
    assert batch.adapters.tolist() == [1, 1, 1, -1, 0, 0]
    assert "adapters" not in batch.inputs()
    assert round_up(batch, tokens=16, length=8).adapters.tolist() == [1, 1, 1, -1, *[0] * 12]
    assert pack([[5, 6], [8]]).adapters.tolist() == [NO_ADAPTER] * 3


def test_inputs_have_the_names_and_dtypes_of_the_graph() -> None:
    inputs = pack([[1, 2], [3]]).inputs()
    assert tuple(inputs) == INPUT_NAMES
    assert [array.dtype for array in inputs.values()] == [np.int64] * 3 + [np.float32] * 2


@pytest.mark.parametrize(
    ("rows", "prompt_tokens", "message"),
    [
        ([], None, "at least one row"),
        ([[1], []], None, "row 1 has 0 tokens"),
        ([[1], [2, 3]], [0, 2], "row 1 has 2 tokens, none of which would be pooled"),
    ],
)
def test_row_without_pooled_tokens_raises_with_its_index(
    rows: list[list[int]], prompt_tokens: list[int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pack(rows, prompt_tokens)


def test_round_up_adds_only_padding() -> None:
    batch = pack([[5, 6, 7], [8]], prompt_tokens=[1, 0])
    rounded = round_up(batch, tokens=16, length=8)
    assert (rounded.input_ids.shape, rounded.padded_index.shape) == ((16,), (2, 8))
    assert rounded.input_ids.tolist() == [5, 6, 7, 8] + [0] * 12
    assert rounded.packed_index.tolist() == [0, 1, 2, 8] + [0] * 12
    assert np.flatnonzero(rounded.attention_mask).tolist() == [0, 1, 2, 8]
    assert np.flatnonzero(rounded.pooling_mask).tolist() == [1, 2, 8]
    assert rounded.padded_index.reshape(-1)[[0, 1, 2, 8]].tolist() == [0, 1, 2, 3]


def test_round_up_leaves_a_round_batch_unchanged() -> None:
    batch = pack([list(range(8)), list(range(8))])
    rounded = round_up(batch, tokens=16, length=8)
    for name in INPUT_NAMES:
        np.testing.assert_array_equal(getattr(rounded, name), getattr(batch, name))
