"""Tests of waterflow: they mirror its packages."""
