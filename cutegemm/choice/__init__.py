"""Which configuration serves a problem: asked for, else measured, else estimated.

plan         the choice, and what `explain` prints
heuristics   the cheapest of a few candidates
cost_model   the estimate, `cost_formula` how it is made of its parts, `cost_terms` their names, `cost_rates` its
             constants, `footprint` what one CTA of a configuration does, `learned` a correction from measured times
compare      the cheapest of several estimates, `compiled` the same as machine code
"""
