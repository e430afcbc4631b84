"""Scores of spans of words for labels, as in GLiNER; the labels are part of the row.

Shapes: T tokens in B rows, N words in all rows and up to K in one, up to C labels in a row, P pairs
of a word and a label of its row, spans of up to W words, token vectors of width D and word vectors
of width H. Source: Zaratiana et al. 2023, arXiv:2311.08526, and the package gliner 0.2.29, whose
span representation "markerV0" this is.
"""

import torch
from torch import Tensor, nn
from torch.library import Library, register_fake
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from models.network.packed_attention import Rows

# The op is only a node of exported graphs, with weights as the ONNX operator LSTM has them.
_LIBRARY = Library("vitrine", "FRAGMENT")
_LIBRARY.define("lstm(Tensor x, Tensor w, Tensor r, Tensor b) -> Tensor")
# Gates of ONNX, input, output, forget and cell, among those of torch: input, forget, cell, output.
_GATES = [0, 3, 1, 2]


def _fake(x: Tensor, _w: Tensor, r: Tensor, _b: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], r.shape[1])


register_fake("vitrine::lstm", _fake, lib=_LIBRARY)


class WordLSTM(nn.LSTM):
    """A bidirectional LSTM over the words of each row.

    Args:
        width: Width of a word vector, H; even.
        num_layers: Number of layers.
    """

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__(width, width // 2, num_layers, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:  # type: ignore[override]
        """Return word vectors `(B, K, H)` for `x`, `(B, K, H)`, and word counts `(B,)`."""
        if not torch.compiler.is_exporting():
            packed = pack_padded_sequence(x, counts.cpu(), batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(super().forward(packed)[0], batch_first=True)[0]
        # OpenVINO 2026.4 ignores the lengths of sequences, so rows are reversed without padding.
        (B, K), device = x.shape[:2], x.device
        position = torch.arange(K, device=device)
        is_word = position < counts[:, None]  # (B, K)
        index = torch.where(is_word, counts[:, None] - 1 - position, position)
        index = (index + K * torch.arange(B, device=device)[:, None]).flatten()  # (B * K,)

        def reversed_rows(x: Tensor) -> Tensor:
            return x.flatten(0, 1).index_select(0, index).unflatten(0, (B, K))

        for layer in range(self.num_layers):
            forward = torch.ops.vitrine.lstm(x, *self._onnx_parameters(f"l{layer}"))
            parameters = self._onnx_parameters(f"l{layer}_reverse")
            backward = torch.ops.vitrine.lstm(reversed_rows(x), *parameters)
            x = torch.cat([forward, reversed_rows(backward)], -1)
        return x

    def _onnx_parameters(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return W `(2H, H)`, R `(2H, H / 2)` and B `(4H,)` of a layer's direction; see ONNX."""

        def gates(kind: str) -> Tensor:
            parameter: Tensor = getattr(self, f"{kind}_{name}")
            return parameter.unflatten(0, (4, -1))[_GATES].flatten(0, 1)

        return (
            gates("weight_ih"),
            gates("weight_hh"),
            torch.cat([gates("bias_ih"), gates("bias_hh")]),
        )


class _Mlp(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 4 * out)
        self.out = nn.Linear(4 * out, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x).relu())


class SpanHead(nn.Module):
    """Head that scores each span of words for each label.

    Args:
        token_width: Width of a token vector, D.
        width: Width of a word vector, H.
        max_width: Maximum number of words of a span, W.
        lstm_layers: Number of LSTM layers; 0: none.
    """

    def __init__(self, token_width: int, width: int, max_width: int, lstm_layers: int) -> None:
        super().__init__()
        self.max_width = max_width
        self.projection = nn.Linear(token_width, width) if token_width != width else nn.Identity()
        self.lstm = WordLSTM(width, lstm_layers) if lstm_layers else None
        self.start, self.end, self.label = (_Mlp(width, width) for _ in range(3))
        self.span = _Mlp(2 * width, width)

    def forward(
        self,
        tokens: Tensor,
        word_tokens: Tensor,
        padded_words: Tensor,
        packed_words: Tensor,
        word_counts: Tensor,
        label_tokens: Tensor,
        pairs: Tensor,
    ) -> Tensor:
        """Return the logits of the spans that begin at a word, `(P, W)`, for each word and label.

        Logits of spans beyond the row's last word are 0. The other arguments than the token vectors
        `(T, D)` are the fields of `models.packing.PackedWords`.
        """
        x = self.projection(tokens.to(self.start.hidden.weight.dtype))  # (T, H)
        rows = Rows(padded_words, packed_words)
        # The word vector of a word without tokens is zero.
        words = torch.cat([torch.zeros_like(x[:1]), x]).index_select(0, word_tokens)  # (N, H)
        if self.lstm is not None:
            words = rows.pack(self.lstm(rows.pad(words), word_counts))
        labels = x.index_select(0, label_tokens.flatten()).unflatten(0, label_tokens.shape)
        labels = self.label(labels)  # (B, C, H)
        # The first layer of `span` is computed per word, in two parts, and its last layer per label
        # instead of per span: out(h) . label = h . (label @ weight) + label . bias.
        hidden, out = self.span.hidden, self.span.out
        width = words.shape[1]
        of_start, of_end = hidden.weight[:, :width], hidden.weight[:, width:]  # (4H, H)
        starts = nn.functional.linear(self.start(words).relu(), of_start, hidden.bias)
        ends = nn.functional.linear(self.end(words).relu(), of_end)  # (N, 4H)
        starts, ends = rows.pad(starts), rows.pad(ends)  # (B, K, 4H)
        weight = (labels @ out.weight).transpose(1, 2)  # (B, 4H, C)
        bias = (labels @ out.bias)[:, None]  # (B, 1, C)
        length = padded_words.shape[1]
        ends = nn.functional.pad(ends, (0, 0, 0, self.max_width - 1))
        position = torch.arange(length, device=x.device)
        scores = []
        for extra in range(self.max_width):
            logits = (starts + ends[:, extra : extra + length]).relu() @ weight + bias  # (B, K, C)
            is_inside = position + extra < word_counts[:, None]  # (B, K)
            scores.append(torch.where(is_inside[..., None], logits, 0.0))
        return torch.stack(scores, -1).flatten(0, 2).index_select(0, pairs)
