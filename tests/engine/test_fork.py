"""A process that is forked from an engine's has none of its threads: every use ends at once with one error there."""

from __future__ import annotations

import pytest
from conftest import Tiny, in_a_process

# What a child tries, each in a process of its own; `g` is a generation that is under way, `p` a finished prompt.
USES = {
    "generate": "e.generate('ab', max_tokens=2)",
    "score": "e.score([1, 2, 3])",
    "tokenize": "e.tokenize('ab')",
    "next": "next(g)",
    "close a generation": "g.close()",
}

CODE = """
import os, signal, sys, time
e = bmoe.Engine.open(sys.argv[1], threads=2, ctx=256, overlap=True, cache_mb={cache}, force_cache=True)
whole = [t.id for t in e.generate('abcabcabc', max_tokens=12, stop_at_end=False)]
g = e.generate('abcabcabc', max_tokens=12, stop_at_end=False)
first = [next(g).id for _ in range(3)]
pid = os.fork()
if pid == 0:
    signal.alarm(10)  # a child that waits for a thread dies by it
    try:
        {use}
        print('nothing was said', flush=True)
    except bmoe.BmoeError as error:
        print(error, flush=True)
    {end}
_, status = os.waitpid(pid, 0)
print('child', os.waitstatus_to_exitcode(status))
print('same', first + [t.id for t in g] == whole)
print('again', [t.id for t in e.generate('abcabcabc', max_tokens=12, stop_at_end=False)] == whole)
e.close()
"""


def forked(path: object, use: str, end: str = "sys.exit(0)", cache: int = 0) -> list[str]:
    return in_a_process(CODE.format(use=use, end=end, cache=cache), path)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_in_a_child_is_an_error_at_once(use: str, tiny: Tiny) -> None:
    """The child ends in the ordinary way, its collector and all, and the parent goes on as if nothing had been."""
    said, *rest = forked(tiny("qwen3moe", "Q8_0"), use)
    assert said.startswith("this engine was opened in process ")
    assert "of which this one is a fork" in said
    assert rest == ["child 0", "same True", "again True"]


@pytest.mark.parametrize("cache", [0, 1])
def test_a_child_may_close_what_it_does_not_use(cache: int, tiny: Tiny) -> None:
    said, *rest = forked(tiny("qwen3moe", "Q8_0"), "e.close(); e.close()", cache=cache)
    assert said == "nothing was said"
    assert rest == ["child 0", "same True", "again True"]


def test_a_child_that_lets_go_of_everything(tiny: Tiny) -> None:
    """The collector takes engine, generation and lanes away, as `del` and the end of the interpreter do."""
    use = "import gc; del g, e; gc.collect()"
    said, *rest = forked(tiny("qwen3moe", "Q8_0"), use)
    assert (said, rest) == ("nothing was said", ["child 0", "same True", "again True"])


def test_a_child_opens_one_of_its_own(tiny: Tiny) -> None:
    use = (
        "own = bmoe.Engine.open(sys.argv[1], threads=1, ctx=256, cache_mb=0); "
        "assert [t.id for t in own.generate('abcabcabc', max_tokens=12, stop_at_end=False)] == whole; own.close()"
    )
    said, *rest = forked(tiny("qwen3moe", "Q8_0"), use)
    assert (said, rest) == ("nothing was said", ["child 0", "same True", "again True"])
