"""A real sampler beside the library: vLLM on a CPU (`make vllm`), in an environment of its own."""
