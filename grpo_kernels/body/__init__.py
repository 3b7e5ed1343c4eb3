"""The model below the head: a batch in a layout that computes each distinct prefix once.

In the order in which a call runs::

    trunk       which module is the trunk; its forward in a call: choose a layout, run its forwards
    layout      its inputs; their tokens as a prefix tree, or as rows; one forward on them
    trial       is a layout exact for this model? tried once, on the batch's own tokens
    attention   along the paths of a tree
    states      convolutions and recurrences along them
"""
