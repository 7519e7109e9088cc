"""Names, settings, precedence: bmoe/speculation/drafters.py, settings.py; the flags are in tests/cli."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bmoe import drafting
from bmoe.errors import UsageError
from bmoe.speculation import DrafterStack, DraftSpec, make_drafter
from bmoe.speculation.drafters import make

DEMO = Path(__file__).parents[2] / "bmoe" / "data"


class Fake:
    """A source with a script of drafts, which remembers what it was told."""

    nbytes = 10

    def __init__(self, name: str, *drafts: list[int]) -> None:
        self.name, self.drafts, self.told = name, list(drafts), []
        self.stats = {"steps": 0}

    def begin(self, prompt: Any) -> None:
        self.told.append(("begin", list(prompt)))

    def draft(self, history: Any, last: int, n_max: int | None = None) -> Any:
        self.told.append(("draft", list(history), last, n_max))
        return np.array(self.drafts.pop(0)[:n_max], np.int32)

    def trim(self, n: int) -> None:
        self.told.append(("trim", n))

    def accept(self, n_accepted: int, is_other: bool = False) -> None:
        self.told.append(("accept", n_accepted, is_other))


def test_the_face_needs_no_model_and_no_command_line() -> None:
    code = "import sys, bmoe.drafting; print(*(n for n in sys.modules if n.startswith(('bmoe.', 'argparse'))))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "bmoe.speculation.verify" in loaded
    assert [n for n in loaded if n == "argparse" or n.split(".")[1] in ("llama", "gguf", "engine", "cli")] == []


def test_make_makes_each_by_name() -> None:
    for name in drafting.TYPES:
        for compat in (False, True):
            drafter = make(name, compat=compat)
            assert drafter.name == name
            assert drafter.compat is compat
            assert set(drafter.stats) >= {"steps", "drafted_steps", "drafted", "accepted"}
            assert name in repr(drafter)
            with pytest.raises(AttributeError):
                drafter.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ngram-cache", {}, "--spec-type: 'ngram-cache' is none of ngram-simple, "),
        ("ngram", {"size_n": 3}, "ngram: no setting 'size_n'; it has n_max, min_match, max_match, compat"),
        ("ngram-map-k", {"size_n": 0}, "--spec-ngram-map-k-size-n: 0 is out of range, give 1 to 1024"),
        ("ngram-map-k4v", {"size_m": 1025}, "--spec-ngram-map-k4v-size-m: 1025 is out of range, give 1 to 1024"),
        ("ngram-simple", {"min_hits": -1}, "--spec-ngram-simple-min-hits: -1 is out of range"),
        ("ngram-mod", {"n_match": 0}, "--spec-ngram-mod-n-match: 0 is out of range"),
        ("ngram-mod", {"table_size": 0}, "table_size: 0 is out of range"),
        ("ngram", {"n_max": 0}, "--draft: 0 is out of range"),
        ("ngram", {"min_match": 20}, "--ngram-max-match: 16 is below --ngram-min-match 20"),
        ("ngram-mod", {"n_match": 9, "size_m": 9}, "ngram-mod: no setting 'size_m'; it has n_match, n_min, n_max, "),
    ],
)
def test_make_refuses(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        make(name, **config)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_precedence_is_llama_cpps_whatever_the_order_given() -> None:
    spec = DraftSpec(types=("ngram", "ngram-mod", "ngram-map-k4v", "ngram-simple", "ngram-map-k"))
    want = ["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram"]
    assert [source.name for source in make_drafter(spec).sources] == want
    spec = DraftSpec(types=("mtp", *spec.types))
    behind = make_drafter(spec, Fake("mtp"))  # the model's own head stands behind draftless ones
    assert [source.name for source in behind.sources] == [*want, "mtp"]
    assert behind.name == ",".join([*want, "mtp"]) == ",".join(spec.ordered())


def test_first_that_drafts_wins_and_the_others_are_told() -> None:
    a, b, c = Fake("a", [], [1], []), Fake("b", [5, 6, 7], []), Fake("c", [])
    stack = DrafterStack([a, b, c])
    stack.begin([1, 2])
    history = np.array([1, 2, 3], np.int32)
    assert stack.draft(history).tolist() == [5, 6, 7]
    assert stack.winner == "b"
    stack.accept(2)
    assert stack.winner is None
    assert a.told == [("begin", [1, 2]), ("draft", [1, 2], 3, None), ("accept", 2, True)]
    assert b.told == [("begin", [1, 2]), ("draft", [1, 2], 3, None), ("accept", 2, False)]
    assert c.told == [("begin", [1, 2]), ("accept", 2, True)]
    for source in (a, b, c):
        source.told.clear()
    assert stack.draft(history, 4).tolist() == [1]
    stack.accept(0)
    assert b.told == [("accept", 0, True)]
    for source in (a, b, c):
        source.told.clear()
    assert stack.draft(history).tolist() == []
    stack.accept(0)  # nothing was drafted: nobody is told
    assert [kind for source in (a, b, c) for kind, *_ in source.told] == ["draft"] * 3
    assert stack.nbytes == 30
    assert set(stack.stats) == {"a", "b", "c"}


def test_what_costs_is_not_asked_for_nothing() -> None:
    text, head = Fake("a", [], []), Fake("mtp", [5, 6])
    head.costs = True
    stack = DrafterStack([text, head])
    stack.free_only = True
    assert len(stack.draft(np.array([1, 2], np.int32), 9)) == 0
    assert head.told == []
    stack.free_only = False
    assert stack.draft(np.array([1, 2], np.int32), 9).tolist() == [5, 6]


def test_stack_limits() -> None:
    a = Fake("a", *[[1, 2, 3, 4]] * 4)
    stack = DrafterStack([a], n_max=3)
    history = np.array([9], np.int32)
    assert stack.draft(history).tolist() == [1, 2, 3]
    assert stack.draft(history, 2).tolist() == [1, 2]
    assert stack.draft(history, 9).tolist() == [1, 2, 3]
    assert stack.draft(history, 0).tolist() == []
    assert stack.draft(history[:0]).tolist() == []
    assert len(a.told) == 3


def test_empty_stack_is_plain_decoding() -> None:
    stack = make_drafter(DraftSpec())
    stack.begin([1, 2, 3])
    history = np.array([1, 2, 3, 1, 2], np.int32)
    assert stack.draft(history) is stack.draft(history)
    assert stack.draft(history).size == 0
    stack.accept(0)
    assert (stack.name, stack.nbytes, stack.stats, stack.winner) == ("none", 0, {}, None)


def test_stack_drafts_for_real() -> None:
    text = np.arange(1000, 1200, dtype=np.int32)
    stack = make_drafter(DraftSpec(types=("ngram", "ngram-map-k")))
    stack.begin(text)
    copied = np.concatenate([text, text[10:30]])
    assert np.array_equal(stack.draft(copied), text[30:78])
    assert stack.winner == "ngram-map-k"
    stack.accept(48)
    # The prompt's last 61 positions are no keys of ngram-map (docs/drafting.md): there ngram stands in.
    copied = np.concatenate([text, text[10:78], text[150:170]])
    assert np.array_equal(stack.draft(copied), text[170:173])
    assert stack.winner == "ngram"
    stack.accept(3)
    assert [counts["accepted"] for counts in stack.stats.values()] == [48, 3]


def test_adapter_for_llama_cpp_python() -> None:
    pytest.importorskip("llama_cpp")
    fake = Fake("fake", [4, 5], [7], [], [1, 1], [2])
    model = drafting.llama_draft_model(fake)
    calls = [[1, 2, 3], [1, 2, 3, 4, 9], [1, 2, 3, 4, 9, 7], [1, 2, 3, 4, 9, 7, 8], [1, 2, 5]]
    drafts = [model(np.array(ids, np.intc)).tolist() for ids in calls]
    assert drafts == [[4, 5], [7], [], [1, 1], [2]]
    assert fake.told == [
        ("begin", [1, 2]),
        ("draft", [1, 2], 3, None),
        ("accept", 1, False),
        ("draft", [1, 2, 3, 4], 9, None),
        ("accept", 1, False),
        ("draft", [1, 2, 3, 4, 9], 7, None),
        ("draft", [1, 2, 3, 4, 9, 7], 8, None),
        ("begin", [1, 2]),
        ("draft", [1, 2], 5, None),
    ]


@pytest.mark.slow
def test_adapter_in_llama_cpp_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """`llama_cpp.Llama(draft_model=...)` with each drafter generates what it generates without."""
    llama_cpp = pytest.importorskip("llama_cpp")
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain_buffers() -> Any:
        # llama.cpp's weight repacking crashes on some CPUs, with or without a draft model.
        params = defaults()
        params.use_extra_bufts = False
        return params

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", plain_buffers)
    models = sorted(DEMO.glob("*.gguf"))
    if not models:
        pytest.skip("no demo model")
    texts = {}
    for name in ("", "ngram", "ngram-mod"):
        config = {"n_match": 4, "n_min": 2, "n_max": 8} if name == "ngram-mod" else {}
        drafter = make(name, **config) if name else None
        llm = llama_cpp.Llama(
            str(models[0]),
            n_ctx=512,
            verbose=False,
            draft_model=drafting.llama_draft_model(drafter) if drafter else None,
        )
        out = llm.create_completion(
            "def add(a, b):\n    return a + b\n\ndef add(a, b):\n", max_tokens=96, temperature=0.0
        )
        texts[name] = out["choices"][0]["text"]
        if drafter:
            assert drafter.stats["accepted"] > 0
        llm.close()
    assert texts["ngram"] == texts[""]
    assert texts["ngram-mod"] == texts[""]


def test_a_draft_that_is_cut_is_the_winner_s_business_alone() -> None:
    first, second = Fake("first", [], [1, 2, 3], [1, 2]), Fake("second", [4], [], [])
    stack = DrafterStack([first, second])
    history = np.array([7, 8], np.int32)
    assert stack.draft(history).tolist() == [4]
    stack.trim(0)
    assert stack.winner is None
    stack.accept(0)
    assert stack.draft(history).tolist() == [1, 2, 3]
    stack.trim(2)
    stack.accept(1)
    assert [t for t in first.told if t[0] != "draft"] == [("trim", 2), ("accept", 1, False)]
    assert [t for t in second.told if t[0] != "draft"] == [("trim", 0), ("accept", 1, True)]
