"""Plug-in in the entry point group ``vllm.general_plugins`` that makes vLLM's Model Runner V2 draft with hdtool.

vLLM runs a ``custom_class`` drafter in its V1 runner, but refuses it if ``VLLM_USE_V2_MODEL_RUNNER=1`` requests V2,
which has no hook for external drafters. If V2 is requested, the plug-in wraps two functions of vLLM: the check of its
configuration, and the factory of its speculators. This module imports little, because every process of vLLM loads it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

LOGGER = logging.getLogger("vllm.hdtool")
PROPOSER = "hdtool.runtime.integrations.vllm.HierarchyProposer"
CUSTOM_CLASS_METHOD = "custom_class"
PLUGIN_NAME = "hdtool"
"""Name of the entry point."""
REQUEST_V2 = "VLLM_USE_V2_MODEL_RUNNER"
REFUSED_FEATURE = f"speculative method '{CUSTOM_CLASS_METHOD}'"
"""Name by which vLLM lists ``custom_class`` among the features that V2 does not support."""
CHECK_FUNCTION, FACTORY_FUNCTION = "_get_v2_model_runner_unsupported_features", "init_speculator"


def register() -> None:
    """Make Model Runner V2 accept hdtool's drafter if V2 is requested.

    vLLM calls this in each of its processes before it reads its configuration, possibly several times.
    """
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
    """Make vLLM's configuration check accept hdtool's drafter in V2."""
    unsupported: Callable[[Any], list[str]] = getattr(config_class, CHECK_FUNCTION)

    def without_ours(vllm_config: Any) -> list[str]:
        return [
            feature for feature in unsupported(vllm_config) if feature != REFUSED_FEATURE or not is_ours(vllm_config)
        ]

    _replace(config_class, CHECK_FUNCTION, without_ours)


def patch_speculator_factory(factories: Any) -> None:
    """Make V2's speculator factory build hdtool's speculator; call this before the runner imports the factory."""
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
