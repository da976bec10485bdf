"""The plug-in by which vLLM's Model Runner V2 drafts with hdtool: an entry point of ``vllm.general_plugins``.

vLLM serves a ``custom_class`` drafter with its V1 runner and refuses it where ``VLLM_USE_V2_MODEL_RUNNER=1`` requests
V2, which has no hook for drafters of others. If V2 is requested, two functions of vLLM are wrapped: the check of its
configuration, and the factory of its speculators. Everything else stays as it is, and this module imports little,
because every process of vLLM loads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

LOGGER = logging.getLogger("vllm.hdtool")
PROPOSER = "hdtool.runtime.integrations.vllm.HierarchyProposer"
CUSTOM_CLASS_METHOD = "custom_class"
PLUGIN_NAME = "hdtool"
"""The name of the entry point."""
REQUEST_V2 = "VLLM_USE_V2_MODEL_RUNNER"
REFUSED_FEATURE = f"speculative method '{CUSTOM_CLASS_METHOD}'"
"""What vLLM lists among the features that V2 does not support."""
CHECK_FUNCTION, FACTORY_FUNCTION = "_get_v2_model_runner_unsupported_features", "init_speculator"


def register() -> None:
    """Called by vLLM in each of its processes, before it reads its configuration; may be called again."""
    from vllm import envs

    if not getattr(envs, REQUEST_V2, None):
        return
    try:
        from vllm.config.vllm import VllmConfig
        from vllm.v1.worker.gpu import spec_decode

        patch_config_check(VllmConfig)
        patch_speculator_factory(spec_decode)
    except (ImportError, AttributeError) as error:
        LOGGER.error(
            "hdtool cannot draft in Model Runner V2 of this vLLM (%s): unset %s, and vLLM chooses V1",
            error,
            REQUEST_V2,
        )


def is_ours(vllm_config: Any) -> bool:
    """Return True if vLLM's configuration names hdtool's drafter."""
    speculation = vllm_config.speculative_config
    return speculation is not None and speculation.method == CUSTOM_CLASS_METHOD and speculation.model == PROPOSER


def patch_config_check(config_class: Any) -> None:
    """Have the check of the configuration accept hdtool's drafter in V2."""
    unsupported: Callable[[Any], list[str]] = getattr(config_class, CHECK_FUNCTION)

    def without_ours(vllm_config: Any) -> list[str]:
        return [
            feature for feature in unsupported(vllm_config) if feature != REFUSED_FEATURE or not is_ours(vllm_config)
        ]

    _replace(config_class, CHECK_FUNCTION, without_ours)


def patch_speculator_factory(factories: Any) -> None:
    """Have the factory of V2's speculators build hdtool's; the runner imports the factory after this."""
    others: Callable[..., Any] = getattr(factories, FACTORY_FUNCTION)

    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not is_ours(vllm_config):
            return others(vllm_config, device, req_states)
        from hdtool.runtime.integrations.vllm.speculator import HierarchySpeculator

        return HierarchySpeculator(vllm_config, device, req_states)

    _replace(factories, FACTORY_FUNCTION, init_speculator)


def _replace(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    if getattr(getattr(owner, name), "__module__", None) != __name__:
        setattr(owner, name, wrapper)
