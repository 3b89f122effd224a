"""The global tier: checkpoints in the format of ``torch.distributed.checkpoint``, with a digest for every byte.

``manifest`` describes a checkpoint and is its commit; ``directory`` is a path or any URL that fsspec supports;
``items`` and ``layout`` decide which rank writes which bytes; ``global_lane`` saves in the background, with
``assemble`` in the writer process; ``reader`` and ``reshard`` load. The format's ``.metadata`` is a pickle for other
readers and is never read here.
"""
