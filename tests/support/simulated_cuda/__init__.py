"""Simulated CUDA device for builds of torch without CUDA, to test GPU code on machines without a GPU.

Its tensors report ``cuda:0`` and compute real numbers on the CPU, in memory that the host cannot read directly. The
device works late: kernels and copies are queued, and run when the host next waits for them. A host that does not wait
therefore reads old numbers, and one that reuses a buffer too early sends wrong ones. Graphs record operations and
repeat them on the same memory. What a graph allocates is overwritten before each replay, and a graph that uses freed
memory is a fault. Kernels, copies and waits are counted, each with the line of the project that caused it.

There is one device with one queue: streams are not concurrent, and allocation never fails. Kernels compute as on the
CPU, and take an assumed time. ``install`` patches torch for the rest of the process, so tests run it in a separate
process.
"""
