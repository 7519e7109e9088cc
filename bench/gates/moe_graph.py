"""Expert matmuls with routes of ours: a graph of ggml as llama.cpp builds it, without a model or a router.

`MoeGraph` is a stack of layers, each `down(gate(x))` and `up(x)` by MUL_MAT_ID over random weights in a file. It runs
twice on the same weights: as ggml computes it, or through a `Streamer` that plans each layer, reads what is missing
and computes from slots. The experts that a layer routes are what `route` was given.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.reference import Tensor
from bmoe.host._memory import Region
from bmoe.llama import library
from bmoe.streamer import ALIGNMENT, ExpertCache, Lanes, Streamer

F32, I32 = 0, 26
TYPES = {"F32": 0, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
N_RING = 12
_ON_NODE = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


class _Init(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Plan(ctypes.Structure):
    """ggml_cplan."""

    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort", ctypes.c_void_p),
        ("abort_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


def _bind() -> Any:
    library.check()
    lib = ctypes.CDLL(os.path.realpath(library.C._lib._name))
    p, i, n = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (p, [_Init]),
        "ggml_free": (None, [p]),
        "ggml_new_tensor_3d": (p, [p, ctypes.c_int, i, i, i]),
        "ggml_new_tensor_2d": (p, [p, ctypes.c_int, i, i]),
        "ggml_mul_mat_id": (p, [p, p, p, p]),
        "ggml_new_graph": (p, [p]),
        "ggml_build_forward_expand": (None, [p, p]),
        "ggml_graph_n_nodes": (ctypes.c_int, [p]),
        "ggml_graph_node": (p, [p, ctypes.c_int]),
        "ggml_graph_plan": (_Plan, [p, ctypes.c_int, p]),
        "ggml_graph_compute": (ctypes.c_int, [p, ctypes.POINTER(_Plan)]),
        "ggml_quantize_chunk": (n, [ctypes.c_int, p, p, i, i, i, p]),
        "ggml_row_size": (n, [ctypes.c_int, i]),
        "ggml_quantize_init": (None, [ctypes.c_int]),
    }
    for name, (result, args) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, args
    return lib


class _Layers:
    """Tensors and nodes of all layers in one ggml context, and how to run them."""

    def __init__(self, lib: Any, graph: MoeGraph) -> None:
        self.lib, self.shape = lib, graph
        self.context = lib.ggml_init(_Init(64 << 20, None, False))
        self.weights: list[list[int]] = []
        self.ids: list[npt.NDArray[np.int32]] = []
        self.out: list[npt.NDArray[np.float32]] = []
        # As large as ggml's default, 2048 nodes.
        self.graph = lib.ggml_new_graph(self.context)
        x = lib.ggml_new_tensor_3d(self.context, F32, graph.n_embd, 1, graph.n_tok)
        values = np.random.default_rng(7).standard_normal(graph.n_embd * graph.n_tok, np.float32)
        _view(x, np.float32, len(values))[:] = values
        for _ in range(graph.n_layers):
            # Weights have a place of their own: what ggml sets aside here for them is one expert's.
            gate, up, down = (
                lib.ggml_new_tensor_3d(self.context, TYPES[graph.quant], cols, rows, 1)
                for cols, rows in graph.part_shapes
            )
            for t in (gate, up, down):
                head = Tensor.from_address(t)
                head.ne[2] = graph.n_expert
                head.nb[3] = head.nb[2] * graph.n_expert
            ids = lib.ggml_new_tensor_2d(self.context, I32, graph.k, graph.n_tok)
            a = lib.ggml_mul_mat_id(self.context, gate, x, ids)
            b = lib.ggml_mul_mat_id(self.context, up, x, ids)
            c = lib.ggml_mul_mat_id(self.context, down, a, ids)
            for node in (a, b, c):
                lib.ggml_build_forward_expand(self.graph, node)
            self.weights.append([gate, up, down])
            self.ids.append(_view(ids, np.int32, graph.k * graph.n_tok).reshape(graph.n_tok, graph.k))
            self.out += [
                _view(b, np.float32, graph.n_ff * graph.k * graph.n_tok),
                _view(c, np.float32, graph.n_embd * graph.k * graph.n_tok),
            ]
        self.nodes = [lib.ggml_graph_node(self.graph, i) for i in range(lib.ggml_graph_n_nodes(self.graph))]

    def prepare(self) -> None:
        """Makes ggml's plan: work buffer and threads."""
        self.plan = self.lib.ggml_graph_plan(self.graph, self.shape.n_threads, None)
        self.work = np.empty(self.plan.work_size + 64, np.uint8)
        self.plan.work_data = self.work.ctypes.data

    def compute(self) -> int:
        """Runs it; nanoseconds."""
        started = perf_counter_ns()
        code = self.lib.ggml_graph_compute(self.graph, ctypes.byref(self.plan))
        took = perf_counter_ns() - started
        if code:
            raise RuntimeError(f"ggml_graph_compute: {code}")
        return took

    def route(self, experts: npt.NDArray[np.int32]) -> None:
        for layer, ids in enumerate(self.ids):
            ids[:] = experts[layer]

    def close(self) -> None:
        self.lib.ggml_free(self.context)


