"""The abilities that a pool's class has without a pool: AppWorld's has them, the counter's has none."""

from agent_environments.counter import CounterPool
from agent_environments.protocol import (
    PoolWithDifficulties,
    PoolWithFinalStates,
    PoolWithPackages,
    pool_class,
)


def test_the_counter_has_none_of_them():
    abilities = (PoolWithPackages, PoolWithDifficulties, PoolWithFinalStates)
    assert not any(isinstance(CounterPool, ability) for ability in abilities)


def test_appworld_has_all_of_them(tmp_path):
    pool = pool_class("appworld")
    assert isinstance(pool, PoolWithPackages)
    (tmp_path / "env/lib/python3.11/site-packages/appworld-0.1.3.dist-info").mkdir(parents=True)
    assert pool.packages({"python": str(tmp_path / "env/bin/python")}) == {"appworld": "0.1.3"}
    assert pool.packages({}) == {}
    assert isinstance(pool, PoolWithDifficulties)
    assert pool.difficulties({"root": str(tmp_path)}, ["a_1"]) == pool.difficulties({}, ["a_1"]) == {}
    assert isinstance(pool, PoolWithFinalStates)
    kept = pool.keeping_states({"root": "r"}, tmp_path)
    assert kept == {"root": "r", "keep_experiments": True, "experiments_root": str(tmp_path)}
