"""The tools that every other room uses, and the version of the package.

errors         bad input, in one sentence
progress       what a long computation tells while it runs
report         how results print, are saved and drawn: one line, one page, tables, pictures
results        the common parts of all results: status, settings, replicates, and the error bar
saved          results in files
citing         what results rest on, as BibTeX; `sources.bib` has the entries
machine        cores and memory that a process may use
files          files that are written whole: arrays, tables, and what a long computation resumes from
pieces         pieces of a long computation: here, on an executor, in a folder
programs       compiled programs that are kept from one process to the next
arrays         trees of arrays, small linear algebra at very many nodes, and types that many signatures share
nodewise       functions of a few numbers, evaluated at very many nodes
kernels        loops over nodes as one kernel of a GPU
derivatives    derivatives of values that a search found
"""

VERSION = "0.1.0"  # which pyproject.toml reads here
