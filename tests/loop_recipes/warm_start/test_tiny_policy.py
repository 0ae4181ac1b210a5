"""The tiny policy: how it starts, what it is trained on, and the files that are committed."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from agent_environments.protocol import Message
from appworld_adapter import flaws
from loop_formats.schema import ConfigError
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.logprobs import FullLogProbs
from loop_recipes.paths import loop_package
from loop_recipes.warm_start import tiny_model, tiny_tokenizer
from loop_recipes.warm_start.appworld import draw_scripts, quoting, texts, with_other_names
from loop_recipes.warm_start.batches import collate, copy_batches, demonstration_batches
from loop_recipes.warm_start.config import TinyModelConfig
from loop_recipes.warm_start.demonstration import Demonstration, render
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat
from support.texts import texts_beside

TABLES = texts_beside(__file__)

POLICY = loop_package("tiny_policy")
TASK = "My name is: Pimi Dirim. My personal email is pimi.dirim@example.com and phone number is 5559780032.\nTask: Pay."
REMINDER = f"\nAs a reminder\n\n{TASK}"
VOCABULARY = 300
SMALL = TinyModelConfig(4, 4, 2, 128, 384, max_seq_len=512, norm_eps=1e-6, rope_base=1e8, sharpness=12.0)


@pytest.fixture(scope="module")
def tokens() -> ChatFormat:
    return open_chat(POLICY)


@pytest.fixture
def demonstration() -> Demonstration:
    login = "I log in.\n```python\nt = apis.venmo.login(username='pimi.dirim@example.com', password='pevigavu')\n```"
    return Demonstration(
        task_id="0000000_1",
        flaw=None,
        reward=1.0,
        success=True,
        opening=(Message("system", "You write code."), Message("user", TASK)),
        steps=(
            (
                "I look.\n```python\nprint(1)\n```",
                f"phone: bapu\nvenmo: pevigavu\ngmail: tubikide\nAs a reminder\n\n{TASK}",
            ),
            (login, f"Execution successful.{REMINDER}"),
            ("Done.\n```python\napis.supervisor.complete_task()\n```", "Execution successful."),
        ),
    )


def new_model(seed: int = 0):
    model = tiny_model.build(SMALL, VOCABULARY)
    tiny_model.initialise(model, SMALL, seed)
    return model


@torch.no_grad()
def test_heads_of_layer_0_look_one_to_four_tokens_back():
    model = new_model()
    layer = model.layers[0]
    token_ids = torch.randint(VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(1))
    hidden = layer.sa_norm(model.tok_embeddings(token_ids))
    attention = layer.attn
    query = attention.pos_embeddings(attention.q_proj(hidden).view(1, 60, SMALL.num_heads, SMALL.head_dim))
    key = attention.pos_embeddings(attention.k_proj(hidden).view(1, 60, SMALL.num_kv_heads, SMALL.head_dim))
    for head in range(SMALL.num_heads):
        scores = query[0, :, head] @ key[0, :, head // 2].T / math.sqrt(SMALL.head_dim)
        scores = scores.masked_fill(torch.ones(60, 60).triu(1).bool(), -math.inf)
        back = torch.arange(10, 60) - scores.softmax(-1)[10:].argmax(-1)
        assert (back == head + 1).all()


@torch.no_grad()
def test_the_start_already_copies_what_stood_there_before():
    """Before any training a repeated random stream is guessed better than by chance, and not without the start."""

    def loss(model) -> float:
        (batch,) = copy_batches(1, 1024, VOCABULARY, pad_id=0, seed=3)
        outputs = attach_head(model, FullLogProbs())(batch.tokens, rows=batch.rows, targets=batch.targets)
        return -outputs.logprobs.mean().item()

    plain = new_model()
    for attention in (plain.layers[0].attn, plain.layers[1].attn):
        for parameter in attention.parameters():
            parameter.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    assert loss(new_model()) < math.log(VOCABULARY) - 0.7 < loss(plain)


@torch.no_grad()
def test_the_saved_model_is_the_same_function_in_transformers(tmp_path: Path):
    model = new_model()
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())  # as the file has them
    tiny_model.save(model, SMALL, tmp_path, pad_id=1, stop_id=2)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    token_ids = torch.randint(VOCABULARY, (2, 300), generator=torch.Generator().manual_seed(0))
    assert (theirs(token_ids).logits - model.eval()(token_ids)).abs().max() < 1e-4


def test_committed_policy_is_small_and_of_the_stated_shape():
    sizes = {path.name: path.stat().st_size for path in POLICY.iterdir()}
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "own_tokenizer.py",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 4e6
    model = AutoModelForCausalLM.from_pretrained(POLICY)
    assert 0.85e6 < model.num_parameters() < 1.3e6
    assert model.config.vocab_size == open_chat(POLICY).vocab_size


def test_chat_template_and_chat_tokens_give_the_same_ids(tokens: ChatFormat, demonstration: Demonstration):
    theirs = PreTrainedTokenizerFast.from_pretrained(POLICY)
    chat = [{"role": message.role, "content": message.content} for message in demonstration.opening]
    for action, shown in demonstration.steps:
        prompt = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert prompt == tokens.prompt([Message(**message) for message in chat])
        chat += [{"role": "assistant", "content": action}, {"role": "user", "content": shown}]
    assert theirs.eos_token_id == tokens.turn_end
    assert theirs.pad_token_id == tokens.pad_id


def test_a_password_is_the_same_pieces_wherever_it_stands(tokens: ChatFormat):
    rng = random.Random(0)
    for _ in range(50):
        password = "".join(rng.choice(tiny_tokenizer.SYLLABLES) for _ in range(4))
        pieces = tokens.encode_text(password)
        assert len(pieces) <= 4
        for before, after in (("venmo: ", "\n"), ("password='", "')['access_token']"), ('"password": "', '"')):
            assert tokens.encode_text(before + password + after) == [
                *tokens.encode_text(before),
                *pieces,
                *tokens.encode_text(after),
            ]


def test_no_piece_of_a_frequent_word_stands_in_a_name():
    """Such a piece means the word everywhere else, and a small model does not copy it."""
    tokenizer = tiny_tokenizer.train(["alarms for large dollars"] * 30, vocab_size=1280, min_frequency=24)
    assert tokenizer.encode("alarms for dollars").tokens == ["alarmsĠ", "forĠ", "dollars"]
    assert tokenizer.decode(tokenizer.encode("alarms for dollars").ids) == "alarms for dollars"
    assert tokenizer.encode("pilar.gumes").tokens == ["pi", "la", "r", ".", "gu", "me", "s"]


def test_mask_covers_what_the_agent_says_and_its_end_mark(tokens: ChatFormat, demonstration: Demonstration):
    example = render(demonstration, tokens)
    spoken = tokens.decode(example.token_ids[example.mask].tolist())
    assert spoken == "".join(f"{action}<|im_end|>" for action, _ in demonstration.steps)
    whole = tokens.decode(example.token_ids.tolist())
    assert whole.startswith("<|im_start|>system\nYou write code.<|im_end|>\n<|im_start|>user\nMy name is: Pimi Dirim.")
    assert whole.count("<|im_start|>assistant\n") == 3


def test_targets_are_predicted_from_the_position_before(tokens: ChatFormat, demonstration: Demonstration):
    short = Demonstration(**{**vars(demonstration), "steps": demonstration.steps[:1]})
    examples = [render(demonstration, tokens), render(short, tokens)]
    batch = collate(examples, tokens.pad_id)
    width = batch.tokens.shape[1]
    assert torch.equal(batch.tokens.flatten()[batch.rows + 1], batch.targets)
    assert len(batch.targets) == sum(int(example.mask.sum()) for example in examples)
    assert ((batch.rows + 1) % width != 0).all()


def test_other_names_are_used_throughout(demonstration: Demonstration):
    other = with_other_names(demonstration, random.Random(0))
    assert with_other_names(demonstration, random.Random(0)) == other != demonstration
    text = json.dumps([vars(message) for message in other.opening]) + json.dumps(other.steps)
    for word in ("Pimi", "dirim", "pevigavu", "tubikide", "5559780032"):
        assert word not in text
    shown, login = other.steps[0][1], other.steps[1][0]
    password = login.partition("password='")[2].partition("'")[0]
    assert f"venmo: {password}\n" in shown
    first, last = login.partition("username='")[2].partition("@")[0].split(".")
    assert f"My name is: {first.capitalize()} {last.capitalize()}. My personal email is {first}.{last}@" in shown
    assert other.steps[0][0] == demonstration.steps[0][0]


def test_other_numbers_are_used_where_the_agent_copied_them():
    def told(task: str, code: str, seen: str = "Done.") -> Demonstration:
        return Demonstration("0000000_1", None, 1.0, True, (Message("user", task),), ((code, seen),))

    original = told("At 12:37 on 2023-05-37 pay $37, not 3712.", "pay(amount=37, note_id=8)", "8 rent 37.0")
    other = with_other_names(original, random.Random(0))
    amount = other.steps[0][0].partition("amount=")[2].partition(",")[0]
    note = other.steps[0][0].partition("note_id=")[2].partition(")")[0]
    assert amount not in ("37", "12")
    assert note != "8"
    assert (len(amount), len(note)) == (2, 1)
    assert other.opening[0].content == f"At 12:37 on 2023-05-37 pay ${amount}, not 3712."
    assert other.steps[0][1] == f"{note} rent {amount}.0"
    guessed = told("How much is it together?", "complete_task(answer=54)")
    assert with_other_names(guessed, random.Random(0)) == guessed


@pytest.mark.parametrize("assumed", [assumed for _, assumed in flaws.ASSUMED])
def test_what_is_assumed_is_the_same_in_every_use(assumed: str):
    """Also where others of its shape are renamed, and where the environment showed it too, such as a line's number."""
    code = f"I assume it is {assumed}\n```python\nsend(id={assumed}, message='{assumed}', note_id=28)\n```"
    seen = f'File "<python-input>", line {assumed}\nsafe: {assumed}\nbike: 28'
    original = Demonstration("0000000_1", "assumed_value", 0.0, False, (Message("user", "Send it."),), ((code, seen),))
    ids = set()
    for seed in range(20):
        ((action, _),) = with_other_names(original, random.Random(seed)).steps
        assumption, _, note_id = action.rpartition(", note_id=")
        assert assumption == code.rpartition(", note_id=")[0]
        ids.add(note_id)
    assert len(ids) > 5, "other numbers are others each time"


