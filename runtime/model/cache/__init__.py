"""The target's cache: keys, values and states, and the context kept between answers.

Imports `runtime/model/families` for the tolerance of rounding.
"""
