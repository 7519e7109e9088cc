"""From documents to token streams on disk: a byte-level BPE and one array of ids for each kind of text."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from . import corpus

END = "<|endoftext|>"
WINDOW = 1024  # tokens of a text that a model is judged by at once


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE of `vocab` entries with GPT-2's word pattern, which llama.cpp knows as `gpt-2`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def stream(tokenizer: Tokenizer, texts: list[str]) -> npt.NDArray[np.uint16]:
    """The ids of all texts, each begun by the end-of-text token (id 0), which is also the model's BOS. uint16."""
    ids: list[int] = []
    for encoded in tokenizer.encode_batch(texts):
        ids.append(0)
        ids.extend(encoded.ids)
    return np.array(ids, np.uint16)


def copies(
    tokenizer: Tokenizer, texts: list[corpus.Repetition]
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """The same of texts with repeats, and for each id whether it is to be learnt: 0 inside an unscored part."""
    ids: list[int] = []
    weights: list[int] = []
    for text, encoded in zip(texts, tokenizer.encode_batch([t.text for t in texts]), strict=True):
        unscored = np.zeros(len(text.text) + 1, bool)
        for begin, end in text.unscored:
            unscored[begin:end] = True
        ids += [0, *encoded.ids]
        weights += [1, *(int(not unscored[begin]) for begin, _ in encoded.offsets)]
    return np.array(ids, np.uint16), np.array(weights, np.uint8)


def prepare(work: Path, stdlib: Path, docs: Path, vocab: int, count: int, seed: int) -> dict[str, Any]:
    """Writes `tokenizer.json`, `<kind>.npy`, `copy_weights.npy`, `held_out.json` and `corpus.json` into `work`; the
    last one's content.

    `count` texts with repeats are made; they and the order of the documents are drawn with `seed`.
    Raises FileNotFoundError where the text is missing.
    """
    documents = corpus.collect(stdlib, docs)
    train = [d for d in documents if not d.held_out]
    held = [d for d in documents if d.held_out]
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer((d.text for d in train), vocab)
    tokenizer.save(str(work / "tokenizer.json"))
    facts: dict[str, Any] = {
        "license": corpus.LICENSE,
        "files": len(documents),
        "held_out_files": len(held),
        "bytes": sum(len(d.text.encode()) for d in documents),
        "crc32": zlib.crc32("".join(d.name + d.text for d in documents).encode()),
        "tokens": {},
    }
    rng = np.random.default_rng(seed)
    for kind in corpus.NATURAL:
        texts = [d.text for d in train if d.kind == kind]
        ids = stream(tokenizer, [texts[i] for i in rng.permutation(len(texts))])
        np.save(work / f"{kind}.npy", ids)
        facts["tokens"][kind] = len(ids)
    ids, weights = copies(tokenizer, corpus.repetitions(train, count, seed))
    np.save(work / "copy.npy", ids)
    np.save(work / "copy_weights.npy", weights)
    facts["tokens"]["copy"] = len(ids)
    (work / "held_out.json").write_text(json.dumps([{"name": d.name, "kind": d.kind, "text": d.text} for d in held]))
    (work / "corpus.json").write_text(json.dumps(facts, indent=1))
    return facts


def held_out(work: Path) -> list[dict[str, str]]:
    """Name, kind and text of the files that `prepare` has set aside in `work`."""
    found: list[dict[str, str]] = json.loads((work / "held_out.json").read_text())
    return found
