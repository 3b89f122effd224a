"""How a run is: what ``outlast status`` tells, from the run directory, and from the coordinator where one answers."""
