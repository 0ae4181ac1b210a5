"""What a run rests on is compared when it goes on: base model, initial adapter, dataset, tasks, grader."""

import json
import shutil

import pytest
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from agent_environments.description import Description
from loop_formats.ids import parse_collection_id
from loop_formats.run_files import to_json
from loop_formats.schema import ConfigError
from loop_recipes.engine.checkpoint import load_latest
from loop_recipes.rollouts.plan import CollectionPlan
from loop_recipes.rollouts.replay_source import ReplaySource
from loop_recipes.rollouts.source import NoRollouts
from support.random_policy import write_adapter, write_model
from support.small_runs import on_source, replay_config, sft_config, train, train_sft_into

pytestmark = pytest.mark.fault("a resumed run on another model or grader")


def edit_weights(folder, name=None):
    """Change one tensor of a model or of an adapter."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    tensors[name or sorted(tensors)[-1]] += 0.25
    save_file(tensors, file, metadata={"format": "pt"})


def describe(folder, **identity):
    described = {"name": "made-up", "identity": identity}
    (folder / "logs/environment.json").write_text(to_json(described))


def other_weights(folder):
    write_model(folder / "base", seed=9)


def one_tensor(folder):
    edit_weights(folder / "base", "model.layers.1.self_attn.k_proj.weight")


def moved_link(folder):
    write_model(folder / "new", seed=9)
    (folder / "base").rename(folder / "old")
    (folder / "base").symlink_to("new")


def tokenizer(folder):
    file = folder / "base/tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "{{ messages }}"}))


def adapter(folder):
    edit_weights(folder / "adapter")


def code(folder):
    describe(folder, code="2", tasks="1")


def tasks(folder):
    describe(folder, code="1", tasks="2")


def no_more_said(folder):
    describe(folder, code="1")


def dataset(folder):
    for log in (folder / "logs").glob("*.jsonl"):
        log.write_text(log.read_text().replace('"made-up"', '"other"'))


CHANGES = {
    other_weights: "base model",
    one_tensor: "base model",
    moved_link: "base model",
    tokenizer: "base model",
    adapter: "initial adapter",
    code: "code",
    tasks: "tasks",
    no_more_said: "tasks",
    dataset: "dataset",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of one iteration, of a model and an adapter in the same folder."""
    folder = tmp_path_factory.mktemp("begun")
    cfg = OmegaConf.load(replay_config(folder, iterations=2))
    write_adapter(folder / "adapter", 0)
    describe(folder, code="1", tasks="1")
    cfg.initial_adapter = str(folder / "adapter")
    OmegaConf.save(cfg, folder / "config.yaml")
    train(OmegaConf.merge(cfg, {"max_iterations": 1}))
    return folder


def copied(begun, tmp_path):
    """A copy of the run in another place, to go on with."""
    shutil.copytree(begun, tmp_path / "run_of_all")
    text = (begun / "config.yaml").read_text().replace(str(begun), str(tmp_path / "run_of_all"))
    return tmp_path / "run_of_all", OmegaConf.merge(OmegaConf.create(text), {"resume_from_checkpoint": True})


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_refused_in_one_line_before_anything_is_loaded(begun, tmp_path, monkeypatch, change):
    folder, cfg = copied(begun, tmp_path)
    change(folder)
    if change not in (code, tasks, no_more_said, dataset):
        monkeypatch.setattr(
            "loop_recipes.algorithm.training_recipe.load_base", lambda *_: pytest.fail("the weights are loaded")
        )
    with pytest.raises(
        ConfigError, match=f"has changed since its checkpoint: {CHANGES[change]}; .*accept_changes=True"
    ):
        train(cfg)


def test_what_is_as_it_was_goes_on_wherever_it_lies(begun, tmp_path):
    folder, cfg = copied(begun, tmp_path)
    (folder / "base").rename(folder / "real")
    (folder / "base").symlink_to("real")
    train(cfg)
    assert load_latest(folder / "run/checkpoints").state["iteration"] == 2


def test_a_change_may_be_gone_on_with_knowingly(begun, tmp_path, caplog):
    folder, cfg = copied(begun, tmp_path)
    code(folder)
    train(OmegaConf.merge(cfg, {"accept_changes": True}))
    assert "going on though these have changed since the checkpoint: code" in caplog.text
    state = load_latest(folder / "run/checkpoints").state
    assert (state["iteration"], state["fingerprint"]["environment"]["code"]) == (2, "2")


def test_supervised_training_compares_its_model_too(tmp_path):
    file = tmp_path / "sft.yaml"
    OmegaConf.save(sft_config(tmp_path, max_iterations=1, resume_from_checkpoint=True), file)
    train_sft_into(file, tmp_path / "run")
    edit_weights(tmp_path / "base")
    with pytest.raises(ConfigError, match="has changed since its checkpoint: base model; "):
        train_sft_into(file, tmp_path / "run")


def test_what_was_asked_for_of_another_grader_is_asked_for_anew(begun):
    """The node has rollouts of the old one under the old id, and would give them again."""
    from loop_recipes.config.loop_config import LoopConfig, read_config

    conf = read_config(OmegaConf.load(begun / "config.yaml"), LoopConfig)
    plans = [
        CollectionPlan(conf, "run", ["a", "b", "c"], [], Description(), {"code": code}) for code in ("1", "1", "2")
    ]
    asked = [plan.training(1, 0, "adapter") for plan in plans]
    assert asked[0] == asked[1]
    assert asked[0].id != asked[2].id
    renamed = plans[2].anew(asked[0])
    assert renamed.id.startswith("run-i0001-")
    assert renamed.id not in (asked[0].id, asked[2].id)
    assert renamed.tasks == asked[0].tasks


def test_a_node_that_is_started_again_on_another_grader_ends_the_run(tmp_path, monkeypatch):
    """Between two iterations, where the node is a program of its own."""
    from support.small_runs import write_logs

    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2))
    describe(tmp_path, code="1")
    source = ReplaySource(write_logs(tmp_path / "logs", 2, cfg.model.vocab_size))
    read = source.read

    def restarted_before_the_second(request, *_):
        describe(tmp_path, code=str(parse_collection_id(request.id).iteration))
        return read(request)

    source.read = restarted_before_the_second
    on_source(monkeypatch, cfg, source)
    cfg.sampler_gap = {"ok": 99.0, "broken": 100.0}
    with pytest.raises(NoRollouts, match="the rollout node has another code than when the run began or was resumed"):
        train(cfg)
    assert load_latest(tmp_path / "run/checkpoints").state["iteration"] == 1, "what was graded before is kept"
