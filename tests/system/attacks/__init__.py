"""Tests of attacks on a running service. Each file covers one kind of weakness."""
