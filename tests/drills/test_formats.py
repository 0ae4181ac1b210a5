"""Drill: ten files of each format of conversations, from the writer of its own package where it has one: each becomes
ids, or one line that names file, line and field.

    make drills K=formats
"""

import subprocess
import sys
from pathlib import Path

import pytest

from loop_formats.schema import ConfigError
from loop_recipes.rollouts.chats import read_chat_set
from model_families.chat import open_chat
from support import random_policy
from support.chat_templates import FORMS
from support.texts import texts_beside

TABLES = texts_beside(__file__)

pytestmark = [pytest.mark.integration, pytest.mark.drill, pytest.mark.timeout(1800)]

PACKAGES = ("atif==1.8.0", "verifiers==0.4.0", "pyarrow==26.0.1", "openai==2.54.0")

WRITE = texts_beside(__file__)["write"]

REFUSED = TABLES["refused"]
REFUSED_BY_TEMPLATES = {
    "sharegpt_begins_with_gpt": "the chat template has no form for a conversation that begins with an answer",
}
"""By the template that the thinking model has, beside those that nothing can read."""
TURNS = {"calls": 2, "table_as_parquet": 2, "begins_with_gpt": 2}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    packages, folder = (tmp_path_factory.mktemp(name) for name in ("packages", "files"))
    install = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*install, "--target", packages, *PACKAGES], check=True, timeout=900)
    script = tmp_path_factory.mktemp("script") / "write.py"
    script.write_text(WRITE)
    command = [sys.executable, "-I", "-S", script, packages, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {file.stem: file for file in sorted(folder.iterdir())}


@pytest.mark.parametrize("thinks", [False, True], ids=["chatml", "thinking"])
@pytest.mark.parametrize("form", ["atif", "trace", "openai", "sharegpt"])
def test_each_file_becomes_ids_or_one_line(tmp_path, written, form, thinks):
    if thinks:
        FORMS["SmolLM3"].write(tmp_path)
    else:
        random_policy.write_tokenizer(tmp_path)
    chat = open_chat(tmp_path)
    files = {name: file for name, file in written.items() if name.startswith(f"{form}_")}
    assert len(files) == 10
    for name, file in files.items():
        if (said := REFUSED.get(name) or (REFUSED_BY_TEMPLATES.get(name) if thinks else None)) is not None:
            with pytest.raises(ConfigError, match=said) as refused:
                read_chat_set([str(file)], chat, "all", 0.0)
            assert str(refused.value).startswith(f"data: {file}:1")
            assert "\n" not in str(refused.value)
            print(f"{name}: {refused.value}")
            continue
        rollout, *_ = read_chat_set([str(file)], chat, "all", 0.0).rollouts
        assert len(rollout.turns) == TURNS.get(name.removeprefix(f"{form}_"), 1), name
        assert rollout.token_ids[-1] in (2, *chat.stop_ids), name
        turn = rollout.turns[-1]
        if name.endswith("thinking"):
            read = chat.read(rollout.token_ids[: turn.start], rollout.token_ids[turn.start : turn.end], False)
            assert read.reasoning == ("I add." if thinks else ""), name
        print(f"{name}: {len(rollout.token_ids)} ids, {rollout.sampled_tokens} learned")
