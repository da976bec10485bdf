"""Drafts inside vLLM with the hierarchy: as a ``custom_class`` in its V1 runner, as a speculator in its V2 runner.

Every worker of vLLM imports the class that the speculative configuration names, and asks it after each pass for draft
tokens for each row of the batch. Only `speculator`, and `vllm_plugin` beside this folder, import vLLM.
"""

from hdtool.runtime.integrations.vllm.speculator import HierarchyProposer

__all__ = ["HierarchyProposer"]
