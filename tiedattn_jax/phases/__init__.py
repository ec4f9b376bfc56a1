"""The theory over many settings.

inputs         what the others are given, checked
follow         a branch from one setting to the next
arclength      around folds
secant         the zero of a number
events         a table of what can happen at one alpha, and one way to find any of it
transitions    alpha_c and alpha_l
breaking       what replica symmetry breaking does to alpha_c
ends           how branches end
boundaries     events through a second parameter
grid           both branches in every cell
diagram        reading and saving these cells
"""
