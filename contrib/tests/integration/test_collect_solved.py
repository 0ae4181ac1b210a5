"""`loop method solved` on a real rollout node: what it solved, and a second start that samples nothing anew."""

import pytest

from loop_contrib.rft.collect_solved import main
from loop_formats.run_files import find_logs, read_rollouts
from support.small_runs import launched_node, replay_config

pytestmark = pytest.mark.integration


def test_what_was_sampled_is_found_again(tmp_path, shared_vllm, capsys):
    """Each start launches a node of its own, on the server that the tests share, whose policy has the same shape."""
    config = replay_config(tmp_path, iterations=1, **launched_node({"name": "counter"}, max_num_seqs=16))
    command = [str(config), f"node.servers.urls=[{shared_vllm.url}]"]
    command += ["--temperatures", "0.5", "1.0", "--attempts", "2"]

    def collect() -> str:
        status = main(command)
        output = capsys.readouterr()
        assert status == 0, output.err[-2000:]
        return output.out

    first = collect()
    logs = {log.name: log.read_bytes() for log in find_logs(tmp_path / "run/node")}
    sampled = [rollout for log in find_logs(tmp_path / "run/node") for rollout in read_rollouts(log)]
    assert {rollout.temperature for rollout in sampled} == {0.5, 1.0}
    assert len({rollout.collection_id for rollout in sampled}) == 4
    solved = [rollout for log in find_logs(tmp_path / "run/solved") for rollout in read_rollouts(log)]
    assert solved == [rollout for rollout in sampled if rollout.reward >= 1.0]
    assert f"{len(solved)} rollouts solved" in first
    assert collect() == first
    assert {log.name: log.read_bytes() for log in find_logs(tmp_path / "run/node")} == logs, "nothing was sampled anew"
