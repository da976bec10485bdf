"""Answers prompts: everything that runs while a model generates.

Three front ends plan answers (`answering/answer_plan.py`) and drive a `core` ``Session``: `answering/answer_prompts.py`
(the command line), `integrations/server`, and `integrations/hf_generate.py` (``model.generate``). A session asks
`drafters` for trees and an engine (`engines`, through `target`) for passes.

Of the rest of hdtool, ``runtime`` imports only ``data``.
"""
