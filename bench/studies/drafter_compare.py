"""bmoe's drafters against llama.cpp's own C++, on the same token streams in one run.

    python bench/studies/drafter_compare.py                      # fetches the sdist with pip, builds, checks, measures
    python bench/studies/drafter_compare.py --sdist FILE_OR_DIR  # ... from an sdist or source tree already here
    python bench/studies/drafter_compare.py --check              # compat against the C++, random requests, no timing

llama.cpp's common/ngram-map.cpp and common/ngram-mod.cpp are compiled as they are, from the sdist of the pinned
llama-cpp-python, in a temporary folder that is deleted afterwards. Around them goes a small driver (DRIVER below)
for what llama.cpp does outside those files: ngram-mod's indexing and resets, and growing the history. Both sides
run a whole stream in one native call, with a fresh drafter each time (its construction is not timed), in turn:
C++, bmoe compat, bmoe default. Times are CPU time. What compat drafts must equal what the C++ drafts, or the run
fails.
"""

from __future__ import annotations

import argparse
import ctypes
import gzip
import json
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bmoe import drafting
from bmoe.speculation._drafters import replay

PINNED = "llama-cpp-python==0.3.36"
VECTORS = Path(__file__).parents[2] / "tests" / "data" / "drafters" / "reference_vectors.json.gz"
Tokens = npt.NDArray[np.int32]

# A C interface to llama.cpp's drafters. Handles are tagged by kind: 0 simple, 1 map, 2 mod.
DRIVER = r"""
#include "ngram-map.h"
#include "ngram-mod.h"
#include <cstring>
#include <memory>
#include <stdexcept>

// What the two files need of llama.cpp: a silent log, and an abort that can be caught.
struct common_log * common_log_main() { return nullptr; }
int common_log_get_verbosity_thold() { return -1; }
void common_log_add(struct common_log *, enum ggml_log_level, const char *, ...) {}
extern "C" void ggml_abort(const char *, int, const char *, ...) { throw std::runtime_error("abort"); }

namespace {

struct drafter {
    virtual ~drafter() = default;
    virtual void begin(const llama_tokens &) {}
    virtual void draft(const llama_tokens & history, llama_token last, llama_tokens & out) = 0;
    virtual void accept(int) {}
    llama_tokens history;
};

struct simple : drafter {
    common_ngram_simple_config config;
    void draft(const llama_tokens & h, llama_token last, llama_tokens & out) override {
        out = common_ngram_simple_draft(config, h, last);
    }
};

struct map : drafter {
    common_ngram_map state;
    explicit map(common_ngram_map && m) : state(std::move(m)) {}
    void begin(const llama_tokens & prompt) override { common_ngram_map_begin(state, prompt); }
    void draft(const llama_tokens & h, llama_token last, llama_tokens & out) override {
        common_ngram_map_draft(state, h, last, out);
    }
    void accept(int n) override { common_ngram_map_accept(state, (uint16_t) n); }
};

// The rules of llama.cpp's ngram-mod driver (common/speculative.cpp), on its own table.
struct mod : drafter {
    common_ngram_mod table;
    size_t n, next = 0, drafted = 0;
    int n_min, n_max, low = 0;
    mod(int n, int n_min, int n_max, size_t size)
        : table((uint16_t) n, size), n(n), n_min(n_min), n_max(n_max) {}
    void add(const llama_tokens & h) {
        for (; next + n < h.size(); next++) { table.add(h.data() + next); }
        next = h.size() - n;
    }
    void begin(const llama_tokens & prompt) override {
        next = drafted = 0;
        if (prompt.size() < n) { return; }
        add(prompt);
        if ((double) table.get_used() / (double) table.size() > 0.25) { table.reset(); }
    }
    void draft(const llama_tokens & h, llama_token last, llama_tokens & out) override {
        drafted = 0;
        if (h.size() < n) { return; }
        if (next + 32 < h.size()) { add(h); }
        out.resize(n + n_max);
        std::memcpy(out.data(), h.data() + h.size() - (n - 1), (n - 1) * sizeof(llama_token));
        out[n - 1] = last;
        int k = 0;
        for (; k < n_max; k++) {
            const auto t = table.get(out.data() + k);
            if (t == common_ngram_mod::EMPTY) { break; }
            out[n + k] = t;
        }
        if (k < n_max && k < n_min) { out.clear(); return; }
        std::memmove(out.data(), out.data() + n, k * sizeof(llama_token));
        out.resize(k);
        drafted = k;
    }
    void accept(int k) override {
        if (drafted == 0) { return; }
        if ((double) k / (double) drafted >= 0.25) { low = 0; return; }
        if (++low >= 5) { table.reset(); low = 0; next = 0; }
    }
};

}

extern "C" {

void * peer_new(int kind, int a, int b, int c, long long d) {
    if (kind == 0) { auto s = new simple; s->config = { (uint16_t) a, (uint16_t) b }; return s; }
    if (kind == 3) { return new mod(a, b, c, (size_t) d); }
    return new map(common_ngram_map((uint16_t) a, (uint16_t) b, kind == 1, (uint16_t) c));
}

void peer_free(void * p) { delete (drafter *) p; }

void peer_begin(void * p, const int * tokens, int n) {
    ((drafter *) p)->begin(llama_tokens(tokens, tokens + n));
}

// The draft's length; -1 where llama.cpp would have aborted.
int peer_draft(void * p, const int * tokens, int n, int last, int * out) {
    llama_tokens draft;
    try {
        ((drafter *) p)->draft(llama_tokens(tokens, tokens + n), last, draft);
    } catch (const std::runtime_error &) {
        return -1;
    }
    std::memcpy(out, draft.data(), draft.size() * sizeof(int));
    return (int) draft.size();
}

void peer_accept(void * p, int n) { ((drafter *) p)->accept(n); }

// The driver of the shared reference runs; rows are (pos, accepted, size) per draft. Returns the steps.
int peer_replay(void * p, const int * tokens, int n, int prompt, int * rows, int * n_rows, int * drafted) {
    auto * d = (drafter *) p;
    auto & h = d->history;
    h.reserve(n);
    h.assign(tokens, tokens + prompt);
    d->begin(h);
    int pos = prompt, steps = 0, r = 0;
    size_t o = 0;
    while (pos + 1 < n) {
        llama_tokens draft;
        d->draft(h, tokens[pos], draft);
        steps++;
        int accepted = 0;
        if (!draft.empty()) {
            while (accepted < (int) draft.size() && pos + 1 + accepted < n
                    && draft[accepted] == tokens[pos + 1 + accepted]) {
                accepted++;
            }
            d->accept(accepted);
            rows[3*r] = pos; rows[3*r + 1] = accepted; rows[3*r + 2] = (int) draft.size();
            r++;
            std::memcpy(drafted + o, draft.data(), draft.size() * sizeof(int));
            o += draft.size();
        }
        for (int i = 0; i <= accepted; i++) { h.push_back(tokens[pos + i]); }
        pos += 1 + accepted;
    }
    *n_rows = r;
    return steps;
}

}
"""


