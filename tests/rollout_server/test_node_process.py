"""A rollout node as a child: what is said of one that ended."""

import sys

import pytest

from rollout_server.config import EnvironmentConfig, ModelConfig, NodeConfig
from rollout_server.node_process import NodeDied, NodeProcess


def test_a_node_that_died_is_not_explained_by_what_an_earlier_one_said(tmp_path, monkeypatch):
    config = NodeConfig(str(tmp_path / "node"), ModelConfig("model"), EnvironmentConfig("counter"))
    process = NodeProcess(config, tmp_path, "secret")
    process.log_path.write_text("rollout-server: cannot listen on 127.0.0.1:8700: choose another port\n")
    program = tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))
    for words, said in (("no such module", "no such module"), ("rollout-server: no GPU", ": no GPU (log: ")):
        program.write_text(f"#!/bin/sh\necho '{words}'\nexit 3\n")
        program.chmod(0o755)
        with pytest.raises(NodeDied, match="ended with status 3") as died:
            process.start()
        assert said in str(died.value)
        assert "choose another port" not in str(died.value)
