"""What happened in a run and what it cost, for people: ``outlast report`` on a terminal, as a page, and as a trace."""
