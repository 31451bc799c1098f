"""Which configuration serves a problem: asked for, else measured, else estimated.

plan         the choice, and what `explain` prints
heuristics   the cheapest of a few candidates
cost_model   the estimate, `cost_terms` its parts, `cost_rates` its constants, `footprint` what one CTA of a
             configuration does
"""
