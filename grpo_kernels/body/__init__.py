"""The model below the head: compute each distinct prefix of a batch once.

Modules, in the order in which a call runs them::

    trunk       find the trunk; replace its forward for a call: choose a layout, run its forwards
    layout      read the inputs; arrange tokens as a prefix tree or as rows; run one forward
    trial       decide if a layout is exact: try it before its first use, on the batch's own tokens
    paths       attention, convolutions and recurrences along the paths of a tree
"""
