"""`loop check`: what it says of jobs that can run, and of those that cannot."""

import itertools
import re

import pytest

from loop_recipes.config.files import compose
from loop_recipes.engine.model import meta_model
from loop_recipes.paths import loop_package
from loop_recipes.plan import job_check, job_memory
from loop_recipes.plan.layer_memory import layer_bytes
from loop_recipes.plan.report import Report
from loop_recipes.verbs.check import main
from model_families.base_model import BaseModel
from rollout_server.config import ModelConfig
from rollout_server.inference import command
from support.configs import files_read_once  # noqa: F401 - a fixture for all tests here
from support.families import PUBLISHED, PUBLISHED_GENERAL, write_config, write_headers
from support.small_runs import replay_config
from support.texts import texts_beside

TABLES = texts_beside(__file__)

TINY = {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e8, "max_position_embeddings": 4096}
TINY |= {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 384, "vocab_size": 783}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
LONG = {"max_position_embeddings": 131_072}
FOLDERS = {  # config.json, and the number of files of weights
    "tiny": (TINY, 1),
    "1_5b": (PUBLISHED["Qwen2.5-1.5B"] | LONG, 1),
    "7b": (PUBLISHED["Qwen2.5-7B"] | LONG, 4),
    "32b": (PUBLISHED["Qwen2.5-32B"] | LONG, 17),
    "smollm2": (PUBLISHED["SmolLM2-135M"], 1),
    "qwen3_4b": (PUBLISHED["Qwen3-4B-Instruct-2507"], 1),
    "qwen3_8b": (PUBLISHED["Qwen3-8B"], 1),
    "qwen3_14b": (PUBLISHED["Qwen3-14B"], 1),
    "qwen3_32b": (PUBLISHED["Qwen3-32B"], 1),
    "qwen3_5_4b": (PUBLISHED_GENERAL["Qwen3.5-4B"], 1),
    "qwen3_5_9b": (PUBLISHED_GENERAL["Qwen3.5-9B"], 1),
    "qwen3_6_27b": (PUBLISHED_GENERAL["Qwen3.6-27B"], 1),
    "qwen3_30b_a3b": (PUBLISHED_GENERAL["Qwen3-30B-A3B-Instruct-2507"], 1),
    "gpt_oss_20b": (PUBLISHED_GENERAL["gpt-oss-20b"], 1),
}


@pytest.fixture(autouse=True, scope="module")
def every_model_is_built_once():
    """A model does not depend on the GPUs and nodes that a job has, nor what its layers take."""
    built, made_of, counted = {}, {}, {}

    def once(component, dtype):
        key = (repr(component), dtype)
        if key not in built:
            built[key] = meta_model(component, dtype)
            made_of[id(built[key])] = component, dtype
        return built[key]

    def counted_once(model):
        if id(model) not in counted:
            counted[id(model)] = layer_bytes(meta_model(*made_of[id(model)]))  # which is of no use afterwards
        return counted[id(model)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_memory, "meta_model", once)
        patch.setattr(job_memory, "layer_bytes", counted_once)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with a config.json each and the headers of their weights, which is all that the check reads of them."""
    folders = {}
    for model, (config, files) in FOLDERS.items():
        folders[model] = write_headers(write_config(tmp_path_factory.mktemp(model), config), files)
    return folders


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Forty tasks of the paper's training scenarios, by name only."""
    from appworld_adapter.dataset import PAPER_TRAIN_SCENARIOS

    root = tmp_path_factory.mktemp("dataset")
    (root / "data/datasets").mkdir(parents=True)
    (root / "dataset.json").write_text('{"name": "forty"}')
    (root / "data/tasks").mkdir()
    tasks = [f"{scenario}_{number}" for scenario in PAPER_TRAIN_SCENARIOS for number in (1, 2)]
    (root / "data/datasets/train.txt").write_text("\n".join(tasks[:40]))
    return root


