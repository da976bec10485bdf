"""Drafting inside vLLM with the hierarchy: a ``custom_class`` in its V1 runner, a speculator in its V2 runner.

vLLM imports the class named in its speculative configuration in every worker, and calls it after each pass for draft
tokens of each row of the batch. Only `speculator` and `vllm_plugin`, beside this folder, import vLLM.
"""

from hdtool.runtime.integrations.vllm.speculator import HierarchyProposer

__all__ = ["HierarchyProposer"]
