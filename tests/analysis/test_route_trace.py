"""The reader of route traces: what it yields, and one clear line for what it cannot read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from bmoe.analysis.route_trace import RoutedBatch, read_trace
from bmoe.analysis.table import TableError

SHARED = Path(__file__).parents[3] / "shared" / "data" / "route-traces"

HEAD = """# route_trace v1
# model=tiny.gguf arch=qwen3moe n_layer=2 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=100 dense_bytes=7
# layer=1 expert_bytes=200 dense_bytes=7
"""
ROWS = """turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,3,0.6,0,100
0,0,0,0,1,1,0.4,0,100
0,0,1,0,0,3,0.7,0,0
0,0,1,0,1,5,0.3,0,100
0,0,1,1,0,2,0.9,0,200
0,0,1,1,1,0,0.1,0,200
0,1,2,0,0,1,0.5,1,0
0,1,2,0,1,3,0.5,1,0
0,1,2,1,0,2,0.5,1,0
0,1,2,1,1,4,0.5,0,200
0,1,3,1,0,7,0.5,0,200
0,1,3,1,1,4,0.5,1,0
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_batches_are_a_layers_tokens_in_prefill_and_one_step_in_decode(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "tiny.route.csv", HEAD + ROWS))
    assert list(trace.batches()) == [
        RoutedBatch(0, 0, 0, 0, ((3, 1), (3, 5))),
        RoutedBatch(0, 0, 1, 1, ((2, 0),)),
        RoutedBatch(0, 1, 2, 0, ((1, 3),)),
        RoutedBatch(0, 1, 2, 1, ((2, 4),)),
        RoutedBatch(0, 1, 3, 1, ((7, 4),)),
    ]
    assert next(trace.batches()).distinct() == [3, 1, 5]
    assert [b.prefill for b in trace.batches()] == [True, True, False, False, False]
    assert (trace.name, len(trace), trace.n_expert) == ("tiny", 12, 8)
    assert dict(trace.expert_bytes) == {0: 100, 1: 200}
    assert trace.header["arch"] == "qwen3moe"
    assert trace.weights is not None
    assert trace.weights[:2].tolist() == [0.6, 0.4]
    assert trace.columns["residency"].tolist() == [0] * 6 + [1, 1, 1, 0, 0, 1]
    assert "dropped" not in trace.columns


def test_gzip_is_told_by_content_and_columns_by_name(tmp_path: Path) -> None:
    lines = ROWS.splitlines()
    mixed = "\n".join(",".join(["x" if i == 0 else "9", *line.split(",")[::-1]]) for i, line in enumerate(lines))
    packed = tmp_path / "any.name"
    packed.write_bytes(gzip.compress((HEAD + mixed + "\n# summary tok/s=1\n\n").encode()))
    plain = read_trace(write(tmp_path / "plain.gz", HEAD + ROWS))
    assert list(read_trace(packed).batches()) == list(plain.batches())


def test_a_trace_without_weights(tmp_path: Path) -> None:
    rows = "\n".join(",".join(line.split(",")[:6]) for line in ROWS.splitlines())
    trace = read_trace(write(tmp_path / "t.csv", HEAD + rows))
    assert trace.weights is None
    assert len(list(trace.batches())) == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no line of column names"),
        (HEAD, "no line of column names"),
        (HEAD + "a,b\n1,2\n", ":5: no column 'turn'"),
        (ROWS, "no line 'layer=N expert_bytes=N'"),
        (HEAD + ROWS.splitlines()[0], "no rows after line 5"),
        (HEAD + ROWS + "0,1,4,0\n", ":18: 4 fields where the header has 9"),
        (HEAD + ROWS + "0,1,4,0,0,x,0.5,0,0\n", ":18: expert 'x' is not a whole number"),
        (HEAD + ROWS + "0,1,4,0,0,-1,0.5,0,0\n", ":18: expert '-1' is not a whole number"),
        (HEAD + ROWS + "0,1,4,0,0,1,half,0,0\n", ":18: weight 'half' is not a number"),
        (HEAD + ROWS + "0,1,4,2,0,1,0.5,0,0\n", "rows of layer 2, which the preamble does not have"),
        (HEAD + ROWS + "0,1,4,0,0,8,0.5,0,0\n", "expert 8 of n_expert=8"),
        (HEAD + ROWS + "0,2,4,0,0,1,0.5,0,0\n", "phase 2 is neither 0 (prefill) nor 1 (decode)"),
        (HEAD.replace("expert_bytes=200", "x=1") + ROWS, ":4: the line of layer 1 has no expert_bytes"),
        (HEAD.replace("=200", "=0") + ROWS, ":4: expert_bytes of layer 1 is 0"),
        (HEAD.replace("=200", "=2k") + ROWS, ":4: expert_bytes '2k' is not a whole number"),
    ],
)
def test_what_is_no_trace_is_told_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", text)
    with pytest.raises(TableError) as e:
        read_trace(path)
    assert says in str(e.value)
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress((HEAD + ROWS).encode())[:-20])
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    for path, says in (
        (cut, "cut off"),
        (binary, "not a text file"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "directory"),
    ):
        with pytest.raises(TableError, match=says):
            read_trace(path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared traces are not here")
@pytest.mark.parametrize(
    ("name", "layers", "prompt", "steps", "top"),
    [("qwen", 48, 28, 128, 6), ("gptoss", 36, 85, 64, 2), ("gemma", 30, 29, 128, 6)],
)
def test_the_shared_traces(name: str, layers: int, prompt: int, steps: int, top: int) -> None:
    trace = read_trace(SHARED / f"{name}.route.csv.gz")
    batches = list(trace.batches())
    assert [b.layer for b in batches] == list(range(layers)) * (1 + steps)
    assert [b.prefill for b in batches] == [True] * layers + [False] * (layers * steps)
    assert {len(b.rows) for b in batches[: layers - 1]} == {prompt}
    assert {len(row) for b in batches for row in b.rows} == {top}
