"""The files that a model is loaded from: where they are, their download from the hub, and their fingerprint.

Imports `runtime/model/gguf`, `runtime/config` and `data`; nothing here loads a model.
"""
