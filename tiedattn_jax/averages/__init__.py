"""Gaussian averages of functions of the proximal operator. The modules, from small to large:

program    compilation of the functions that average, and the loops of an evaluation
moreau     the proximal problem: the energy of the Moreau envelope, and its derivatives
prox       the proximal operator: the minima of the energy, and the lowest one
rules      averaging rules: replicates, blocks, points, and the fields that their normals stand for
nodes      replicates of single nodes
maxwell    the jumps of the proximal operator along a line
lines      replicates of lines that are broken at the jumps
recipes    which nodes a function averages over: recipes, and the default ones with their sizes
"""
