"""Stopping a generation: by cancel, by an interrupt, by leaving the loop; and what the next one finds."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest
from conftest import OpenEngine, Resident, Tiny
from generating import ids

import bmoe
from bench.models.tiny import prompt_ids
from bench.reference import Resident as ResidentModel
from bench.reference import differences, drive

A, B = prompt_ids(64, seed=1), prompt_ids(30, seed=2)
N = 8
Stoppable = tuple[bmoe.Engine, Callable[[], list[str]]]
"""An engine, and what is wrong with its next generation."""


@pytest.fixture(params=["qwen3moe", "qwen35moe", "llama"])
def stoppable(request: pytest.FixtureRequest, tiny: Tiny, resident: Resident, open_engine: OpenEngine) -> Stoppable:
    path = tiny(request.param, "Q8_0")
    engine = open_engine(path, "few", overlap=True, ubatch=16, ctx=2048)
    (expected,) = resident(path, [B], N, threads=1, ubatch=16, ctx=2048)
    return engine, lambda: differences(drive(engine, B, N)[0], expected)


def test_cancel_from_another_thread(stoppable: Stoppable) -> None:
    engine, wrong = stoppable
    running = threading.Event()

    def cancel() -> None:
        running.wait(30)
        time.sleep(0.01)
        engine.cancel()

    threading.Thread(target=cancel).start()
    generation = engine.generate(A, max_tokens=100_000, stop_at_end=False)
    for token in generation:
        if token.index == 2:
            running.set()
    assert generation.result.stop == "cancelled"
    assert 3 <= len(generation.result.token_ids) < 1500
    assert not wrong()


def test_cancel_between_two_tokens(stoppable: Stoppable) -> None:
    engine, wrong = stoppable
    generation = engine.generate(A, max_tokens=100, stop_at_end=False)
    seen = [engine.cancel() for token in generation if token.index == 2]
    assert generation.result.stop == "cancelled"
    assert (len(seen), len(generation.result.token_ids)) == (1, 3)
    assert not wrong()


def test_cancel_in_the_prefill(stoppable: Stoppable) -> None:
    engine, wrong = stoppable
    engine.set_progress(lambda stage, done, whole: engine.cancel() if done >= 32 else None)
    generation = engine.generate(A, max_tokens=100)
    assert list(generation) == []
    assert generation.result.stop == "cancelled"
    engine.set_progress(lambda stage, done, whole: None)
    assert not wrong()
    assert ids(engine, A) != []


def test_cancel_with_nothing_running(stoppable: Stoppable) -> None:
    engine, wrong = stoppable
    for _ in range(2):
        engine.cancel()
        assert not wrong()


def test_cancel_over_and_over(stoppable: Stoppable) -> None:
    """Wherever in a graph it comes, nothing half done is left behind."""
    engine, wrong = stoppable
    for i in range(12):
        generation = engine.generate(A if i % 2 else [*B, *A], max_tokens=100_000, stop_at_end=False)
        timer = threading.Timer(0.0015 * i, engine.cancel)
        timer.start()
        for _ in generation:
            pass
        timer.join()
        assert generation.result.stop == "cancelled"
        if engine.cache is not None:
            engine.cache.check()
    assert not wrong()


@pytest.mark.parametrize("overlap", [False, True])
def test_cancel_in_the_middle_of_a_layer(
    overlap: bool, tiny: Tiny, resident: Resident, open_engine: OpenEngine
) -> None:
    """Where reads of a batch are still to come, no slot may claim an expert that never arrived."""
    path = tiny("qwen3moe", "Q8_0", n_expert=48, n_ff=512)
    other, batch = prompt_ids(64, seed=3), prompt_ids(64, seed=4)
    (expected,) = resident(path, [other], 1, threads=1, ubatch=64)
    engine = open_engine(path, "few", overlap=overlap, io_threads=1, ubatch=64)
    drive(engine, batch, 1)
    cancelled = 0
    for i in range(40):
        generation = engine.generate(batch, max_tokens=1)
        timer = threading.Timer(0.0004 * i, engine.streamer.request_abort)
        timer.start()
        cancelled += list(generation) == []
        timer.join()
        assert not differences(drive(engine, other, 1)[0], expected)
    assert cancelled > 3


def test_an_interrupt_comes_out_of_the_loop(stoppable: Stoppable) -> None:
    engine, wrong = stoppable

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    # Python drops what a handler raises inside a callback of the collector, and hypothesis has one.
    gc.disable()
    try:
        started = time.monotonic()
        generation = engine.generate(A, max_tokens=100_000, stop_at_end=False)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            for _ in generation:
                pass
        assert time.monotonic() - started < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    generation.close()
    assert not wrong()


def test_an_interrupt_that_the_last_graph_was_too_late_to_act_on(
    tiny: Tiny, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that raised at the last node of the last token: there is no next graph that would be stopped."""
    path = tiny("qwen3moe", "Q8_0")
    engine = open_engine(path, "few")
    streamer, decode, calls = engine.streamer, engine.sequence.context.decode, []

    class Late:
        interrupt_pending = False

        def __getattr__(self, name: str) -> object:
            return getattr(streamer, name)

        def take_interrupt(self) -> BaseException | None:
            pending, self.interrupt_pending = self.interrupt_pending, False
            return KeyboardInterrupt() if pending else streamer.take_interrupt()

    late = Late()

    def last(*args: object) -> int:
        calls.append(decode(*args))  # type: ignore[arg-type]
        late.interrupt_pending = len(calls) == 3
        return calls[-1]

    monkeypatch.setattr(engine.sequence.graphs, "streamer", late)
    monkeypatch.setattr(engine.sequence.context, "decode", last)
    generation = engine.generate(A, max_tokens=3, stop_at_end=False)
    with pytest.raises(KeyboardInterrupt):
        list(generation)
    assert generation.result.stop == "interrupted"
    # The graph did run: its token is in the sequence, and is what the engine says that it holds.
    assert engine.sequence.ids == [*A, *generation.result.token_ids]
    monkeypatch.undo()
    longer = [*engine.sequence.ids, *B]
    run, result = drive(engine, longer, 2)
    assert result.reused_tokens == len(longer) - len(B)
    with ResidentModel(path) as model:
        model.generate(A, len(longer) - len(A) - len(B))
        model.go_on(generation.result.token_ids[-1:], 1)
        assert not differences(run, model.go_on(B, 2))


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_exception_from_a_signal_between_a_graph_and_its_account(
    error: type[BaseException], arch: str, tiny: Tiny, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler runs as llama.cpp returns: its memory holds a token that the engine has not noted yet."""
    path = tiny(arch, "Q8_0")
    engine = open_engine(path, "few", ubatch=16)
    decode, calls = engine.sequence.context.decode, []

    def interrupted(*args: object) -> int:
        code = decode(*args)  # type: ignore[arg-type]
        calls.append(code)
        if len(calls) == len(A) // 16 + 4:
            raise error
        return code

    monkeypatch.setattr(engine.sequence.context, "decode", interrupted)
    generation = engine.generate(A, max_tokens=50, stop_at_end=False)
    with pytest.raises(error):
        for _ in generation:
            pass
    monkeypatch.undo()
    assert len(generation.result.token_ids) == 4
    with ResidentModel(path, ubatch=16) as model:
        assert not goes_on_wrong(engine, model, generation.result.token_ids)


@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
def test_a_conversation_goes_on_after_a_cancel(arch: str, tiny: Tiny, open_engine: OpenEngine) -> None:
    """A graph that was stopped half way may have moved a recurrent state on."""
    path = tiny(arch, "Q8_0", n_layer=4)
    engine = open_engine(path, "few", ubatch=16)
    with ResidentModel(path, ubatch=16) as model:
        for i in range(20):
            generation = engine.generate(A, max_tokens=150, stop_at_end=False)
            next(generation)
            timer = threading.Timer(0.0025 + 0.0003 * i, engine.streamer.request_abort)
            timer.start()
            for _ in generation:
                pass
            timer.join()
            assert generation.result.stop == "cancelled"
            assert not goes_on_wrong(engine, model, generation.result.token_ids)
            drive(engine, B, 1)


def goes_on_wrong(engine: bmoe.Engine, model: ResidentModel, answer: list[int]) -> list[str]:
    """What is wrong with a prompt that takes up `A` and its answer, wherever the engine takes it up."""
    longer = [*A, *answer, *B]
    run, result = drive(engine, longer, 2)
    if result.reused_tokens == 0:
        return differences(run, model.generate(longer, 2))
    assert result.reused_tokens == len(A) + len(answer) - 1
    assert model.generate(A, len(answer)).tokens == answer
    return differences(run, model.go_on(longer[result.reused_tokens :], 2))


def test_leaving_the_loop_leaves_the_engine_usable(stoppable: Stoppable) -> None:
    """By break, by an exception, or by letting a generation lie: the next one ends it."""
    engine, wrong = stoppable
    for token in engine.generate(A, max_tokens=50, stop_at_end=False):
        if token.index == 3:
            break
    assert not wrong()
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for token in engine.generate(A, max_tokens=50, stop_at_end=False):
            if token.index == 3:
                raise ZeroDivisionError
    assert not wrong()
    engine.generate(A)
    assert not wrong()


def test_closing_a_generation_or_cancelling_one_that_is_not_read_on(stoppable: Stoppable) -> None:
    engine, wrong = stoppable
    generation = engine.generate(A, max_tokens=50, stop_at_end=False)
    next(generation)
    generation.close()
    assert list(generation) == []
    assert generation.result.stop == "cancelled"
    assert not wrong()
    generation = engine.generate(A, max_tokens=50, stop_at_end=False)
    next(generation)
    engine.cancel()
    assert list(generation) == []
    assert not wrong()
    assert generation.result.stop == "cancelled"
