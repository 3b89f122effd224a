"""Launching: agents, the coordinator they obey, and the rendezvous between them."""
