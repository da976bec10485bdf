"""Drafting inside vLLM: its server, its batches, our hierarchy.

vLLM imports the class that its speculative configuration names in every worker, and asks it after each pass what may
come next in each row of the batch. What it hands over is taken as it comes; only `repair` imports it.
"""

from hdtool.runtime.integrations.vllm.proposer import HierarchyProposer

__all__ = ["HierarchyProposer"]
