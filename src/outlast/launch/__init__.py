"""The launcher: agents, the coordinator, and the rendezvous between them."""
