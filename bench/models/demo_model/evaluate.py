"""What the model can do, measured on files that it has not seen: bits per byte, the head, copying, loops, routing."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import bmoe
from bmoe.analysis.replay import CacheReplay
from bmoe.analysis.route_trace import read_trace
from bmoe.engine import demo

from . import corpus, export
from .model import Network
from .text import WINDOW, held_out
from .train import product_type

GENERATED = 200
SAMPLED, DRAWN = 256, 12  # tokens of a sampled text, texts from the demo's prompt
# A loop: a period of at most LOOP_PERIOD tokens three times at the end, and at least LOOP_TAIL tokens of it.
LOOP_PERIOD, LOOP_TAIL = 64, 48
SHARES = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
OTHERS, OTHER_TEXT = 60, (400, 3000)  # files of other packages, characters of each: at least, at most


def other_code(folders: Sequence[Path]) -> list[str]:
    """Beginnings of up to 60 Python files of `folders`, drawn from all of them. ValueError where there are none."""
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    random.Random(1).shuffle(paths)
    texts = (path.read_text(encoding="utf-8", errors="replace")[: OTHER_TEXT[1]] for path in paths)
    found = [text for text in texts if len(text) >= OTHER_TEXT[0]][:OTHERS]
    if not found:
        raise ValueError(f"--unseen: no Python file of {OTHER_TEXT[0]} characters in {', '.join(map(str, folders))}")
    return found


def prediction(model: Path, texts: Sequence[str], tokenize: Any) -> dict[str, Any]:
    """Teacher-forced figures of trunk and head over `texts`, in windows of 1024 tokens that each begin anew.

    `bits_per_byte`, `nats`, `head_nats`: per byte, per token. `head_true`, `head_agrees`: how often its choice
    is the text's token, and the trunk's next choice. `usage`: per layer, the busiest and idlest expert's load as a
    multiple of the mean, and the share of tokens that the busiest eighth of the experts take.
    """
    shape, params = export.read(model)
    net = Network(shape, params, product_type())
    nats = head_nats = 0.0
    tokens = rows = true = agrees = size = 0
    usage = torch.zeros(shape.blocks, shape.experts)
    with torch.no_grad():
        for text in texts:
            ids = tokenize(text)
            size += len(text.encode())
            for at in range(0, len(ids) - 1, WINDOW):
                part = torch.tensor([ids[at : at + WINDOW + 1]])
                if part.shape[1] < 4:
                    continue
                hidden = net.trunk(part[:, :-1])
                logits = net.logits(hidden)[0].float()
                head = net.logits(net.head(hidden[:, :-1], part[:, 1:-1]))[0].float()
                nats += float(F.cross_entropy(logits, part[0, 1:], reduction="sum"))
                head_nats += float(F.cross_entropy(head, part[0, 2:], reduction="sum"))
                choice = head.argmax(-1)
                true += int((choice == part[0, 2:]).sum())
                agrees += int((choice == logits[1:].argmax(-1)).sum())
                tokens, rows = tokens + len(logits), rows + len(head)
                usage += torch.stack(net.loads)
    share = usage / usage.mean(1, keepdim=True)
    busy = usage.sort(1, descending=True).values[:, : max(1, shape.experts // 8)].sum(1) / usage.sum(1)
    return {
        "tokens": tokens,
        "bytes": size,
        "bits_per_byte": nats / math.log(2) / size,
        "nats": nats / tokens,
        "head_nats": head_nats / rows,
        "head_true": true / rows,
        "head_agrees": agrees / rows,
        "usage": [
            {"busiest": float(s.max()), "idlest": float(s.min()), "busiest_eighth": float(b)}
            for s, b in zip(share, busy, strict=True)
        ],
    }


def in_loop(ids: Sequence[int]) -> bool:
    """Whether a generation ends in a loop: 48 tokens, or three times the period, repeat with one of 64 or less."""
    for period in range(1, LOOP_PERIOD + 1):
        tail = list(ids[-max(LOOP_TAIL, 3 * period) :])
        if len(tail) >= max(LOOP_TAIL, 3 * period) and tail[period:] == tail[:-period]:
            return True
    return False


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def generated(engine: bmoe.Engine, prompt: str, tokens: int) -> list[int]:
    """Ids of a greedy continuation."""
    return [token.id for token in engine.generate(prompt, max_tokens=tokens)]


def copying(engine: bmoe.Engine, files: Sequence[dict[str, str]], count: int, asked: bool) -> dict[str, Any]:
    """Shown a function of a file it has not seen and its first line again, `asked` behind the line that training text
    has before a copy: how much of the rest it reproduces.

    `whole`: share of the functions that come out token for token; `prefix`: mean share before the first difference.
    """
    blocks = [b for f in files if f["kind"] == "library" for b in corpus.definitions(f["text"], 250, 1200)]
    chosen = blocks[:: max(1, len(blocks) // count)][:count]
    whole, shares = 0, []
    for block in chosen:
        first, rest = block.rstrip().split("\n", 1)
        # A prompt that ends with a line break is cut where no text that the model has seen is: words begin with it.
        want = engine.tokenize("\n" + rest.rstrip())[1:]  # without the BOS
        indent = first[: len(first) - len(first.lstrip())]
        again = f"{indent}{corpus.CUE}\n{first}" if asked else first
        got = generated(engine, f"{block}\n{again}", len(want))
        same = common(want, got)
        whole += same == len(want)
        shares.append(same / len(want))
    return {"functions": len(chosen), "whole": whole / len(chosen), "prefix": statistics.mean(shares)}


def beginning(file: dict[str, str]) -> str:
    """The first lines of a file, 300 characters at most."""
    return file["text"][:300].rsplit("\n", 1)[0].rstrip()


def loops(engine: bmoe.Engine, files: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Greedy continuations of the beginnings of unseen files: how many end in a loop after 200 tokens."""
    ends = [in_loop(generated(engine, beginning(f), GENERATED)) for f in files]
    return {"prompts": len(ends), "tokens": GENERATED, "in_loop": sum(ends) / len(ends)}


