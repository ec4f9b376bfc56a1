"""Gaussian averages of functions of the proximal operator. The modules, from small to large:

loops       loops of an evaluation, on CPUs and elsewhere
fields      the Gaussian law of the local fields
moreau      the Moreau envelope of the loss, and its derivatives
minima      the minima of its energy: starts, and Newton's method
prox        the proximal operator: the global minimum, and its derivative
rule        averaging rules: replicates, blocks, points
nodes       rules of single nodes
maxwell     the jumps of the proximal operator along a line
lines       the rule of lines that are broken at the jumps
sizes       default sizes of the averages, each with its reason
default     the default rule
program     compilation of the functions that average
"""
