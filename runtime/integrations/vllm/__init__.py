"""Runs hdtool's drafter inside vLLM: as a ``custom_class`` in the V1 runner, as a speculator in the V2 runner.

Every worker of vLLM imports the class that the speculative configuration names, and after each pass asks the class
for draft tokens for each row of the batch. Only `speculator`, and `vllm_plugin` beside this folder, import vLLM.
"""

from hdtool.runtime.integrations.vllm.speculator import HierarchyProposer

__all__ = ["HierarchyProposer"]
