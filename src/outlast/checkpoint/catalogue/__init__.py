"""What lies in checkpoint directories, told to people: listed, verified, pruned. Nothing here imports torch.

It looks at files alone: no ranks, no run, no writer. ``entries`` names what is found, ``local`` finds it in nodes'
folders, ``store`` in global directories, ``listing`` says which is which, ``verification`` reads every byte, and
``pruning`` decides what may go.
"""
