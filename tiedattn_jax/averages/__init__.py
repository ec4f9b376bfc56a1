"""Gaussian averages of what a proximal operator gives, from small to large.

nodewise    a function of a few numbers at very many nodes
loops       how loops of an evaluation end, on CPUs and elsewhere
fields      the Gaussian law of the local fields
prox        the proximal operator: global minimum, derivative
rule        what an averaging rule is
nodes       rules of single nodes
maxwell     where the proximal operator jumps along a line
lines       the rule of lines that are broken there
near_jumps  nodes on these lines that are dense at the jumps
clusters    the inner average of one step of replica symmetry breaking
sizes       how large averages are, each with its reason
default     which rule is used unless another is given
program     how functions that average are compiled
"""
