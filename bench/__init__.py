"""Measurements and torture, each against a peer in the same run. ``python -m bench <name> --help``."""
