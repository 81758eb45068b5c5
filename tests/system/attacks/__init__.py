"""Attacks on a running service, one file per class of defect."""
