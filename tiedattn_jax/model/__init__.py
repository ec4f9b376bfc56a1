"""A model: a loss of the local fields, a law of the data, and a penalty.

overlaps      order parameters, branches, coordinates
law           the law of the data
spectra       numbers of a law from matrices
penalties     penalties besides the ridge
model         `Model`, which users extend
layers        the layers that the library ships
preimages     the teacher's fields that are compatible with a label
checks        checks for the usual mistakes in a new layer
probes        kinks of a loss, and losses without a proximal operator
identity      what a model computes, for the fingerprint of a run that resumes
parameters    numbers of a model by name, for the axes of curves and diagrams
plane         models over two numbers, and results over them
"""
