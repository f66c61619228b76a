"""Models of the user's own, as a factory gives them: a plain module with its loss, and one whose forward is the loss."""

import torch
from torch import nn
from torch.nn import functional as F


class Bag(nn.Module):
    """Next token from the mean of an embedding of this one and some blocks; positions are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )
        self.out = nn.Linear(32, 300)
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.out(hidden * self.scale)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"), (
        batch["labels"] != -100
    ).sum()


def with_loss():
    return Bag(), loss


class Own(Bag):
    def forward(self, batch):
        logits = super().forward(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"), (
            batch["labels"] != -100
        ).sum()


def own_forward():
    return Own()


class Unfillable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(300, 300))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


def unfillable():
    return Unfillable(), loss
