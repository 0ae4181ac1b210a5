import pytest

from loop_plumbing.secret import read_secret


@pytest.mark.parametrize("around", ["", "\r", "\n", "\r\n", " ", "\t", " \n\n"])
def test_blanks_and_line_ends_around_a_secret_are_not_of_it(monkeypatch, around):
    monkeypatch.setenv("A_KEY", f"{around}s3cret{around}")
    assert read_secret("A_KEY") == "s3cret"
    monkeypatch.setenv("A_KEY", around)
    assert read_secret("A_KEY") == ""


@pytest.mark.parametrize("secret", ["s3crét", "s3cret\nX-Admin: 1", "s3cret s3cret", "s3cret\x7f", "s3cret\ud800"])
def test_what_no_header_carries_is_refused_without_being_told(monkeypatch, secret):
    monkeypatch.setattr("os.environ", {"A_KEY": secret})
    with pytest.raises(ValueError, match="A_KEY must hold printable ASCII") as refused:
        read_secret("A_KEY")
    assert "s3cr" not in str(refused.value)
