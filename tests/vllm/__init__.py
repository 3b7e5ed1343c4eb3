"""A real sampler beside the library: vLLM on a CPU (`make vllm`), in an environment that `make
test` does not have.

engine.py     samples of an engine, with its log-probabilities, in a process of its own
training.py   two steps of TRL with a colocated engine, in a process of its own
check_*.py    what must be true of them; pytest runs these files where they are named
"""
