"""The operating system and ``torch.distributed`` in general ways."""