def test_ids_that_are_neighbours_stay_neighbours():
    """Otherwise the first digits of the right id told it apart, as they do not in a database."""
    step = ("show_note(note_id=105)", "safe: 104\nbike: 105\nideas: 66\n\nAs a reminder")
    original = Demonstration("0000000_1", None, 1.0, True, (Message("user", "Read it."),), (step,))
    chosen = set()
    for seed in range(20):
        other = with_other_names(original, random.Random(seed))
        action, observed = other.steps[0]
        safe, bike, ideas = (int(line.partition(": ")[2]) for line in observed.splitlines()[:3])
        assert action == f"show_note(note_id={bike})"
        assert bike - safe in (1, 1 - 900)
        assert 10 <= ideas <= 99
        chosen.add(bike)
    assert len(chosen) > 10


def test_day_time_and_words_do_not_tell_the_task():
    """A small model would otherwise remember by the date which label a task asks for, and not copy it."""
    task = "Today's date is: 2023-05-24T15:11:00\nTask: Set an alarm for 09:10 with the label swim in the album."
    code = "I set the alarm.\n```python\nprint(apis.phone.create_alarm(time='09:10', label='swim'))\n```"
    original = Demonstration("0000000_1", None, 1.0, True, (Message("user", task),), ((code, "Done."),))
    labels = set()
    for seed in range(20):
        other = with_other_names(original, random.Random(seed))
        opening, action = other.opening[0].content, other.steps[0][0]
        time, label = (action.partition(f"{key}='")[2].partition("'")[0] for key in ("time", "label"))
        assert "2023-05-24T15:11" not in opening
        assert f"an alarm for {time} with the label {label} in the album." in opening
        assert action.startswith("I set the alarm.")
        labels.add(label)
    assert "swim" in labels
    assert len(labels) > 5


