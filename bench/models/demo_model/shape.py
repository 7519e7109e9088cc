"""The size of the model and the length of its training: plain numbers, no torch."""

from __future__ import annotations

from dataclasses import dataclass


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
    # The last part: text that has come least until then, most windows from where a file begins, as any text does that
    # the model will be asked for. Without it only copies and random tokens would begin at a window's first place.
    finish_share: float = 1 / 6
    finish_mix: tuple[float, ...] = (0.25, 0.17, 0.35, 0.17, 0.06)
    finish_starts: float = 0.6
    finish_rate: float = 0.5  # of `rate`, at its beginning
    finish_warmup: int = 20
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

    @property
    def main_steps(self) -> int:
        """Steps before the last part."""
        return self.steps - round(self.steps * self.finish_share)

    def is_early(self, step: int) -> bool:
        """Whether this step is of the first part, short windows and much that only looking back predicts."""
        return step * self.batch_tokens < self.early_tokens

    def length(self, step: int) -> int:
        """Tokens of one sequence in this step."""
        if self.is_early(step):
            return self.early
        return self.long if step >= self.main_steps * (1 - self.long_share) else self.short

    def mix_at(self, step: int) -> tuple[float, ...]:
        """Shares of the kinds of text in this step; their sum is 1."""
        if step >= self.main_steps:
            return self.finish_mix
        return self.early_mix if self.is_early(step) else self.mix

    def starts_at(self, step: int) -> float:
        """Share of the windows of natural text that begin where a document does; the others begin anywhere."""
        return self.finish_starts if step >= self.main_steps else 0.0

    def heads_at(self, step: int) -> bool:
        """Whether this step trains the MTP head."""
        return step >= self.main_steps * (1 - self.mtp_share)

    def rate_at(self, step: int) -> float:
        """Warm-up, a plateau, a straight line to `floor` of the rate; then a lower one, and down again."""
        if step >= self.main_steps:
            at, whole = step - self.main_steps, self.steps - self.main_steps
            top = self.rate * self.finish_rate
            up = self.rate * self.floor + (top - self.rate * self.floor) * min(1.0, (at + 1) / self.finish_warmup)
            return min(up, self._line(top, whole - at, whole))
        start = self.main_steps * (1 - self.decay_share)
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        if step < start:
            return self.rate
        return self._line(self.rate, self.main_steps - step, self.main_steps - start)

    def _line(self, top: float, left: float, whole: float) -> float:
        """From `top` down to `floor` of the rate, with `left` of `whole` steps to go."""
        floor = self.rate * self.floor
        return floor + (top - floor) * left / max(1.0, whole)