@dataclass(frozen=True)
class Case:
    """One drafter configuration, made on either side."""

    name: str
    config: dict[str, int]

    def __str__(self) -> str:
        return f"{self.name} {','.join(str(v) for v in self.config.values())}"

    def peer_args(self) -> tuple[int, int, int, int, int]:
        c = self.config
        if self.name == "ngram-mod":
            return 3, c["n_match"], c["n_min"], c["n_max"], c.get("table_size", 4194304)
        kind = {"ngram-simple": 0, "ngram-map-k": 1, "ngram-map-k4v": 2}[self.name]
        return kind, c["size_n"], c["size_m"], c["min_hits"], 0


class Peer:
    """llama.cpp's drafters, through the compiled driver."""

    def __init__(self, library: Path) -> None:
        self.lib = lib = ctypes.CDLL(str(library))
        lib.peer_new.restype = ctypes.c_void_p
        lib.peer_new.argtypes = [ctypes.c_int] * 4 + [ctypes.c_longlong]
        pointer, number = ctypes.c_void_p, ctypes.c_int
        lib.peer_free.argtypes = [pointer]
        lib.peer_begin.argtypes = [pointer, pointer, number]
        lib.peer_draft.argtypes = [pointer, pointer, number, number, pointer]
        lib.peer_accept.argtypes = [pointer, number]
        lib.peer_replay.argtypes = [pointer, pointer, number, number, pointer, pointer, pointer]

    def new(self, case: Case) -> int:
        return int(self.lib.peer_new(*case.peer_args()))

    def replay(self, handle: int, tokens: Tokens, prompt_len: int, room: list[Tokens]) -> tuple[int, int]:
        """Steps and number of drafts; the drafts are left in `room`: rows int32[3 n], drafted int32[...]."""
        rows, drafted, count = room
        steps = self.lib.peer_replay(
            handle,
            tokens.ctypes.data,
            len(tokens),
            prompt_len,
            rows.ctypes.data,
            count.ctypes.data,
            drafted.ctypes.data,
        )
        return int(steps), int(count[0])


