"""Runs hdtool's drafter inside vLLM, as a ``custom_class`` of its V1 model runner.

Every worker of vLLM imports the class that the speculative configuration names, and after each pass asks the class
for draft tokens for each row of the batch. Only ``cpu_repairs`` imports vLLM.
"""

from hdtool.runtime.integrations.vllm.proposer import HierarchyProposer

__all__ = ["HierarchyProposer"]
