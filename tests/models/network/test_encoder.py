from itertools import product

import pytest
import torch
from torch import Tensor, nn

from models.network.config import EncoderConfig
from models.network.encoder import Encoder
from models.network.layer import ACTIVATIONS, EncoderLayer
from models.network.positions import distance_bucket
from models.packing import pack

N, L, D, H = 4, 10, 32, 4

CONFIG = EncoderConfig(
    vocab_size=50,
    d_model=D,
    num_layers=3,
    num_heads=H,
    dim_feedforward=64,
    max_positions=20,
    type_vocab_size=2,
)


@pytest.fixture(autouse=True)
def _no_fast_path() -> object:
    """Seed torch and disable its inference fast path, which treats masked rows differently."""
    torch.manual_seed(0)
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def encoder_pair(
    activation: str = "relu", norm_first: bool = False, bias: bool = True, dropout: float = 0.0
) -> tuple[EncoderLayer, nn.TransformerEncoderLayer]:
    """Return our layer and torch's with equal weights, all away from their initial values."""
    theirs = nn.TransformerEncoderLayer(
        D,
        H,
        dim_feedforward=64,
        dropout=dropout,
        activation=ACTIVATIONS[activation],
        norm_first=norm_first,
        bias=bias,
        batch_first=True,
    )
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = EncoderLayer(D, H, 64, dropout, activation, norm_first=norm_first, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def key_padding() -> Tensor:
    mask = torch.zeros(N, L, dtype=torch.bool)
    mask[1, 6:] = True
    mask[2, 1:] = True
    return mask


SRC_MASKS = {
    "none": None,
    "bool": torch.ones(L, L).triu(2).bool(),
    "float": torch.linspace(-2, 2, L * L).view(L, L),
    "minus infinity": nn.Transformer.generate_square_subsequent_mask(L),
    "per head": torch.linspace(-2, 2, N * H * L * L).view(N * H, L, L),
}


@pytest.mark.filterwarnings("ignore:Support for mismatched src_key_padding_mask")
@pytest.mark.parametrize("src_mask", SRC_MASKS)
@pytest.mark.parametrize(
    ("activation", "norm_first", "bias", "padded", "causal"),
    list(product(["relu", "gelu"], [False, True], [False, True], [False, True], [False, True])),
)
def test_layer_equals_torch_encoder_layer_in_every_combination(
    src_mask: str, activation: str, norm_first: bool, bias: bool, padded: bool, causal: bool
) -> None:
    ours, theirs = encoder_pair(activation, norm_first, bias)
    src = torch.randn(N, L, D)
    mask = SRC_MASKS[src_mask]
    padding = key_padding() if padded else None
    actual = ours(src, mask, padding, is_causal=causal)
    if causal:  # torch uses the flag as a hint only and needs the explicit mask
        triangle = nn.Transformer.generate_square_subsequent_mask(L)
        if mask is not None and not mask.is_floating_point():
            mask = torch.zeros(L, L).masked_fill(mask, float("-inf"))
        mask = triangle if mask is None else mask + triangle
    expected = theirs(src, mask, padding)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_layer_gradients_equal_torch_encoder_layer(norm_first: bool) -> None:
    ours, theirs = encoder_pair("gelu", norm_first)
    src, dy = torch.randn(N, L, D), torch.randn(N, L, D)
    ours(src, src_key_padding_mask=key_padding()).backward(dy)
    theirs(src, src_key_padding_mask=key_padding()).backward(dy)
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_has_the_mean_and_deviation_of_torch(norm_first: bool) -> None:
    ours, theirs = encoder_pair(norm_first=norm_first, dropout=0.3)
    draws = 4000
    src = torch.randn(1, 3, D).expand(draws, 3, D)
    actual, expected = ours.train()(src), theirs.train()(src)  # (draws, 3, D)
    spread = expected.std(0)
    # A difference above 6 standard errors has a probability below 1e-8 per element.
    assert ((actual.mean(0) - expected.mean(0)).abs() < 6 * spread * (2 / draws) ** 0.5).all()
    torch.testing.assert_close(actual.std(0), spread, rtol=0.15, atol=0)
    assert torch.equal(ours.eval()(src), ours(src))


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.uint8])
def test_nonzero_padding_mask_values_mask_the_token(kind: torch.dtype) -> None:
    ours, _ = encoder_pair()
    src = torch.randn(N, L, D)
    numbers = (key_padding() * 3).to(kind)
    torch.testing.assert_close(
        ours(src, src_key_padding_mask=numbers), ours(src, src_key_padding_mask=key_padding())
    )


