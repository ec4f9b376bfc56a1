"""The theory over many settings: branches, transitions, and phase diagrams.

inputs         checks of the arguments
follow         natural continuation: a branch from one setting to the next
arclength      pseudo-arclength continuation, around folds
secant         root search in one number
events         table of the events in alpha, and the result of a search
locate         the search for any of them
transitions    alpha_c and alpha_l
ends           how branches end
thresholds     thresholds in alpha that need no search: `threshold`
sweep          one question asked of many settings
table          the answers: numbers, rows, files, pictures
questions      what tables of states, events, best values and landscapes have
best_search    the test error along a number: a coarse walk, and Newton's method
best_places    places where the error can be smallest
best_ridge     `best_ridge`, and its result
trace          events followed through a number of the model
grid           both branches in every cell of a grid
diagram        the result: regions, curves, files
"""
