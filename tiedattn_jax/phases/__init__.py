"""The theory over many settings: branches, transitions, and phase diagrams.

follow         natural continuation: a branch from one setting to the next; the check of a call's arguments
arclength      pseudo-arclength continuation, around folds
secant         root search in one number
events         table of all events, and the result of a search in alpha
locate         the search for any of them, along any number
transitions    doors: alpha_c and alpha_l, any event near a guess, the ends of a branch, thresholds
places         where the test error can be smallest along a number
best           the best ridge, or the best value of another number
sweep          one question asked of many settings
table          the answers: numbers, rows, files, pictures
questions      how a table reads the answers to each kind of question
trace          events followed through a number of the model
grid           both branches in every cell of a grid
diagram        the result: regions, curves, files
"""
