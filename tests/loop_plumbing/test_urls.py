"""Which URLs an endpoint may have."""

import pytest

from loop_plumbing.urls import url_problem


@pytest.mark.parametrize("url", ["localhost", "ftp://a/v1", "http://", "http://[::1/v1", "https://me:s3cret@host/v1"])
def test_what_no_endpoint_is_called(url):
    assert "s3cret" not in str(url_problem(url))
    assert url_problem("https://host/v1") is url_problem("http://[::1]:80") is None
