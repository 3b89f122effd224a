"""The live view of ``outlast top``: what is looked at, and how it is shown."""
