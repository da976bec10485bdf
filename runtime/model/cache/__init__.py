"""The target model's cache: keys, values and recurrent states, which are kept between answers.

Imports `runtime/model/families` to select rows of a tensor.
"""
