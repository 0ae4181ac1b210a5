import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_environments.extraction import code_blocks, extract_code

GOLDEN = Path(__file__).parent / "golden" / "extraction.json"


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["name"])
def test_golden(case):
    assert extract_code("\n".join(case["action"])) == "\n".join(case["code"])


def starts_at_the_margin(program: str) -> bool:
    return program.lstrip("\n")[:1] not in ("", " ")


@pytest.mark.slow
@given(st.lists(st.text(alphabet="abc =\n()", min_size=1).filter(starts_at_the_margin), min_size=1, max_size=4))
def test_blocks_come_back_in_order(programs):
    action = "thought\n".join(f"```python\n{program}\n```\n" for program in programs)
    assert code_blocks(action) == [program.strip("\n") for program in programs]


@given(st.text())
def test_any_text_has_code_or_none(action):
    code = extract_code(action)
    assert isinstance(code, str)
    if "```python" not in action and "```py" not in action:
        assert code == ""
