"""Tables that describe models as data: how the layers of each known family differ from Llama's.

`model_parts` recognizes a stock model by its modules and returns its parts; all engines read the same tables. Imports
only `runtime/caches`, `runtime/kernels` and `runtime/model`.
"""
