"""Lets pytest rewrite the assertions of the command helper, as it does in test files."""

import pytest

pytest.register_assert_rewrite("tests.launch.command")
