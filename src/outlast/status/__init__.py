"""The status of a run for ``outlast status``, from the run directory and from the coordinator if it responds."""
