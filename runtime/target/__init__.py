"""The target model: a stock model as an engine, loaded with its tokenizer from a folder, the hub or a GGUF file.

`target` chooses between compiled passes, captured steps and stock code; `load` brings weights, engines and kept proofs
together, in one process or in several. No engine imports this package.
"""
