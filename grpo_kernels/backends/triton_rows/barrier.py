"""The barrier at which all threads of a program wait for each other, by the name that this release of Triton has.

Triton does not order reads and writes of global memory by different threads of a program: a kernel that writes where
another thread has read or written must call it. The builtin is `debug_barrier`, to be renamed to `barrier`
(https://github.com/triton-lang/triton/pull/11437).
"""

import triton
import triton.language as tl

if hasattr(tl, "debug_barrier"):

    @triton.jit
    def barrier():
        """Wait until all threads of the program are here, and have done their reads and writes."""
        tl.debug_barrier()

else:

    @triton.jit
    def barrier():
        """Wait until all threads of the program are here, and have done their reads and writes."""
        tl.barrier()
