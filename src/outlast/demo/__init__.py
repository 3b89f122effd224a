"""``outlast demo``: one real training, struck four times, and the proof that its result is the same."""
