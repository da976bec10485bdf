"""hdtool inside vLLM: ``make test-vllm``, in an environment of its own."""
