"""A small transformer for the tokens of a text, trained from nothing (`sst2-transformer.yaml`)."""

import torch
from torch import Tensor, nn


class Reader(nn.Module):
    """Attention over the words of a text, and the mean of what it tells about those that are there.

    `forward` takes tokens (B, L), below 0 where a text has ended, and returns (B, outputs).
    """

    def __init__(self, length: int, words: int, width: int, blocks: int, heads: int, outputs: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        there = x >= 0
        hidden = ~there & (torch.arange(x.shape[1], device=x.device) > 0)  # an empty text looks at its first place
        found = self.words(x.clamp_min(0)) + self.places(torch.arange(x.shape[1], device=x.device).expand(x.shape))
        for block in self.blocks:
            found = block(found, src_key_padding_mask=hidden)
        known = there.unsqueeze(-1).to(found.dtype)
        mean = (self.norm(found) * known).sum(dim=1) / known.sum(dim=1).clamp_min(1.0)
        answer: Tensor = self.head(mean)
        return answer


def build(
    shape: tuple[int, ...], outputs: int, words: int = 4096, width: int = 32, blocks: int = 1, heads: int = 2
) -> nn.Module:
    """Return the model for tokens of `shape` (L,)."""
    return Reader(shape[0], words, width, blocks, heads, outputs)
