"""A loss of one token, as row kernels take it: the seam between the objective and the backends."""
