"""What lies in checkpoint directories, for people: listed, verified, pruned. Nothing here imports torch.

It looks at files alone: no ranks, no run, no writer. ``entries`` names what is found, and decides what of it may go;
``listing`` finds it, in nodes' folders and in global directories, and verifies every byte (with the loader's
:mod:`outlast.checkpoint.verification`).
"""
