"""Copies of shards on other nodes, over authenticated connections between the nodes' writers. Must not import torch."""
