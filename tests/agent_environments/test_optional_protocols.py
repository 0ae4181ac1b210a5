"""The abilities that a pool's class has without a pool: AppWorld's has them, the counter's has none."""

from agent_environments.counter import CounterPool
from agent_environments.protocol import PoolWithDifficulties, PoolWithFinalStates, PoolWithPackages
from appworld_adapter.pool.forked import AppWorldPool as Pool


def test_appworld_has_all_of_them_and_the_counter_none(tmp_path):
    for ability in (PoolWithPackages, PoolWithDifficulties, PoolWithFinalStates):
        assert [isinstance(each, ability) for each in (Pool, CounterPool)] == [True, False]
    (tmp_path / "env/lib/python3.11/site-packages/appworld-0.1.3.dist-info").mkdir(parents=True)
    assert Pool.packages({"python": str(tmp_path / "env/bin/python")}) == {"appworld": "0.1.3"}
    assert Pool.packages({}) == Pool.difficulties({}, ["a_1"]) == Pool.difficulties({"root": tmp_path}, ["a_1"]) == {}
    kept = Pool.keeping_states({"root": "r"}, tmp_path)
    assert kept == {"root": "r", "keep_experiments": True, "experiments_root": str(tmp_path)}