def test_causal_layer_hides_later_tokens() -> None:
    ours, _ = encoder_pair()
    src = torch.randn(1, L, D)
    changed = src.clone()
    changed[:, 5:] = 7.0
    before, after = ours(src, is_causal=True), ours(changed, is_causal=True)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_fully_masked_row_gets_no_context_and_stays_finite() -> None:
    ours, _ = encoder_pair()
    src = torch.randn(1, L, D, requires_grad=True)
    masked = ours(src, src_key_padding_mask=torch.ones(1, L))
    masked.sum().backward()
    assert src.grad is not None
    assert src.grad.isfinite().all()
    with torch.no_grad():
        ours.self_attn.in_proj_weight.zero_()
        assert ours.self_attn.in_proj_bias is not None
        ours.self_attn.in_proj_bias.zero_()
    torch.testing.assert_close(masked, ours(src))


def test_documented_shape_runs() -> None:
    layer = EncoderLayer(512, 8)
    assert layer(torch.randn(16, 10, 512)).shape == (16, 10, 512)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: EncoderLayer(10, 3), "d_model 10 is not divisible by num_heads 3"),
        (lambda: EncoderLayer(8, 2, activation="tanhh"), "activation 'tanhh' is not one of"),
        (lambda: EncoderLayer(8, 2)(torch.zeros(3, 8)), r"src is \(3, 8\); it must be \(N, L, D\)"),
        (
            lambda: EncoderLayer(8, 2)(torch.zeros(1, 3, 8), torch.zeros(2, 2)),
            r"src_mask is \(2, 2\); it must be \(3, 3\) or \(2, 3, 3\)",
        ),
        (
            lambda: EncoderLayer(8, 2)(
                torch.zeros(1, 3, 8), src_key_padding_mask=torch.zeros(1, 2)
            ),
            r"src_key_padding_mask is \(1, 2\); it must be \(1, 3\)",
        ),
    ],
)
def test_invalid_layer_arguments_raise_value_error(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("position_padding_id", [None, 1])
@pytest.mark.parametrize("relative_buckets", [0, 32])
def test_packed_and_dense_forward_give_the_same_vectors(
    norm_first: bool, position_padding_id: int | None, relative_buckets: int
) -> None:
    config = EncoderConfig(
        **{
            **vars(CONFIG),
            "norm_first": norm_first,
            "position_padding_id": position_padding_id,
            "relative_buckets": relative_buckets,
        }
    )
    encoder = Encoder(config).eval()
    # Id 1 is the padding token of some families; the third row has it in the middle.
    rows = [[3, 4, 5], [6], [7, 8, 1, 9, 2, 5, 3], [9, 9]]
    batch = pack(rows)
    arrays = [torch.from_numpy(array) for array in batch.inputs().values()]
    packed = encoder.forward_packed(*arrays[:4])
    alone = torch.cat([encoder(torch.tensor([row]))[0] for row in rows])
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)

    width = max(map(len, rows))
    dense_ids = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    mask = torch.from_numpy(batch.attention_mask)
    dense = encoder(dense_ids, 3 * mask)[mask.bool()]  # any nonzero value marks a token
    torch.testing.assert_close(dense, alone, rtol=1e-5, atol=1e-5)


def test_pre_norm_encoder_ends_in_a_norm() -> None:
    encoder = Encoder(EncoderConfig(**{**vars(CONFIG), "norm_first": True})).eval()
    vectors = encoder(torch.tensor([[3, 4, 5]]))
    torch.testing.assert_close(vectors.mean(-1), torch.zeros(1, 3), rtol=0, atol=1e-5)


def test_token_types_without_a_type_table_raise_value_error() -> None:
    encoder = Encoder(EncoderConfig(**{**vars(CONFIG), "type_vocab_size": 0}))
    with pytest.raises(ValueError, match="this encoder has no token type embeddings"):
        encoder(torch.tensor([[3]]), token_type_ids=torch.tensor([[0]]))


def test_distance_buckets_equal_mpnet() -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distance = torch.arange(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(distance, num_buckets=32)
    assert torch.equal(distance_bucket(distance, 32), expected)


def test_layer_runs_under_autocast() -> None:
    layer = EncoderLayer(D, H, 64, dropout=0.0)
    src = torch.randn(N, L, D)
    with torch.autocast("cpu", torch.bfloat16):
        actual = layer(src)
    torch.testing.assert_close(actual.float(), layer(src), rtol=0.05, atol=0.05)