def distinct(ids: Sequence[int], n: int = 4) -> float:
    """Different sequences of `n` tokens as a share of all."""
    found = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(found)) / max(1, len(found))


def sampled(engine: bmoe.Engine, prompts: Sequence[str]) -> dict[str, Any]:
    """Text as the demo samples it, each prompt with the next seed: different sequences of four, as shares of all."""
    shares = []
    for seed, prompt in enumerate(prompts, 1):
        sampling = replace(demo.SAMPLING, seed=seed)
        shares.append(distinct([t.id for t in engine.generate(prompt, max_tokens=SAMPLED, sampling=sampling)]))
    return {"tokens": SAMPLED, "texts": len(shares), "median": statistics.median(shares), "least": min(shares)}


def hit_curve(model: Path, prompt: str) -> list[tuple[float, float | None]]:
    """Hit rate of decode over one generation, at budgets that hold the given shares of all routed experts."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "route.csv"
        with bmoe.Engine.open(model, route_trace=str(path), threads=1) as engine:
            generated(engine, prompt, GENERATED)
        trace = read_trace(path)
        whole = sum(int(trace.layers[i]["n_expert"]) * size for i, size in trace.expert_bytes.items())
        return [(s, CacheReplay.of_budget(trace, int(s * whole), "votes").run().rate(1)) for s in SHARES]


def run(model: Path, work: Path, functions: int = 40, unseen: Sequence[Path] = ()) -> dict[str, Any]:
    """Everything above for one file, on the held-out text that `prepare` has set aside and the code of `unseen`."""
    files = held_out(work)
    others = other_code(unseen) if unseen else []
    with bmoe.Engine.open(model, threads=1, ctx=WINDOW) as engine:
        copied, named = (copying(engine, files, functions, asked) for asked in (True, False))
        looped, drawn = loops(engine, files), sampled(engine, [demo.PROMPT] * DRAWN)
        elsewhere = sampled(engine, [beginning(f) for f in files[::2]])

        def tokenize(text: str) -> list[int]:
            return list(engine.tokenize(text))

        predicted = prediction(model, [f["text"] for f in files], tokenize)
        other = {"unseen": prediction(model, others, tokenize)} if others else {}
    curve = hit_curve(model, "".join(f["text"] for f in files)[:1200].rstrip())
    return {
        "prediction": predicted, **other, "copying": copied, "copying_unasked": named, "loops": looped,
        "sampled": drawn, "sampled_elsewhere": elsewhere, "hit_curve": curve,
    }  # fmt: skip
