"""What generates the answers of a server: one thread with the batch loop, and the drafters of each tenant.

It may import ``runtime``, but nothing of the protocol or of HTTP.
"""