def check(capsys, *words):
    """Exit code, what was printed, and the problems named."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as error:
        code = error.code
    printed = capsys.readouterr()
    return code, printed.out, [line.removeprefix("problem: ") for line in printed.err.splitlines()]


@pytest.fixture
def check_config(capsys, models, dataset, tmp_path):
    def run(config, model, *more):
        environment = "node.environment"
        words = (
            f"output_dir={tmp_path / 'run'}",
            f"model.path={models[model]}",
            f"{environment}.root={dataset}",
            f"{environment}.python=/bin/sh",
            "max_iterations=2",
        )
        return check(capsys, config, *words, *more)

    return run


@pytest.fixture
def check_32b(check_config):
    return lambda *more: check_config("qwen2_5_32b", "32b", *more)


CONFIGS = TABLES["configs"]
ANYWHERE = set(itertools.product((1, 2, 3), (1, 2, 4, 8)))
ONE_NODE = {(1, gpus) for gpus in (1, 2, 4, 8)}
EIGHT_GPUS = {(1, 8), (2, 8), (3, 8)}
SOUND = {  # nodes and GPUs of a node on which a config needs no change
    **dict.fromkeys(("tiny_cpu", "tiny_gpu", "gpu", "qwen2_5_1_5b_one_gpu"), ANYWHERE),
    **dict.fromkeys(("qwen2_5_7b_one_gpu", "qwen3_4b_one_gpu", "qwen3_4b_24gb", "qwen3_5_4b_one_gpu"), ONE_NODE),
    "qwen2_5_7b_24gb": ONE_NODE,
    **dict.fromkeys(("qwen2_5_7b", "qwen3_8b", "qwen3_14b", "qwen3_5_9b", "qwen3_30b_a3b", "gpt_oss_20b"), EIGHT_GPUS),
    "qwen2_5_32b": {(2, 8), (3, 8)},
    "qwen3_32b": {(2, 8), (3, 8)},
    "qwen2_5_32b_one_node": {(1, 8)},
    "qwen3_6_27b": {(1, 8)},
}


@pytest.mark.parametrize(("config", "words"), TABLES["the_recipes_after_loop_can_be_planned"])
def test_the_recipes_after_loop_can_be_planned(check_config, config, words):
    code, shown, problems = check_config(
        config, CONFIGS.get(config, "tiny"), "collection.tasks_per_iteration=10", *words
    )
    assert (code, problems) == (0, [])
    assert "x 6 rollouts" in shown if "preset=draco_outcome" in words else "x 32 rollouts" in shown


@pytest.mark.parametrize("config", CONFIGS)
def test_any_number_of_gpus_and_nodes_gets_an_answer(check_config, config):
    sound = set()
    for nodes, gpus in sorted(ANYWHERE):
        words = ("collection.tasks_per_iteration=10", "collection.split=paper_train", "--nodes", nodes, "--gpus", gpus)
        code, shown, problems = check_config(config, CONFIGS[config], *words)
        assert "trainer" in shown
        assert code == (1 if problems else 0)
        assert all("\n" not in problem for problem in problems)
        if code == 0:
            sound.add((nodes, gpus))
    assert sound == SOUND[config]


@pytest.mark.parametrize(("config", "gpu_gib", "gpus"), TABLES["a_trainer_and_a_server_share_one_gpu"])
def test_a_trainer_and_a_server_share_one_gpu(check_config, config, gpu_gib, gpus):
    words = ("--nodes", "1", "--gpus", gpus, "--gpu-memory", gpu_gib)
    code, shown, problems = check_config(config, CONFIGS[config], *words)
    assert (code, problems) == (0, [])
    assert "1 rank on GPU 0, which it shares with vLLM" in shown
    servers = "node.servers"
    _, _, problems = check_config(config, CONFIGS[config], f"{servers}.kv_cache_bytes=null", *words)
    assert "needs both gpu_memory_utilization" in problems[0]
    _, _, problems = check_config(config, CONFIGS[config], *words[:-1], 0.8 * gpu_gib)
    assert "of the GPU that they share: lower servers.kv_cache_bytes" in problems[0]


TWICE = "node.servers.gpus names [0] more than once, and a server is planned as"
NO_POSITIONS = "max_context is 200000, and the model in"
HEADS = "node.servers.tensor_parallel_size is {0}, by which the model's 28 heads"


def one_server(gpus):
    """Words that have one server over so many GPUs of two nodes."""
    on = ("node.servers.count=1", f"node.servers.gpus=[{[*range(gpus)]}]", f"node.servers.tensor_parallel_size={gpus}")
    return (*on, "--nodes", "2")


@pytest.mark.parametrize(
    ("config", "model", "words", "problem"),
    [
        ("qwen2_5_7b", "7b", one_server(8), HEADS.format(8) + " and 4 key heads"),
        ("qwen2_5_7b", "7b", one_server(3), HEADS.format(3) + " and 4 key heads"),
        ("qwen2_5_7b", "7b", one_server(7), HEADS.format(7)),
        ("qwen2_5_7b_one_gpu", "7b", ("node.servers.count=2", "node.servers.gpus=[[0],[0]]", "--gpus", "2"), TWICE),
        ("qwen2_5_32b", "32b", ("node.model.max_context=200000",), NO_POSITIONS),
    ],
)
def test_what_a_server_could_not_do_is_named(check_config, config, model, words, problem):
    """vLLM would say some of it after it has loaded the model."""
    code, _, problems = check_config(config, model, *words)
    assert code == 1
    assert any(problem in said for said in problems), problems


IN_TURNS = ("node.servers.share=trainer", "collection.max_policy_lag=0", "--nodes", "1")


def test_a_gpu_that_trainer_and_server_have_in_turns_is_planned_by_phases(check_config):
    small = ("--gpus", "1", "--gpu-memory", "23.5")
    code, shown, problems = check_config("qwen3_4b_24gb", "qwen3_4b", *small)
    assert (code, problems) == (0, [])
    assert "1 rank on GPU 0, in turns with vLLM" in shown
    for said in ("sampling, in turns (arithmetic)", "training, in turns (arithmetic)", "GB/s (arithmetic)"):
        assert said in shown
    assert re.search(
        r"^host's memory +about 16\.5 GiB: 7\.5 the trainer's frozen weights, 1\.4 inputs of its layers, "
        r"7\.6 servers that sleep \(arithmetic\); \d+\.\d GiB available here",
        shown,
        flags=re.M,
    )
    _, _, problems = check_config("qwen3_4b_24gb", "qwen3_4b", "node.servers.share=null", *small)
    assert len(problems) == 1
    assert "have it in turns with node.servers.share=trainer" in problems[0]
    more = ("enable_activation_offloading=True", *IN_TURNS, *small)
    _, _, problems = check_config("qwen2_5_7b_one_gpu", "7b", *more)
    assert any(problem.startswith("training needs about") for problem in problems), problems
    assert check_config("qwen2_5_32b", "32b", *IN_TURNS, "~node.servers.gpus")[1]
    _, _, problems = check_config("qwen3_4b_24gb", "qwen3_4b", "--nodes", "2")
    assert "node.servers.share: trainer is for one node, whose GPUs both have: give --nodes 1" in problems


@pytest.mark.parametrize(("config", "fetched"), TABLES["a_job_is_planned_before_its_weights_are_fetched"])
def test_a_job_is_planned_before_its_weights_are_fetched(check_config, capsys, monkeypatch, config, fetched):
    """Experts and hybrids too: memory and time are those that the folder gives, and the problem is its absence; what
    the world lacks stands beside it."""
    _, planned, _ = check_config(config, CONFIGS[config])
    monkeypatch.setenv("LOOP_HOME", "/nowhere")  # this checkout may have a fetched model
    code, shown, problems = check(capsys, config)
    assert code == 1
    problem, *of_the_world = problems
    assert all("AppWorld" in said for said in of_the_world)
    name = fetched.partition("/")[2]
    assert re.search(
        f"{name} holds no config.json; .*download it: tune download {fetched} --output-dir .*{name}$", problem
    )
    assert f"memory of the published {name}, whose folder is not here" in " ".join(shown.split())
    tables = [re.findall(r"^.* GiB$|^.*\(arithmetic\)$|^  .*", text, flags=re.M) for text in (planned, shown)]
    assert len(tables[0]) > 12
    assert tables[0] == tables[1]


@pytest.mark.fault("hours of an update are those of dense layers on H100s, whatever the model and the card")
@pytest.mark.parametrize(
    ("config", "gib", "card", "about", "minutes"), TABLES["an_update_takes_what_its_layers_and_the_card_make_of_it"]
)
def test_an_update_takes_what_its_layers_and_the_card_make_of_it(check_config, config, gib, card, about, minutes):
    _, shown, _ = check_config(config, CONFIGS[config], "--gpu-memory", str(gib))
    update = re.search(
        rf"^update +{about}(\d+\.\d) min, .* at the speed of the {card} \(arithmetic\)$", shown, flags=re.M
    )
    assert update, shown
    assert re.search(rf"^sampling +at most {about}[\d,]+ tokens a second, by what the {card} reads", shown, flags=re.M)
    assert minutes[0] < float(update[1]) < minutes[1]


SHORT_ROWS = [f"{key}=4096" for key in ("update.micro_batch_tokens", "collection.limits.max_context")]
CARDS = {  # the GiB of a card, and the configs that are planned for it; all of them in one command
    79.0: ["qwen3_4b_one_gpu", "qwen2_5_7b_one_gpu", "qwen3_5_4b_one_gpu", "qwen2_5_32b_one_node", "qwen2_5_32b"],
    80.0: ["qwen3_30b_a3b", "gpt_oss_20b"],
    24.0: ["qwen3_4b_24gb", "qwen2_5_7b_24gb"],
    23.5: ["qwen3_4b_24gb", "qwen2_5_7b_24gb"],
}


@pytest.mark.parametrize(("gib", "config"), [(gib, config) for gib, configs in CARDS.items() for config in configs])
def test_a_shipped_config_shows_memory_of_gpus_and_host_and_hours(check_config, config, gib):
    for words in ([], [*SHORT_ROWS, "node.model.max_context=4096"]) if "24gb" in config else ([],):
        code, shown, problems = check_config(config, CONFIGS[config], "--gpu-memory", gib, *words)
        assert (code, problems) == (0, [])
        turns = "in turns with vLLM" in shown
        of_gpus = re.findall(r"^(\S.*) \(\d+\.\d GiB available\)$", shown, flags=re.M)
        sides = ["sampling, in turns", "training, in turns"] if turns else ["trainer, one of", "vLLM server"]
        assert [title.startswith(side) for title, side in zip(of_gpus, sides, strict=True)] == [True, True]
        host = re.search(r"^host's memory +about (\d+\.\d) GiB: .*; \d+\.\d GiB available here", shown, flags=re.M)
        assert (float(host[1]) > 0) == (config != "qwen2_5_32b")
        assert re.search(r"^update +(about )?\d+\.\d min, .* \(arithmetic\)$", shown, flags=re.M)
        assert re.search(r"^sampling +at most (about )?[\d,]+ tokens a second", shown, flags=re.M)


def test_which_shipped_configs_fit_a_card(capsys, models, monkeypatch):
    def composed(name, words=()):
        return compose(name, [f"model.path={models[CONFIGS[name]]}", *words] if name in here else list(words))

    here = {"qwen3_4b_24gb", "qwen3_4b_one_gpu", "qwen2_5_1_5b_one_gpu", "qwen2_5_7b_one_gpu"}
    monkeypatch.setattr(job_memory, "compose", composed)
    some = {"machine": ["cpu", "gpu", *sorted(here), "qwen3_14b", "qwen3_5_4b_one_gpu"]}
    monkeypatch.setattr("loop_recipes.verbs.check.config_files", lambda: some)
    code, shown, problems = check(capsys, "--gpu-memory", "23.5")
    assert (code, problems) == (0, [])
    *table, no, _ = shown.splitlines()
    assert no.startswith("no: it does not fit on GPUs of 23.5 GiB")
    rows = {line.split()[0]: line for line in table[1:]}
    assert rows.keys() == {*some["machine"]} - {"cpu"}
    assert [line.count(" no") for line in table] == sorted(line.count(" no") for line in table)
    assert re.search(r"\d no +\d+\.\d\d, \d+\.\d\d no$", rows["qwen3_5_4b_one_gpu"]), "a hybrid by its sizes too"
    assert re.search(r"\d no +\d+\.\d\d, \d+\.\d\d no$", rows["qwen3_14b"]), "by the published sizes"
    number = r"\d+\.\d\d"
    for name, divided, turns in (
        ("qwen3_4b_24gb", False, True),
        ("qwen2_5_1_5b_one_gpu", True, True),
        ("qwen2_5_7b_one_gpu", False, False),
    ):
        words = [rf"{number}, {number}{'' if fits else ' no'}" for fits in (divided, turns)]
        assert re.fullmatch(rf"{name} +{words[0]} +{words[1]}", rows[name]), shown


def test_a_head_for_half_precision_on_cuda_is_refused_elsewhere(check_config):
    cut = "log_probs=loop_recipes.engine.cut_cross_entropy.CutCrossEntropyLogProbs"
    cores = "log_probs=loop_recipes.engine.logprobs.TensorCoreLogProbs"
    for words in (("tiny_cpu", "tiny", cut), ("tiny_cpu", "tiny", cores), ("qwen2_5_7b", "7b", cut, "dtype=fp32")):
        _, _, problems = check_config(*words)
        [problem] = [problem for problem in problems if problem.startswith("log_probs: ")]
        assert "half precision on CUDA alone" in problem
        assert "give log_probs=loop_recipes.engine.logprobs.AutoLogProbs" in problem


@pytest.mark.parametrize(("words", "message"), TABLES["what_cannot_be_looked_at_is_one_line"])
def test_what_cannot_be_looked_at_is_one_line(check_32b, words, message):
    code, _, _ = check_32b(*words)
    assert message in str(code)
    assert "\n" not in str(code)


def test_a_sound_job_is_shown_with_its_memory(check_32b, tmp_path):
    code, shown, problems = check_32b()
    assert (code, problems) == (0, [])
    assert "1 node of 2 vLLM servers on 4 GPUs each, 240 episodes" in shown
    assert "8 ranks on the last node, bf16" in shown
    assert "forty, 40 tasks of paper_train, 40 x 6 rollouts an iteration" in shown
    assert "starts from the beginning, to iteration 2" in shown
    assert not (tmp_path / "run").exists(), "a check makes nothing"
    assert "KV cache of the server" in shown


def test_one_node_takes_other_servers_and_names_the_gpus(check_32b):
    code, _, problems = check_32b("--nodes", "1")
    assert code == 1
    assert problems[0].startswith("the servers need 8 GPUs, a rollout node has 4: lower node.servers")
    assert problems[1].endswith("on 1 node(s) of 8 vLLM may use 4 to 7")
    servers = "node.servers"
    code, shown, problems = check_32b(f"{servers}.count=1", f"{servers}.gpus=[[4, 5, 6, 7]]", "--nodes", "1")
    assert (code, problems) == (0, [])
    assert "4 ranks on GPUs 0 to 3 of the same node" in shown


@pytest.mark.parametrize(("word", "problem"), TABLES["what_would_stop_a_job_is_named"])
def test_what_would_stop_a_job_is_named(check_32b, word, problem):
    code, _, problems = check_32b(word)
    assert code == 1
    assert len(problems) == 1, problems
    assert problem in problems[0]


def test_a_way_of_thinking_that_the_model_has_not_is_named():
    problems = []
    for settings in ({}, {"thinking": "kept"}):
        model = ModelConfig(path=str(loop_package("tiny_policy")), max_context=4096, **settings)
        found = job_check._served(model, BaseModel.read(model.path, general=True), cuda=False)
        problems += Report.of(found).problems
    [problem] = problems
    assert problem.startswith("node.model: ")
    assert "does not think: leave model.thinking null" in problem


def test_sizes_that_are_not_those_of_the_model_are_named(capsys, dataset, models, tmp_path):
    """Which only a builder of torchtune's can have: all else is read from the model's folder."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        f"""
        machine: tiny_cpu
        output_dir: {tmp_path}/run
        max_iterations: 2
        collection: {{tasks_per_iteration: 10, split: paper_train}}
        model: {{_component_: torchtune.models.qwen2.lora_qwen2, lora_attn_modules: [q_proj], lora_rank: 16,
          lora_alpha: 32, vocab_size: 784, num_layers: 5, num_heads: 4, num_kv_heads: 2, embed_dim: 128,
          intermediate_dim: 384, max_seq_len: 4096, norm_eps: 1.0e-6, rope_base: 1.0e+8, tie_word_embeddings: True}}
        checkpointer: {{_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: {models["tiny"]},
          checkpoint_files: [model.safetensors], model_type: QWEN2, output_dir: {tmp_path}/run}}
        node: {{model: {{path: {models["tiny"]}}}, environment: {{root: {dataset}, python: /bin/sh}}}}
        """
    )
    code, _, problems = check(capsys, file)
    assert code == 1
    assert len(problems) == 1, problems
    assert "has layers 5 (6), vocabulary 784 (783) where the config.json in " in problems[0]


def test_a_key_that_is_left_out_counts_with_its_default(check_32b):
    code, shown, problems = check_32b("~collection.limits.max_context", "~update.micro_batch_tokens")
    assert (code, problems) == (0, [])
    assert "micro-batches of 32768 tokens" in shown


def test_rows_that_ranks_share_are_shorter_on_each(check_32b):
    longer = ("collection.limits.max_context=65536", "node.model.max_context=65536", "sequence_parallel={}")
    ((_, alone, _), (_, shared, _)) = (check_32b(*longer[:2], longer[2].format(sharers)) for sharers in (1, 2))
    assert "micro-batches of 65536 tokens (" in alone
    assert "micro-batches of 32768 tokens a rank, rows of 2 ranks (" in shared
    _, _, problems = check_32b("sequence_parallel=4", "--gpus", "6")
    assert "sequence_parallel is 4; it must divide the 6 ranks of the trainer" in problems


def test_a_model_too_large_for_the_gpus_is_named(check_32b):
    code, _, problems = check_32b("--gpu-memory", "20")
    assert code == 1
    assert problems[0].startswith("a trainer rank needs about 45 GiB of 20: use enable_activation_offloading: True, ")
    assert problems[1].startswith("a vLLM server has room for")
    assert len(problems) == 2


def test_a_run_that_exists_goes_on_from_its_newest_checkpoint(check_32b, tmp_path):
    for iteration in (1, 2):
        folder = tmp_path / f"run/checkpoints/iteration_{iteration:04d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
    code, shown, problems = check_32b()
    assert (code, problems) == (0, [])
    assert "goes on from iteration_0002" in shown


def test_a_config_without_a_node_to_launch_is_refused(capsys, tmp_path):
    code, _, _ = check(capsys, replay_config(tmp_path, iterations=1))
    assert "the config has no node" in code


@pytest.mark.fault("a config of one GPU is checked for sixteen")
@pytest.mark.parametrize(("gpus", "expected"), TABLES["a_config_is_checked_on_the_machines_that_it_is_meant_for"])
def test_a_config_is_checked_on_the_machines_that_it_is_meant_for(gpus, expected):
    from loop_recipes.plan.report import usual_machines
    from rollout_server.config import ServersConfig

    servers = ServersConfig(count=len(gpus or [0]), tensor_parallel_size=len((gpus or [[0]])[0]), gpus=gpus)
    assert list(usual_machines(servers)) == expected


def test_a_model_is_compared_with_transformers_on_demand(tmp_path):
    from loop_recipes.plan.job_check import probe_model
    from support.families import small, write_model
    from support.tiny_models import write_random

    general = probe_model(str(write_random("smollm3", tmp_path / "smollm3")), 512)
    assert str(general).startswith("exact          the model's first 1 layers give log-probs within ")
    family = probe_model(str(write_model(tmp_path / "qwen3", small("Qwen3-4B"))), 512)
    assert str(family).endswith("a qwen3 is built by torchtune's modules, which tests compare")


def test_a_cpu_that_cannot_serve_mxfp4_is_a_problem_and_a_gpu_none(check_config, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("flags : avx512f")
    monkeypatch.setattr(command, "CPU_FLAGS", tmp_path / "cpuinfo")
    found = {}
    for config in ("tiny_cpu", "gpt_oss_20b"):
        _, printed, problems = check_config(config, "gpt_oss_20b", "--nodes", "1", "--gpus", "8")
        found[config] = [problem for problem in problems if "MXFP4" in problem]
        assert ("weights, bf16 and MXFP4" in printed) == (config == "gpt_oss_20b")
    assert [len(problems) for problems in found.values()] == [1, 0]
    assert found["tiny_cpu"][0].endswith("take a copy in bf16")
