"""Drafting with a model's own head, on real (tiny) models: output, state, streams and accounts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import OpenEngine
from gguf_edit import Gguf
from reference import prompt_ids
from tiny_mtp import Batch, ForcedHead, ResidentHead, force, head_state, record, write_tiny_mtp

import bmoe
from bmoe import mtp
from bmoe.drafting import DrafterStack, DraftSpec, ModConfig

N = 40
PROMPT = prompt_ids(24, 3)
MODELS = [("glm4moe", 1), ("deepseek2", 1), ("qwen35moe", 1), ("hy_v3", 2), ("hy_v3", 3)]
models = pytest.mark.parametrize(("arch", "heads"), MODELS, ids=[f"{arch}-{heads}" for arch, heads in MODELS])
TinyMtp = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny_mtp(tmp_path_factory: pytest.TempPathFactory) -> TinyMtp:
    base, written = tmp_path_factory.mktemp("mtp"), dict[str, Path]()

    def write(arch: str, heads: int = 1, quant: str = "F32") -> Path:
        key = f"{arch}-{heads}-{quant}"
        if key not in written:
            written[key] = write_tiny_mtp(base / f"{key}.gguf", arch, quant, heads)
        return written[key]

    return write


def spec(draft: int = 3, **settings: Any) -> DraftSpec:
    return DraftSpec(types=("mtp",), draft=draft, **settings)


def ids(engine: bmoe.Engine, prompt: Sequence[int], n: int = N, **settings: Any) -> list[int]:
    return [t.id for t in engine.generate(prompt, max_tokens=n, stop_at_end=False, **settings)]


def head_of(engine: bmoe.Engine) -> mtp.MtpSource:
    assert engine.head is not None
    return engine.head


def close_state(a: bytes, b: bytes) -> None:
    """Two states of a head's context: the same positions; keys and values but for the rounding of wider batches."""
    assert len(a) == len(b)
    x, y = np.frombuffer(a[: len(a) & ~1], np.float16), np.frombuffer(b[: len(b) & ~1], np.float16)
    np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), atol=0.02, rtol=0.02)
    assert (x.view(np.uint16) == y.view(np.uint16)).mean() > 0.8


def same_drafts(a: tuple[list[int], list[Batch]], b: tuple[list[int], list[Batch]]) -> None:
    """Two runs wrote the same, and their heads, asked at the same places, gave the same first token.

    Logits but for the rounding of batches of other widths; a wrong row or key moves them by more than 1.
    """
    assert a[0] == b[0]
    first = [
        {
            x.position: x
            for x in batches
            if len(x.logits) and len(x.tokens) == 1 and x.head == 0 and x.position == x.held
        }
        for _, batches in (a, b)
    ]
    assert first[0].keys() == first[1].keys()
    assert len(first[0]) >= 5
    for position, x in first[0].items():
        assert x.tokens == first[1][position].tokens
        np.testing.assert_allclose(x.logits, first[1][position].logits, atol=0.1)


