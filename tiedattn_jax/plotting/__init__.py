"""Pictures of results: functions from results to matplotlib figures.

The docstrings name the types of the results. The functions read fields of these types but do not import them, and they
compute no results. A band or a bar around a number reaches two error bars to either side.

style          colours, labels, panels
theory         pictures along one axis: branches, events, best values, numbers of tables, the optimal learner
diagrams       pictures over two axes: phase diagrams, maps of tables; a transition
page           a phase diagram as a page of HTML; `diagram.html` is its template
simulations    training, message passing, instances, learning dynamics, the counting task
"""
