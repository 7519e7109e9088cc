"""bench/models/make_model.py: its files load and decode in stock llama.cpp, and their routers do what they say."""

from __future__ import annotations

import ctypes
import hashlib
import math
import shutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from bench.models import make_model as mm
from bench.models.made import plan, pools, shapes
from bmoe import Engine
from bmoe.errors import UsageError
from bmoe.speculation import DraftSpec

# name, quantization: every architecture and every tensor type.
MINIS = [("qwen3-30b-a3b", "q4_k_m"), ("qwen3.6-35b-a3b", "mxfp4"), ("gpt-oss-120b", "mxfp4")]
Minis = Callable[[str, str, str], mm.ModelInfo]


@dataclass
class Run:
    """A greedy decode: the prompt, what came after it, and per layer the experts of each token."""

    prompt: list[int]
    text: bytes
    tokens: list[int] = field(default_factory=list)
    spread: float = math.nan
    routes: dict[int, NDArray[np.int32]] = field(default_factory=dict)

    def top_quarter(self, n_expert: int) -> float:
        """Share of the routed slots that went to the most used quarter of the experts, mean over layers."""
        used = [np.sort(np.bincount(r.ravel(), minlength=n_expert))[::-1] for r in self.routes.values()]
        return float(np.mean([u[: n_expert // 4].sum() / u.sum() for u in used]))


def decode(info: mm.ModelInfo, n_tokens: int, prompt: str = " the and in wonder") -> Run:
    """Decode greedily with stock llama.cpp, one token at a time, watching the router."""
    ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    ggml.ggml_get_name.argtypes = ggml.ggml_nbytes.argtypes = [ctypes.c_void_p]
    ggml.ggml_get_name.restype, ggml.ggml_nbytes.restype = ctypes.c_char_p, ctypes.c_size_t
    ggml.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
    ggml.ggml_backend_tensor_get.restype = None
    seen: dict[int, list[NDArray[np.int32]]] = defaultdict(list)

    @llama_cpp.ggml_backend_sched_eval_callback
    def watch(tensor: int, ask: bool, _: object) -> bool:
        name, _, layer = ggml.ggml_get_name(tensor).partition(b"-")
        if name != b"ffn_moe_argsort":
            return not ask
        if not ask:
            order = np.empty(ggml.ggml_nbytes(tensor) // 4, np.int32)
            ggml.ggml_backend_tensor_get(tensor, order.ctypes.data, 0, order.nbytes)
            seen[int(layer)].append(order[: info.n_used].copy())
        return True

    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    options.use_extra_bufts = False  # no repacked copy of the weights: faster to load, and one code path
    model = llama_cpp.llama_model_load_from_file(str(info.path).encode(), options)
    assert model
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads = 512, 1  # a second thread waits in a spin, and starves on a busy machine
    params.cb_eval = watch
    context = llama_cpp.llama_init_from_model(model, params)
    assert context
    vocab = llama_cpp.llama_model_get_vocab(model)
    n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
    buffer, text = (ctypes.c_int * 256)(), ctypes.create_string_buffer(256)
    raw = prompt.encode()
    count = llama_cpp.llama_tokenize(vocab, raw, len(raw), buffer, len(buffer), True, False)
    ids = list(buffer[:count])
    size = llama_cpp.llama_detokenize(vocab, buffer, count, text, len(text), False, False)
    run = Run(ids, text.raw[:size])
    one = (ctypes.c_int * 1)()
    for step in range(count + n_tokens - 1):
        one[0] = ids[step] if step < count else run.tokens[-1]
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(one, 1)) == 0
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, -1), (n_vocab,))
        assert np.isfinite(logits).all()
        if step >= count - 1:
            run.tokens.append(int(logits.argmax()))
            run.spread = float(logits.std())
    run.routes = {layer: np.stack(rows) for layer, rows in seen.items()}
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return run


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing the pools is most of the time that a miniature takes."""
    monkeypatch.setattr(pools, "POOL_UNITS", 1 << 12)


@pytest.fixture(scope="module")
def minis(tmp_path_factory: pytest.TempPathFactory) -> Minis:
    """Miniatures, each written once: the real layers, a little of everything else."""
    folder, made = tmp_path_factory.mktemp("minis"), {}

    def get(shape: str, quant: str, router: str) -> mm.ModelInfo:
        path = folder / f"{shape}-{quant}-{router}.gguf"
        if path not in made:
            made[path] = mm.make_model(path, shape, layers=4, router=router, quant=quant, scale=8)
        return made[path]

    return get


@pytest.mark.parametrize(("shape", "quant"), [*MINIS, ("qwen3.6-35b-a3b", "q4_k_m")])
def test_decodes_in_stock_llama_cpp(minis: Minis, shape: str, quant: str) -> None:
    info = minis(shape, quant, "uniform")
    run = decode(info, 16)
    assert run.text == b" the and in wonder"
    assert len(run.prompt) < len(run.text)  # some merges apply
    assert len(set(run.tokens)) >= 12
    assert 1.5 < run.spread < 4
    assert set(run.routes) == set(range(info.layers))


@pytest.mark.parametrize(("shape", "quant"), MINIS)
def test_routers_differ_as_asked(minis: Minis, shape: str, quant: str) -> None:
    uniform, zipf = minis(shape, quant, "uniform"), minis(shape, quant, "zipf")
    # Fair draws of as many tokens; the most used quarter of them has more than a quarter by chance.
    rng, n, used = np.random.default_rng(0), uniform.n_expert, uniform.n_used
    even, skewed, fair = decode(uniform, 64), decode(zipf, 64), Run([], b"")
    for layer, routes in even.routes.items():
        fair.routes[layer] = np.stack([rng.permutation(n)[:used] for _ in routes])
    assert even.top_quarter(n) < fair.top_quarter(n) + 0.08
    assert skewed.top_quarter(n) > even.top_quarter(n) + 0.1
    wanted = plan.popularity(n, used, 1.0)[: n // 4].sum() / used
    assert skewed.top_quarter(n) == pytest.approx(float(wanted), abs=0.1)
    # Each layer has favourites of its own.
    best = {int(np.bincount(routes.ravel(), minlength=n).argmax()) for routes in skewed.routes.values()}
    assert len(best) > 1


def test_popularity_is_zipf_below_its_cap() -> None:
    share = plan.popularity(128, 8, 1.0)
    assert share.sum() == pytest.approx(8)
    assert share.max() == plan.MAX_POPULARITY
    free = share < plan.MAX_POPULARITY
    np.testing.assert_allclose((share * np.arange(1, 129))[free], share[-1] * 128)


@pytest.mark.parametrize(
    ("shape", "quant", "parameters", "size"),
    [
        ("qwen3-30b-a3b", "q4_k_m", 30.53e9, 18.56e9),
        ("qwen3.6-35b-a3b", "q4_k_m", 34.66e9, 21.2e9),
        ("gpt-oss-120b", "mxfp4", 116.83e9, 63.39e9),
    ],
)
def test_whole_models_have_the_real_size(shape: str, quant: str, parameters: float, size: float) -> None:
    tensors = list(plan.Plan(shapes.SHAPES[shape], quant, None).tensors())
    assert sum(math.prod(t.dims) for t in tensors) == pytest.approx(parameters, rel=1e-3)
    assert sum(t.nbytes for t in tensors) == pytest.approx(size, rel=0.01)


def test_vocabulary_is_whole_and_has_no_twins() -> None:
    for shape in shapes.SHAPES.values():
        tokens, types, merges = shapes.vocabulary(shape)
        assert len(tokens) == len(set(tokens)) == len(types) == shape.n_vocab
        assert tokens[shape.special_at] == shape.special[0]
        assert {merge.replace(" ", "") for merge in merges} < set(tokens)


def test_a_head_is_one_layer_more_and_drafts(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("plain.gguf", "mtp.gguf")]
    for path in paths:
        mm.make_model(path, "qwen3.6-35b-a3b", layers=4, scale=16, mtp=path is paths[1])
    plain, with_head = ({t.name: t for t in GGUFReader(path).tensors} for path in paths)
    assert {name: t.tobytes() for name, t in ((n, with_head[n].data) for n in plain)} == {
        name: t.data.tobytes() for name, t in plain.items()
    }
    assert with_head["blk.4.nextn.eh_proj.weight"].shape.tolist() == [512, 256]
    assert {name.split(".", 2)[2] for name in with_head.keys() - plain.keys()} == {
        # A layer with full attention, which layer 3 is, and what joins token and row.
        *(name.removeprefix("blk.3.") for name in plain if name.startswith("blk.3.")),
        *(f"nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")),
    }
    with pytest.raises(UsageError, match="no multi-token-prediction head"):
        Engine.open(paths[0], draft=DraftSpec(types=("mtp",)))
    outputs = []
    for types in ((), ("mtp",)):
        draft = DraftSpec(types=types, draft=2, policy="always")
        with Engine.open(paths[1], cache_mb=40, force_cache=True, ctx=256, threads=1, draft=draft) as engine:
            generation = engine.generate(list(range(40, 60)), max_tokens=12, stop_at_end=False)
            outputs.append([token.id for token in generation])
            split = generation.result.flash_split
            assert (generation.result.spec.drafted > 0) == (split.bytes["draft_source"] > 0) == bool(types)
    # The weights are random: a verify batch may tip two logits that are next to each other (token 12 with AVX2).
    assert outputs[0][:8] == outputs[1][:8]


def test_experts_are_all_different_and_sizes_are_told(minis: Minis) -> None:
    info = minis("qwen3-30b-a3b", "q4_k_m", "uniform")
    tensors = GGUFReader(info.path).tensors
    experts = [tensor for tensor in tensors if tensor.name.endswith("_exps.weight")]
    digests = {hashlib.sha256(expert.tobytes()).digest() for tensor in experts for expert in tensor.data}
    assert len(digests) == 3 * info.layers * info.n_expert
    assert info.expert_bytes == sum(int(tensor.n_bytes) for tensor in experts)
    assert info.dense_bytes == sum(int(tensor.n_bytes) for tensor in tensors) - info.expert_bytes
    assert info.bytes == info.path.stat().st_size > info.expert_bytes + info.dense_bytes


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    digests = []
    for seed in (1, 1, 2):
        info = mm.make_model(tmp_path / "m.gguf", "gpt-oss-120b", 1, seed=seed, scale=64, force=True)
        digests.append(hashlib.sha256(info.path.read_bytes()).digest())
    assert digests[0] == digests[1] != digests[2]


def test_pieces_bound_the_memory() -> None:
    big = next(plan.Plan(shapes.SHAPES["qwen3-30b-a3b"], "q4_k_m", None).tensors())
    written = 0
    for piece in pools.Pools(0).pieces(big):
        assert piece.nbytes <= pools.PIECE_BYTES
        written += piece.nbytes
    assert written == big.nbytes > 4 * pools.PIECE_BYTES


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["qwen9"], "unknown model 'qwen9': choose from qwen3-30b-a3b"),
        (["qwen3-30b-a3b", "--router", "magic"], "unknown router 'magic'"),
        (["gpt-oss-120b", "--quant", "q4_k_m"], "no quantization 'q4_k_m': choose from mxfp4"),
        (["gpt-oss-120b", "--layers", "37"], "1 to 36 layers, not 37"),
        (["gpt-oss-120b", "--layers", "many"], "--layers"),
        (["gpt-oss-120b", "--mtp"], "gpt-oss-120b has no multi-token-prediction block"),
        (["gpt-oss-120b", "--zipf-s", "nan"], "zipf exponent"),
        (["gpt-oss-120b"], "the disk has 0.0 GiB free"),
    ],
)
def test_refuses_in_one_line(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = type(shutil.disk_usage(tmp_path))(1 << 30, 1 << 30, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(SystemExit) as stop:
        mm.main([*arguments, "--out", str(tmp_path / "m.gguf")])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert says in error
    assert not list(tmp_path.iterdir())


def test_keeps_an_existing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"mine")
    with pytest.raises(SystemExit) as stop:
        mm.main(["qwen3-30b-a3b", "--out", str(path)])
    assert stop.value.code == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_bytes() == b"mine"


def test_stopping_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, make = tmp_path / "m.gguf", mm.make_model
    partial = path.with_name("m.gguf.partial")
    partial.write_bytes(b"of a run that was killed")

    def stop(done: int, total: int) -> None:
        assert partial.exists()
        if done > total // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(mm, "make_model", lambda out, **_: make(out, layers=1, scale=64, progress=stop))
    assert mm.main(["qwen3-30b-a3b", "--out", str(path)]) == 130
    assert "nothing was left behind" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = shapes.SHAPES["gpt-oss-120b"]
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes.scaled(tiny, 64))
    path = tmp_path / "m.gguf"
    assert mm.main(["tiny", "--layers", "2", "--router", "zipf", "--out", str(path)]) == 0
    told = capsys.readouterr()
    assert told.err == ""  # no progress bar away from a terminal
    assert told.out.startswith(f"{path}: 2 layers, ")
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]
