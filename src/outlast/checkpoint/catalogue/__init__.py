"""What lies in checkpoint directories, for people: listed, verified, pruned. Nothing here imports torch.

It looks at files alone: no ranks, no run, no writer. ``entries`` names what is found, ``local`` finds it in nodes'
folders, ``store`` in global directories, ``listing`` finds out which is which and verifies every byte (with the
loader's :mod:`outlast.checkpoint.verification`), and ``pruning`` decides what may go.
"""
