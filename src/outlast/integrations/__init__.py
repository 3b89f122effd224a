"""Adapters to other people's schedulers and frameworks; each is imported only by those who use it."""
