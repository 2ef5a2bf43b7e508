"""The command ``locoprop``: one file per subcommand.

``main`` starts the command and prints errors, ``app`` lists the subcommands, ``options`` and ``shared``
hold what several of them use, and ``tables`` prints results.
"""
