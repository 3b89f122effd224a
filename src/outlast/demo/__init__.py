"""``outlast demo``: one real training, struck six times, and the proof that its result is the same."""
