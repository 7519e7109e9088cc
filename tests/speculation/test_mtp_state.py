"""The head's state: after rejections, kept prefixes, stops and failures it is what never drafting would have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import OpenEngine
from mtp_heads import (
    PROMPT,
    Batch,
    ForcedHead,
    N,
    TinyMtp,
    close_state,
    force,
    head_of,
    head_state,
    ids,
    models,
    record,
    same_drafts,
    spec,
)

import bmoe
from bench.models.tiny import prompt_ids
from bmoe.speculation import DrafterStack, draft_width, mtp

# ---- state ------------------------------------------------------------------------------------------


@models
def test_state_after_rejection_is_that_of_never_drafting(
    arch: str, heads: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    path, states, rows = tiny_mtp(arch, heads), [], []
    expected = ids(open_engine(path), PROMPT)
    for wrong in (None, 1, 2):
        engine = open_engine(path, draft=spec())
        if wrong is None:
            engine.drafting.drafter = DrafterStack()
        else:
            force(engine, ForcedHead(head_of(engine), len(PROMPT), expected, wrong))
        assert ids(engine, PROMPT) == expected
        source = head_of(engine)
        source.feed(engine.sequence.ids)
        assert source.held == len(engine.sequence.ids) == len(PROMPT) + N - 1
        assert source.pending.start == source.held - 1
        states.append(head_state(engine))
        rows.append(source.pending.rows)
    for state, row in zip(states[1:], rows[1:], strict=True):
        close_state(state, states[0])
        np.testing.assert_allclose(row, rows[0], atol=0.01)
    # Where keys and values lie differs: 64 bytes of them that are missing are seen.
    seen, size = 0, len(states[0])
    for at in (size // 2, size * 3 // 4, size - 64):
        try:
            close_state(states[0][:at] + bytes(64) + states[0][at + 64 :], states[0])
        except AssertionError:
            seen += 1
    assert seen


@models
def test_a_draft_leaves_what_feeding_leaves(arch: str, heads: int, tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    """Bit for bit: the last confirmed token with the target's row, and nothing of the draft."""
    path = tiny_mtp(arch, heads)
    states = []
    for draft in (True, False):
        engine = open_engine(path, draft=spec())
        first = ids(engine, PROMPT, 1)[0]
        source = head_of(engine)
        if draft:
            assert len(source.draft(np.array(PROMPT, np.int32), first, 3)) == (heads if heads > 1 else 3)
        # The target's row of the last token is known, that of `first` is not: the head may hold both.
        source.feed([*PROMPT, first])
        assert source.held == len(PROMPT) + 1
        states.append(head_state(engine))
    assert states[0] == states[1]


