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
independent    many settings, each for itself
sweep          states or events of many models
event_map      an event of models over two numbers
boundaries     boundaries as results, and where they intersect
best_search    the test error along a number: a coarse walk, and Newton's method
best_places    places where the error can be smallest
best_ridge     `best_ridge`, and its result
best_curve     best values along a second parameter
trace          events followed through a second parameter
grid           both branches in every cell of a grid
diagram        the result: regions, curves, files
labelled       numbers of many states with labels, for tables and xarray
"""
