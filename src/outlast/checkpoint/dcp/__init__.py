"""The global tier: generations in the format of ``torch.distributed.checkpoint``, each byte of them digested.

``manifest`` says what a generation consists of and is its commit; ``directory`` is the place, a path or any URL that
fsspec knows; ``items`` and ``layout`` decide which rank writes what, and what it looks like in a file; ``global_lane``
makes the generations behind training's back, with ``assemble`` in the writer process; ``reader`` and ``reshard`` get
them back.

The format's own ``.metadata`` is a pickle, written for other readers. It is never read here.
"""
