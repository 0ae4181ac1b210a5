"""The project gets no larger unless somebody says so: the numbers of tests/size.toml do not rise."""

import pytest

from benchmarks import size

FILES = {
    "one/__init__.py": "",
    "one/a.py": "def found():\n    from one import b\n\n\nclass Same:\n    class _Nested:\n        pass\n",
    "one/b.py": "# Of it: it is no X.\n# One.\nif TYPE_CHECKING:\n    import one.a\n\n\nclass _Nested:\n    pass\n",
    "one/tests/test_a.py": "class Same:\n    pass\n",
    "one/tests/data.json": "{}\n",
    "contrib/two/__init__.py": "import one.a\n",
    "contrib/two/page.css": "a {}\nb {}\n",
    "tests/test_b.py": "assert True\n",
    "README.md": "# What is\n\n- What is it?\n- What `is no` game is\n  read. There is no longer\n  one.\n",
}


@pytest.mark.slow
def test_no_number_rises():
    found = size.sizes(size.ROOT)
    print(*size.slack(found), sep="\n")
    assert size.risen(found) == []


def test_what_is_counted(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = size.sizes(tmp_path)
    assert found == {
        "own_task_estimated": None,
        "own_task_and_scoring_estimated": None,
        "package_lines": 16,
        "package_lines_without_contrib": 15,
        "test_lines": 3,
        "tests_per_package_line": 0.188,
        "class_names_with_two_meanings": 1,
        "circles_of_imports": 1,
        "openings_without_a_noun": 1,
        "denied_nouns": 1,
        "vague_names": 1,
        "clauses_as_subjects": 1,
        "lines_of_data_in_packages": 2,
        "lines_of_data_in_tests": 1,
    }
    source = size.Source(tmp_path)
    assert (size.twins(source), size.circles(source)) == ({"_Nested": ["one.a", "one.b"]}, [["one.a", "one.b"]])
    monkeypatch.setattr(size, "caps", lambda: {"circles_of_imports": 0, "tests_per_package_line": 0.3})
    assert size.risen(found) == [f"circles_of_imports rose from 0 to 1. {size.RULE}"]
    assert size.slack(found) == ["tests_per_package_line is 0.188 and its cap 0.3: lower it in tests/size.toml"]
