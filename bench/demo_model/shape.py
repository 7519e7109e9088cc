"""The size of the model and the length of its training: plain numbers, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Hyperparameters of a `glm4moe` model with every layer MoE and one MTP block of the same form."""

    vocab: int = 4096
    embd: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary: int = 32  # dimensions of a head that are rotated; by the others a head looks back at any distance alike
    experts: int = 32
    used: int = 4
    ff: int = 128
    context: int = 2048
    rope_base: float = 10000.0
    eps: float = 1e-5

    @property
    def blocks(self) -> int:
        """Layers of the trunk and the MTP block."""
        return self.layers + 1


@dataclass(frozen=True)
class Plan:
    """How it is trained. Token counts are of the next-token loss; the sequence grows from `early` to `long`."""

    tokens: int = 7_400_000
    batch_tokens: int = 8192
    early: int = 256
    early_tokens: int = 5_038_080  # what it takes to learn to look back, however long the training is
    short: int = 512
    long: int = 1024
    long_share: float = 0.15
    # Library, docs, tests, copy, random: looking back is learnt first, and on short sequences.
    early_mix: tuple[float, ...] = (0.28, 0.13, 0.10, 0.14, 0.35)
    mix: tuple[float, ...] = (0.38, 0.21, 0.15, 0.20, 0.06)
    loop_share: float = 0.20  # of the windows of natural text: a loop that ends is put into them
    rate: float = 8e-3
    router_rate: float = 0.25  # of `rate`
    warmup: int = 60
    decay_share: float = 0.6
    floor: float = 0.02
    weight_decay: float = 0.1
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.97)
    mtp_weight: float = 0.3
    mtp_share: float = 0.7  # of the steps, the last ones: a head learns little from a trunk that knows little
    bias_rate: float = 1e-2
    load_low: float = 0.6
    load_high: float = 1.5
    seed: int = 1

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens

    def is_early(self, step: int) -> bool:
        """Whether this step is of the first part, short windows and much that only looking back predicts."""
        return step * self.batch_tokens < self.early_tokens

    def length(self, step: int) -> int:
        """Tokens of one sequence in this step."""
        if self.is_early(step):
            return self.early
        return self.long if step >= self.steps * (1 - self.long_share) else self.short

    def mix_at(self, step: int) -> tuple[float, ...]:
        """Shares of the kinds of text in this step; their sum is 1."""
        return self.early_mix if self.is_early(step) else self.mix

    def heads_at(self, step: int) -> bool:
        """Whether this step trains the MTP head."""
        return step >= self.steps * (1 - self.mtp_share)

    def rate_at(self, step: int) -> float:
        """Warm-up, a plateau, then a straight line to `floor` of the rate."""
        start = self.steps * (1 - self.decay_share)
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        if step < start:
            return self.rate
        left = (self.steps - step) / max(1.0, self.steps - start)
        return self.rate * (self.floor + (1 - self.floor) * left)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
