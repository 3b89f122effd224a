"""Pure decisions over frozen facts: no I/O, no torch, no clock, no randomness."""
