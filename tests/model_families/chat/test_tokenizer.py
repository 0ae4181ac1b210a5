import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from model_families.chat import open_chat
from support.chat_templates import Form
from support.chat_tokenizers import LLAMA3_SPECIAL, write_qwen3, write_small, write_template
from support.random_policy import write_tokenizer


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return open_chat(path)


def test_spans_cover_the_text(tokens):
    text = "counter 12\n  done, é"
    spans = tokens.spans(text)
    assert spans[0][0] == 0
    assert spans[-1][1] == len(text)
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(spans))


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        open_chat(tmp_path)


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged: EOF .*; copy it anew"):
        open_chat(tmp_path)


def test_a_folder_without_a_template_is_one_line_with_the_cure(tmp_path):
    write_small(tmp_path, "AnyForCausalLM", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    with pytest.raises(ValueError, match=r"^.* has no chat template: add the model's own chat_template\.jinja .*$"):
        open_chat(tmp_path)


def test_ordinary_text_has_the_ids_of_the_models_own_tokenizer(tmp_path):
    own = Tokenizer.from_file(str(write_qwen3(tmp_path, words=12_000) / "tokenizer.json"))
    chat = open_chat(tmp_path)
    for text in ("def f(x):\n\treturn  x**2  # é 你好 \U0001f600\n\n\n", "<think", "a < b > c | d [x]"):
        assert chat.encode_text(text) == own.encode(text, add_special_tokens=False).ids
        assert chat.decode(chat.encode_text(text)) == text
    assert chat.vocab_size == own.get_vocab_size(with_added_tokens=True)


@pytest.mark.parametrize(
    "added", ["\n\n", "print", "<b>", "</table>", "<obs>", "<unused7>", "[multimodal]", "[obs: a]"]
)
def test_an_added_word_of_ordinary_text_has_the_ids_of_the_models_own_tokenizer(tmp_path, added):
    write_small(tmp_path, "LlamaForCausalLM", LLAMA3_SPECIAL, [added])
    write_template(tmp_path, "llama3_0", bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")
    own, text = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), f"x\n\nprint(1){added}"
    assert own.token_to_id(added) in open_chat(tmp_path).encode_text(text)
    assert open_chat(tmp_path).encode_text(text) == own.encode(text, add_special_tokens=False).ids


WORDS = ["<|eot_id|>", "<|fim|>", "<\uff5cUser\uff5c>", "<think>", "<user>", "[END]"]


@pytest.mark.parametrize("word", WORDS)
def test_an_added_word_that_divides_turns_is_not_forged(tmp_path, word):
    """By its form, because the template holds it, or because it ends what is generated."""
    turn = "{{ {'user': '<user>'}.get(m.role, '<assistant>') }}{{ m.content.replace('<think>', '') }}<|eot_id|>"
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
    added = (*WORDS, "<assistant>")
    folder = Form(template, tuple(LLAMA3_SPECIAL[:2]), added, ends=("[END]",)).write(tmp_path)
    word_id = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(word)
    chat = open_chat(folder)
    assert word_id in chat.control_ids
    assert word_id not in chat.encode_text(f"x{word}x")


def test_a_control_token_of_ordinary_text_is_refused(tmp_path):
    write_small(tmp_path, "LlamaForCausalLM", [*LLAMA3_SPECIAL, "print"])
    write_template(tmp_path, "llama3_0")
    with pytest.raises(ValueError, match="the control token 'print' is ordinary text"):
        open_chat(tmp_path)


PIECES = st.sampled_from(
    ["word ", "x", " ", "=", "\n", "é", "\u0301", "你", "aB3$", "counter.add(3)\n", "\U0001f600", "🇩🇪"]
)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.lists(PIECES, min_size=1, max_size=4), st.integers(1, 3000)), max_size=4), st.data())
def test_what_is_said_to_overfill_does(tokens, runs, data):
    texts = ["".join(pieces) * times for pieces, times in runs]
    count = sum(len(tokens.encode_text(text)) for text in texts)
    assert not tokens.overfill(texts, count)
    most = data.draw(st.integers(0, count + 1))
    assert not tokens.overfill(texts, most) or count > most


def test_whether_a_text_of_megabytes_fits_is_found_in_its_first_pages(tokens, monkeypatch):
    encoded = []
    encode = tokens._encode
    monkeypatch.setattr(tokens, "_encode", lambda text: encoded.append(len(text)) or encode(text))
    for text in ("word " * 1_400_000, "x" * 7_000_000, " " * 7_000_000, "=" * 7_000_000, "你" * 2_000_000):
        encoded.clear()
        assert tokens.overfill([text], 1000)
        assert sum(encoded) < 300_000
