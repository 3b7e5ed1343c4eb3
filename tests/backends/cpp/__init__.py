"""The C++ row kernels: results, and how the library is built."""
