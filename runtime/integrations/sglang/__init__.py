"""Drafting inside SGLang with our hierarchy: trees, verified by SGLang's own n-gram worker.

Only `algorithm`, `worker` and ``sglang_plugin``, beside this folder, import SGLang.
"""