def find_source(sdist: Path | None, work: Path) -> Path:
    """The vendored llama.cpp of the pinned llama-cpp-python: unpacked, or fetched with pip first."""
    if sdist is None:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--no-binary",
                ":all:",
                "-d",
                str(work),
                PINNED,
            ],
            check=True,
        )
        sdist = next(work.glob("llama_cpp_python-*.tar.gz"))
    if sdist.is_file():
        with tarfile.open(sdist) as tar:
            wanted = ("/common/", "/include/", "/ggml/include/")
            tar.extractall(
                work,
                members=[m for m in tar if "/vendor/llama.cpp/" in m.name and any(w in m.name for w in wanted)],
                filter="data",
            )
        sdist = work
    found = sorted(p for p in [sdist, *sdist.rglob("llama.cpp")] if (p / "common" / "ngram-map.cpp").is_file())
    if not found:
        raise SystemExit(f"no llama.cpp source with common/ngram-map.cpp under {sdist}")
    return found[0]


def build(source: Path, work: Path) -> Peer:
    driver = work / "driver.cpp"
    driver.write_text(DRIVER)
    library = work / "libpeer.so"
    common = source / "common"
    includes = [f"-I{p}" for p in (common, source / "include", source / "ggml" / "include")]
    command = ["g++", "-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-Wl,-Bsymbolic", *includes]
    subprocess.run(
        [*command, str(common / "ngram-map.cpp"), str(common / "ngram-mod.cpp"), str(driver), "-o", str(library)],
        check=True,
    )
    return Peer(library)


def streams() -> Iterator[tuple[str, Tokens, int]]:
    """(name, tokens, prompt length): the 12 shared streams, then three of 131,072 tokens."""
    with gzip.open(VECTORS) as f:
        for s in json.load(f):
            yield s["stream"], np.array(s["tokens"], np.int32), s["prompt_len"]
    n = 131072
    rng = np.random.default_rng(1)
    text = rng.integers(0, 32000, n // 4, dtype=np.int32)
    copy = np.tile(text, 4)
    edits = rng.random(n) < 1 / 30
    copy[edits] = rng.integers(0, 32000, int(edits.sum()), dtype=np.int32)
    yield "copy_131072", copy, n // 4
    yield "nothing_131072", rng.integers(0, 32000, n, dtype=np.int32), n - 8192
    yield "common_131072", np.minimum(rng.zipf(1.3, n), 32000).astype(np.int32), n - 8192


CASES = [
    Case("ngram-simple", {"size_n": 12, "size_m": 48, "min_hits": 1}),
    Case("ngram-simple", {"size_n": 3, "size_m": 5, "min_hits": 1}),
    Case("ngram-map-k", {"size_n": 12, "size_m": 48, "min_hits": 1}),
    Case("ngram-map-k", {"size_n": 3, "size_m": 6, "min_hits": 1}),
    Case("ngram-map-k4v", {"size_n": 12, "size_m": 48, "min_hits": 1}),
    Case("ngram-map-k4v", {"size_n": 8, "size_m": 8, "min_hits": 2}),
    Case("ngram-mod", {"n_match": 24, "n_min": 48, "n_max": 64}),
    Case("ngram-mod", {"n_match": 16, "n_min": 2, "n_max": 32}),
]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}..{max(values):.2f}]"


@dataclass
class Round:
    """One stream through the three of them: CPU ns each, which is not what other processes take from the core."""

    steps: int
    peer: int
    compat: int
    default: int


def one_round(peer: Peer, case: Case, stream: str, tokens: Tokens, prompt_len: int, room: list[Tokens]) -> Round:
    handle = peer.new(case)
    start = time.thread_time_ns()
    steps, n_drafts = peer.replay(handle, tokens, prompt_len, room)
    took = [time.thread_time_ns() - start]
    peer.lib.peer_free(handle)
    for compat in (True, False):
        drafter = drafting.make(case.name, **case.config, compat=compat)
        start = time.thread_time_ns()
        result = replay(drafter, tokens, prompt_len)
        took.append(time.thread_time_ns() - start)
        if compat:
            rows, drafted = room[0][: 3 * n_drafts].reshape(-1, 3), room[1][: len(result[4])]
            same = result[0] == steps and len(result[1]) == n_drafts and np.array_equal(drafted, result[4])
            if not same or not all(np.array_equal(rows[:, i], result[1 + i]) for i in range(3)):
                raise SystemExit(f"{stream}: {case} drafted differently from llama.cpp's C++")
    return Round(steps, *took)


