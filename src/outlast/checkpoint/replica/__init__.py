"""Copies of shards on other nodes: an authenticated stream between the nodes' writers. Nothing here imports torch."""
