"""An exported policy behind a plain vLLM server, by the line that the export says, is the policy of the run."""

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer

from loop_recipes.export.comparison import LogprobDifference, sampled_logprobs, stored_samples
from loop_recipes.export.policy import ExportConfig, config_of_run, export
from loop_recipes.paths import loop_package
from support import small_runs
from support.plain_server import plain_server

pytestmark = pytest.mark.integration
TEXT = "print(apis.spotify.login(username='joe@mail.com', password='x_1'))\n  # 1234"


def test_a_plain_server_gives_the_runs_logprobs_and_the_tokenizers_ids(tmp_path):
    config = OmegaConf.load(small_runs.replay_config(tmp_path, iterations=2))
    config.pop("checkpointer")
    config.model = {
        "path": str(loop_package("tiny_policy")),
        "lora_rank": 8,
        "lora_alpha": 16,
        "apply_lora_to_mlp": True,
    }
    config.model.lora_attn_modules = ["q_proj", "k_proj", "v_proj", "output_proj"]
    config.optimizer.lr = 0.02
    small_runs.train(config)
    run = tmp_path / "run"
    (tmp_path / "logs").rename(run / "collections")
    done = export(run, ExportConfig())
    samples = stored_samples(run, 8, 4096)
    policy, base = sampled_logprobs(config_of_run(run)[1], samples, done.folder)
    assert LogprobDifference.between(policy, base).most > 0.1, (
        "training changed nothing, so the comparison says nothing"
    )
    with plain_server(done.serve[0], tmp_path / "vllm.log") as server:
        served = server.logprobs(samples)
        apart = LogprobDifference.between(served, policy)
        print(f"served log-probs of {len(served)} tokens: {apart} from the run's")
        assert apart.most < 1e-3
        ids = server.ask("/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"]
        assert ids == Tokenizer.from_file(str(done.folder / "tokenizer.json")).encode(TEXT).ids
