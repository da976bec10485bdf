"""Drafting inside vLLM with our hierarchy, through its ``custom_class`` interface.

vLLM imports the class named in its speculative configuration in every worker, and calls it after each pass for draft
tokens of each row of the batch. Only `cpu_fixes` imports vLLM.
"""

from hdtool.runtime.integrations.vllm.proposer import HierarchyProposer

__all__ = ["HierarchyProposer"]
