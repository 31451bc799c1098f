"""Epilogues as programs: small typed expression graphs, traced from functions that are written with `cutegemm.ops`.

graph       the nouns: inputs, nodes, outputs
build       nodes made one by one, and their canonical numbering
writing     a program as text; `text` says what it means and reads it
evaluate    the outputs on torch tensors, in float64 or fp32; `random` has the generator that programs use
simplify    one canonical program for each meaning
trace       from a Python function to a program; `known` remembers what a function meant
interval    sets of numbers that a device may compute, and what is assumed of it; `bound` applies them to a program
derive      gradients, as programs
"""
