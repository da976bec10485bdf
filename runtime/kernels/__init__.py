"""Compiled CPU kernels, such as matmuls, norms, mixtures of experts, argmax and top-k, and their thread pool.

Imports only `data`.
"""
