"""Blocks of documentation about estimators run: Horovod's, in `seeds`, and those of this project."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import estimator_seeds
import pytest

RANKS = 2
PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "SPARK_ESTIMATORS.md"
# A block, and what it prints.
BLOCK = re.compile(r"test_estimator_seeds.py runs this block -->\n```python\n(.*?)```\n\nIt prints `(.*?)`", re.DOTALL)


def test_blocks_of_the_page_print_what_it_states(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert len(blocks) == 2
    for text, expected in blocks:
        exec(compile(text, PAGE, "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.strip() == expected


def test_the_blocks_of_horovods_documentation_run(spark: Any, tmp_path: pathlib.Path) -> None:
    names = estimator_seeds.namespace(spark, tmp_path)
    estimator_seeds.run(names, "estimator", ranks=RANKS)
    rows = names["predict_df"].collect()
    assert len(rows) == 4
    assert all(0 < row["predict"] < 1 for row in rows)
    # The data sets of this block are there once `prepare_data` has written them.
    estimator_seeds.run(names, "prepared", "parquet", "parquet_model", ranks=RANKS)
    assert names["pred"].shape == (1, 1)
    estimator_seeds.run(names, "databricks", ranks=RANKS)
    assert type(names["store"]).__name__ == "DBFSLocalStore"
