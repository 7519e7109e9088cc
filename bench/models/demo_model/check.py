"""The trainer and llama.cpp on the same tokens: logits of the trunk and of the MTP head, token for token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import bmoe
from bmoe.speculation import DraftSpec

from . import export
from .model import Network

Logits = npt.NDArray[np.float32]

TOLERANCE = {True: 0.1, False: 0.5}
"""Largest difference of a logit, by whether the weights are float32. There the two differ by the order of sums and by
llama.cpp's float16 keys and values; with Q8_0 weights llama.cpp rounds the activations to 8 bits as well. Where a token
is routed to other experts for it, a near-tie of a router, its logits differ by more, and those of tokens that look back
at it a little: such tokens may be `MAY_DIFFER` of all."""
MAY_DIFFER = {True: 0.05, False: 0.1}


@dataclass
class Agreement:
    """How far two sets of logits [tokens, vocab] agree; `worst`, `median`: largest difference of a token's logits."""

    tokens: int
    worst: float
    median: float
    beyond: float
    same_choice: float
    nats: tuple[float, float]

    @classmethod
    def of(cls, ours: Logits, theirs: Logits, target: npt.NDArray[np.int64], tolerance: float) -> Agreement:
        gap = np.abs(ours - theirs).max(1)

        def nats(logits: Logits) -> float:
            return float(torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.from_numpy(target)))

        same = float((ours.argmax(1) == theirs.argmax(1)).mean())
        beyond = float((gap > tolerance).mean())
        return cls(len(ours), float(gap.max()), float(np.median(gap)), beyond, same, (nats(ours), nats(theirs)))


def trainer_logits(path: Path, ids: list[int]) -> tuple[Logits, Logits]:
    """Float32 logits of trunk [n, vocab] and head [n - 1, vocab], computed by the training code from the file."""
    shape, params = export.read(path)
    net = Network(shape, params, torch.float32)
    with torch.no_grad():
        tokens = torch.tensor([ids])
        hidden = net.trunk(tokens)
        head = net.head(hidden[:, :-1], tokens[:, 1:])
        return net.logits(hidden)[0].numpy(), net.logits(head)[0].numpy()


def llama_logits(path: Path, ids: list[int]) -> tuple[Logits, Logits]:
    """The same from llama.cpp, one token at a time, the head fed with the target's rows as drafting feeds it."""
    draft = DraftSpec(types=("mtp",), draft=1)
    trunk, head = [], []
    with bmoe.Engine.open(path, ctx=len(ids) + 8, threads=1, draft=draft) as engine:
        assert engine.sequence.head is not None
        context, rows = engine.sequence.head.head, engine.sequence.rows
        assert rows is not None
        before = None
        for position, token in enumerate(ids):
            if code := engine.sequence.context.decode(np.array([token], np.int32)):
                raise RuntimeError(f"llama.cpp's decode failed with code {code}")
            trunk.append(engine.sequence.context.logits().copy())
            row = rows.last(1).copy()
            if before is not None:
                if code := context.run(0, [token], before, position, True):
                    raise RuntimeError(f"llama.cpp's decode of the head failed with code {code}")
                head.append(context.output_logits(0).copy())
            before = row
    return np.stack(trunk), np.stack(head)


def compare(path: Path, texts: list[list[int]], exact: bool) -> dict[str, Agreement]:
    """Trunk and head of one file, each over all of `texts`; `exact`: its weights are float32."""
    found = [(trainer_logits(path, ids), llama_logits(path, ids)) for ids in texts]
    agreed = {}
    for which, name in enumerate(("trunk", "head")):
        # The last row of a text predicts what is not in it.
        ours, theirs = (np.concatenate([pair[side][which][:-1] for pair in found]) for side in (0, 1))
        target = np.concatenate([np.array(ids[1 + which :], np.int64) for ids in texts])
        agreed[name] = Agreement.of(ours, theirs, target, TOLERANCE[exact])
    return agreed


def verdict(found: dict[str, Agreement], exact: bool) -> list[str]:
    """What does not agree, a line each; nothing where all does."""
    return [
        f"{name}: {100 * a.beyond:.1f} % of {a.tokens} tokens differ by more than "
        f"{TOLERANCE[exact]} (worst {a.worst:.3f})"
        for name, a in found.items()
        if a.beyond > MAY_DIFFER[exact]
    ]
