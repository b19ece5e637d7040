"""Tests of custom training loops."""
