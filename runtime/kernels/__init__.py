"""Compiled CPU kernels: small-batch matmuls, mixtures of experts, argmax, top-k, and their thread pool.

Imports only `data`.
"""
