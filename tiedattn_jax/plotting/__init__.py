"""Pictures of results: functions from results to matplotlib figures.

The docstrings name the types of the results. The functions read fields of these types but do not import them, and they
compute no results. A band or a bar around a number reaches two error bars to either side.

style          colours, labels, panels
branches       branches along alpha, and in arclength
events         a transition, boundaries
diagrams       phase diagrams
best           the best ridge
dynamics       learning dynamics
optimal        the Bayes-optimal learner
simulations    training, message passing, instances
counting       the counting task
"""
