"""The operating system and ``torch.distributed`` in general ways; imports of torch stay inside functions or modules that need it."""
