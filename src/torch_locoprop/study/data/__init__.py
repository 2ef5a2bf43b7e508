"""The data sets of the study: where their files are found, how they are read and checked.

``datasets`` is the entry. The genuine or generated images of CURVES are in ``curves_files`` and
``curves``, the files of MNIST and Fashion-MNIST in ``idx``, downloads in ``download``.
"""
