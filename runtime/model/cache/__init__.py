"""The KV cache of the target model: its tensors, and the context that it keeps from one answer to the next.

Imports `runtime/model/families` for the tolerance of rounding.
"""
