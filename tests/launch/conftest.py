"""For the tests of the command: what its helper asserts is explained as a test's own."""

import pytest

pytest.register_assert_rewrite("tests.launch.command")
