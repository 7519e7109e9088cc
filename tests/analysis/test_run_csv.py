"""The reader of a run's CSV: what was written is read, and a file that is cut off up to there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_files import row, steady, write_run

from bmoe.analysis.run_csv import read_run
from bmoe.analysis.table import TableError


def test_what_was_written_is_read(tmp_path: Path) -> None:
    rows = [row(0, 9.5), row(1, 2.0, tight_usage_mib=None), row(2, 4.0)]
    got = read_run(write_run(tmp_path / "a.csv", rows, cache_mb="20"))
    assert got.columns["wall_ms"].tolist() == [9.5, 2.0, 4.0]
    assert np.isnan(got.columns["tight_usage_mib"]).tolist() == [False, True, False]
    assert got.decode.tolist() == [False, True, True]
    assert got.config == {"overlap": True, "cache_mb": "20"}
    assert (got.summary, got.notes) == ({"stop": "length"}, [])


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    """Wherever it is cut, it is read up to there with notes, or refused with one line."""
    path = write_run(tmp_path / "a.csv", steady(6, 3.0))
    whole = path.read_bytes()
    head = whole.index(b"\n0,") + 1
    first = whole.index(b"\n", head) + 1
    for at in [*range(0, head, 41), *range(head, len(whole), 7), len(whole)]:
        path.write_bytes(whole[:at])
        if at < first - 1:
            with pytest.raises(TableError) as e:
                read_run(path)
            assert str(e.value).startswith(str(path))
            assert "\n" not in str(e.value)
        elif at == first - 1:
            continue  # a whole row that only lacks its line break
        else:
            got = read_run(path)
            rows = whole[head:at].count(b"\n") - whole[head:at].count(b"# summary ")
            assert len(got) in (rows, rows + 1)
            assert any("no summary" in note for note in got.notes) == (got.summary is None) == (at < len(whole))
