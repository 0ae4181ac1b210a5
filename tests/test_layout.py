"""Tests are found by name: ``a/b.py`` is tested by ``tests/a/test_b.py``, or :data:`ELSEWHERE` says by which file."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = {
    "loop_recipes": ROOT / "recipes" / "loop_recipes",
    "loop_formats": ROOT / "loop_formats",
    "model_families": ROOT / "model_families",
    "rollout_server": ROOT / "rollout_server",
    "agent_environments": ROOT / "agent_environments",
    "appworld_adapter": ROOT / "appworld_adapter",
}
OTHER_INTERPRETERS = ("appworld_adapter/worker/", "agent_environments/worlds/workers/", "agent_environments/sandbox/")
ELSEWHERE = {
    "agent_environments/colbench/test_grader.py": ["agent_environments/colbench/run_calls"],
    "agent_environments/harness/test_pool.py": ["agent_environments/program_protocol"],
    "agent_environments/colbench/test_pool.py": ["agent_environments/colbench/expert"],
    "agent_environments/services/test_server.py": [
        "agent_environments/services/cli",
        "agent_environments/services/service_pool",
    ],
    "agent_environments/worlds/test_pool.py": [
        "agent_environments/remote/line",
        "agent_environments/worlds/worker_process",
    ],
    "loop_recipes/test_cli.py": ["config/arguments"],
    "loop_recipes/methods/test_ground_truth.py": ["rollouts/scripted"],
    "loop_recipes/methods/sweet_rl/test_rank_turns.py": ["methods/sweet_rl/turn_candidates"],
    "loop_recipes/rollouts/test_several_nodes.py": ["rollouts/node_source"],
    "loop_recipes/methods/turn_credit/test_turn_values.py": ["methods/turn_credit/turn_values_cli"],
    "loop_recipes/config/test_loop_config.py": [
        "config/command_line",
        "config/components",
        "config/preflight",
        "config/resolvers",
        "config/rollout_node",
    ],
    "loop_recipes/evaluation/test_endpoint.py": ["evaluation/endpoint_speaker"],
    "loop_recipes/evaluation/test_scores.py": ["evaluation/comparison", "evaluation/compare_cli"],
    "recipes/test_sft_appworld.py": ["rollouts/fixed_set", "config/sft_config", "methods/sweet_rl/stored_critic"],
    "recipes/test_eval_appworld.py": [
        "rollouts/open",
        "evaluation/config",
    ],
    "loop_recipes/launch/test_job_check.py": ["launch/check_cli"],
    "integration/test_collect_solved.py": ["methods/rft/collect_solved"],
    "recipes/test_dpo_mcts.py": ["methods/dpo_mcts/search_trees"],
    "loop_recipes/engine/test_checkpoint.py": [
        "engine/adapter_versions",
        "algorithm/lr_schedules",
        "engine/optimizer",
    ],
    "integration/test_cce_kernels.py": ["engine/cce_kernels"],
    "loop_recipes/algorithm/test_policy_update.py": ["algorithm/learner", "engine/model"],
    "loop_recipes/methods/sweet_rl/test_turn_critic.py": [
        "agent_environments/hidden_information",
    ],
    "integration/test_learner_ranks.py": ["engine/packed_attention", "engine/sequence_parallel"],
    "integration/test_recipe_ranks.py": ["rollouts/shared_source", "engine/process_group"],
    "integration/test_recipe_loop.py": ["run/stop_request"],
    "integration/test_packaging.py": ["paths"],
    "loop_recipes/plots/test_curves.py": ["plots/style"],
    "loop_recipes/viewer/test_viewer.py": ["viewer/app", "viewer/cli", "viewer/export", "viewer/run_data"],
    "loop_recipes/warm_start/test_tiny_policy.py": [
        "warm_start/appworld",
        "warm_start/batches",
        "warm_start/demonstration",
        "warm_start/tiny_model",
        "warm_start/tiny_tokenizer",
    ],
    "integration/test_warm_start.py": ["warm_start/config"],
    "loop_recipes/warm_start/test_expert.py": ["warm_start/demonstrators"],
    "rollout_server/test_app.py": ["rollout_server/display", "rollout_server/metrics"],
    "rollout_server/test_node.py": ["rollout_server/collecting/run", "loop_formats/collection_request"],
    "rollout_server/collecting/test_episode.py": ["rollout_server/collecting/attempt"],
    "rollout_server/collecting/test_policy_speaker.py": [
        "rollout_server/collecting/policy_sampler",
        "rollout_server/collecting/speaker",
    ],
    "rollout_server/endpoint/test_harness_episode.py": ["agent_environments/harness/chat_agent"],
    "rollout_server/endpoint/test_routes.py": [
        "rollout_server/endpoint/dialects/chat",
        "rollout_server/endpoint/dialects/dialect",
        "rollout_server/endpoint/serving",
        "rollout_server/endpoint/session",
        "rollout_server/endpoint/sessions",
        "rollout_server/endpoint/wire",
    ],
    "loop_formats/test_schema.py": ["rollout_server/config"],
    "model_families/test_family.py": [f"model_families/{name}" for name in ("llama", "mistral", "qwen2", "qwen3")],
    "model_families/decoder/test_builder.py": ["model_families/decoder/attention", "model_families/decoder/rope"],
    "rollout_server/inference/test_server.py": ["rollout_server/inference/server_group"],
    "rollout_server/policies/test_store.py": ["rollout_server/policies/folder", "rollout_server/policies/placement"],
    "agent_environments/test_counter.py": ["agent_environments/protocol"],
    "agent_environments/tools/test_environment.py": [
        "agent_environments/tools/answer",
        "agent_environments/tools/deadline",
        "agent_environments/tools/tool",
    ],
    "agent_environments/tools/test_instances.py": [
        "agent_environments/fork_server",
        "agent_environments/forked_process",
        "agent_environments/tools/forked",
    ],
    "agent_environments/tools/test_module.py": ["agent_environments/tools/reward", "agent_environments/tools/tasks"],
    "appworld_adapter/worker/test_synthetic_world.py": ["appworld_adapter/flaws"],
    "model_families/chat/test_chatml.py": ["model_families/chat/tokenizer"],
    "model_families/chat/test_rendered.py": ["model_families/chat/control", "model_families/chat/format"],
    "integration/test_adapter_pool.py": ["appworld_adapter/pool/base"],
    "integration/test_cpu_lora.py": ["rollout_server/inference/cpu_lora"],
    "appworld_adapter/pool/test_forked.py": ["appworld_adapter/pool/bubblewrap"],
}
"""File below tests/ -> the modules that it tests too, in a whole or with real parts; wings are of loop_recipes."""
WHERE = {
    (name if name.startswith(tuple(ROOTS)) else f"loop_recipes/{name}") + ".py": tests
    for tests, names in ELSEWHERE.items()
    for name in names
}


def modules() -> list[str]:
    """``package/path.py`` of all modules but those that run under another interpreter."""
    found = []
    for package, folder in ROOTS.items():
        for file in sorted(folder.rglob("*.py")):
            name = f"{package}/{file.relative_to(folder)}"
            if file.name != "__init__.py" and not name.startswith(OTHER_INTERPRETERS):
                found.append(name)
    return found


@pytest.mark.parametrize("module", modules())
def test_a_modules_tests_are_found_by_its_name(module):
    own = ROOT / "tests" / Path(module).parent / f"test_{Path(module).name}"
    if module in WHERE:
        assert not own.exists(), f"{own.name} exists: take {module} out of ELSEWHERE"
        assert (ROOT / "tests" / WHERE[module]).is_file()
    else:
        assert own.is_file(), f"no {own.relative_to(ROOT)}; write it, or say in ELSEWHERE where {module} is tested"


def test_nothing_is_listed_that_is_gone():
    assert set(WHERE) <= set(modules())
