"""A simulated CUDA device for a build of torch without CUDA, to test what runs on a GPU where there is none.

Its tensors say ``cuda:0`` and compute real numbers on the CPU, in memory that the host cannot read directly. The device
works late: kernels and copies are queued, and done when the host next waits for them, so that a host that does not wait
reads old numbers, and one that reuses a buffer too early sends wrong ones. Graphs record operations and repeat them on
the same memory. What a graph allocates is overwritten before each replay, and a graph that uses freed memory is a
fault. Kernels, copies and waits are counted, each with the line of the project that asked for it.

There is one device with one queue: streams are not concurrent, and allocation never fails. Kernels compute as those of
the CPU do, and take an assumed time. `install` patches torch for the rest of the process, so a test starts a process of
its own for it.
"""
