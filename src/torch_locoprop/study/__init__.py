"""The study of LocoProp on deep autoencoders; needs the extra ``study``.

Each package imports only those before it in this list:

- ``data``: the data sets.
- ``models``: the autoencoders.
- ``methods``: one record for each method that is compared.
- ``training``: one run, and populations of runs.
- ``tuning``: the search for settings.
- ``figures``: the figures of the paper.
- ``equal_budgets``: the protocol in which every method has the same number of trials.
- ``report``: an HTML page over many runs.
- ``demo``: a comparison of four methods in about a minute.
- ``cli``: the command ``locoprop``.

``atomic_files`` and ``machine`` are used by several packages and import none of them.
"""