# ---- output -----------------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("draft", [1, 3])
def test_a_head_that_is_right_saves_the_full_width(
    arch: str, heads: int, draft: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    path = tiny_mtp(arch, heads)
    expected = ids(open_engine(path, "few", ubatch=32), PROMPT)
    engine = open_engine(path, "few", ubatch=32, draft=spec(draft))
    force(engine, ForcedHead(head_of(engine), len(PROMPT), expected))
    generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
    assert [t.id for t in generation] == expected
    done = generation.result.spec
    assert done.acceptance == 1.0
    width = min(draft, heads) if heads > 1 else draft
    assert done.decodes == -(-(N - 1) // (width + 1))
    assert head_of(engine).stats["accepted_whole"] == head_of(engine).stats["drafted_steps"]


@models
@pytest.mark.parametrize("wrong", [1, 2, 5])
def test_a_head_that_is_wrong_costs_time_alone(
    arch: str, heads: int, wrong: int, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    """The output, and the logits after it, are those of plain decoding; every byte has its cause."""
    path = tiny_mtp(arch, heads)
    plain = open_engine(path, "few", ubatch=32)
    expected = ids(plain, PROMPT)
    logits = plain.context.logits().copy()
    engine = open_engine(path, "few", ubatch=32, draft=spec())
    force(engine, ForcedHead(head_of(engine), len(PROMPT), expected, wrong))
    generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
    assert [t.id for t in generation] == expected
    r = generation.result
    np.testing.assert_allclose(engine.context.logits(), logits, atol=0.03, rtol=0)
    assert r.spec.recoveries == 0
    if wrong == 1:
        assert r.spec.accepted == 0
        assert r.spec.decodes == N - 1
    else:
        assert r.spec.drafted > r.spec.accepted > 0
    assert r.flash_split.bytes["draft_source"] > 0
    assert r.flash_split.total == r.prefill.bytes + r.decode.bytes
    parts = ("base", "accepted", "rejected", "draft_source")
    assert sum(r.flash_split.bytes[c] for c in parts) == r.decode.bytes


def test_the_demo_models_head_is_right_most_of_the_time(open_engine: OpenEngine) -> None:
    """It agrees with its target at 77 % of positions; without hidden rows it would at 19 %."""
    path, prompt = bmoe.demo.model_path(), "class Reader:\n    def __init__(self, path):\n"
    plain = open_engine(path, ctx=512)
    script = plain.tokenize(Path(bmoe.__file__).with_name("chat.py").read_text())[:200]
    engine = open_engine(path, ctx=512, draft=spec(1))
    generation = engine.generate(prompt, max_tokens=len(script), script=script, stop_at_end=False)
    assert [t.id for t in generation] == script
    assert (generation.result.spec.acceptance or 0) > 0.25  # of a text that the target itself would not write
    generation = engine.generate(prompt, max_tokens=150, stop_at_end=False)
    assert [t.id for t in generation] == ids(plain, plain.tokenize(prompt), 150)
    assert (generation.result.spec.acceptance or 0) > 0.6


def test_unsure_heads_stop(open_engine: OpenEngine) -> None:
    """A higher --mtp-p-min drafts less, and what it drafts is accepted more often."""
    path, prompt = bmoe.demo.model_path(), "class Reader:\n    def __init__(self, path):\n"
    drafted, acceptance = [], []
    for p_min in (0.0, 0.5, 0.95):
        engine = open_engine(path, ctx=512, draft=spec(4, mtp_p_min=p_min))
        generation = engine.generate(prompt, max_tokens=100, stop_at_end=False)
        for _ in generation:
            pass
        drafted.append(generation.result.spec.drafted)
        acceptance.append(generation.result.spec.acceptance or 0)
    assert drafted == sorted(drafted, reverse=True)
    assert acceptance == sorted(acceptance)
    assert drafted[2] < drafted[0]


# ---- the head's stream ------------------------------------------------------------------------------


@models
@pytest.mark.parametrize("cache", ["off", "few"])
def test_a_streamed_head_is_the_resident_one(
    arch: str, heads: int, cache: str, tiny_mtp: TinyMtp, open_engine: OpenEngine
) -> None:
    """Bit for bit, although the experts of what only feeds it are neither read nor computed."""
    path = tiny_mtp(arch, heads, "Q8_0")
    engine = open_engine(path, cache, ubatch=16, draft=spec(), overlap=True)
    batches = record(engine)
    ids(engine, PROMPT)
    resident = ResidentHead(path, heads)
    n = 0
    for batch in batches:
        got = resident.replay(batch)
        assert got.tobytes() == batch.logits.tobytes()
        n += len(got)
    resident.close()
    assert n > N
    assert any(len(b.tokens) == 16 and not len(b.logits) for b in batches), "the prompt was fed"


def test_feeding_reads_nothing(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny_mtp("glm4moe"), "few", ubatch=16, draft=spec())
    generation = engine.generate(PROMPT, max_tokens=1)
    for _ in generation:
        pass
    assert head_of(engine).stats["fed"] == len(PROMPT)
    assert generation.result.flash_split.bytes["draft_source"] == 0
    assert generation.result.prefill.bytes == generation.result.flash_split.bytes["prefill"] > 0
    assert not engine.streamer.skip


def test_the_heads_experts_have_slots_of_their_own(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    path = tiny_mtp("glm4moe")
    plain, engine = open_engine(path), open_engine(path, draft=spec())
    assert len(engine.layers) == len(plain.layers) + 1
    ids(engine, PROMPT)
    assert engine.cache is not None
    assert engine.cache.resident(len(engine.layers) - 1), "experts of the head are cached"


def test_what_the_head_takes_is_counted(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    """Of the memory that `--cache-mb auto` divides: the head's context and the target's hidden rows."""
    path = tiny_mtp("glm4moe")
    plain, engine = open_engine(path), open_engine(path, draft=spec())
    head, rows = engine.head.head, engine.target_rows  # type: ignore[union-attr]
    assert engine.buffers.kv == plain.buffers.kv + head.buffers.kv > plain.buffers.kv  # type: ignore[attr-defined]
    assert engine.buffers.compute == engine.context.buffers.compute + head.buffers.compute + rows.nbytes  # type: ignore[attr-defined]
    assert engine.decision is not None
    assert (engine.decision.sizes.kv, engine.decision.sizes.compute) == (engine.buffers.kv, engine.buffers.compute)
    assert head.n_batch == min(mtp.WIDTH, engine.context.n_batch)


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
            engine.drafter = DrafterStack()
        else:
            force(engine, ForcedHead(head_of(engine), len(PROMPT), expected, wrong))
        assert ids(engine, PROMPT) == expected
        source = head_of(engine)
        source.feed(engine.cached_ids)
        assert source.held == len(engine.cached_ids) == len(PROMPT) + N - 1
        assert source.pending.start == source.held - 1
        states.append(head_state(engine))
        rows.append(source.pending.rows)
    for state, row in zip(states[1:], rows[1:], strict=True):
        close_state(state, states[0])
        np.testing.assert_allclose(row, rows[0], atol=0.01)
    with pytest.raises(AssertionError):
        close_state(states[0][:-64] + bytes(64), states[0])


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
        engine.head.head.run = type(engine.head.head).run.__get__(engine.head.head)  # type: ignore[union-attr]
        return tokens, batches

    warm = open_engine(path, draft=spec())
    ids(warm, first)
    for prompt in (
        [*first, *warm.cached_ids[60:80], 65, 66],  # goes back into what was generated
        first[:30] + prompt_ids(30, 9),  # leaves the prompt in its middle
        first[:30] + prompt_ids(30, 9)[:10],  # a part of what is there
        [7, 8, 9],  # nothing in common
    ):
        with_prefix = drafts(warm, prompt)
        # And right behind what is there.
        again = [*warm.cached_ids, with_prefix[0][-1], 70, 71]
        same_drafts(with_prefix, drafts(open_engine(path, draft=spec()), prompt))
        same_drafts(drafts(warm, again), drafts(open_engine(path, draft=spec()), again))


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
            engine._cancelled.set()
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
        decode_each, calls = engine.context.decode_each, 0

        def stopping(*args: Any, engine: Any = engine, decode_each: Any = decode_each) -> int:
            nonlocal calls
            calls += 1
            if calls == 4:
                engine.cancel()
            return int(decode_each(*args))

        engine.context.decode_each = stopping  # type: ignore[method-assign]
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
    assert len(engine.cached_ids) == len(PROMPT) + n - 1
    assert ids(engine, PROMPT) == expected


@models
def test_the_context_fills_inside_a_group(arch: str, heads: int, tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    path, prompt = tiny_mtp(arch, heads), prompt_ids(230, 3)
    plain = open_engine(path)
    expected = ids(plain, prompt, 100)
    assert len(expected) == plain.context.n_ctx - len(prompt) + 1
    engine = open_engine(path, draft=spec())
    force(engine, ForcedHead(head_of(engine), len(prompt), expected))
    assert ids(engine, prompt, 100) == expected


def test_an_end_token_inside_a_group(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    for arch in ("glm4moe", "qwen35moe"):
        path = tiny_mtp(arch)
        engine = open_engine(path, draft=spec())
        source = head_of(engine)
        end = next(t for t in range(engine.context.n_vocab) if bmoe.llama.is_end(engine.model, t))
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
    monkeypatch.setattr(engine.context, "truncate", lambda n: False)
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
        assert engine.context.recurrent
        assert (engine.head is None) == (snapshots == 0)
        if engine.head is not None:
            force(engine, ForcedHead(engine.head, len(PROMPT), expected))
        generation = engine.generate(PROMPT, max_tokens=N, stop_at_end=False)
        assert [t.id for t in generation] == expected
        assert generation.result.spec.drafted <= snapshots * generation.result.spec.drafted_steps
        assert (generation.result.spec.drafted > 0) == (snapshots > 0)


def test_drafting_can_be_limited_to_nothing(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    path = tiny_mtp("glm4moe")
    engine = open_engine(path, draft=spec(n_max=0))
    assert engine.head is None
    assert ids(engine, PROMPT) == ids(open_engine(path), PROMPT)


# ---- with other sources -----------------------------------------------------------------------------

TEXT = DraftSpec(types=("ngram-mod", "mtp"), ngram_mod=ModConfig(n_match=3, n_min=1, n_max=16))


def test_sources_of_text_come_first_and_the_head_keeps_up(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    """However long others draft, few rows wait, and the head then drafts from the right state."""
    path = tiny_mtp("glm4moe")
    phrase = prompt_ids(30, 5)
    prompt, script = phrase * 2, [*phrase * 4, *prompt_ids(30, 6)]
    engine = open_engine(path, "few", draft=TEXT, ctx=512)
    source = head_of(engine)
    force_at = ForcedHead(source, len(prompt), script)
    engine.head = force_at
    engine.drafter.sources = (engine.drafter.sources[0], force_at)
    most, take = 0, force_at.take

    def watched(position: int, rows: Any) -> None:
        nonlocal most
        take(position, rows)
        most = max(most, force_at.behind)

    force_at.take = watched  # type: ignore[method-assign]
    generation = engine.generate(prompt, max_tokens=len(script), script=script, stop_at_end=False)
    assert [t.id for t in generation] == script
    stats = engine.drafter.stats
    assert stats["ngram-mod"]["accepted"] > 60
    assert stats["mtp"]["accepted"] > 10
    assert most <= len(prompt) + 1 or most <= mtp.WIDTH + 17
    r = generation.result
    assert r.flash_split.total == r.prefill.bytes + r.decode.bytes
    force_at.feed(engine.cached_ids)
    other = open_engine(path, "few", draft=spec(), ctx=512)
    other.drafter = DrafterStack()
    assert ids(other, prompt, len(script), script=script) == script
    head_of(other).feed(other.cached_ids)
    close_state(head_state(engine), head_state(other))


def test_text_goes_on_from_what_the_head_drafted(tiny_mtp: TinyMtp, open_engine: OpenEngine) -> None:
    """--spec-extend: three tokens of the head make a match of three, from which ngram-mod drafts on; one batch."""
    path = tiny_mtp("glm4moe")
    phrase = prompt_ids(40, 5)
    prompt = [*phrase, 64]
    script = [*phrase, *prompt_ids(20, 8)]
    extended = DraftSpec(types=TEXT.types, ngram_mod=TEXT.ngram_mod, extend=True)
    assert extended.longest() == 19
    decodes = []
    for chosen in (TEXT, extended):
        engine = open_engine(path, "few", draft=chosen, ctx=512)
        head = ForcedHead(head_of(engine), len(prompt), script)
        engine.head = head
        engine.drafter.sources = (engine.drafter.sources[0], head)
        generation = engine.generate(prompt, max_tokens=len(script), script=script, stop_at_end=False)
        assert [t.id for t in generation] == script
        decodes.append(generation.result.spec.decodes)
        assert engine.drafter.stats["ngram-mod"]["accepted"] > 20
        assert generation.result.flash_split.total == generation.result.prefill.bytes + generation.result.decode.bytes
    assert decodes[1] < decodes[0], "an extended draft is verified together with the head's"


# ---- refusals ---------------------------------------------------------------------------------------


def test_a_model_without_a_head_is_refused(tmp_path: Path, tiny: Any, tiny_mtp: TinyMtp) -> None:
    headless = Gguf(tiny_mtp("glm4moe"))
    for tensor in headless.tensors:
        tensor.name = tensor.name.replace(b"nextn", b"other")
    two = Gguf(tiny_mtp("hy_v3", 2)).set("general.architecture", "glm4moe")
    two.kv |= {key.replace("hy_v3", "glm4moe"): value for key, value in two.kv.items()}
    foreign = Gguf(tiny_mtp("hy_v3", 2)).set("general.architecture", "qwen3moe")
    foreign.kv |= {key.replace("hy_v3", "qwen3moe"): value for key, value in foreign.kv.items()}
    cases = {
        tiny("qwen3moe"): "has no multi-token-prediction head",
        tiny("llama"): "has no multi-token-prediction head",
        headless.write(tmp_path / "headless.gguf"): "has no multi-token-prediction head",
        two.write(tmp_path / "two.gguf"): "llama.cpp cannot draft with 2 heads of glm4moe",
        foreign.write(tmp_path / "foreign.gguf"): "llama.cpp cannot draft with the head of qwen3moe",
    }
    for path, message in cases.items():
        with pytest.raises(bmoe.UsageError, match=message) as caught:
            bmoe.Engine.open(path, draft=spec())
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