@models
def test_the_head_only_holds_what_was_confirmed(
    arch: str, heads: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    """Every batch starts where the confirmed tokens with the target's rows end, or goes on from the draft."""
    path = tiny_mtp(arch, heads)
    expected = ids(open_engine(path), PROMPT)
    engine = open_engine(path, draft=spec())
    force(engine, ForcedHead(head_of(engine), len(PROMPT), expected, 2))
    batches = record(engine)
    ids(engine, PROMPT)
    whole, fed = [*PROMPT, *expected], dict[int, np.ndarray[Any, Any]]()
    for b in batches:
        if not len(b.logits):
            assert b.position == b.held, "nothing is fed twice, nothing left out"
            assert b.tokens == whole[b.position : b.position + len(b.tokens)]
            for i, row in enumerate(b.rows):
                # All heads are given the same row for a position.
                assert np.array_equal(fed.setdefault(b.position + i, row), row)
    if heads > 1:
        assert {b.head for b in batches} == set(range(heads))


@models
def test_a_kept_prefix_drafts_as_a_fresh_engine(
    arch: str, heads: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    path = tiny_mtp(arch, heads)
    first = prompt_ids(60, 3)

    def drafts(engine: bmoe.Engine, prompt: Sequence[int]) -> tuple[list[int], list[Batch]]:
        batches = record(engine)
        tokens = ids(engine, prompt, 20)
        engine.sequence.head.head.run = type(engine.sequence.head.head).run.__get__(engine.sequence.head.head)  # type: ignore[union-attr]
        return tokens, batches

    warm = open_engine(path, draft=spec())
    ids(warm, first)
    for prompt in (
        [*first, *warm.sequence.ids[60:80], 65, 66],  # goes back into what was generated
        first[:30] + prompt_ids(30, 9),  # leaves the prompt in its middle
        first[:30] + prompt_ids(30, 9)[:10],  # a part of what is there
        [7, 8, 9],  # nothing in common
    ):
        with_prefix = drafts(warm, prompt)
        # And right behind what is there.
        again = [*warm.sequence.ids, with_prefix[0][-1], 70, 71]
        same_drafts(with_prefix, drafts(open_engine(path, draft=spec()), prompt))
        same_drafts(drafts(warm, again), drafts(open_engine(path, draft=spec()), again))


@models
def test_a_head_that_is_not_asked_leaves_tokens_out_and_can_come_back(
    arch: str, heads: int, tiny_mtp: TinyMtp, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never(draft_width.Always):
        def ready(self) -> bool:
            return False

        def choose(self, draft: Sequence[int], source: str, matched: int = 0) -> int:
            return 0

    monkeypatch.setattr(mtp, "WIDTH", 4)
    path = tiny_mtp(arch, heads)
    engine = open_engine(path, draft=spec())
    source, always = head_of(engine), engine.drafting.width
    assert source.limit == engine.sequence.context.n_batch
    source.limit = 8
    engine.drafting.width = Never()
    assert ids(engine, PROMPT, 30) == ids(open_engine(path), PROMPT, 30)
    left = source.left_out
    assert len(PROMPT) < left == source.held <= len(PROMPT) + 30
    assert source.behind <= 8
    assert (source.stats["fed"], source.stats["left_out"]) == (len(PROMPT), left - len(PROMPT))
    engine.drafting.width = always
    whole = len(engine.sequence.ids)
    for keep in (whole, whole - 2, len(PROMPT)):  # the last one: before the gap
        prompt = [*engine.sequence.ids[:keep], 65, 66]
        generation = engine.generate(prompt, max_tokens=12, stop_at_end=False)
        assert [t.id for t in generation] == ids(open_engine(path), prompt, 12)
        if (
            keep == whole or not engine.sequence.context.recurrent
        ):  # a recurrent state goes back no further than its copies
            assert keep - 2 <= generation.result.reused_tokens <= keep
        assert generation.result.spec.drafted > 0
        assert source.left_out > 0


# ---- the edges --------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("at", [0, 1, 2, 7])
def test_cancelled_inside_a_graph_of_the_head(
    arch: str, heads: int, at: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    path = tiny_mtp(arch, heads)
    expected = ids(open_engine(path), PROMPT)
    engine = open_engine(path, "few", draft=spec())
    context, left = head_of(engine).head, at
    run = context.run

    def stopping(*args: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            engine.streamer.request_abort()
            engine.sequence.graphs._cancelled.set()
        return run(*args)

    context.run = stopping  # type: ignore[method-assign]
    generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
    got = [t.id for t in generation]
    assert generation.result.stop == "cancelled"
    assert got == expected[: len(got)]
    assert len(got) < N
    split = generation.result.flash_split
    assert split.total == generation.result.prefill.bytes + generation.result.decode.bytes
    context.run = run  # type: ignore[method-assign]
    batches = record(engine)
    assert ids(engine, PROMPT) == expected
    # It goes on as if nothing had happened: every draft is that of a fresh engine.
    other = open_engine(path, "few", draft=spec())
    fresh = record(other)
    same_drafts((expected, batches), (ids(other, PROMPT), fresh))


def test_cancelled_inside_a_verify_batch(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    for arch in ("glm4moe", "qwen35moe"):
        path = tiny_mtp(arch)
        expected = ids(open_engine(path), PROMPT)
        engine = open_engine(path, "few", draft=spec())
        force(engine, ForcedHead(head_of(engine), len(PROMPT), expected, 3))
        decode_each, calls = engine.sequence.context.decode_each, 0

        def stopping(*args: Any, engine: Any = engine, decode_each: Any = decode_each) -> int:
            nonlocal calls
            calls += 1
            if calls == 4:
                engine.cancel()
            return int(decode_each(*args))

        engine.sequence.context.decode_each = stopping  # type: ignore[method-assign]
        generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
        got = [t.id for t in generation]
        assert generation.result.stop == "cancelled"
        assert got == expected[: len(got)]
        assert ids(engine, PROMPT) == expected


@pytest.mark.parametrize("heads", [1, 2])
def test_a_failed_read_of_the_head(heads: int, tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    path = tiny_mtp("hy_v3", heads)
    expected = ids(open_engine(path), PROMPT)
    engine = open_engine(path, "few", draft=spec())
    context = head_of(engine).head
    run, failed = context.run, False

    def failing(head: int, tokens: Any, rows: Any, position: int, outputs: bool) -> int:
        nonlocal failed
        if outputs and position > len(PROMPT) + 4 and not failed:
            failed = True
            engine.lanes.sabotage(3)
            engine.cache.clear()  # type: ignore[union-attr]
        return run(head, tokens, rows, position, outputs)

    context.run = failing  # type: ignore[method-assign]
    got: list[int] = []
    with pytest.raises(bmoe.ReadError, match="Input/output error"):  # noqa: PT012
        for token in engine.generate(PROMPT, max_tokens=N, stop_at_end=False):
            got.append(token.id)
    assert failed
    assert got == expected[: len(got)]
    engine.lanes.sabotage(0)
    assert ids(engine, PROMPT) == expected


@models
@pytest.mark.parametrize("n", [1, 2, 5, 6, 9])
def test_the_limit_is_reached_inside_a_group(
    arch: str, heads: int, n: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    path = tiny_mtp(arch, heads)
    expected = ids(open_engine(path), PROMPT)
    engine = open_engine(path, draft=spec())
    force(engine, ForcedHead(head_of(engine), len(PROMPT), expected))
    assert ids(engine, PROMPT, n) == expected[:n]
    assert len(engine.sequence.ids) == len(PROMPT) + n - 1
    assert ids(engine, PROMPT) == expected


@models
def test_the_context_fills_inside_a_group(arch: str, heads: int, tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    path, prompt = tiny_mtp(arch, heads), prompt_ids(230, 3)
    plain = open_engine(path)
    expected = ids(plain, prompt, 100)
    assert len(expected) == plain.sequence.context.n_ctx - len(prompt) + 1
    engine = open_engine(path, draft=spec())
    force(engine, ForcedHead(head_of(engine), len(prompt), expected))
    assert ids(engine, prompt, 100) == expected


def test_an_end_token_inside_a_group(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    for arch in ("glm4moe", "qwen35moe"):
        path = tiny_mtp(arch)
        engine = open_engine(path, draft=spec())
        source = head_of(engine)
        end = next(t for t in range(engine.sequence.context.n_vocab) if bmoe.llama.is_end(engine.model, t))
        script = [*range(60, 67), end, *range(70, 100)]
        force(engine, ForcedHead(source, len(PROMPT), script))
        generation = engine.generate(PROMPT, max_tokens=len(script), script=script)
        assert [t.id for t in generation] == script[:8]
        assert generation.result.stop == "end"
        expected = ids(open_engine(path), PROMPT, 10)
        assert ids(engine, PROMPT, 10) == expected


def test_a_memory_that_refuses_keeps_the_heads_state(
    tiny_mtp: TinyMtp, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the target has to be decoded again, the head has not; the bytes of it are the recovery's."""
    path = tiny_mtp("glm4moe")
    expected = ids(open_engine(path), PROMPT)
    engine = open_engine(path, "few", draft=spec())
    force(engine, ForcedHead(head_of(engine), len(PROMPT), expected, 2))
    monkeypatch.setattr(engine.sequence.context, "truncate", lambda n: False)
    batches = record(engine)
    generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
    assert [t.id for t in generation] == expected
    r = generation.result
    assert r.spec.recoveries > 0
    assert r.flash_split.bytes["recovery"] == r.spec.recovery_bytes
    assert r.flash_split.total == r.prefill.bytes + r.decode.bytes
    assert sum(len(b.tokens) for b in batches if not len(b.logits)) <= len(PROMPT) + N


def test_a_recurrent_model_drafts_no_further_than_its_snapshots(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    path = tiny_mtp("qwen35moe")
    expected = ids(open_engine(path), PROMPT)
    for snapshots in (0, 2, 5):
        engine = open_engine(path, draft=spec(8), rs_snapshots=snapshots)
        assert engine.sequence.context.recurrent
        assert (engine.sequence.head is None) == (snapshots == 0)
        if engine.sequence.head is not None:
            force(engine, ForcedHead(engine.sequence.head, len(PROMPT), expected))
        generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
        assert [t.id for t in generation] == expected
        assert generation.result.spec.drafted <= snapshots * generation.result.spec.drafted_steps
        assert (generation.result.spec.drafted > 0) == (snapshots > 0)


def test_drafting_can_be_limited_to_nothing(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    path = tiny_mtp("glm4moe")
    engine = open_engine(path, draft=spec(n_max=0))
    assert engine.sequence.head is None
    assert ids(engine, PROMPT) == ids(open_engine(path), PROMPT)
