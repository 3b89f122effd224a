"""The live view of ``outlast top``."""