def test_a_name_that_only_an_api_printed_is_another_too(demonstration: Demonstration):
    find = ("I look.\n```python\nprint(c['first_name'], c['last_name'])\n```", f"Bigi Lerum{REMINDER}")
    answer = ("Done.\n```python\napis.supervisor.complete_task(answer='Bigi Lerum')\n```", "Execution successful.")
    original = Demonstration(**{**vars(demonstration), "steps": (find, answer)})
    other = with_other_names(original, random.Random(0))
    name = other.steps[1][0].partition("answer='")[2].partition("'")[0]
    assert name != "Bigi Lerum"
    assert other.steps[0][1].startswith(f"{name}\nAs a reminder")


def test_a_demonstration_survives_its_file_format(demonstration: Demonstration):
    assert Demonstration.from_json(demonstration.to_json()) == demonstration


def write_solutions(root: Path, logins: dict[str, bool]) -> None:
    """Reference solutions of one turn that acts, some with a log-in before it."""
    for task_id, login in logins.items():
        folder = root / "data/tasks" / task_id / "ground_truth"
        folder.mkdir(parents=True)
        codes = ["login(password='bapu')", "act()", "complete()"] if login else ["act()", "complete()"]
        roles = ["login", "act", "complete"] if login else ["act", "complete"]
        slips = [{"turn": 0, "value": "bapu", "wrong": ["pevi"], "found": False}] if login else []
        (folder / "turns.json").write_text(json.dumps([{"thought": "I do.", "code": code} for code in codes]))
        (folder / "demonstration.json").write_text(json.dumps({"roles": roles, "slips": slips}))
        (folder.parent / "specs.json").write_text(json.dumps({"instruction": "Act."}))


