"""Gaussian averages of functions of the proximal operator. The modules, from small to large:

loops       loops of an evaluation, on CPUs and elsewhere
fields      the Gaussian law of the local fields
moreau      the proximal problem: the energy of the Moreau envelope, and its derivatives
minima      the minima of its energy: starts, and Newton's method
prox        the proximal operator: the global minimum, and its derivative
rules       averaging rules: replicates, blocks, points, and the fields that they are for
nodes       replicates of single nodes
maxwell     the jumps of the proximal operator along a line
lines       replicates of lines that are broken at the jumps
recipes     which nodes a function averages over: recipes, and the default ones with their sizes
program     compilation of the functions that average
"""
