"""``outlast demo``: one real training, struck three times, and the proof that its result is the same."""
