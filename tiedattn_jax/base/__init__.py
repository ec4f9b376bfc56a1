"""The tools that every other room uses.

errors         bad input, in one sentence
printing       results as text
results        statuses, error bars, averages over replicates
store          files that survive an interruption
saved          results as files
programs       compiled programs that are kept from one process to the next
linalg         small linear algebra at very many nodes
nodewise       functions of a few numbers, evaluated at very many nodes
derivatives    derivatives of values that a search found
trees          one operation on every array of a tree
types          types that many signatures share
"""
