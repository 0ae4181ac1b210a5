"""A model's folder is proven when it is opened: taken, or refused in one line, by every door alike."""

import json

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.own_task.training import check_model
from support.chat_tokenizers import template_text
from support.families import write_config
from support.model_folders import CASES, plain, qwen2
from support.texts import texts_beside

TABLES = texts_beside(__file__)

TAKEN = [case for case in CASES if case.refused is None]
REFUSED = [case for case in CASES if case.refused is not None]


@pytest.mark.fault("a model's folder as another tool writes it is refused, or trained in another form")
@pytest.mark.parametrize("case", TAKEN, ids=lambda case: case.name)
def test_a_folder_as_a_tool_writes_it_is_taken(tmp_path, case):
    case.make(tmp_path)
    assert check_model(tmp_path) == tmp_path


@pytest.mark.fault("a model's folder that contradicts itself is trained without a word, or refused late")
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_a_folder_that_cannot_be_trained_is_one_line_that_names_it(tmp_path, case):
    case.make(tmp_path)
    with pytest.raises(ConfigError, match=case.refused) as raised:
        check_model(tmp_path)
    assert "\n" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3"])
def test_the_name_of_a_chat_format_is_refused(tmp_path, name):
    qwen2(tmp_path)
    assert check_model(tmp_path, ["node.model.chat_format=template"]) == tmp_path
    with pytest.raises(ConfigError, match=rf"^node\.model\.chat_format: {name} is not a choice; leave chat_format out"):
        check_model(tmp_path, [f"node.model.chat_format={name}"])


def test_each_way_of_thinking_is_that_of_the_template(tmp_path):
    from support.model_folders import qwen3

    qwen3(tmp_path)
    for words in (["thinking=kept"], ["thinking=stripped"], ["thinking=off"], ["observation_role=user"]):
        assert check_model(tmp_path, [f"node.model.{word}" for word in words]) == tmp_path


@pytest.mark.parametrize(("changes", "name", "positions"), TABLES["a_window_is_a_bound_of_the_context"])
def test_a_window_is_a_bound_of_the_context(tmp_path, changes, name, positions):
    from model_families.opening import check_served_as, open_weights
    from support.model_folders import CHATML, CHATML_WORDS

    plain(tmp_path, name, CHATML, CHATML_WORDS, **changes)
    base = open_weights(tmp_path)
    check_served_as(tmp_path, base, positions, "float32")
    with pytest.raises(ValueError, match=rf"is {positions + 1}, and the model .* has {positions} positions"):
        check_served_as(tmp_path, base, positions + 1, "float32")


def test_a_mistral_that_says_nothing_of_a_window_has_one(tmp_path):
    """As transformers reads it."""
    from model_families.base_model import BaseModel
    from support.families import small

    config = small("Mistral-7B-v0.3", max_position_embeddings=32_768)
    del config["sliding_window"]
    assert BaseModel.read(write_config(tmp_path, config)).positions == 4096


def test_a_template_is_rendered_as_transformers_does_it(tmp_path):
    """Jinja's settings, filters and functions, several templates, and the tokenizer's words."""
    from transformers import AutoTokenizer

    from model_families.chat.template import ChatTemplate

    qwen2(tmp_path, template_text("odd_statements"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["bos_token"] = {"content": "<|im_start|>", "__type": "AddedToken", "lstrip": False, "rstrip": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": role, "content": f" é<{role}>\n"} for role in ("system", "user", "assistant")]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for tools in ((), (tool,)):
        expected = reference.apply_chat_template(
            messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
        assert ChatTemplate(tmp_path).render(messages, tools) == expected


@pytest.mark.parametrize("text", TABLES["a_template_is_a_strangers_program"])
def test_a_template_is_a_strangers_program(tmp_path, text):
    from model_families.chat.template import ChatTemplate

    qwen2(tmp_path, text)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        ChatTemplate(tmp_path).render([{"role": "user", "content": "x"}])
