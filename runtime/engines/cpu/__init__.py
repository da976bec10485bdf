"""CPU engine: computes passes of supported model families in compiled code, from token ids to logits.

Transformers' code computes unsupported models and passes, and models changed by more than in-place writes to weights.

The entry point is `compile_cpu`. Token mixers other than attention keep the inputs of each row's state update, so that
the accepted path can be replayed. Of the other engines, only `stock` and `proofs` are imported, to compare passes.
"""
