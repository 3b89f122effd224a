"""Events of a run and their cost for people: ``outlast report`` on a terminal, as a page, and as a trace."""
