"""Fixtures of all Python tests."""
import pytest


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """One for the tests of a file."""
    return tmp_path_factory.mktemp(request.module.__name__.removeprefix("test_"))
