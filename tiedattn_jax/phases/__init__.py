"""The theory over many settings: branches, transitions, and phase diagrams.

inputs         checks of the arguments
follow         natural continuation: a branch from one setting to the next
arclength      pseudo-arclength continuation, around folds
secant         root search in one number
events         table of all events, and the result of a search in alpha
locate         the search for any of them, along any number
transitions    doors: alpha_c and alpha_l, any event near a guess, the ends of a branch
places         where the test error can be smallest along a number
best           the best ridge, or the best value of another number
independent    many settings, each for itself
sweep          states or events of many models
event_map      an event of models over two numbers
boundaries     boundaries as results, and where they intersect
best_curve     best values along a second parameter
trace          events followed through a second parameter
grid           both branches in every cell of a grid
diagram        the result: regions, curves, files
labelled       numbers of many states with labels, for tables and xarray
"""
