"""The reader of tables: what it takes, and that each kind of damage is told with its line."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import pytest

from bmoe.analysis.table import Table, TableError, integer, number, whole_numbers

TEXT = "# a=1\n\n# b=2\nn, x,text\n1,0.5,one\n# a comment\n\n2,,\n"


def table(path: Path, text: str | bytes, **settings: str) -> Table:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Table(path, "a table", **settings)


def two_columns(t: Table) -> dict[str, list[int]]:
    t.need(["n", "x"])
    return t.columns({"n": whole_numbers(), "x": integer})


@pytest.mark.parametrize("pack", [str.encode, lambda text: gzip.compress(text.encode())], ids=["plain", "gzip"])
def test_what_is_there_is_read(tmp_path: Path, pack) -> None:  # type: ignore[no-untyped-def]
    t = table(tmp_path / "t", pack(TEXT))
    assert list(t.preamble()) == [(1, "# a=1"), (2, ""), (3, "# b=2")]
    t.need(["text", "n"])
    got = t.columns({"x": number, "n": whole_numbers(), "text": str})
    assert (got["n"], got["text"], got["x"][0]) == ([1, 2], ["one", ""], 0.5)
    assert math.isnan(got["x"][1])
    assert list(t.comments()) == [(6, "# a comment")]
    assert t.ended
    assert not table(tmp_path / "t", TEXT.rstrip()).ended


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("# a=1\n", ": no line of column names: not a table, or cut off"),
        ("n,text\n1,2\n", ":1: no column 'x': not a table (columns n, text)"),
        ("n,x,x\n1,2,3\n", ":1: more than one column 'x': not a table"),
        ("n,x\n", ": no rows after line 1"),
        ("n,x\n1,2\n# c\n3\n", ":4: bad row: 1 fields where the header has 2 (cut off?)"),
        ("n,x\n1,2\n3,4,5\n", ":3: bad row: 3 fields where the header has 2"),
        ("n,x\n1,2\n-3,4\n", ":3: bad row: n '-3' is not a whole number in range"),
        ("n,x\n1,2\n2147483648,4\n", ":3: bad row: n '2147483648' is not a whole number in range"),
        ("n,x\n1,2\n3,4.5\n", ":3: bad row: x '4.5' is not a whole number"),
    ],
)
def test_damage_is_told(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t"
    with pytest.raises(TableError) as e:
        two_columns(table(path, text, row_fault="bad row: "))
    assert str(e.value).startswith(f"{path}{says}")


def test_more_numbers_than_are_kept(tmp_path: Path) -> None:
    values = list(range(40_000))
    assert table(tmp_path / "t", "n\n" + "\n".join(map(str, values))).columns({"n": whole_numbers()})["n"] == values
