"""Tests of attacks on a running service. Each file covers one class of defect."""
