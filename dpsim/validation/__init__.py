"""The referee: predictions of other people's published measurements, scored against nulls.

``sets`` has the measurements; ``cases`` says what of them is known, and what is predicted from it; ``workloads`` has
what was trained.
"""
