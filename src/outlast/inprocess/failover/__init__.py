"""Failover of the hub where any rank may die, also the one whose monitor process hosts it.

:mod:`~outlast.inprocess.failover.bootstrap` locates the hub for the first time, and
:class:`~outlast.inprocess.failover.peers.PeerFailover` whenever it is lost. The monitor process knows neither: it
knows a :class:`~outlast.inprocess.hub_client.HubLocator`. Where the hub has a host that outlives all ranks, a locator
that always names this host takes its place.
"""
