"""The protocol of equal budgets: every method gets the same number of trials on every task.

``trials`` draws settings and keeps them and their results in files, ``workers`` trains the trials,
``task_study`` decides which trials of a task are next, ``plan`` estimates how long the rest takes, and
``summary`` and ``trial_table`` show the outcome. A search for one method by Optuna is in
``torch_locoprop.study.tuning``.
"""
