"""The model below the head: a batch in a layout that computes each distinct prefix once.

In the order in which a call runs::

    trunk       a trunk's forward in a call: choose a layout, run its forwards, fill in the states
    forwards    its inputs, read once; one forward on the tokens of a layout
    layout      the tokens of a batch as a prefix tree, or as rows
    trial       is a layout exact for this model? tried once, on the batch's own tokens
    attention   along the paths of a tree
    states      convolutions and recurrences along them

`grpo_kernels.transformers.seam` puts the first in the place of the trunk's own forward.
"""
