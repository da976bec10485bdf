"""Registers the algorithm ``HDTOOL`` in SGLang, and refuses unsupported options before a model is loaded."""

from __future__ import annotations

import os
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.speculative.spec_info import CustomSpecAlgo, SpeculativeAlgorithm

from hdtool.data.errors import OptionError
from hdtool.runtime.core.tree import LARGEST_TREE
from hdtool.runtime.integrations.sglang.ngram_corpus import SETTINGS_VARIABLE, SglangSettings

DEFAULT_RUNNING, DEFAULT_NODES = 48, 12
"""Default numbers of running requests and of nodes per tree, as for SGLang's NGRAM."""
UNUSED_NODES = 64
"""Size of the corpus that SGLang's worker allocates and hdtool does not use."""


class HierarchyAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # SGLang is not installed for type checks
    """A speculative algorithm that SGLang treats like its own NGRAM algorithm, for example in masks and cache sizes."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return False

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(self, device: Any, *arguments: Any, **options: Any) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, *arguments, **options)

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in options as NGRAM does; raise OptionError for options that do not work with trees.

        SGLang records what is assigned to ``server_args``.
        """
        options = resolving_view(server_args)
        if options.device not in ("cuda", "cpu", "xpu"):
            raise OptionError(f"hdtool drafts in SGLang on cuda, cpu and xpu, and the device is {options.device}")
        if options.device == "cpu":
            server_args.disable_overlap_schedule = True
        if options.max_running_requests is None:
            server_args.max_running_requests = DEFAULT_RUNNING
        nodes = options.speculative_num_draft_tokens or DEFAULT_NODES
        server_args.enable_mixed_chunk = False
        server_args.speculative_num_draft_tokens = nodes
        server_args.speculative_ngram_capacity = UNUSED_NODES
        server_args.speculative_eagle_topk = options.speculative_ngram_max_bfs_breadth
        if options.speculative_num_steps is None:
            server_args.speculative_num_steps = nodes - 1
        if (options.page_size or 1) > 1 and options.attention_backend != "flashinfer":
            raise OptionError(
                f"--page-size {options.page_size} with trees needs --attention-backend flashinfer: use --page-size 1"
            )
        if options.enable_dp_attention:
            raise OptionError("SGLang verifies no trees with --enable-dp-attention: leave it out")


def register_in(name: str) -> None:
    """Register the algorithm as ``name`` in SGLang's registry."""

    @SpeculativeAlgorithm.register(
        name, supports_overlap=True, validate_server_args=check, spec_class=HierarchyAlgorithm
    )
    def worker_class(server_args: Any) -> type:
        from hdtool.runtime.integrations.sglang.worker import HierarchyWorker

        return HierarchyWorker


def check(server_args: Any) -> None:
    """Raise OptionError for options that hdtool does not support in SGLang."""
    options = resolving_view(server_args)
    settings = SglangSettings.of(os.environ)
    if options.speculative_ngram_external_corpus_path is not None:
        raise OptionError(
            "--speculative-ngram-external-corpus-path is a corpus of SGLang's NGRAM: leave it out, and name a store of "
            f"hdtool's by corpus_db in {SETTINGS_VARIABLE}"
        )
    nodes = options.speculative_num_draft_tokens
    if nodes is not None and not 2 <= nodes <= LARGEST_TREE + 1:
        raise OptionError(f"--speculative-num-draft-tokens must be from 2 to {LARGEST_TREE + 1}, got {nodes}")
    if options.pp_size > 1 or options.nnodes > 1:
        raise OptionError("hdtool drafts in SGLang on one machine without pipeline parallelism: use --pp-size 1")
    if options.tp_size > 1 and settings.decoding.keeps_history:
        raise OptionError(
            f"history {settings.decoding.history} in {SETTINGS_VARIABLE} "
            f"with --tp-size {options.tp_size}: the ranks must draft "
            "the same, but would read the store at different times; use history memory or none"
        )