def _view(tensor: int, dtype: Any, n: int) -> Any:
    size = n * np.dtype(dtype).itemsize
    buffer = (ctypes.c_char * size).from_address(Tensor.from_address(tensor).data)
    return np.frombuffer(buffer, dtype)


class MoeGraph:
    """See above; a context manager. `path`: the file of weights, written here. `n_slots`: of the cache.

    `resident` and `streamed` route `experts`, int32 [layers, tokens, k], run all layers and return the nanoseconds
    of the graph. `outputs` are the results of either.
    """

    def __init__(
        self,
        path: Path,
        *,
        quant: str = "Q4_K",
        n_layers: int = 2,
        n_expert: int = 16,
        k: int = 4,
        n_tok: int = 1,
        n_embd: int = 256,
        n_ff: int = 256,
        n_slots: int = 16,
        n_threads: int = 1,
        n_lanes: int = 2,
        overlap: bool = True,
        policy: str = "lru",
        direct: bool = True,
    ) -> None:
        self.quant, self.n_layers, self.n_expert, self.k, self.n_tok = quant, n_layers, n_expert, k, n_tok
        self.n_embd, self.n_ff, self.n_threads = n_embd, n_ff, n_threads
        self.part_shapes = [(n_embd, n_ff), (n_embd, n_ff), (n_ff, n_embd)]
        self._stack = ExitStack()
        lib = _bind()
        self._write(lib, path)
        self.plain, self.hooked = _Layers(lib, self), _Layers(lib, self)
        self._stack.callback(self.plain.close)
        self._stack.callback(self.hooked.close)
        # As large as a direct read may bring them in.
        areas = [(n + 2 * ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT for n in self.part_bytes]
        stride = sum(areas)
        self.memory = Region(n_slots * stride + N_RING * max(areas), huge=False)
        self._stack.callback(self.memory.close)
        self.memory.populate(0, self.memory.size)
        self.lanes = Lanes([os.fspath(path)], n_lanes, direct)
        self._stack.callback(self.lanes.close)
        specs: list[tuple[list[tuple[int, int, int, int, int]], int]] = []
        at = 0
        for layer in range(n_layers):
            parts, area = [], 0
            for part, nbytes in enumerate(self.part_bytes):
                Tensor.from_address(self.plain.weights[layer][part]).data = self.data.ctypes.data + at
                parts.append((self.hooked.weights[layer][part], 0, at, nbytes, area))
                at += nbytes * n_expert
                area += areas[part]
            specs.append((parts, n_expert))
        self.streamer = Streamer(self.lanes, specs, n_threads, overlap)
        self._stack.callback(self.streamer.close)
        self._stack.callback(self.lanes.close)
        self.cache = ExpertCache([n_expert] * n_layers, [0] * n_layers, [n_slots], policy, k)
        self.streamer.start(
            self.cache,
            [(self.memory.address, n_slots, 0, stride)],
            [0] * n_layers,
            [max(1, n_slots // n_layers)] * n_layers,
            N_RING,
            self.memory.address + n_slots * stride,
            max(areas),
        )
        self._hook = _ON_NODE(self.streamer.callback)
        self._mark()
        self.plain.prepare()
        self.hooked.prepare()

    def _write(self, lib: Any, path: Path) -> None:
        rng = np.random.default_rng(5)
        qtype, pieces = TYPES[self.quant], []
        self.part_bytes = []
        for cols, rows in self.part_shapes:
            self.part_bytes.append(lib.ggml_row_size(qtype, cols) * rows)
        lib.ggml_quantize_init(qtype)
        for _ in range(self.n_layers):
            for (cols, rows), nbytes in zip(self.part_shapes, self.part_bytes, strict=True):
                values = rng.standard_normal((self.n_expert * rows, cols), np.float32) / np.float32(np.sqrt(cols))
                if self.quant == "F32":
                    pieces.append(values.view(np.uint8).ravel())
                    continue
                out = np.empty(nbytes * self.n_expert, np.uint8)
                lib.ggml_quantize_chunk(qtype, values.ctypes.data, out.ctypes.data, 0, len(values), cols, None)
                pieces.append(out)
        self.data = np.concatenate(pieces)
        path.write_bytes(self.data.tobytes())

    def _mark(self) -> None:
        # What llama.cpp's scheduler does before it runs a graph.
        for node in self.hooked.nodes:
            self._hook(node, True, self.streamer.userdata)

    def resident(self, experts: npt.NDArray[np.int32]) -> int:
        self.plain.route(experts)
        return self.plain.compute()

    def streamed(self, experts: npt.NDArray[np.int32]) -> int:
        self.hooked.route(experts)
        self._mark()
        took = self.hooked.compute()
        self.lanes.raise_failure()
        return took

    def outputs(self) -> tuple[list[npt.NDArray[np.float32]], list[npt.NDArray[np.float32]]]:
        """Copies of what the last `resident` and the last `streamed` have computed."""
        return [o.copy() for o in self.plain.out], [o.copy() for o in self.hooked.out]

    def fill(self, order: Sequence[int] | None = None) -> None:
        """Routes every expert once, so that a cache with a slot for each has all of them."""
        experts = list(order or range(self.n_expert))
        for at in range(0, self.n_expert, self.k):
            row = [experts[(at + i) % self.n_expert] for i in range(self.k)]
            self.streamed(np.tile(np.array(row, np.int32), (self.n_layers, self.n_tok, 1)))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> MoeGraph:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
