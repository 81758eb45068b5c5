"""Attacks on a running service, with one file per class of defect."""
