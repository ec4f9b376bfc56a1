"""The model: a loss of the local fields and a law of the data, all that defines a problem.

model        `Model`, the base of all layers; preimages of a label; a text of what a model computes
law          `SpectralLaw` and `TokenClassMixture`, the law of the data
layers       the attention layers that the library ships
penalties    penalties of the weights besides the ridge
overlaps     order parameters, their conjugates, and the branches that a symmetry defines
parameters   named numbers of a setting, and axes of them
checks       checks of a model: mistakes in a new layer, and the kind that a computation takes
kinks        how a loss grows, and where its slope jumps
"""