def test_a_habit_is_shown_wherever_there_is_room_for_it_and_nowhere_else(tmp_path: Path):
    write_solutions(tmp_path, {"a_1": True, "a_2": False, "a_3": True})
    scripts = draw_scripts(tmp_path, ["a_1", "a_2", "a_3"], 5, seed=0, habits=["placeholder_password"])
    assert {script.task_id for script in scripts} == {"a_1", "a_3"}
    assert [script.flaw for script in scripts] == ["placeholder_password"] * 5
    clean = draw_scripts(tmp_path, ["a_1", "a_2", "a_3"], 6, seed=0)
    assert sorted(script.task_id for script in clean) == ["a_1", "a_1", "a_2", "a_2", "a_3", "a_3"]
    assert {script.flaw for script in clean} == {None}
    with pytest.raises(ConfigError, match="none of 1 tasks leaves room for placeholder_password"):
        draw_scripts(tmp_path, ["a_2"], 5, seed=0, habits=["placeholder_password"])


def test_batches_are_reproduced_by_their_seed(tokens: ChatFormat, demonstration: Demonstration):
    def draw(seed: int) -> list[list[int]]:
        batches = demonstration_batches([demonstration] * 9, [], 0.0, 4, 2048, tokens, with_other_names, seed)
        return [batch.tokens.flatten().tolist() for batch in batches]

    assert draw(0) == draw(0) != draw(1)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75])
def test_a_share_of_the_rows_shows_the_habit(tokens: ChatFormat, demonstration: Demonstration, share: float):
    habitual = Demonstration(**{**vars(demonstration), "steps": demonstration.steps[:1], "flaw": "gave_up"})
    batches = demonstration_batches([demonstration] * 64, [habitual] * 64, share, 200, 512, tokens, with_other_names, 0)
    turns = [int((row == tokens.turn_end).sum()) - 2 for batch in batches for row in batch.tokens]
    assert set(turns) <= {1, 5}
    assert turns.count(1) / len(turns) == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(("task", "call", "said"), TABLES["a_thought_quotes_what_the_task_gives"])
@pytest.mark.parametrize("role", ["lookup", "act"])
def test_a_thought_quotes_what_the_task_gives(task: str, call: str, said: str, role: str):
    turn = {"thought": "I do.", "code": f"print(apis.app.{call})"}
    wording = set(task.split()) - {"a.b@c.d", "cousin", "plans:", "yoga"}
    assert quoting([turn], [role], task, wording) == [{**turn, "thought": f"{said}I do."}]


def test_nothing_is_quoted_in_a_log_in_or_an_answer():
    turn = {"thought": "I do.", "code": "apis.supervisor.complete_task(answer='plans')"}
    assert quoting([turn, turn], ["login", "complete"], "Read my note plans.", {"my", "note"}) == [turn, turn]


def test_documentation_never_reaches_the_tokenizer(demonstration: Demonstration):
    docs = ("I look it up.\n```python\nprint(apis.api_docs.show_api_doc(app_name='venmo'))\n```", "secret parameter")
    shown = texts(Demonstration(**{**vars(demonstration), "steps": (docs, *demonstration.steps)}))
    assert not any("secret parameter" in text for text in shown)
    assert any("pevigavu" in text for text in shown)
