"""The table behind the monitor's figure: what it holds, that it is repeatable, how it is stored."""

import numpy as np
import pytest

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.battery import Budget
from dflash2_lab.monitor_paths import main, monitor_paths
from dflash2_lab.results import read_results

SMALL = {"num_tokens": 512, "num_runs": 3}


@pytest.fixture(scope="module")
def paths():
    return monitor_paths(("correct", "q-unary-only"), **SMALL)


def test_a_row_for_each_decoder_run_and_size_up_to_all_tokens(paths):
    assert list(paths) == ["decoder", "run", "tokens", "log_e", "stopped_at", "log_level"]
    sizes = paths.groupby(["decoder", "run"])["tokens"].apply(list)
    assert len(sizes) == 2 * 3
    assert all(size == sizes.iloc[0] for size in sizes)
    assert (sizes.iloc[0][0], sizes.iloc[0][-1]) == (8, 512)
    assert (np.diff(sizes.iloc[0]) > 0).all()


def test_a_fault_is_stopped_where_its_evidence_passes_the_level_and_a_right_decoder_is_not(paths):
    level = -np.log(Budget().level("monitor"))
    assert (paths["log_level"] == level).all()
    right = paths[paths["decoder"] == "correct"]
    assert (right["stopped_at"] == 0).all()
    for _, run in paths[paths["decoder"] == "q-unary-only"].groupby("run"):
        stopped = run["stopped_at"].iloc[0]
        assert 0 < stopped <= 512
        over = run.loc[run["log_e"] >= level, "tokens"]
        assert stopped <= over.min()


def test_the_same_seed_gives_the_same_table_and_another_seed_another(paths):
    assert monitor_paths(("correct", "q-unary-only"), **SMALL).equals(paths)
    other = monitor_paths(("correct",), **SMALL, seed=1)
    assert not other["log_e"].equals(paths.loc[paths["decoder"] == "correct", "log_e"])


def test_an_unknown_decoder_is_an_error():
    with pytest.raises(LabError, match="fault: found 'nobody'"):
        monitor_paths(("nobody",), **SMALL)


def test_the_command_leaves_a_run_that_reads_back(tmp_path, monkeypatch, paths):
    monkeypatch.setattr("dflash2_lab.monitor_paths.monitor_paths", lambda seed: paths)
    main([str(tmp_path), "--seed", "3"])
    found = read_results(tmp_path)
    assert found.values.equals(paths)
    assert (found.info["seed"], found.info["complete"]) == (3, True)
