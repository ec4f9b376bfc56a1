"""The theory over many settings: branches, transitions, and phase diagrams.

family         settings along one number: what a search is given after the check of its arguments
follow         natural continuation: a branch from one setting to the next
branch_path    the result of continuation in arclength
arclength      pseudo-arclength continuation, around folds
secant         root search in one number
events         table of all events, and the result of a search in alpha
locate         the search for any of them, along any number
transitions    doors: alpha_c and alpha_l, any event near a guess, the ends of a branch, thresholds
places         where the test error can be smallest along a number
best           the best ridge, or the best value of another number
boundaries     alpha_c and alpha_l read off the rows of a diagram
sweep          one question asked of many settings
table          the answers: numbers, rows, files, pictures
cells          cells of a table, and what follows from many of them
trace          events followed through a number of the model
grid           both branches in every cell of a grid
pair           both branches at a setting, or at all of them: region, global minimum, and what can be trusted
diagram        the result: a table of pairs, with boundaries and files
join           tables and diagrams of separate jobs, put together
"""
