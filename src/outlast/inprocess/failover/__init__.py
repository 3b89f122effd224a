"""Failover of the hub, where any rank may die, the hub's host included."""
