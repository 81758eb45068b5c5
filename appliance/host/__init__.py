"""Wrappers for operating system functions that several processes of the service use."""
