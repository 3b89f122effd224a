"""Checkpoint directories for operators: listed, verified, pruned. Must not import torch.

Reads only files, without ranks, run or writer. ``entries`` defines the results and decides what may be deleted;
``listing`` scans nodes' folders and global directories and verifies every byte
(:mod:`outlast.checkpoint.verification`).
"""
