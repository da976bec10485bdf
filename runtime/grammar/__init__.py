"""Structured output: grammars compiled for a tokenizer, their masks, and drafts of what they force.

Imports `data` and the interface of drafters, trees and processors.
"""
