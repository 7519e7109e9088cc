"""`bmoe.Engine` as a library: several generations, several engines, and closing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import held
import pytest
from conftest import OpenEngine, Resident, Tiny, in_a_process
from generating import ids

import bmoe
from bench.models.tiny import prompt_ids
from bench.reference import Resident as ResidentModel
from bench.reference import Run, differences, drive

A, B = prompt_ids(64, seed=1), prompt_ids(30, seed=2)
N = 8


# ---- several generations on one engine ------------------------------------------------------------


def test_a_context_manager_with_several_generations(tiny: Tiny, resident: Resident) -> None:
    path = tiny("qwen3moe", "Q8_0")
    expected = resident(path, [A, B], N, threads=1)
    with bmoe.Engine.open(path, cache_mb=0, threads=1, ctx=256) as engine:
        for prompt, run in ((A, expected[0]), (B, expected[1]), (A, expected[0])):
            generation = engine.generate(prompt, max_tokens=N, stop_at_end=False)
            tokens = list(generation)
            assert [t.id for t in tokens] == generation.result.token_ids == run.tokens
            assert [t.index for t in tokens] == list(range(N))
            assert generation.result.stop == "length"
            assert generation.result.prompt_tokens == len(prompt)
            assert not generation.running
            assert list(generation) == []


def test_text_in_text_out(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"))
    prompt = "The quick brown fox"
    generation = engine.generate(prompt, max_tokens=40)
    pieces = [t.text for t in generation]
    result = generation.result
    assert result.prompt_tokens == len(engine.tokenize(prompt))
    assert result.text.startswith("".join(pieces))
    # What is missing at the end is an unfinished character.
    assert len(result.text) - len("".join(pieces)) <= 1
    ids(engine, A)
    assert result.token_ids == ids(engine, engine.tokenize(prompt), 40)


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe", "gemma4", "gpt-oss", "deepseek2"])
def test_a_shared_prefix_is_not_computed_again(
    arch: str, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    """A prompt that parts from the sequence in the middle gives what a fresh engine gives, bit for bit.

    A recurrent state cannot go back: then nothing is reused.
    """
    path = tiny(arch, "Q8_0")
    # The common part ends with a batch, so that both compute the rest in the same batches.
    other = [*A[:48], *B]
    expected = resident(path, [A, other], N, threads=1, ubatch=16)
    engine = open_engine(path, "few", ubatch=16)
    assert not differences(drive(engine, A, N)[0], expected[0])
    for prompt, run in ((other, expected[1]), (A, expected[0]), (other, expected[1])):
        again, result = drive(engine, prompt, N)
        assert not differences(again, run)
        assert result.reused_tokens == (0 if arch == "qwen35moe" else 48)
        assert result.prefill_tokens == len(prompt) - result.reused_tokens


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe", "gemma4", "gpt-oss", "deepseek2"])
def test_a_conversation_goes_on(arch: str, tiny: Tiny, open_engine: OpenEngine) -> None:
    """A prompt that extends the sequence is computed from its end on, whatever the memory of the model."""
    path = tiny(arch, "Q8_0")
    engine = open_engine(path, "few", ubatch=16)
    with ResidentModel(path, ubatch=16) as model:
        first = model.generate(A, N)
        run, _ = drive(engine, A, N)
        assert not differences(run, first)
        longer = [*A, *run.tokens, *B]
        # The last token of the answer was chosen, not yet computed.
        second = model.go_on(longer[len(A) + N - 1 :], N)
    run, result = drive(engine, longer, N)
    assert result.reused_tokens == len(A) + N - 1
    assert result.prefill_tokens == len(B) + 1
    assert not differences(run, second)


def test_the_same_prompt_again_computes_its_last_token_only(tiny: Tiny, open_engine: OpenEngine) -> None:
    """Which rounds otherwise than the whole prompt in one batch: stock llama.cpp does the same."""
    path = tiny("qwen3moe", "Q8_0")
    engine = open_engine(path, ubatch=16)
    drive(engine, A, N)
    again, result = drive(engine, A, N)
    assert result.reused_tokens == len(A) - 1
    with ResidentModel(path, ubatch=16) as model:
        model.generate(A, N)
        model.truncate(len(A) - 1)
        assert not differences(again, model.go_on(A[-1:], N))


def test_generations_end_where_the_context_does(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"))
    n_ctx = engine.sequence.context.n_ctx
    prompt = prompt_ids(n_ctx - 5, seed=3)
    run, result = drive(engine, prompt, 100)
    assert (result.stop, len(run.tokens)) == ("length", 6)
    assert len(ids(engine, prompt_ids(n_ctx, seed=4), 10)) == 1
    with pytest.raises(bmoe.UsageError, match=f"{n_ctx + 1} tokens, the context holds {n_ctx}"):
        engine.generate(prompt_ids(n_ctx + 1, seed=4))
    assert ids(engine, prompt, 6) == run.tokens


@pytest.mark.parametrize(("prompt", "settings"), [([], {}), ([-1], {}), ([1 << 20], {}), ([1], {"max_tokens": -1})])
def test_a_refused_generation_changes_nothing(
    prompt: list[int], settings: dict[str, int], tiny: Tiny, open_engine: OpenEngine
) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"))
    ids(engine, A)
    before = ids(engine, A)
    with pytest.raises(bmoe.UsageError):
        engine.generate(prompt, **settings)  # type: ignore[arg-type]
    assert ids(engine, A) == before
    assert list(engine.generate(A, max_tokens=0)) == []


# ---- sampling -------------------------------------------------------------------------------------


def test_a_seed_decides_what_is_sampled(tiny: Tiny, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "Q8_0")

    def sample(engine: bmoe.Engine, seed: int) -> list[int]:
        sampling = bmoe.Sampling(temp=1.5, seed=seed)
        return [t.id for t in engine.generate(B, max_tokens=24, sampling=sampling, stop_at_end=False)]

    one, two = open_engine(path, "few", overlap=True), open_engine(path, "off")
    first = sample(one, 1)
    # From the same batches: another prompt has taken the sequence in between.
    ids(one, A)
    assert sample(one, 1) == first == sample(two, 1)
    ids(one, A)
    assert sample(one, 2) != first
    ids(one, A)
    ids(two, A)
    assert ids(one, B, 24) == ids(two, B, 24) != first


# ---- two engines in one process -------------------------------------------------------------------


def test_two_engines_interleaved_do_as_they_do_alone(tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    paths = tiny("qwen3moe", "Q8_0"), tiny("gemma4", "Q4_K")
    expected = [resident(path, [A], 16, threads=2, ubatch=16)[0] for path in paths]
    engines = [open_engine(path, "few", overlap=True, threads=2, ubatch=16) for path in paths]
    generations = [e.generate(A, max_tokens=16, stop_at_end=False) for e in engines]
    runs = [Run(), Run()]
    for _ in range(16):
        for generation, engine, run in zip(generations, engines, runs, strict=True):
            run.tokens.append(next(generation).id)
            run.logits.append(engine.sequence.context.logits().copy())
    for generation, run, reference in zip(generations, runs, expected, strict=True):
        assert list(generation) == []
        assert not differences(run, reference)
    # Closing one leaves the other alone.
    engines[0].close()
    drive(engines[1], B, 4)
    assert not differences(drive(engines[1], A, 16)[0], expected[1])


def test_two_engines_in_two_threads(tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> None:
    """On the same file, even."""
    path = tiny("qwen3moe", "Q8_0")
    expected = resident(path, [A, B], 16, threads=1, ubatch=16)
    engines = [open_engine(path, "few", overlap=True, ubatch=16) for _ in expected]
    runs: dict[int, Run] = {}

    def work(i: int) -> None:
        runs[i] = drive(engines[i], (A, B)[i], 16)[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i, reference in enumerate(expected):
        assert not differences(runs[i], reference)


# ---- closing --------------------------------------------------------------------------------------


def test_closing_gives_everything_back(tiny: Tiny, open_engine: OpenEngine) -> None:
    path = tiny("qwen3moe", "Q8_0", shards=3)
    with open_engine(path) as warm:
        ids(warm, A)
    threads, fds = held.threads(), held.files()
    engine = open_engine(path, io_threads=5)
    ids(engine, A)
    assert held.threads() >= threads + 5
    engine.close()
    assert held.threads() == threads
    assert held.files() == fds
    assert path.parent.name not in Path("/proc/self/maps").read_text()
    engine.close()


def test_a_refused_opening_gives_everything_back(tiny: Tiny) -> None:
    path = tiny("qwen3moe", "Q8_0")
    threads, fds = held.threads(), held.files()
    with pytest.raises(bmoe.UsageError):
        bmoe.Engine.open(path, n_expert_used=9, threads=1)
    with pytest.raises(bmoe.MemoryBudgetError):
        bmoe.Engine.open(path, cache_mb=1, threads=1)
    assert held.threads() == threads
    assert held.files() == fds
    assert path.name not in Path("/proc/self/maps").read_text()


def test_closing_inside_a_generation(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", overlap=True)
    generation = engine.generate(A, max_tokens=50, stop_at_end=False)
    for token in generation:
        if token.index == 3:
            engine.close()
    assert len(generation.result.token_ids) == 4
    engine.close()


def test_closing_from_another_thread_ends_what_runs(tiny: Tiny, open_engine: OpenEngine) -> None:
    engine = open_engine(tiny("qwen3moe", "Q8_0"), "few", overlap=True, ctx=2048)
    generation = engine.generate(A, max_tokens=100_000, stop_at_end=False)
    next(generation)
    thread = threading.Thread(target=lambda: list(generation))
    thread.start()
    time.sleep(0.02)
    engine.close()
    thread.join(30)
    assert not thread.is_alive()
    assert generation.result.stop == "cancelled"


def test_a_closed_engine_says_so(tiny: Tiny) -> None:
    code = """
engine = bmoe.Engine.open(sys.argv[1], cache_mb=0, threads=1)
engine.close()
for call in (lambda: engine.generate([1, 2, 3]), lambda: engine.generate("text"), lambda: engine.tokenize("text")):
    try:
        call()
    except bmoe.BmoeError as e:
        print(e)
engine.cancel()
print(engine.counters().bytes, engine.resident_bytes)
"""
    *messages, last = in_a_process(code, tiny("qwen3moe", "Q8_0"))
    assert len(messages) == 3
    assert all("closed" in message for message in messages)
    assert last == "0 0"


def test_closing_from_inside_a_step_does_not_hang(tiny: Tiny) -> None:
    """A progress callback or a signal handler may try; the thread that runs the step cannot wait for its end."""
    code = """
def close(*_):
    try:
        engine.close()
    except bmoe.BmoeError as e:
        print(e)
engine = bmoe.Engine.open(sys.argv[1], cache_mb=0, threads=1)
engine.set_progress(close)
print(list(engine.generate([1, 2, 3])))
engine.close()
print("closed")
"""
    assert in_a_process(code, tiny("qwen3moe", "Q8_0"))[-1] == "closed"