def measure(peer: Peer, rounds: int, only: str) -> None:
    print(f"# {rounds} interleaved rounds. ns: CPU time per step, median. ratio: CPU time of the C++ / of bmoe for the")
    print("# whole stream, begin included, per round: median [min..max]; above 1, bmoe is faster. The default may take")
    print("# other steps than the C++.")
    titles = ("stream", "drafter", "steps", "C++ ns", "compat", "ratio compat", "ratio default")
    print("{:15} {:26} {:>6} {:>8} {:>8}   {:24} {:24}".format(*titles))
    summary: dict[str, list[float]] = {}
    for stream, tokens, prompt_len in streams():
        room = [np.empty(3 * len(tokens), np.int32), np.empty(70 * len(tokens), np.int32), np.empty(1, np.int32)]
        for case in [c for c in CASES if only in c.name]:
            done = [one_round(peer, case, stream, tokens, prompt_len, room) for _ in range(rounds)]
            compat, default = [r.peer / r.compat for r in done], [r.peer / r.default for r in done]
            summary.setdefault(f"{case} compat", []).append(statistics.median(compat))
            summary.setdefault(f"{case} default", []).append(statistics.median(default))
            steps = max(done[0].steps, 1)
            ns = [statistics.median(r.peer for r in done) / steps, statistics.median(r.compat for r in done) / steps]
            print(
                f"{stream:15} {case!s:26} {steps:6} {ns[0]:8.0f} {ns[1]:8.0f}   "
                f"{spread(compat):24} {spread(default):24}",
                flush=True,
            )
    print("\n# over the streams: lowest, median and highest of the median ratios")
    for name, values in summary.items():
        print(f"{name:40} {min(values):6.2f} {statistics.median(values):6.2f} {max(values):6.2f}")


def check(peer: Peer, rounds: int, seed: int) -> None:
    """Random requests one after the other on one drafter, rewritten histories included: compat must draft what
    the C++ drafts, carry over what it carries over, and refuse where it aborts."""
    rng = random.Random(seed)
    drafts = refusals = 0
    for _ in range(rounds):
        name = rng.choice(["ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"])
        if name == "ngram-mod":
            config = {"n_match": rng.randint(1, 6), "n_min": rng.randint(0, 3), "n_max": rng.randint(0, 9)}
            config["table_size"] = rng.choice([7, 64, 100, 4096])
        else:
            config = {"size_n": rng.randint(1, 5), "size_m": rng.randint(1, 8), "min_hits": rng.randint(0, 3)}
        case = Case(name, config)
        ours = drafting.make(name, **config, compat=True)
        handle = peer.new(case)
        out = np.empty(64, np.int32)
        # Tokens a multiple of 262,144 apart share ngram-map's slots.
        far = rng.choice([0, 0, 262144])
        base = [rng.randint(0, rng.choice([1, 2, 5, 40])) + far * rng.randint(0, 1) for _ in range(rng.randint(0, 150))]
        for _request in range(rng.randint(1, 5)):
            history = base[: rng.randint(0, len(base))]
            if rng.random() < 0.5:
                history += [rng.randint(0, 4) + far * rng.randint(0, 1) for _ in range(rng.randint(0, 60))]
            prompt = np.array(history, np.int32)
            peer.lib.peer_begin(handle, prompt.ctypes.data, len(prompt))
            ours.begin(prompt)
            for _step in range(rng.randint(0, 60)):
                tokens = np.array(history, np.int32)
                last = rng.choice(history) if history and rng.random() < 0.7 else rng.randint(0, 5)
                n = peer.lib.peer_draft(handle, tokens.ctypes.data, len(tokens), last, out.ctypes.data)
                try:
                    got = ours.draft(tokens, last).tolist()
                except ValueError:
                    if n != -1:
                        raise SystemExit(f"{case}: refused where the C++ drafts") from None
                    refusals += 1
                    break
                if n == -1 or got != out[:n].tolist():
                    raise SystemExit(f"{case}: drafted {got}, the C++ {'aborts' if n < 0 else out[:n].tolist()}")
                accepted = rng.choice([0, n, rng.randint(0, n)])
                if n:
                    drafts += 1
                    peer.lib.peer_accept(handle, accepted)
                    ours.accept(accepted)
                if rng.random() < 0.9:
                    history += [last, *got[:accepted]]
                if rng.random() < 0.03:
                    history = history[: rng.randint(0, len(history))]
        peer.lib.peer_free(handle)
    print(f"compat equals the C++ on {rounds} random drafters: {drafts} drafts, {refusals} aborts refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdist", type=Path, help=f"sdist or source tree of {PINNED} (default: pip download)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: 9)")
    parser.add_argument("--check", type=int, nargs="?", const=2000, metavar="N", help="only compare N random drafters")
    parser.add_argument("--only", default="", metavar="TEXT", help="measure the drafters with TEXT in their name")
    parser.add_argument("--seed", type=int, default=0, help="of --check (default: 0)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        peer = build(find_source(args.sdist, Path(work)), Path(work))
        if args.check is not None:
            check(peer, args.check, args.seed)
        else:
            measure(peer, args.rounds, args.only)


if __name__ == "__main__":
    main()
