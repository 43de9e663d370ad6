"""The token table on disk gives the rows that were written, whatever type holds them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from triptych.core.table import open_table
from triptych.errors import BundleError


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rows_come_back_as_f32_exactly(tmp_path: Path, dtype):
    rows = np.random.default_rng(0).standard_normal((10, 6)).astype(dtype)
    np.save(tmp_path / "table.npy", rows.view(np.uint16) if dtype is ml_dtypes.bfloat16 else rows)
    found = open_table(tmp_path / "table.npy")(np.array([3, 3, 0, 9], np.int32))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, rows.astype(np.float32)[[3, 3, 0, 9]])


def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path):
    for content in (b"", b"not numpy's", b"\x93NUMPY\x01\x00"):
        (tmp_path / "table.npy").write_bytes(content)
        with pytest.raises(BundleError, match=r"table\.npy is no table of embeddings"):
            open_table(tmp_path / "table.npy")
