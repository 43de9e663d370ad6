"""The token table on disk gives the rows that were written, whatever type holds them."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from triptych.core.table import open_table


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rows_come_back_as_f32_exactly(tmp_path: Path, dtype):
    rows = np.random.default_rng(0).standard_normal((10, 6)).astype(dtype)
    np.save(tmp_path / "table.npy", rows.view(np.uint16) if dtype is ml_dtypes.bfloat16 else rows)
    found = open_table(tmp_path / "table.npy")(np.array([3, 3, 0, 9], np.int32))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, rows.astype(np.float32)[[3, 3, 0, 9]])
